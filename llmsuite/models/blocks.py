"""Building blocks of decoders, for one card: no degree, no rank, no mesh; and of a device only its `Ops`.

Shapes: B batch, L length, D hidden, H query heads, J key-value heads, K head size, V vocabulary.
A cache is a pair of tensors for each layer. Its length S is their last dim but one with `Ops.heads_first`, else dim 1.
It is replaced, not written in place (but see `CausalLM.decode_step`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import nn

from llmsuite.devices.ops import Ops, is_first_choice, matmul, nll_and_entropy, step_mask
from llmsuite.models.head import head_of, is_tied
from llmsuite.models.rope import magnitude
from llmsuite.models.rotation import rotation, rotation_at
from llmsuite.typing import Tensor

LayerCache = tuple[Tensor, Tensor]

ZEROS = paddle.ParamAttr(initializer=nn.initializer.Constant(0.0))
"""Matrices start as zeros: `llmsuite.train.weights` or a checkpoint fills them."""


def linear(num_inputs: int, num_outputs: int, bias: bool = False) -> nn.Linear:
    """A matrix [inputs, outputs], and a bias if asked for."""
    return nn.Linear(num_inputs, num_outputs, weight_attr=ZEROS, bias_attr=ZEROS if bias else False)


def products(layers: Sequence[nn.Layer], x: Tensor, then: nn.Layer | None = None) -> list[Tensor]:
    """The outputs of linear layers of one input, as operands (`Ops.operand_matmul`) where they are for `then` alone.
    Modules call it as their own `products`, where the engine puts others (`models.products`, `parallel.overlap`)."""
    return [layer(x) for layer in layers]


class RMSNorm(nn.Layer):
    """Root mean square norm with a gain, over the last dim."""

    def __init__(self, size: int, eps: float, ops: Ops):
        super().__init__()
        self.eps, self.norm = eps, ops.rms_norm
        self.weight = self.create_parameter([size], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, self.weight, self.eps)


class Attention(nn.Layer):
    """Grouped-query self-attention with rotary positions."""

    def __init__(
        self,
        config: Any,
        ops: Ops,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm: bool = False,
        interleaved: bool = False,
    ):
        """`config` has hidden_size, head_size, both numbers of heads and, with `qk_norm`, rms_norm_eps. With
        `interleaved`, the elements of a head that are rotated together lie side by side."""
        super().__init__()
        self.head_size, self.rotary, self.core = config.head_size, ops.rotary, ops.attention
        self.heads_first, self.interleaved, self.products = ops.heads_first, interleaved, products
        self.has_operands = ops.attends_operands and not qk_norm  # norms are of float32
        width, kv_width = (n * config.head_size for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = linear(config.hidden_size, width, qkv_bias)
        self.k_proj = linear(config.hidden_size, kv_width, qkv_bias)
        self.v_proj = linear(config.hidden_size, kv_width, qkv_bias)
        self.o_proj = linear(width, config.hidden_size, o_bias)
        # norms of each head, before the rotation
        self.q_norm = RMSNorm(config.head_size, config.rms_norm_eps, ops) if qk_norm else None
        self.k_norm = RMSNorm(config.head_size, config.rms_norm_eps, ops) if qk_norm else None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, past: LayerCache | None = None
    ) -> tuple[Tensor, LayerCache]:
        """x [B, L, D] to [B, L, D]; the cache holds keys and values, each [B, S, J, K], or [B, J, S, K]."""
        projections, then = [self.q_proj, self.k_proj, self.v_proj], self.o_proj if self.has_operands else None
        q, k, v = (part.reshape([0, 0, -1, self.head_size]) for part in self.products(projections, x, then))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.interleaved:
            q, k = halves(q), halves(k)
        q, k = self.rotary(q, cos, sin), self.rotary(k, cos, sin)
        k, v = extend_cache(k, v, past, self.heads_first)
        out = self.core(q, k, v, mask)
        return self.o_proj(out.reshape([0, 0, -1])), (k, v)


def extend_cache(k: Tensor, v: Tensor, past: LayerCache | None, heads_first: bool) -> LayerCache:
    """The cache with new keys and values, each [B, L, J, K]."""
    if heads_first:
        k, v = k.transpose([0, 2, 1, 3]), v.transpose([0, 2, 1, 3])
    if past is None:
        return k, v
    dim = 2 if heads_first else 1
    return paddle.concat([past[0], k], dim), paddle.concat([past[1], v], dim)


def halves(x: Tensor) -> Tensor:
    """Heads [B, L, H, K] with pairs side by side to halves, as `Ops.rotary` takes them; scores of queries and keys do
    not depend on the order."""
    pairs = x.reshape([0, 0, 0, x.shape[-1] // 2, 2])
    return pairs.transpose([0, 1, 2, 4, 3]).reshape([0, 0, 0, x.shape[-1]])


def halves_first(num_rotated: int, num_values: int, size: int) -> Tensor:
    """Places of columns of interleaved heads, in the order of `halves`; behind them values stay as they are."""
    rotated = paddle.arange(num_rotated * size).reshape([num_rotated, size // 2, 2]).transpose([0, 2, 1]).flatten()
    return paddle.concat([rotated, paddle.arange(num_rotated * size, (num_rotated + num_values) * size)])


class GatedMLP(nn.Layer):
    """Gated MLP with SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int, ops: Ops, bias: bool = False):
        super().__init__()
        self.swiglu, self.products, self.has_operands = ops.swiglu, products, ops.operand_matmul is not None
        self.gate_proj, self.up_proj = (linear(hidden_size, intermediate_size, bias) for _ in range(2))
        self.down_proj = linear(intermediate_size, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, D] to [B, L, D]; where the device has operands of products, `swiglu` takes and gives them."""
        inner = self.products([self.gate_proj, self.up_proj], x, self.down_proj if self.has_operands else None)
        return self.down_proj(self.swiglu(*inner))


class DecoderLayer(nn.Layer):
    """Pre-norm attention and MLP, each around a residual."""

    def __init__(self, first_norm: nn.Layer, attention: nn.Layer, second_norm: nn.Layer, mlp: nn.Layer):
        super().__init__()
        self.input_layernorm = first_norm
        self.self_attn = attention
        self.post_attention_layernorm = second_norm
        self.mlp = mlp

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, past: LayerCache | None = None
    ) -> tuple[Tensor, LayerCache]:
        """x [B, L, D], and what `CausalLM.layer_inputs` returns, to [B, L, D] and the layer's cache."""
        attended, present = self.self_attn(self.input_layernorm(x), cos, sin, mask, past)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), present

    def forward_train(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """`forward` without the cache, as training calls a layer: compiled, or recomputed."""
        return self(x, cos, sin, mask)[0]


class Decoder(nn.Layer):
    """Embedding, layers, last norm: the part HF calls `model`."""

    def __init__(self, vocab_size: int, hidden_size: int, layers: Sequence[nn.Layer], norm: nn.Layer):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size, weight_attr=ZEROS)
        self.layers = nn.LayerList(list(layers))
        self.norm = norm


class CausalLM(nn.Layer):
    """A causal language model, or with a score head a reward model. Matrices start as zeros, norms as ones:
    `llmsuite.train.weights` or a checkpoint fills them."""

    matmul = staticmethod(matmul)

    def __init__(self, config: Any, ops: Ops, layers: Sequence[nn.Layer], norm: nn.Layer):
        """`config` has vocab_size, hidden_size and tie_word_embeddings, and may have a `head` and a
        `sliding_window`."""
        super().__init__()
        self.config, self.ops = config, ops
        self.window: int | None = getattr(config, "sliding_window", None)
        self.cross_entropy, self.nll_and_entropy = ops.cross_entropy, nll_and_entropy
        self.is_first_choice = is_first_choice
        self.model = Decoder(config.vocab_size, config.hidden_size, layers, norm)
        scores = head_of(config) == "score"
        self.lm_head = None if scores or is_tied(config) else linear(config.hidden_size, config.vocab_size)
        self.score = linear(config.hidden_size, 1) if scores else None

    def layer_inputs(
        self, start: int, length: int, dtype: Any, document_starts: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        """The further inputs of every layer, made once a pass: such as the rotation and the mask, for the positions
        from `start` or for those that `document_starts` implies; see `hidden_states`."""
        raise AssertionError(f"{type(self).__name__} has to define layer_inputs")

    def mask(self, start: int, length: int, dtype: Any, document_starts: Tensor | None) -> Tensor | None:
        """The attention mask, in the form that `ops.attention` takes; arguments as in `layer_inputs`."""
        keys = start + length
        window = [] if self.window is None or self.window >= keys else [self.window]
        if document_starts is not None:
            return self.ops.document_mask(document_starts, dtype, *window)
        return self.ops.causal_mask(length, keys, dtype, *window)

    def hidden_states(
        self, input_ids: Tensor, cache: list[LayerCache] | None = None, document_starts: Tensor | None = None
    ) -> tuple[Tensor, list[LayerCache]]:
        """Input ids [B, L] to normed hidden states [B, L, D] and the cache for the next call; in training there is
        none.

        Positions continue from the cache. Sequences start at position 0 and are padded on the right, so that no
        token sees padding and none needs a mask of its own.

        A row may hold several documents. Then `document_starts` [B, L] is, for each token, where in its row the
        token's document begins, or -1 for padding that is marked: no token sees another document, and each begins at
        position 0. A document may also continue the first tokens of one before it, see `devices.ops.document_spans`.
        """
        x, present = self.decode(self.embed(input_ids, self._length(cache), document_starts), cache, document_starts)
        return self.final_norm(x), present

    def embed(self, input_ids: Tensor, start: int = 0, document_starts: Tensor | None = None) -> Tensor:
        """Input ids [B, L] at the positions from `start`, or of their documents, to the input of the first
        layer, [B, L, D]."""
        return self.model.embed_tokens(input_ids)

    def final_norm(self, x: Tensor) -> Tensor:
        """Output of the last layer to normed hidden states, [B, L, D]."""
        return self.model.norm(x)

    def decode(
        self, x: Tensor, cache: list[LayerCache] | None = None, document_starts: Tensor | None = None
    ) -> tuple[Tensor, list[LayerCache]]:
        """[B, L, D] through the layers of this part of the model to [B, L, D]; and the cache for the next call."""
        assert cache is None or not self.training, "a cache is for evaluation"
        assert cache is None or document_starts is None, "a cache has one document a row"
        inputs = self.layer_inputs(self._length(cache), x.shape[1], x.dtype, document_starts)
        present = []
        layers = (layer for layer in self.model.layers if not _predicts_further(layer))
        for i, layer in enumerate(layers):
            if self.training:
                x = layer.forward_train(x, *inputs)
            else:
                x, kv = layer(x, *inputs, past=cache[i] if cache else None)
                present.append(kv)
        return x, present

    def mtp_hidden_states(self, hidden: Tensor, next_ids: Tensor, document_starts: Tensor | None = None) -> Tensor:
        """What predicts the token after the next one (`llmsuite.models.mtp`).

        Args:
            hidden: normed hidden states of the same tokens, [B, L, D].
            next_ids: the token behind each, [B, L].
            document_starts: as in `hidden_states`.

        Returns:
            Normed hidden states, [B, L, D], for `token_nll`.
        """
        (layer,) = [layer for layer in self.model.layers if _predicts_further(layer)]
        inputs = self.layer_inputs(0, hidden.shape[1], hidden.dtype, document_starts)
        run = layer.forward_train if self.training else layer
        return run(hidden, self.embed(next_ids), *inputs)

    def decode_step(
        self,
        input_ids: Tensor,
        padding: Tensor,
        cache: Sequence[LayerCache] | None,
        filled: int | None = None,
        num_seen: int = 0,
        entering: Tensor | None = None,
    ) -> tuple[Tensor, list[LayerCache]]:
        """One pass of generation over a batch that is padded on the left. Shapes may be those of a static program.

        Args:
            input_ids: [B, L], the tokens that follow the cache.
            padding: [B], how many of the first S + L columns of each row are padding, which no token sees.
            cache: cache of the columns so far; None at the start.
            filled: only where `llmsuite.inference.fused.accepts_buffer`: this many columns of the cache are filled, and
                the new ones are written in place behind them.
            num_seen: columns of the cache that every token sees: padding begins behind them. It is a prefix.
            entering: what the part of the model before this one returned; None for the first.

        Returns:
            Hidden states [B, L, D], normed by the last part, and the cache of S + L columns.
        """
        assert self.ops.heads_first, "the model is built for training"
        length, start = dim_size(input_ids, 1), 0 if cache is None else dim_size(cache[0][0], -2)
        if filled is None:
            queries, keys = paddle.arange(length) + start, paddle.arange(start + length)
        else:  # columns that are still free are later than every query
            queries, keys = paddle.arange(filled, filled + length), paddle.arange(start)
        positions = paddle.clip(queries.unsqueeze(0) - padding.unsqueeze(1), min=0)
        x = self.embed_at(input_ids, positions) if entering is None else entering
        mask = step_mask(queries, keys, padding, x.dtype, num_seen, self.window)
        inputs = self.layer_inputs_at(positions, mask, x.dtype)
        present = []
        for i, layer in enumerate(self.model.layers):
            past: Any = None if cache is None else cache[i] if filled is None else (*cache[i], filled)
            x, kv = layer(x, *inputs, past=past)
            present.append(kv)
        return x if self.model.norm is None else self.final_norm(x), present

    def _length(self, cache: list[LayerCache] | None) -> int:
        return cache[0][0].shape[-2 if self.ops.heads_first else 1] if cache else 0

    def embed_at(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """As `embed`, at the positions [B, L]."""
        return self.model.embed_tokens(input_ids)

    def layer_inputs_at(self, positions: Tensor, mask: Tensor, dtype: Any) -> tuple[Tensor | None, ...]:
        """As `layer_inputs`, for positions [B, L] and a mask [B, 1, L, S] that is added to scores."""
        raise AssertionError(f"{type(self).__name__} has to define layer_inputs_at")

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., D] to logits [..., V]."""
        assert self.score is None, "a reward model has no logits; the stage's spec has to ask for a language model"
        if self.lm_head is None:
            return self.tied_logits(hidden)
        return self.lm_head(hidden)

    def tied_logits(self, hidden: Tensor) -> Tensor:
        """`logits` with the matrix of the embedding, where there is no head. A faster form takes its place."""
        return self.matmul(hidden, self.model.embed_tokens.weight, transpose_y=True)

    def token_nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Hidden states [N, D] and target ids [N] to the negative log-probability of each target, [N] in float32."""
        return self.cross_entropy(self.logits(hidden).astype("float32"), targets)

    def token_nll_and_entropy(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """As `token_nll`, and the entropy of each distribution over the vocabulary: [N] each, in float32."""
        return self.nll_and_entropy(self.logits(hidden).astype("float32"), targets)

    def token_nll_and_first_choice(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """As `token_nll`, and 1 where greedy decoding picks the target, else 0: [N] each, in float32."""
        logits = self.logits(hidden).astype("float32")
        is_picked = self.is_first_choice(logits, targets)  # before a kernel writes over the logits
        return self.cross_entropy(logits, targets), is_picked

    def scores(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, D] to scores [N] in float32."""
        assert self.score is not None, "the model has no score head; the stage's spec has to ask for one"
        return self.score(hidden).squeeze(-1).astype("float32")

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [B, L, V] of every position."""
        return self.logits(self.hidden_states(input_ids)[0])


class RotaryLM(CausalLM):
    """A decoder whose layers take a rotation and a mask."""

    def __init__(self, config: Any, ops: Ops, layers: Sequence[nn.Layer], norm: nn.Layer):
        """`config` as for `CausalLM`, with what `decoder_config.RotaryConfig` has."""
        super().__init__(config, ops, layers, norm)
        self._frequencies, self._magnitude = config.rope_frequencies(), magnitude(config.rope_scaling)

    def layer_inputs(
        self, start: int, length: int, dtype: Any, document_starts: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        """Rotation and mask."""
        cos, sin = rotation(self._frequencies, self._magnitude, start, length, dtype, document_starts)
        return cos, sin, self.mask(start, length, dtype, document_starts)

    def layer_inputs_at(self, positions: Tensor, mask: Tensor, dtype: Any) -> tuple[Tensor | None, ...]:
        """Rotation and mask."""
        return (*rotation_at(self._frequencies, self._magnitude, positions, dtype), mask)


def _predicts_further(layer: nn.Layer) -> bool:
    return getattr(layer, "predicts_further", False)


def dim_size(x: Tensor, dim: int) -> Any:
    """Size of a dim: a number, or in a static program that leaves it open, a tensor."""
    size = x.shape[dim]
    return size if size >= 0 else paddle.shape(x)[dim]
