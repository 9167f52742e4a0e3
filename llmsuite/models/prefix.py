"""Prefix tuning (Li and Liang 2021, arXiv 2101.00190), for one card: trained keys and values in front of every row.

They are what tokens in front of the text would leave in a cache, layer by layer, so the text's own positions begin
behind them; as in HF PEFT, their keys are not rotated. (In paddlenlp the text begins at position 0: the same, with keys
turned by P positions.)

With a network in front (the paper's reparametrisation, paddlenlp's `prefix_projection`) they are
`tanh(E A + a) C + c`: an embedding E of the prefix and A are shared by all layers of the model, and C is of each layer.

Shapes: B rows, L length, P prefix tokens, H query heads, J key-value heads, K head size, N width of the network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle import nn

from llmsuite.errors import UserError
from llmsuite.models.blocks import LayerCache, halves
from llmsuite.models.exact import is_own_code, named_kind
from llmsuite.models.prefix_shapes import NETWORK, PREFIX_KEY, PREFIX_VALUE, WINDOW, network_shapes, prefix_shapes
from llmsuite.models.targets import is_trained
from llmsuite.typing import Tensor

Extend = Callable[..., tuple[Tensor, Tensor, Tensor]]


class PrefixNetwork(nn.Layer):
    """Embedding and first layer of a network that makes prefixes, see `prefix_shapes.network_shapes`."""

    def __init__(self, tokens: int, width: int, network: int):
        super().__init__()
        for kind, shape in network_shapes(tokens, width, network).items():
            setattr(self, kind, self.create_parameter(list(shape), is_bias=len(shape) == 1))

    def forward(self, local: Callable[[Tensor], Tensor]) -> Tensor:
        """What is between the two layers, [P, N]; `local` makes of a parameter what this rank computes with."""
        table, inner, bias = (local(part) for part in (self.prefix_table, self.prefix_inner, self.prefix_inner_bias))
        return paddle.tanh(paddle.matmul(table, inner) + bias)


class PrefixedCore:
    """The `core` of an attention whose rows begin with its prefix.

    Queries get P rows too, whose outputs are thrown away: so there are as many queries as keys, which kernels that are
    causal by themselves need, and rows of several documents are documents that all continue the prefix
    (`devices.ops.document_spans`).
    """

    def __init__(self, attention: Any, network: PrefixNetwork | None = None):
        """`attention` has a `core` and the parameters of `prefix_shapes`; `network` makes prefixes of them."""
        self._attention, self._core, self._network = attention, attention.core, network
        self.local: Callable[[Tensor], Tensor] = _itself
        """Makes of a parameter what this rank computes with."""
        self.extend: Extend = extended
        self.remove: Callable[[Tensor, int], Tensor] = without_prefix

    def __eq__(self, other: object) -> bool:
        """Whether another one computes the same of the parameters of its attention: layers can share a program then."""
        return isinstance(other, PrefixedCore) and self._how == other._how

    def __hash__(self) -> int:
        return hash(self._how)

    @property
    def _how(self) -> tuple[Any, ...]:
        return self._core, self._network, self.local, self.extend, self.remove

    @property
    def shared(self) -> PrefixNetwork | None:
        """The module outside of the attention whose parameters it computes with."""
        return self._network

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """As `devices.ops.attention`, with a mask for P + L tokens."""
        keys, values = self._prefix()
        q, k, v = self.extend(q, k, v, keys, values, _is_interleaved(self._attention))
        return self.remove(self._core(q, k, v, mask), keys.shape[0])

    def _prefix(self) -> tuple[Tensor, Tensor]:
        """Keys and values [P, J, K], of this rank's heads."""
        if self._network is None:
            keys, values = (self.local(getattr(self._attention, kind)) for kind in (PREFIX_KEY, PREFIX_VALUE))
            return keys, values
        # made anew in each layer: so a layer that is computed again has a graph of its own, down to the parameters
        inside = self._network(self.local)
        keys, values = (self._made(inside, kind) for kind in (PREFIX_KEY, PREFIX_VALUE))
        return keys, values

    def _made(self, inside: Tensor, kind: str) -> Tensor:
        weight, bias = (self.local(getattr(self._attention, f"{kind}_{part}")) for part in ("weight", "bias"))
        made = paddle.matmul(inside, weight.flatten(1)) + bias
        return made.reshape([inside.shape[0], *weight.shape[1:]])


def _itself(parameter: Tensor) -> Tensor:
    return parameter


def extended(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, L, H, K], keys and values [B, L, J, K] behind those of a prefix, [P, J, K]: P + L of each."""
    rows, count = q.shape[0], keys.shape[0]
    nobody = q[:, :1].detach().expand([rows, count, *q.shape[2:]])  # any numbers do
    in_front = nobody, *(part.expand([rows, *part.shape[1:]]) for part in _stored(keys, values, interleaved))
    extended_q, extended_k, extended_v = (
        paddle.concat([first.astype(of.dtype), of], 1) for first, of in zip(in_front, (q, k, v))
    )
    return extended_q, extended_k, extended_v


def without_prefix(output: Tensor, count: int) -> Tensor:
    """The outputs [B, L, H, K] of the text's own tokens."""
    return output[:, count:]


def _stored(keys: Tensor, values: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """A prefix [1, P, J, K] with the elements of a key in the order in which attention compares them."""
    keys = keys.unsqueeze(0)
    return halves(keys) if interleaved else keys, values.unsqueeze(0)


def _is_interleaved(attention: Any) -> bool:
    return bool(getattr(attention, "interleaved", False))


def add_prefixes(
    model: Any, tokens: int, network_size: int | None = None, network: PrefixNetwork | None = None
) -> PrefixNetwork | None:
    """Put a prefix in front of what every decoder layer attends to, and freeze the rest.

    Args:
        model: with or without memory; `llmsuite.models.blocks.CausalLM`. One for generation (`Ops.heads_first`) gets
            the parameters, and begins with the cache that they are: see `prefix_cache`.
        tokens: P; kept in the attribute `num_prefix_tokens`.
        network_size: N of a network that makes the prefixes, in training; None for none.
        network: that of another chunk of the model, which this one uses; None to make one.

    Returns:
        The network, where there is one.

    Raises:
        UserError: attention has a window.
    """
    if model.window is not None:
        raise UserError(f"prefix: {WINDOW.format(model.window)}")
    model.num_prefix_tokens = tokens
    assert network_size is None or not model.ops.heads_first, "for generation prefixes have been made"
    for name, parameter in model.named_parameters():
        parameter.stop_gradient = parameter.stop_gradient or not is_trained(name)
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        if not is_own_code(attention):
            raise UserError(
                f"prefix: {named_kind(f'model.layers.{number}.self_attn', attention)} has a forward pass of its own, "
                "which need not attend to a prefix; use lora"
            )
        width = attention.k_proj.weight.shape[1]
        if network_size is not None and network is None:
            network = PrefixNetwork(tokens, width, network_size)
            setattr(model, NETWORK, network)
        for kind, shape in prefix_shapes(tokens, width, attention.head_size, network_size).items():
            setattr(attention, kind, attention.create_parameter(list(shape), is_bias=len(shape) == 1))
        if not model.ops.heads_first:
            attention.core = PrefixedCore(attention, network)
            attention.has_operands = False  # prefixes are float32
    if model.ops.heads_first:
        model.__dict__["hidden_states"] = _behind_cache(model)
    else:
        model.__dict__["layer_inputs"] = _behind_prefix(model.layer_inputs, tokens)
        model.__dict__["embed"] = _embed_behind(model.embed, tokens)
    return network


def _behind_prefix(layer_inputs: Any, tokens: int) -> Any:
    """Wraps `CausalLM.layer_inputs`: positions begin at P, and masks are for P + L tokens."""

    def behind(start: int, length: int, dtype: Any, document_starts: Tensor | None = None) -> tuple[Any, ...]:
        assert start == 0, "a prefix has no cache in training"
        if document_starts is not None:
            # the prefix is a document that every other one continues: positions count from its begin
            prefix = paddle.zeros([document_starts.shape[0], tokens], document_starts.dtype)
            document_starts = paddle.concat([prefix, document_starts], 1)
        return tuple(
            given[:, tokens:] if is_of_tokens else given
            for given, is_of_tokens in _described(layer_inputs(0, tokens + length, dtype, document_starts))
        )

    return behind


def _described(inputs: tuple[Any, ...]) -> list[tuple[Any, bool]]:
    """The further inputs of a layer, and whether each is one of tokens (dim 1), as all are but the mask."""
    place = 0 if len(inputs) == 1 else 2  # of the mask: learned positions have no rotation in front of it
    return [(given, given is not None and number != place) for number, given in enumerate(inputs)]


def _embed_behind(embed: Any, tokens: int) -> Any:
    def behind(input_ids: Tensor, start: int = 0, document_starts: Tensor | None = None) -> Tensor:
        return embed(input_ids, start + tokens, document_starts)

    return behind


# generation


def prefix_cache(model: Any, rows: int, whole: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> list[LayerCache]:
    """The cache that a text begins with: keys and values [B, J, P, K] of each layer.

    Args:
        model: for generation, with prefixes.
        rows: B.
        whole: makes of the part of this rank's heads a tensor as the model computes with.
    """
    cache = []
    for layer in model.model.layers:
        attention = layer.self_attn
        own_keys, own_values = (_local(getattr(attention, kind)) for kind in (PREFIX_KEY, PREFIX_VALUE))
        keys, values = (
            whole(part.transpose([0, 2, 1, 3]).expand([rows, part.shape[2], part.shape[1], part.shape[3]]))
            for part in _stored(own_keys, own_values, _is_interleaved(attention))
        )
        cache.append((keys, values))
    return cache


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_value() if tensor.is_dist() else tensor


def behind_padding(tensor: Tensor, padding: Tensor, tokens: int) -> Tensor:
    """A cache whose rows have the prefix in front of their padding, with the prefix behind it instead: from there on
    it is the first tokens of the row.

    Args:
        tensor: [B, J, P + S, K].
        padding: columns of padding of each row, [B].
        tokens: P.
    """
    at, padding = paddle.arange(tensor.shape[2]).unsqueeze(0), padding.unsqueeze(1)
    moved = paddle.where(at < padding, at + tokens, at - padding)
    source = paddle.where(at < padding + tokens, moved, at.expand_as(moved))
    # on the CPU Paddle has no such operation on bfloat16, and through float32 the numbers stay the same
    wide = tensor.astype("float32") if tensor.dtype == paddle.bfloat16 else tensor
    return paddle.take_along_axis(wide, source.unsqueeze([1, 3]).expand(tensor.shape), 2).astype(tensor.dtype)


def _behind_cache(model: Any) -> Any:
    """Wraps `CausalLM.hidden_states` of a model for generation: a text without a cache begins with the prefix."""
    hidden_states = model.hidden_states

    def behind(
        input_ids: Tensor, cache: list[LayerCache] | None = None, document_starts: Tensor | None = None
    ) -> tuple[Tensor, list[LayerCache]]:
        assert document_starts is None, "the model is built for generation"
        return hidden_states(input_ids, cache or prefix_cache(model, input_ids.shape[0]))

    return behind
