"""Layers in the form that is fastest for generation on one device: fewer and larger products, fewer small ops.

A pass over one new token reads every weight once and computes little with it: on a CPU, what ops cost beside that
decides. Values stay what they are, but for rounding.
"""

from __future__ import annotations

from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import nn

from llmsuite.models.blocks import Attention, CausalLM, GatedMLP, LayerCache, longer

Tensor = Any


@paddle.no_grad()
def fuse(model: CausalLM) -> None:
    """Let the layers of a model compute in the forms below, for good; they must not be cut over ranks.

    Layers of other kinds, such as DeepSeek's attention, stay as they are, and layers that round their inputs.
    """
    attentions = [module for module in model.sublayers() if isinstance(module, Attention)]
    if not all(_is_plain(m.q_proj, m.k_proj, m.v_proj) for m in attentions):
        attentions = []
    for module in attentions:
        module.__dict__["forward"] = FusedAttention(module).forward
    for module in model.sublayers():
        if isinstance(module, GatedMLP) and _is_plain(module.gate_proj, module.up_proj):
            module.__dict__["forward"] = FusedMLP(module).forward
    if attentions:
        for name in ("layer_inputs", "layer_inputs_at"):
            model.__dict__[name] = _for_whole_heads(getattr(model, name))


class FusedAttention:
    """As `llmsuite.models.blocks.Attention`, its three projections as one, queries and keys turned together."""

    def __init__(self, attention: Attention):
        self._attention = attention
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        size = attention.head_size
        num_queries, num_keys = (p.weight.shape[1] // size for p in projections[:2])
        self._parts, self._shape = [num_queries, num_keys], [0, 0, num_queries + 2 * num_keys, size]
        attention.qkv_proj = _joined(projections)
        attention.q_proj = attention.k_proj = attention.v_proj = None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, past: LayerCache | None = None
    ) -> tuple[Tensor, LayerCache]:
        """As `Attention.forward`; cos and sin as `_for_whole_heads` makes them."""
        own = self._attention
        qkv = _product(own.qkv_proj, x).reshape(self._shape)
        turned, v = qkv.split([sum(self._parts), self._parts[1]], 2)
        if own.q_norm is None or own.k_norm is None:
            turned = _turn(turned, cos, sin)
            q, k = turned.split(self._parts, 2)
        else:
            q, k = turned.split(self._parts, 2)
            q, k = _turn(own.q_norm(q), cos, sin), _turn(own.k_norm(k), cos, sin)
        k, v = longer(k, v, past, own.heads_first)
        return _product(own.o_proj, own.core(q, k, v, mask).reshape([0, 0, -1])), (k, v)


class FusedMLP:
    """As `llmsuite.models.blocks.GatedMLP`, its first two matrices as one."""

    def __init__(self, mlp: GatedMLP):
        self._mlp = mlp
        mlp.gate_up_proj = _joined([mlp.gate_proj, mlp.up_proj])
        mlp.gate_proj = mlp.up_proj = None

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, D] to [B, L, D]."""
        return _product(self._mlp.down_proj, F.swiglu(_product(self._mlp.gate_up_proj, x)))


def _product(layer: Any, x: Tensor) -> Tensor:
    """What a layer gives, without what Paddle 3.3.1 does around an `nn.Linear`: a third of its time for one token."""
    if not _is_plain(layer):
        return layer(x)
    product = paddle.matmul(x, layer.weight)
    return product if layer.bias is None else product + layer.bias


def _is_plain(*layers: nn.Linear) -> bool:
    return all(type(layer) is nn.Linear for layer in layers)


def _joined(layers: list[nn.Linear]) -> nn.Linear:
    """One linear layer with the outputs of several."""
    has_bias = layers[0].bias is not None
    with paddle.LazyGuard():
        joined = nn.Linear(1, 1, bias_attr=None if has_bias else False)
    joined.weight = _parameter(paddle.concat([layer.weight for layer in layers], 1))
    if has_bias:
        joined.bias = _parameter(paddle.concat([layer.bias for layer in layers]))
    return joined


def _parameter(value: Tensor) -> Any:
    parameter = paddle.create_parameter(value.shape, value.dtype, default_initializer=nn.initializer.Assign(value))
    parameter.stop_gradient = True
    return parameter


def _for_whole_heads(layer_inputs: Any) -> Any:
    """cos and sin of half a head, as a model makes them, to what `_turn` takes; once a pass, not once a layer."""

    def doubled(*args: Any) -> tuple[Tensor, ...]:
        cos, sin, *rest = layer_inputs(*args)
        return (paddle.concat([cos, cos], -1), paddle.concat([-sin, sin], -1), *rest)

    return doubled


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`llmsuite.devices.ops.rotary` in half as many ops. x [B, L, H, K]; cos, sin [B, L, 1, K]."""
    return x * cos + paddle.roll(x, x.shape[-1] // 2, -1) * sin
