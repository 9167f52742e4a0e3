"""Building blocks of decoders, for one card: they know no degree, rank or mesh, and of a device only its `Ops`.

Shapes: B batch, L length, D hidden, H query heads, J key-value heads, K head size, V vocabulary.
A cache is a pair of tensors for each layer. Its length S is their last dim but one with `DecodingOps.heads_first`, else
dim 1.
Each pass returns a new cache and leaves the old one unchanged, except as `CausalLM.decode_step` says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import paddle
import paddle.nn.functional as F
from paddle import nn

from llmsuite.base.errors import UserError
from llmsuite.base.typing import Tensor
from llmsuite.devices.masks import step_mask
from llmsuite.devices.matmul_ops import matmul
from llmsuite.devices.ops import Ops
from llmsuite.models.divergence import Comparison
from llmsuite.models.embedding import Embedding
from llmsuite.models.exact import describe_module
from llmsuite.models.head import head_of, is_tied
from llmsuite.models.linear import Linear
from llmsuite.models.logit_ops import LogitOps
from llmsuite.models.rotation import growth_factors, positions, rotation, rotation_at
from llmsuite.models.shape_spec import GroupedQuery

LayerCache = tuple[Tensor, Tensor]
AttentionKernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, Any], tuple[Tensor, LayerCache]]
"""Computes an attention as `Attention.forward` does, with its arguments. The cache may have spare positions, see
`CausalLM.decode_step`."""
GatedMLPKernel = Callable[[Tensor], Tensor]
"""Computes a gated MLP as `GatedMLP.forward` does."""

ZEROS = paddle.ParamAttr(initializer=nn.initializer.Constant(0.0))
"""Matrices start as zeros: `llmsuite.engine.weights` or a checkpoint fills them."""


def linear(num_inputs: int, num_outputs: int, bias: bool = False) -> nn.Linear:
    """A linear layer of zeros: a matrix [inputs, outputs], and with `bias` a bias [outputs]."""
    return Linear(num_inputs, num_outputs, weight_attr=ZEROS, bias_attr=ZEROS if bias else False)


def apply_linears(layers: Sequence[nn.Layer], x: Tensor, then: nn.Layer | None = None) -> list[Tensor]:
    """Outputs of linear layers that share the input x [..., I], [..., O] each.

    A device with `MatmulOps.rounded_output_matmul` may round them where only the linear layer `then` reads what is
    computed from them. Modules call their own attribute `apply_linears`, which `models.linear_ops` and
    `parallel.overlap` replace by faster forms.
    """
    return [layer(x) for layer in layers]


class RMSNorm(nn.Layer):
    """Root mean square norm with a gain, over the last dim."""

    def __init__(self, size: int, eps: float, ops: Ops):
        super().__init__()
        self.eps = eps
        self.norm = ops.rms_norm
        self.weight = self.create_parameter([size], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, self.weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` with the right gradient where its gain is frozen, as with adapters.

    Workaround for Paddle 3.3.1: on the CPU the gradient of the input omits the gain if the gain itself needs no
    gradient. So a frozen gain is multiplied outside the operation.
    """

    def __init__(self, size: int, eps: float, bias: bool = True):
        super().__init__(size, epsilon=eps, bias_attr=None if bias else False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        if x.stop_gradient or not self.weight.stop_gradient:
            return super().forward(x)
        x = F.layer_norm(x, self._normalized_shape, epsilon=self._epsilon) * self.weight
        return x if self.bias is None else x + self.bias


class WithCore:
    """An attention whose core is a function of its own choice."""

    core: Callable[..., Tensor]
    """Computes the output of each head from its queries, keys and values, as `Ops.attention`."""

    def use_core(self, core: Callable[..., Tensor]) -> None:
        """Compute heads by another function, such as one that begins with a prefix or is recomputed."""
        self.core = core


class Attention(nn.Layer, WithCore):
    """Grouped-query self-attention with rotary positions."""

    def __init__(self, hidden_size: int, eps: float, ops: Ops, spec: GroupedQuery):
        """
        Args:
            hidden_size: width of the residual stream.
            eps: term under the root of the norms of queries and keys.
            ops: the operations of the device.
            spec: its description; `GroupedQuery.is_plain` says which choices this class has.
        """
        super().__init__()
        size = spec.head_size
        self.head_size = size
        self.rotary_size: int = size
        """Number of the first elements of a head that are rotated."""
        self.rotary = ops.rotary
        self.core = ops.attention
        self.heads_first = ops.decoding.heads_first
        self.interleaved = spec.interleaved
        self.kernel: AttentionKernel | None = None
        """A faster way to compute what `forward` does, which generation chooses; None for the code of `forward`."""
        self.apply_linears = apply_linears
        has_head_norms = spec.normed == "heads"
        self.rounds_activations = ops.matmuls.rounds_attention and not has_head_norms  # norms take and return float32
        self.q_proj = linear(hidden_size, spec.heads * size, spec.biased)
        self.k_proj = linear(hidden_size, spec.kv_heads * size, spec.biased)
        self.v_proj = linear(hidden_size, spec.kv_heads * size, spec.biased)
        self.o_proj = linear(spec.heads * size, hidden_size, spec.output_biased)
        self.q_norm = RMSNorm(size, eps, ops) if has_head_norms else None
        self.k_norm = RMSNorm(size, eps, ops) if has_head_norms else None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, past: LayerCache | None = None
    ) -> tuple[Tensor, LayerCache]:
        """x [B, L, D] to [B, L, D]; the cache holds keys and values, each [B, S, J, K], or [B, J, S, K]."""
        if self.kernel is not None:
            return self.kernel(x, cos, sin, mask, past)
        projections = [self.q_proj, self.k_proj, self.v_proj]
        then = self.o_proj if self.rounds_activations else None
        q, k, v = (part.reshape([0, 0, -1, self.head_size]) for part in self.apply_linears(projections, x, then))
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        if self.interleaved:
            q = halves(q)
            k = halves(k)
        q = self.rotary(q, cos, sin)
        k = self.rotary(k, cos, sin)
        k, v = extend_cache(k, v, past, self.heads_first)
        out = self.core(q, k, v, mask)
        return self.o_proj(out.reshape([0, 0, -1])), (k, v)


def extend_cache(k: Tensor, v: Tensor, past: LayerCache | None, heads_first: bool) -> LayerCache:
    """The cache `past` with new keys and values [B, L, J, K] appended."""
    if heads_first:
        k = k.transpose([0, 2, 1, 3])
        v = v.transpose([0, 2, 1, 3])
    if past is None:
        return k, v
    dim = 2 if heads_first else 1
    return paddle.concat([past[0], k], dim), paddle.concat([past[1], v], dim)


def halves(x: Tensor) -> Tensor:
    """Heads [B, L, H, K] whose rotated pairs are neighbours, reordered so that the pairs are halves of the head, as
    `Ops.rotary` takes them. The scores of queries and keys do not depend on the order."""
    pairs = x.reshape([0, 0, 0, x.shape[-1] // 2, 2])
    return pairs.transpose([0, 1, 2, 4, 3]).reshape([0, 0, 0, x.shape[-1]])


def halves_first(num_rotated: int, num_values: int, size: int) -> Tensor:
    """Indices of the columns of interleaved heads in the order of `halves`, followed by those of values, unchanged."""
    rotated = paddle.arange(num_rotated * size).reshape([num_rotated, size // 2, 2]).transpose([0, 2, 1]).flatten()
    return paddle.concat([rotated, paddle.arange(num_rotated * size, (num_rotated + num_values) * size)])


class GatedMLP(nn.Layer):
    """Gated MLP with SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int, ops: Ops, bias: bool = False):
        super().__init__()
        self.swiglu = ops.swiglu
        self.kernel: GatedMLPKernel | None = None
        """A faster way to compute what `forward` does, which generation chooses; None for the code of `forward`."""
        self.apply_linears = apply_linears
        self.rounds_activations = ops.matmuls.rounds_outputs
        self.gate_proj = linear(hidden_size, intermediate_size, bias)
        self.up_proj = linear(hidden_size, intermediate_size, bias)
        self.down_proj = linear(intermediate_size, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, D] to [B, L, D]; on devices that round activations, `swiglu` takes and returns rounded ones."""
        if self.kernel is not None:
            return self.kernel(x)
        then = self.down_proj if self.rounds_activations else None
        gate, up = self.apply_linears([self.gate_proj, self.up_proj], x, then)
        return self.down_proj(self.swiglu(gate, up))


class GeluMLP(nn.Layer):
    """Two matrices with GELU in its tanh form between them (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""

    def __init__(self, hidden_size: int, width: int, bias: bool):
        super().__init__()
        self.up_proj = linear(hidden_size, width, bias)
        self.down_proj = linear(width, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, D] to [B, L, D]."""
        return self.down_proj(F.gelu(self.up_proj(x), approximate=True))


class LayerExecution:
    """The way in which training runs a layer: this one calls its code. Others run the layer as a compiled program,
    recompute it in the backward pass, or do something around another execution."""

    is_plain = True
    """False where the layer is not simply called."""
    is_recomputed = False
    """True where the backward pass runs the layer again."""

    def run(self, function: Callable[..., Tensor], x: Tensor, *context: Tensor | None) -> Tensor:
        """The output [B, L, D] of a layer for x [B, L, D].

        Args:
            function: the training pass of the layer.
            x: hidden states.
            context: outputs of `CausalLM.layer_inputs`.
        """
        return function(x, *context)


def call(layer: nn.Layer, *inputs: Any) -> Any:
    """The output of a layer."""
    return layer(*inputs)


class DecoderLayer(nn.Layer):
    """Pre-norm attention and MLP, each around a residual."""

    is_mtp: ClassVar[bool] = False
    """True for a layer that predicts the token after the next one, see `llmsuite.models.moe.MTPLayer`."""
    attention_inputs: tuple[int, int] = (0, 3)
    """The range of the inputs of its attention among the outputs of `CausalLM.layer_inputs`."""
    keeps_state: bool = False
    """True where the cache of the layer is a state without positions, as that of linear attention."""
    attention_modules: ClassVar[Sequence[str]] = ()
    """Modules of the first half of a layer of which only that half can be compiled; () for a layer that is compiled as
    a whole. See `llmsuite.models.moe.MoELayer`."""

    def __init__(self, first_norm: nn.Layer, attention: nn.Layer, second_norm: nn.Layer, mlp: nn.Layer):
        super().__init__()
        self.input_layernorm = first_norm
        self.self_attn = attention
        self.post_attention_layernorm = second_norm
        self.mlp = mlp
        self.execution = LayerExecution()
        self.call: Callable[..., Any] = call
        """Calls norms, attention and MLP in `forward`. Generation avoids the overhead of calling an `nn.Layer`."""

    def forward(self, x: Tensor, *inputs: Any, past: LayerCache | None = None) -> tuple[Tensor, LayerCache]:
        """x [B, L, D] and the outputs of `CausalLM.layer_inputs` to [B, L, D] and the layer's cache."""
        call = self.call
        given = inputs[slice(*self.attention_inputs)]
        attended, present = call(self.self_attn, call(self.input_layernorm, x), *given, past)
        x = x + attended
        return x + call(self.mlp, call(self.post_attention_layernorm, x)), present

    def forward_train(self, x: Tensor, *context: Any) -> Tensor:
        """x [B, L, D] and the outputs of `CausalLM.layer_inputs` to [B, L, D], as training runs the layer: possibly
        compiled or recomputed. Subclasses define `train_block`."""
        return self.execution.run(self.train_block, x, *context)

    def train_block(self, x: Tensor, *context: Any) -> Tensor:
        """`forward` without the cache, [B, L, D]: the code that `execution` runs."""
        output: Tensor = self(x, *context)[0]
        return output


def check_layer(name: str, layer: Any, key: str) -> None:
    """Raise UserError for a layer that does not let its `execution` run it; `key` is the recipe key that chooses
    one."""
    if not isinstance(layer, DecoderLayer) or type(layer).forward_train is not DecoderLayer.forward_train:
        raise UserError(
            f"{key}: {describe_module(name, layer)} has no `forward_train` of llmsuite's DecoderLayer, which runs a "
            "layer in another way; derive the layer from llmsuite.models.blocks.DecoderLayer, and define its `forward` "
            "or `train_block`"
        )


class Decoder(nn.Layer):
    """Embedding, layers and last norm: the module that HF calls `model`."""

    def __init__(self, vocab_size: int, hidden_size: int, layers: Sequence[nn.Layer], norm: nn.Layer):
        super().__init__()
        self.embed_tokens = Embedding(vocab_size, hidden_size, weight_attr=ZEROS)
        self.layers = nn.LayerList(list(layers))
        self.norm = norm


class TiedHead:
    """Logits by the weight of the embedding, for a model without an output projection."""

    def __init__(self, matmul: Callable[..., Tensor] = matmul):
        self._matmul = matmul

    def __call__(self, hidden: Tensor, embedding: Any) -> Tensor:
        """Hidden states [..., D] and the embedding, a layer, to logits [..., V]."""
        return self._matmul(hidden, embedding.weight, transpose_y=True)


class InputForm:
    """The form in which the layers of a model get their inputs: this one has the results of the model's own methods.
    Other ones begin with a prefix, or lay the inputs out for kernels."""

    def embed(self, model: CausalLM, input_ids: Tensor, start: int, document_starts: Tensor | None) -> Tensor:
        """The input of the first layer, as `CausalLM.embed`."""
        return model.embed(input_ids, start, document_starts)

    def layer_inputs(
        self, model: CausalLM, start: int, length: int, dtype: Any, document_starts: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """The inputs of every layer besides the hidden states, as `CausalLM.layer_inputs`."""
        return model.layer_inputs(start, length, dtype, document_starts)

    def layer_inputs_at(
        self, model: CausalLM, positions: Tensor, mask: Tensor, dtype: Any
    ) -> tuple[Tensor | None, ...]:
        """The inputs of every layer besides the hidden states, as `CausalLM.layer_inputs_at`."""
        return model.layer_inputs_at(positions, mask, dtype)

    def initial_cache(self, model: CausalLM, num_rows: int) -> list[LayerCache] | None:
        """The cache that every text begins with; None for an empty one."""
        return None


class NextLogitsKernel(Protocol):
    """A kernel for the full decoder: logits [B, V] of one new token of each row."""

    def __call__(self, ids: Tensor, padding: Tensor, cache: Sequence[Tensor], filled: int) -> Tensor: ...


class PrefillKernel(Protocol):
    """`CausalLM.decode_step` with a cache whose spare positions it fills."""

    def new_cache(self, num_rows: int, cache_len: int) -> list[Tensor]: ...

    def __call__(self, ids: Tensor, padding: Tensor, cache: Sequence[Tensor], filled: int) -> Tensor: ...


@dataclasses.dataclass(frozen=True)
class DecodingKernels:
    """The kernels that a model has for generation on one device; `llmsuite.inference.fused.fuse` chooses it."""

    next_logits: NextLogitsKernel | None = None
    """Computes a pass over one token of each row in one piece; None to run the layers."""
    prefill: PrefillKernel | None = None
    """Computes a pass over several tokens of each row; None to run the layers."""
    accepts_buffer: bool = False
    """True where the cache may have spare positions, see `CausalLM.decode_step`."""
    cache_dtype: str | None = None
    """Dtype of keys and values in the cache; None for the dtype they are computed in."""


class CausalLM(nn.Layer):
    """A causal language model, or with a score head a reward model. Matrices start as zeros, norms as ones:
    `llmsuite.engine.weights` or a checkpoint fills them."""

    def __init__(self, config: Any, ops: Ops, layers: Sequence[nn.Layer], norm: nn.Layer):
        """`config` has vocab_size, hidden_size and tie_word_embeddings, and may have a `head` and a
        `sliding_window`."""
        super().__init__()
        self.config = config
        self.ops = ops
        self.window: int | None = getattr(config, "sliding_window", None)
        """Size of the attention window of its layers, or of some of them; None for full attention."""
        self.windows: tuple[int | None, ...] = (self.window,)
        """Windows that layers get masks for."""
        self.logit_ops = LogitOps(ops)
        self.input_form = InputForm()
        self.decoding = DecodingKernels()
        self.num_prefix_tokens = 0
        """Trained tokens before every text, see `llmsuite.adapters.layers.prefix`."""
        self.after_backward: Callable[[], None] | None = None
        """Called after the backward pass of a micro-batch: `llmsuite.parallel.zero3` releases what it has gathered."""
        self.edited_ends: tuple[int, int] | None = None
        """Numbers of tokens at both ends of a prompt that interventions edit, see `llmsuite.adapters.layers.reft`."""
        self.model = Decoder(config.vocab_size, config.hidden_size, layers, norm)
        scores = head_of(config) == "score"
        self.tied_head = TiedHead()
        self.lm_head = None if scores or is_tied(config) else linear(config.hidden_size, config.vocab_size)
        self.score = linear(config.hidden_size, 1) if scores else None

    def layer_inputs(
        self, start: int, length: int, dtype: Any, document_starts: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        """The inputs of every layer besides the hidden states, computed once per pass, such as rotation and mask: for
        the positions from `start`, or for those in the documents of `document_starts` (see `hidden_states`)."""
        raise AssertionError(f"{type(self).__name__} has to define layer_inputs")

    def masks(self, start: int, length: int, dtype: Any, document_starts: Tensor | None) -> list[Tensor | None]:
        """The attention mask of each of `windows`, in the form that `ops.attention` takes; arguments as in
        `layer_inputs`."""
        keys = start + length
        made: dict[int | None, Tensor | None] = {}
        for window in self.windows:
            given = [] if window is None or window >= keys else [window]
            if document_starts is not None:
                made[window] = self.ops.document_mask(document_starts, dtype, *given)
            else:
                made[window] = self.ops.causal_mask(length, keys, dtype, *given)
        return [made[window] for window in self.windows]

    def hidden_states(
        self, input_ids: Tensor, cache: list[LayerCache] | None = None, document_starts: Tensor | None = None
    ) -> tuple[Tensor, list[LayerCache]]:
        """Input ids [B, L] to normed hidden states [B, L, D] and the cache for the next call (empty in training).

        Positions continue from the cache. Sequences start at position 0 and are padded on the right: causal attention
        then never sees padding, and padding needs no mask.

        A row may hold several documents. Then `document_starts` [B, L] is, for each token, the index in its row where
        the token's document begins, or -1 for marked padding: no token sees another document, and each document begins
        at position 0. A document may also continue the first tokens of an earlier one, see
        `devices.masks.document_spans`.
        """
        cache = cache or self.input_form.initial_cache(self, input_ids.shape[0])
        x = self.input_form.embed(self, input_ids, self._length(cache), document_starts)
        x, present = self.decode(x, cache, document_starts)
        return self.final_norm(x), present

    def embed(self, input_ids: Tensor, start: int = 0, document_starts: Tensor | None = None) -> Tensor:
        """Input ids [B, L], at the positions from `start` or in their documents, to the input of the first layer,
        [B, L, D]."""
        return self.model.embed_tokens(input_ids)

    def final_norm(self, x: Tensor) -> Tensor:
        """Output of the last layer to normed hidden states, [B, L, D]."""
        return self.model.norm(x)

    def decode(
        self, x: Tensor, cache: list[LayerCache] | None = None, document_starts: Tensor | None = None
    ) -> tuple[Tensor, list[LayerCache]]:
        """Run the layers of this part of the model: [B, L, D] to [B, L, D] and the cache for the next call."""
        assert cache is None or not self.training, "a cache is for evaluation"
        assert cache is None or document_starts is None, "a cache has one document a row"
        inputs = self.input_form.layer_inputs(self, self._length(cache), x.shape[1], x.dtype, document_starts)
        present = []
        layers = (layer for layer in self.model.layers if not is_mtp(layer))
        for i, layer in enumerate(layers):
            if self.training:
                x = layer.forward_train(x, *inputs)
            else:
                past = cache[i] if cache else None
                x, kv = layer(x, *inputs, past=past)
                present.append(kv)
        return x, present

    def mtp_hidden_states(self, hidden: Tensor, next_ids: Tensor, document_starts: Tensor | None = None) -> Tensor:
        """Hidden states that predict the token after the next one (multi-token prediction, `llmsuite.models.mtp`).

        Args:
            hidden: normed hidden states of the same tokens, [B, L, D].
            next_ids: the token that follows each, [B, L].
            document_starts: as in `hidden_states`.

        Returns:
            Normed hidden states, [B, L, D], for `token_nll`.
        """
        (layer,) = [layer for layer in self.model.layers if is_mtp(layer)]
        inputs = self.input_form.layer_inputs(self, 0, hidden.shape[1], hidden.dtype, document_starts)
        run = layer.forward_train if self.training else layer
        return run(hidden, self.input_form.embed(self, next_ids, 0, None), *inputs)

    def decode_step(
        self,
        input_ids: Tensor,
        padding: Tensor,
        cache: Sequence[LayerCache] | None,
        cache_len: int | None = None,
        prefix_len: int = 0,
        stage_input: Tensor | None = None,
    ) -> tuple[Tensor, list[LayerCache]]:
        """One pass of generation over a batch that is padded on the left. Shapes may be those of a static program.

        Args:
            input_ids: [B, L], the tokens that follow the cache.
            padding: [B], how many of the first S + L columns of each row are padding, which no token sees.
            cache: keys and values of the columns so far; None at the start.
            cache_len: only where `decoding.accepts_buffer`: the cache is a buffer of which this many columns are in
                use, and the new ones are written in place after them.
            prefix_len: number of columns at the start of the cache that every token sees (prefix tuning); padding
                comes after them.
            stage_input: hidden states [B, L, D] from the previous pipeline stage; None on the first one.

        Returns:
            Hidden states [B, L, D], normed by the last part, and the cache of S + L columns.
        """
        assert self.ops.decoding.heads_first, "the model is built for training"
        length = dim_size(input_ids, 1)
        start = 0 if cache is None else dim_size(cache[self._layer_with_positions()][0], -2)
        if cache_len is None:
            queries = paddle.arange(length) + start
            keys = paddle.arange(start + length)
        else:  # columns that are still free are later than every query, so the causal mask hides them
            queries = paddle.arange(cache_len, cache_len + length)
            keys = paddle.arange(start)
        positions = paddle.clip(queries.unsqueeze(0) - padding.unsqueeze(1), min=0)
        x = self.embed_at(input_ids, positions) if stage_input is None else stage_input
        made = {w: step_mask(queries, keys, padding, x.dtype, prefix_len, w) for w in set(self.windows)}
        masks = tuple(made[window] for window in self.windows)
        inputs = self.input_form.layer_inputs_at(self, positions, masks[0] if len(masks) == 1 else masks, x.dtype)
        present = []
        for i, layer in enumerate(self.model.layers):
            past: Any = None
            if cache is not None:
                past = cache[i] if cache_len is None else (*cache[i], cache_len)
            x, kv = layer(x, *inputs, past=past)
            present.append(kv)
        return x if self.model.norm is None else self.final_norm(x), present

    def _length(self, cache: list[LayerCache] | None) -> int:
        if not cache:
            return 0
        return cache[self._layer_with_positions()][0].shape[-2 if self.ops.decoding.heads_first else 1]

    def _layer_with_positions(self) -> int:
        """The first layer whose cache has a dim of positions."""
        numbers = (number for number, layer in enumerate(self.model.layers) if not keeps_state(layer))
        return next(numbers)

    def embed_at(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Input ids [B, L] at the positions [B, L] to the input of the first layer, [B, L, D]."""
        return self.model.embed_tokens(input_ids)

    def layer_inputs_at(self, positions: Tensor, mask: Any, dtype: Any) -> tuple[Tensor | None, ...]:
        """The inputs of every layer, as `layer_inputs`, for positions [B, L] and a mask [B, 1, L, S] added to scores:
        a tuple of them where the model has several `windows`."""
        raise AssertionError(f"{type(self).__name__} has to define layer_inputs_at")

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., D] to logits [..., V]."""
        assert self.score is None, "a reward model has no logits; the stage's spec has to ask for a language model"
        if self.lm_head is None:
            return self.tied_logits(hidden)
        return self.lm_head(hidden)

    def tied_logits(self, hidden: Tensor) -> Tensor:
        """Logits by the embedding matrix, for models without a head."""
        return self.tied_head(hidden, self.model.embed_tokens)

    def token_nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Hidden states [N, D] and target ids [N] to the negative log-probability of each target, [N] in float32."""
        nll = self.logit_ops.nll_of_head(self, hidden, targets)
        if nll is not None:
            return nll
        return self.logit_ops.cross_entropy(self.logits(hidden).astype("float32"), targets)

    def token_nll_and_entropy(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """`token_nll` and the entropy in nats of each distribution over the vocabulary: [N] each, in float32."""
        return self.logit_ops.nll_and_entropy(self.logits(hidden).astype("float32"), targets)

    def token_nll_and_greedy_match(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """`token_nll`, and 1 where greedy decoding picks the target, else 0: [N] each, in float32."""
        logits = self.logits(hidden).astype("float32")
        is_match = self.logit_ops.is_greedy_match(logits, targets)  # first: `cross_entropy` may overwrite the logits
        return self.logit_ops.cross_entropy(logits, targets), is_match

    def token_divergence(self, hidden: Tensor, taught: Tensor, comparison: Comparison) -> Tensor:
        """Hidden states [N, D], and those of a teacher at the same positions [N, E], to the divergence of each
        distribution over the vocabulary from that of the teacher, [N] in float32."""
        own = self.logits(hidden).astype("float32")
        return self.logit_ops.divergence(own, comparison.logits(taught), comparison)

    def token_divergence_and_nll(
        self, hidden: Tensor, taught: Tensor, targets: Tensor, comparison: Comparison
    ) -> tuple[Tensor, Tensor]:
        """`token_divergence` and `token_nll`: [N] each, in float32, from the same logits."""
        own = self.logits(hidden).astype("float32")
        found = self.logit_ops.divergence(own, comparison.logits(taught), comparison)
        return found, self.logit_ops.cross_entropy(own, targets)  # last: it may overwrite the logits

    def scores(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, D] to scores [N] in float32."""
        assert self.score is not None, "the model has no score head; the stage's spec has to ask for one"
        return self.score(hidden).squeeze(-1).astype("float32")

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [B, L, V] of every position."""
        return self.logits(self.hidden_states(input_ids)[0])


class RotaryLM(CausalLM):
    """A decoder whose layers take a rotation and a mask.

    Layers may differ in both: the inputs of layers are the cos, sin and mask of each kind of attention, one kind after
    the other.
    """

    def __init__(
        self,
        config: Any,
        ops: Ops,
        layers: Sequence[nn.Layer],
        norm: nn.Layer,
        kinds: Sequence[tuple[int, int | None]] | None = None,
        growth: tuple[float, int] | None = None,
        gives_positions: bool = False,
    ):
        """
        Args:
            config: has `rotations()`, as `decoder_config.RotaryConfig`, and the fields that `CausalLM` needs. A model
                without rotary tables makes the inputs of its layers itself.
            ops: as for `CausalLM`.
            layers: as for `CausalLM`.
            norm: as for `CausalLM`.
            kinds: the different attentions of its layers, as (index of the rotary table, window); None where all are
                alike.
            growth: of queries, see `shape_spec.GroupedQuery`; supports one kind. Cos and sin of queries then follow the
                inputs of the attentions.
            gives_positions: the last input of the layers is the positions of the tokens, [B, L], for linear attention;
                None where the tokens continue a cache, or begin at position 0.
        """
        super().__init__(config, ops, layers, norm)
        self._gives_positions = gives_positions
        tables = config.rotations()
        chosen = [(0, self.window)] if kinds is None else kinds
        self.windows = tuple(window for _, window in chosen)
        self._rotations = [tables[rotation] for rotation, _ in chosen] if tables else []
        self._growth = growth
        assert growth is None or len(chosen) == 1, "queries of several kinds do not grow"

    def layer_inputs(
        self, start: int, length: int, dtype: Any, document_starts: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        """Rotation and mask, of each kind of attention."""
        inputs: list[Tensor | None] = []
        masks = self.masks(start, length, dtype, document_starts)
        for (frequencies, scale), mask in zip(self._rotations, masks):
            inputs += [*rotation(frequencies, scale, start, length, dtype, document_starts), mask]
        if self._growth is not None:
            if document_starts is None:
                at = paddle.arange(start, start + length).unsqueeze(0)
            else:
                at = positions(document_starts)
            inputs += self._of_queries(inputs, at, dtype)
        if self._gives_positions:
            inputs.append(None if document_starts is None else positions(document_starts))
        return tuple(inputs)

    def layer_inputs_at(self, positions: Tensor, mask: Any, dtype: Any) -> tuple[Tensor | None, ...]:
        """Rotation and mask, of each kind of attention."""
        masks = (mask,) if len(self.windows) == 1 else mask
        inputs: list[Tensor | None] = []
        for (frequencies, scale), own in zip(self._rotations, masks):
            inputs += [*rotation_at(frequencies, scale, positions, dtype), own]
        if self._growth is not None:
            inputs += self._of_queries(inputs, positions, dtype)
        if self._gives_positions:
            inputs.append(positions)
        return tuple(inputs)

    def _of_queries(self, inputs: Sequence[Any], at: Tensor, dtype: Any) -> list[Tensor]:
        """Cos and sin of queries at positions [B, L], from those of keys at the start of the inputs."""
        assert self._growth is not None
        factors = growth_factors(self._growth, at, dtype)
        return [inputs[0] * factors, inputs[1] * factors]


def is_mtp(layer: nn.Layer) -> bool:
    """True for a layer that predicts the token after the next one."""
    return isinstance(layer, DecoderLayer) and layer.is_mtp


def keeps_state(layer: nn.Layer) -> bool:
    """True for a layer whose cache is a state without positions."""
    return isinstance(layer, DecoderLayer) and layer.keeps_state


def dim_size(x: Tensor, dim: int) -> Any:
    """Size of a dim: an int, or a tensor in a static program whose input leaves the size open."""
    size = x.shape[dim]
    return size if size >= 0 else paddle.shape(x)[dim]
