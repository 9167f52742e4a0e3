"""Linear attention by the gated delta rule, as Qwen3-Next has it (Yang et al. 2024, arXiv 2412.06464).

Shapes: B batch, L length, D hidden, J heads of queries and keys, H heads of values, K and V their sizes, T taps of the
convolution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

from llmsuite.base.typing import Tensor
from llmsuite.devices.ops import Ops
from llmsuite.models.blocks import ZEROS, LayerCache, RMSNorm, WithCore, apply_linears, linear
from llmsuite.models.delta_rule import causal_convolution, gated_delta_rule, unit_norm
from llmsuite.models.shape_spec import GatedDelta

_MAX_RATE = 16.0
"""Rates of decay start between 0 and this, as in the published code."""


@dataclasses.dataclass(frozen=True)
class Projected:
    """Projections of tokens, with the parameters of the same heads: all of the model, or those of a rank."""

    tokens: list[Tensor]
    """Outputs of the first matrices, [B, L, ...] each."""
    kernels: list[Tensor]
    """Convolutions of queries, keys and values, [T, 1, ...] each."""
    log_rate: Tensor
    """Logarithm of the rate of decay of each head, [H]."""
    time_bias: Tensor
    """Term that is added to the projected decay of each head, [H]."""


class GatedDeltaAttention(nn.Layer, WithCore):
    """Linear attention: a convolution and the gated delta rule over heads, and a gated norm of their outputs."""

    never_packed = ("q_conv", "k_conv", "v_conv")

    def __init__(self, hidden_size: int, eps: float, ops: Ops, spec: GatedDelta):
        super().__init__()
        self.spec = spec
        self.core = gated_delta_rule
        self.on_heads: Callable[..., list[Tensor]] = call_on_heads
        """Calls a function of the projections and parameters of heads: tensor parallelism calls it with those of the
        rank."""
        self.apply_linears = apply_linears
        keys = spec.key_width
        values = spec.width
        if spec.joined:
            self.in_qkvz_proj = linear(hidden_size, 2 * keys + 2 * values)
            self.in_ba_proj = linear(hidden_size, 2 * spec.heads)
        else:
            self.in_q_proj = linear(hidden_size, keys)
            self.in_k_proj = linear(hidden_size, keys)
            self.in_v_proj = linear(hidden_size, values)
            self.in_z_proj = linear(hidden_size, values)
            self.in_b_proj = linear(hidden_size, spec.heads)
            self.in_a_proj = linear(hidden_size, spec.heads)
        self.q_conv = Convolution(spec.taps, keys)
        self.k_conv = Convolution(spec.taps, keys)
        self.v_conv = Convolution(spec.taps, values)
        self.A_log = self.create_parameter([spec.heads], default_initializer=nn.initializer.Assign(_log_rates(spec)))
        self.dt_bias = self.create_parameter([spec.heads], default_initializer=nn.initializer.Constant(1.0))
        self.norm = RMSNorm(spec.head_size, eps, ops)
        self.out_proj = linear(values, hidden_size)

    def forward(self, x: Tensor, positions: Tensor | None, past: LayerCache | None = None) -> tuple[Tensor, LayerCache]:
        """Attention of tokens to those before them in their documents.

        Args:
            x: [B, L, D].
            positions: of the tokens in their documents, [B, L]; None where they continue the cache.
            past: the cache of the tokens before.

        Returns:
            [B, L, D], and the cache: the last inputs of the convolution [B, T - 1, 2 J K + H V], and the state
            [B, H, K, V] in float32.
        """
        spec = self.spec
        if spec.joined:
            matrices = [self.in_qkvz_proj, self.in_ba_proj]
        else:
            matrices = [self.in_q_proj, self.in_k_proj, self.in_v_proj]
            matrices += [self.in_z_proj, self.in_b_proj, self.in_a_proj]
        kernels = [self.q_conv.weight, self.k_conv.weight, self.v_conv.weight]
        projected = Projected(self.apply_linears(matrices, x, None), kernels, self.A_log, self.dt_bias)
        out, gate, inputs, state = self.on_heads(self._heads, projected, positions, past)
        out = self.norm(out) * F.silu(gate.astype("float32")).astype(out.dtype)
        return self.out_proj(out.reshape([0, 0, -1])), (inputs, state)

    def _heads(self, projected: Projected, positions: Tensor | None, past: LayerCache | None) -> list[Tensor]:
        """Outputs and gates of heads, [B, L, H, V] each, and the new cache."""
        spec = self.spec
        q, k, v, gate, step, time = self._split(projected.tokens)
        dtype = v.dtype
        before: list[Any] = [None] * 3
        if past is not None:
            before = paddle.split(past[0], [part.shape[-1] for part in (q, k, v)], -1)
        parts = zip((q, k, v), projected.kernels, before)
        (q, inputs_q), (k, inputs_k), (v, inputs_v) = (
            causal_convolution(part, kernel, positions, earlier) for part, kernel, earlier in parts
        )
        q, k = (unit_norm(part.reshape([0, 0, -1, spec.key_size]).astype("float32")) for part in (q, k))
        q = q * spec.key_size**-0.5
        if spec.group > 1:
            q, k = (part.repeat_interleave(spec.group, 2) for part in (q, k))
        v = v.reshape([0, 0, -1, spec.head_size])
        rate = paddle.exp(projected.log_rate.astype("float32"))
        decay = -rate * F.softplus(time.astype("float32") + projected.time_bias.astype("float32"))
        state = None if past is None else past[1]
        out, state = self.core(q, k, v, decay, F.sigmoid(step.astype("float32")), positions, state)
        inputs = paddle.concat([inputs_q, inputs_k, inputs_v], -1)
        return [out.astype(dtype), gate.reshape([0, 0, -1, spec.head_size]), inputs, state]

    def _split(self, tokens: list[Tensor]) -> list[Tensor]:
        """Queries, keys, values, gates, step sizes and decays of the first matrices' outputs, [B, L, ...] each."""
        spec = self.spec
        if not spec.joined:
            return tokens
        values = spec.group * spec.head_size
        sizes = [spec.key_size, spec.key_size, values, values]
        of_heads = tokens[0].reshape([0, 0, -1, sum(sizes)]).split(sizes, -1)
        of_time = tokens[1].reshape([0, 0, -1, 2 * spec.group]).split(2, -1)
        return [part.flatten(2) for part in (*of_heads, *of_time)]


class Convolution(nn.Layer):
    """The weights of a causal convolution of each channel, [T, 1, I]."""

    def __init__(self, taps: int, channels: int):
        super().__init__()
        self.weight = self.create_parameter([taps, 1, channels], attr=ZEROS)


def call_on_heads(function: Callable[..., list[Tensor]], projected: Projected, *more: Any) -> list[Tensor]:
    """The result of a function of all heads."""
    return function(projected, *more)


def _log_rates(spec: GatedDelta) -> np.ndarray:
    """Initial logarithms of the rates of decay: evenly spaced rates."""
    return np.log((np.arange(spec.heads) + 0.5) / spec.heads * _MAX_RATE).astype("float32")
