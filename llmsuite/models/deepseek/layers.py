"""The DeepSeek decoder for one card: latent attention and experts. The forward pass: `llmsuite.models.blocks`.

Shapes: B batch, L length, S length with the cache, D hidden, H heads, N and R the parts of a head without and with
rotary positions (nope and rope), K value head size, C width of compressed keys and values, E routed experts.
"""

from __future__ import annotations

import functools
from typing import Any

import paddle
from paddle import nn

from llmsuite.base.typing import Tensor
from llmsuite.devices.ops import Ops
from llmsuite.models.blocks import DecoderLayer, GatedMLP, LayerCache, RMSNorm, WithCore, dim_size, halves, linear
from llmsuite.models.deepseek.attention import absorbed_attention, latent_attention, up_matrices
from llmsuite.models.deepseek.config import DeepSeekConfig
from llmsuite.models.deepseek.shape_spec import mixture_spec
from llmsuite.models.exact import has_hooks
from llmsuite.models.linear import is_matrix, is_plain_linear
from llmsuite.models.moe import MoELayer, MoELM, MTPLayer
from llmsuite.models.mtp import num_layers
from llmsuite.models.sparse import make_mixture

_LATENT_EPS = 1e-6
"""Epsilon of the norms of compressed queries, keys and values, whatever rms_norm_eps is."""


class Attention(nn.Layer, WithCore):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values are kept compressed."""

    never_packed = ("kv_b_proj",)  # multiplied by queries and by the output of attention, see `_absorbed`

    def __init__(self, config: DeepSeekConfig, ops: Ops):
        super().__init__()
        self.ops = ops
        self.rotary = ops.rotary
        self.core = functools.partial(latent_attention, ops)
        self.can_absorb = ops.decoding.heads_first and not ops.matmuls.rounds_attention_inputs
        self.score_factor = config.score_factor
        num_heads = config.num_attention_heads
        self.query_sizes = [config.qk_nope_head_dim, config.qk_rope_head_dim]
        self.latent_sizes = [config.kv_lora_rank, config.qk_rope_head_dim]
        self.key_value_sizes = [config.qk_nope_head_dim, config.v_head_dim]
        width = num_heads * sum(self.query_sizes)
        self.is_compressed = config.q_lora_rank is not None
        if config.q_lora_rank is not None:
            self.q_a_proj = linear(config.hidden_size, config.q_lora_rank)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, _LATENT_EPS, ops)
            self.q_b_proj = linear(config.q_lora_rank, width)
        else:
            self.q_proj = linear(config.hidden_size, width)
        self.kv_a_proj_with_mqa = linear(config.hidden_size, sum(self.latent_sizes))
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, _LATENT_EPS, ops)
        self.kv_b_proj = linear(config.kv_lora_rank, num_heads * sum(self.key_value_sizes))
        self.o_proj = linear(num_heads * config.v_head_dim, config.hidden_size)
        self.up_keys: Tensor | None
        self.up_values: Tensor | None
        for name in ("up_keys", "up_values"):  # see `keep_up_matrices`; buffers, so that a program is saved with them
            self.register_buffer(name, None)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, past: LayerCache | None = None
    ) -> tuple[Tensor, LayerCache]:
        """x [B, L, D] to [B, L, D]; the cache holds compressed keys and values [B, S, C] and rotated keys [B, S, R]."""
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.is_compressed else self.q_proj(x)
        if self.score_factor != 1.0:
            q = q * self.score_factor
        q_nope, q_rope = q.reshape([0, 0, -1, sum(self.query_sizes)]).split(self.query_sizes, -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split(self.latent_sizes, -1)
        latent = self.kv_a_layernorm(latent)
        q_rope = self.rotary(halves(q_rope), cos, sin)
        k_rope = self.rotary(halves(k_rope.unsqueeze(2)), cos, sin).squeeze(2)
        if past is not None:
            latent = paddle.concat([past[0], latent], 1)
            k_rope = paddle.concat([past[1], k_rope], 1)
        parts = q_nope, q_rope, latent, k_rope, mask
        absorbs = self._absorbs(dim_size(x, 1))
        if isinstance(absorbs, bool):
            out = self._absorbed(*parts) if absorbs else self._expanded(*parts)
        else:  # a program whose input leaves the number of new tokens open
            out = paddle.static.nn.cond(absorbs, lambda: self._absorbed(*parts), lambda: self._expanded(*parts))
        return self.o_proj(out.reshape([0, 0, -1])), (latent, k_rope)

    def _expanded(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor | None) -> Tensor:
        """Output of all heads, [B, L, H, K], by expanding the compressed cache to full keys and values."""
        size = sum(self.key_value_sizes)
        num_heads = self.kv_b_proj.weight.shape[1] // size  # an int, also in programs that leave lengths open
        heads = self.kv_b_proj(latent).reshape([0, 0, num_heads, size])
        k_nope, v = heads.split(self.key_value_sizes, -1)
        return self.core(q_nope, q_rope, k_nope, k_rope.unsqueeze(2), v, mask)

    def _absorbed(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor | None) -> Tensor:
        """Output of all heads, [B, L, H, K], directly on the compressed keys and values."""
        of_keys = self.up_keys
        of_values = self.up_values
        if of_keys is None or of_values is None:
            of_keys, of_values = self._up_matrices()
        return absorbed_attention(self.ops, q_nope, q_rope, latent, k_rope, of_keys, of_values, mask)

    def _up_matrices(self) -> tuple[Tensor, Tensor]:
        return up_matrices(self.kv_b_proj.weight, self.latent_sizes[0], self.key_value_sizes)

    @paddle.no_grad()
    def keep_up_matrices(self) -> None:
        """Cache the matrices that `_absorbed` multiplies by: to compute them takes longer than to multiply one token.
        For generation; call it again when `kv_b_proj` has new values."""
        if self.can_absorb and is_matrix(self.kv_b_proj) and not self.kv_b_proj.weight.is_dist():
            self.up_keys, self.up_values = (matrix.contiguous() for matrix in self._up_matrices())

    def drop_up_matrices(self) -> None:
        """Drop the cached matrices: they are computed in each pass again."""
        self.up_keys = self.up_values = None

    def _has_own_core(self) -> bool:
        """True if `_absorbed` is equivalent to `_expanded`: neither this method nor the core of attention is
        replaced."""
        is_own_core = isinstance(self.core, functools.partial) and self.core.func is latent_attention
        return is_own_core and type(self)._expanded is Attention._expanded

    def _absorbs(self, num_new: Any) -> Any:
        """True if so few tokens are new that attention on the compressed keys and values is less work than expanding
        the
        cache: a bool, or a tensor where `num_new` is one, as in a program."""
        matrix = self.kv_b_proj
        is_training = paddle.is_grad_enabled() if paddle.in_dynamic_mode() else self.training
        if not self.can_absorb or is_training or not self._has_own_core():
            return False
        if not is_plain_linear(matrix) or matrix.weight.is_dist() or has_hooks(matrix):
            return False  # an adapter, a shard, or a device's own matrix products
        # work per pair of tokens and head: on compressed keys and values, and on expanded ones
        compressed = 2 * self.latent_sizes[0]
        expanded = sum(self.key_value_sizes)
        return compressed <= expanded or num_new < self.latent_sizes[0] * expanded / (compressed - expanded)


def _layer(config: DeepSeekConfig, ops: Ops, number: int) -> DecoderLayer:
    """Latent attention, and experts or a gated MLP."""
    around = _norm(config, ops), Attention(config, ops), _norm(config, ops)
    if not config.has_experts(number):
        return DecoderLayer(*around, GatedMLP(config.hidden_size, config.intermediate_size, ops))
    mixture = make_mixture(config.hidden_size, ops, mixture_spec(config))
    if number >= config.num_hidden_layers:
        return MTPLayer(*around, mixture, config.hidden_size, lambda: _norm(config, ops))
    return MoELayer(*around, mixture)


class DeepSeek(MoELM):
    """DeepSeek-V2 and V3, and Kimi K2; MTP layers are a part of the model where they are trained."""

    def __init__(self, config: DeepSeekConfig, ops: Ops):
        layers = [_layer(config, ops, i) for i in range(num_layers(config))]
        super().__init__(config, ops, layers, _norm(config, ops))


def _norm(config: DeepSeekConfig, ops: Ops) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
