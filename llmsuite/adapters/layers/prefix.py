"""Prefix tuning (Li and Liang 2021, arXiv 2101.00190), for one card: trained keys and values in front of every row.

They are like the cache entries of P tokens before the text in each layer, so the positions of the text begin at P; as
in HF PEFT, their keys are not rotated. (In paddlenlp the text begins at position 0: that is equivalent, with keys
rotated by P positions.)

With a prefix network (the paper's reparametrisation, paddlenlp's `prefix_projection`) they are `tanh(E A + a) C + c`:
all layers of the model share the embedding E of the prefix and A, and each layer has its own C.

Shapes: B rows, L length, P prefix tokens, H query heads, J key-value heads, K head size, N width of the network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle import nn

from llmsuite.adapters.parameters import is_trained
from llmsuite.adapters.prefix_shapes import NETWORK, WINDOW, network_shapes, prefix_shapes
from llmsuite.base.errors import UserError
from llmsuite.base.typing import Tensor
from llmsuite.models.blocks import Attention, CausalLM, InputForm, LayerCache, halves
from llmsuite.models.exact import describe_module, is_own, is_own_code

Extend = Callable[..., tuple[Tensor, Tensor, Tensor]]


class PrefixNetwork(nn.Layer):
    """Embedding and first layer of a network that computes prefixes; shapes: `prefix_shapes.network_shapes`."""

    def __init__(self, tokens: int, width: int, network: int):
        super().__init__()
        for kind, shape in network_shapes(tokens, width, network).items():
            setattr(self, kind, self.create_parameter(list(shape), is_bias=len(shape) == 1))

    def forward(self, local: Callable[[Tensor], Tensor]) -> Tensor:
        """The hidden layer, [P, N]; `local` maps a parameter to the tensor that this rank computes with."""
        table = local(self.prefix_table)
        inner = local(self.prefix_inner)
        bias = local(self.prefix_inner_bias)
        return paddle.tanh(paddle.matmul(table, inner) + bias)


class PrefixedCore:
    """The `core` of an attention whose keys and values start with a prefix.

    P queries are added too, and their outputs discarded: causal kernels need as many queries as keys, and in rows of
    several documents all documents then continue the prefix (`devices.masks.document_spans`).
    """

    def __init__(self, attention: Any, network: PrefixNetwork | None = None):
        """`attention` has a `core` and the parameters of `prefix_shapes`; `network` computes prefixes from them."""
        self._attention = attention
        self._core = attention.core
        self._network = network
        self.local: Callable[[Tensor], Tensor] = _unsharded
        """Maps a parameter to the tensor that this rank computes with."""
        self.extend: Extend = extended
        self.remove: Callable[[Tensor, int], Tensor] = without_prefix

    def __eq__(self, other: object) -> bool:
        """True if another core does the same computation with its attention's parameters: layers can share a
        program."""
        return isinstance(other, PrefixedCore) and self._how == other._how

    def __hash__(self) -> int:
        return hash(self._how)

    @property
    def _how(self) -> tuple[Any, ...]:
        return self._core, self._network, self.local, self.extend, self.remove

    @property
    def shared(self) -> PrefixNetwork | None:
        """The module outside the attention whose parameters the core uses."""
        return self._network

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *of_heads: Tensor) -> Tensor:
        """Attention of q [B, L, H, K] to the prefix and to k, v [B, L, J, K], [B, L, H, K]; the mask is for P + L, and
        `of_heads` are further parameters of the core, such as sinks."""
        keys, values = self._prefix()
        q, k, v = self.extend(q, k, v, keys, values, _interleaved_size(self._attention))
        return self.remove(self._core(q, k, v, mask, *of_heads), keys.shape[0])

    def _prefix(self) -> tuple[Tensor, Tensor]:
        """Keys and values [P, J, K], of this rank's heads."""
        if self._network is None:
            return self.local(self._attention.prefix_k), self.local(self._attention.prefix_v)
        # computed again in each layer: a recomputed layer then has its own graph, down to the parameters
        hidden = self._network(self.local)
        keys = self._project(hidden, self._attention.prefix_k_weight, self._attention.prefix_k_bias)
        values = self._project(hidden, self._attention.prefix_v_weight, self._attention.prefix_v_bias)
        return keys, values

    def _project(self, hidden: Tensor, outer: Tensor, bias: Tensor) -> Tensor:
        """Keys or values [P, J, K] of the hidden layer [P, N], by parameters [N, J, K] and [J K]."""
        weight = self.local(outer)
        projected = paddle.matmul(hidden, weight.flatten(1)) + self.local(bias)
        return projected.reshape([hidden.shape[0], *weight.shape[1:]])


def _unsharded(parameter: Tensor) -> Tensor:
    return parameter


def extended(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, interleaved: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, L, H, K], keys and values [B, L, J, K] with those of a prefix, [P, J, K], before them: P + L each.
    `interleaved` is the number of the first elements of a head whose pairs are neighbours."""
    rows = q.shape[0]
    count = keys.shape[0]
    placeholder = q[:, :1].detach().expand([rows, count, *q.shape[2:]])  # any finite values: outputs are discarded
    prefix = placeholder, *(part.expand([rows, *part.shape[1:]]) for part in _batched(keys, values, interleaved))
    extended_q, extended_k, extended_v = (
        paddle.concat([first.astype(rest.dtype), rest], 1) for first, rest in zip(prefix, (q, k, v))
    )
    return extended_q, extended_k, extended_v


def without_prefix(output: Tensor, count: int) -> Tensor:
    """The outputs [B, L, H, K] of the text's own tokens."""
    return output[:, count:]


def _batched(keys: Tensor, values: Tensor, interleaved: int) -> tuple[Tensor, Tensor]:
    """A prefix as a batch of one row, [1, P, J, K], with the elements of keys in the order that attention uses."""
    keys = keys.unsqueeze(0)
    size = keys.shape[-1]
    if interleaved == size:
        keys = halves(keys)
    elif interleaved:
        first, rest = paddle.split(keys, [interleaved, size - interleaved], -1)
        keys = paddle.concat([halves(first), rest], -1)
    return keys, values.unsqueeze(0)


def _interleaved_size(attention: Any) -> int:
    """Number of the first elements of a head whose rotated pairs are neighbours."""
    return attention.rotary_size if isinstance(attention, Attention) and attention.interleaved else 0


def add_prefixes(
    model: Any, tokens: int, network_size: int | None = None, network: PrefixNetwork | None = None
) -> PrefixNetwork | None:
    """Add a prefix to the keys and values of every decoder layer, and freeze the rest.

    Args:
        model: a `llmsuite.models.blocks.CausalLM`, materialised or not. One for generation (`DecodingOps.heads_first`)
            gets the parameters, and starts with them as its cache: see `prefix_cache`.
        tokens: P; kept in the attribute `num_prefix_tokens`.
        network_size: N of a network that computes the prefixes, in training; None for none.
        network: the network of another chunk of the model, to be shared; None to create one.

    Returns:
        The network, or None.

    Raises:
        UserError: attention has a window, or a forward pass of its own; the model runs its layers in a way of its own.
    """
    if model.window is not None:
        raise UserError(f"prefix: {WINDOW.format(model.window)}")
    cls = type(model)
    for name, method in (("hidden_states", cls.hidden_states), ("decode", cls.decode)):
        if not is_own(method):
            raise UserError(
                f"prefix: {type(model).__name__} has its own `{name}`, which need not begin after a prefix; use lora"
            )
    model.num_prefix_tokens = tokens
    generates = model.ops.decoding.heads_first
    assert network_size is None or not generates, "for generation prefixes are stored without their network"
    for name, parameter in model.named_parameters():
        parameter.stop_gradient = parameter.stop_gradient or not is_trained(name)
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        if not is_own_code(attention):
            raise UserError(
                f"prefix: {describe_module(f'model.layers.{number}.self_attn', attention)} has a forward pass of its "
                "own, which need not attend to a prefix; use lora"
            )
        width = attention.k_proj.weight.shape[1]
        if network_size is not None and network is None:
            network = PrefixNetwork(tokens, width, network_size)
            setattr(model, NETWORK, network)
        for kind, shape in prefix_shapes(tokens, width, attention.head_size, network_size).items():
            setattr(attention, kind, attention.create_parameter(list(shape), is_bias=len(shape) == 1))
        if not generates:
            attention.use_core(PrefixedCore(attention, network))
            attention.rounds_activations = False  # prefixes are float32, and are concatenated with keys and values
    if generates:
        model.input_form = StoredPrefixInputs()
    else:
        model.input_form = PrefixInputs(tokens)
    return network


class PrefixInputs(InputForm):
    """Inputs of layers whose attentions start with a prefix, in training: positions begin at P, and masks are for P + L
    tokens."""

    def __init__(self, tokens: int):
        self._tokens = tokens

    def embed(self, model: CausalLM, input_ids: Tensor, start: int, document_starts: Tensor | None) -> Tensor:
        return model.embed(input_ids, start + self._tokens, document_starts)

    def layer_inputs(
        self, model: CausalLM, start: int, length: int, dtype: Any, document_starts: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        assert start == 0, "a prefix has no cache in training"
        tokens = self._tokens
        if document_starts is not None:
            # the prefix is a document that all others continue: positions count from its start
            prefix = paddle.zeros([document_starts.shape[0], tokens], document_starts.dtype)
            document_starts = paddle.concat([prefix, document_starts], 1)
        inputs = model.layer_inputs(0, tokens + length, dtype, document_starts)
        # the mask of each kind of attention comes after its rotation; layers of a plugin may take a mask alone
        mask_index = 0 if len(inputs) == 1 else 2
        # all but the masks have tokens in dim 1
        return tuple(_from_token(given, tokens, index % 3 == mask_index) for index, given in enumerate(inputs))


class StoredPrefixInputs(InputForm):
    """Inputs of a model for generation: a text without a cache starts with the prefix."""

    def initial_cache(self, model: CausalLM, num_rows: int) -> list[LayerCache]:
        return prefix_cache(model, num_rows)


def _from_token(given: Tensor | None, tokens: int, is_mask: bool) -> Tensor | None:
    """An input of a layer without its first tokens; masks stay, as they are for the prefix too."""
    return given if given is None or is_mask else given[:, tokens:]


# generation


def prefix_cache(
    model: Any, rows: int, to_global: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> list[LayerCache]:
    """The initial cache of every text: keys and values [B, J, P, K] of each layer.

    Args:
        model: for generation, with prefixes.
        rows: B.
        to_global: maps the shard of this rank's heads to the tensor that the model computes with.
    """
    cache = []
    for layer in model.model.layers:
        attention = layer.self_attn
        own_keys = _local(attention.prefix_k)
        own_values = _local(attention.prefix_v)
        keys, values = (
            to_global(part.transpose([0, 2, 1, 3]).expand([rows, part.shape[2], part.shape[1], part.shape[3]]))
            for part in _batched(own_keys, own_values, _interleaved_size(attention))
        )
        cache.append((keys, values))
    return cache


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_value() if tensor.is_dist() else tensor


def move_prefix_after_padding(tensor: Tensor, padding: Tensor, tokens: int) -> Tensor:
    """Move the prefix in each row of a cache from before its padding to after it, where it then is the first tokens of
    the row.

    Args:
        tensor: [B, J, P + S, K].
        padding: columns of padding of each row, [B].
        tokens: P.

    Returns:
        [B, J, P + S, K].
    """
    columns = paddle.arange(tensor.shape[2]).unsqueeze(0)
    padding = padding.unsqueeze(1)
    moved = paddle.where(columns < padding, columns + tokens, columns - padding)
    source = paddle.where(columns < padding + tokens, moved, columns.expand_as(moved))
    # Paddle 3.3.1 has no `take_along_axis` of bfloat16 on the CPU; a cast to float32 and back changes no value
    wide = tensor.astype("float32") if tensor.dtype == paddle.bfloat16 else tensor
    return paddle.take_along_axis(wide, source.unsqueeze([1, 3]).expand(tensor.shape), 2).astype(tensor.dtype)
