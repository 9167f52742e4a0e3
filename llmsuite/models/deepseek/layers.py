"""The DeepSeek decoder for one card: latent attention and experts. The forward pass: `llmsuite.models.blocks`.

Shapes: B batch, L length, S length with the cache, D hidden, H heads, N and R the parts of a head without and with
rotary positions (nope and rope), K value head size, C width of compressed keys and values, E routed experts.
"""

from __future__ import annotations

from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import nn

from llmsuite.devices.ops import Ops, causal_mask, document_mask
from llmsuite.models.blocks import (
    ZEROS,
    CausalLM,
    DecoderLayer,
    GatedMLP,
    LayerCache,
    RMSNorm,
    linear,
    rotation,
    rotation_at,
)
from llmsuite.models.deepseek.config import DeepSeekConfig
from llmsuite.models.experts import Balance, Experts
from llmsuite.models.rope import magnitude
from llmsuite.typing import Tensor

_LATENT_EPS = 1e-6
"""Epsilon of the norms of compressed queries, keys and values, whatever rms_norm_eps is."""


class Attention(nn.Layer):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values are kept compressed."""

    def __init__(self, config: DeepSeekConfig, ops: Ops):
        super().__init__()
        self.rotary, self.core = ops.rotary, attention
        self.scale, self.num_heads = config.attention_scale, config.num_attention_heads
        self.query_sizes = [config.qk_nope_head_dim, config.qk_rope_head_dim]
        self.latent_sizes = [config.kv_lora_rank, config.qk_rope_head_dim]
        self.key_value_sizes = [config.qk_nope_head_dim, config.v_head_dim]
        width = self.num_heads * sum(self.query_sizes)
        self.is_compressed = config.q_lora_rank is not None
        if config.q_lora_rank is not None:
            self.q_a_proj = linear(config.hidden_size, config.q_lora_rank)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, _LATENT_EPS, ops)
            self.q_b_proj = linear(config.q_lora_rank, width)
        else:
            self.q_proj = linear(config.hidden_size, width)
        self.kv_a_proj_with_mqa = linear(config.hidden_size, sum(self.latent_sizes))
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, _LATENT_EPS, ops)
        self.kv_b_proj = linear(config.kv_lora_rank, self.num_heads * sum(self.key_value_sizes))
        self.o_proj = linear(self.num_heads * config.v_head_dim, config.hidden_size)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, past: LayerCache | None = None
    ) -> tuple[Tensor, LayerCache]:
        """x [B, L, D] to [B, L, D]; the cache holds compressed keys and values [B, S, C] and rotated keys [B, S, R].

        Scores are the sum of two products, not one of concatenated heads: under Paddle's static mode every form with
        the concatenation gives wrong gradients (3.3.1).
        """
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.is_compressed else self.q_proj(x)
        q_nope, q_rope = q.reshape([0, 0, -1, sum(self.query_sizes)]).split(self.query_sizes, -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split(self.latent_sizes, -1)
        latent = self.kv_a_layernorm(latent)
        q_rope = self.rotary(_halves(q_rope), cos, sin)
        k_rope = self.rotary(_halves(k_rope.unsqueeze(2)), cos, sin).squeeze(2)
        if past is not None:
            latent, k_rope = paddle.concat([past[0], latent], 1), paddle.concat([past[1], k_rope], 1)
        heads = self.kv_b_proj(latent).reshape([0, 0, -1, sum(self.key_value_sizes)])
        k_nope, v = (part.transpose([0, 2, 1, 3]) for part in heads.split(self.key_value_sizes, -1))
        q_nope, q_rope = ((part * self.scale).transpose([0, 2, 1, 3]) for part in (q_nope, q_rope))
        shared = k_rope.unsqueeze(2).expand([-1, -1, self.num_heads, -1]).transpose([0, 2, 1, 3])
        out = self.core(q_nope, q_rope, k_nope, shared, v, mask).transpose([0, 2, 1, 3])
        return self.o_proj(out.reshape([0, 0, -1])), (latent, k_rope)


def attention(q_nope: Tensor, q_rope: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Softmax of the sum of two products, of scaled queries and keys, times v. Each [B, H, L or S, its size]."""
    scores = paddle.matmul(q_nope, k_nope, transpose_y=True) + paddle.matmul(q_rope, k_rope, transpose_y=True)
    return paddle.matmul(F.softmax(scores + mask, -1), v)


def _halves(x: Tensor) -> Tensor:
    """[B, L, H, R] with pairs side by side to halves, as `rotary` takes them; scores do not depend on the order."""
    pairs = x.reshape([0, 0, 0, x.shape[-1] // 2, 2])
    return pairs.transpose([0, 1, 2, 4, 3]).reshape([0, 0, 0, x.shape[-1]])


class Gate(nn.Layer):
    """The router: which experts a token goes to, and with what weight."""

    def __init__(self, config: DeepSeekConfig):
        super().__init__()
        self.num_experts, self.num_chosen = config.n_routed_experts, config.num_experts_per_tok
        self.num_groups = 1 if config.topk_method == "greedy" else config.n_group
        self.num_chosen_groups = config.topk_group
        self.is_normed, self.factor = config.norm_topk_prob, config.routed_scaling_factor
        self.balance: Balance | None = None
        self.weight = self.create_parameter([config.hidden_size, self.num_experts], attr=ZEROS)
        self.e_score_correction_bias = None
        if config.model_type == "deepseek_v3":
            # it balances the load by shifting the choice: the trainer updates it, no gradient reaches it
            attr = paddle.ParamAttr(initializer=nn.initializer.Constant(0.0), trainable=False)
            self.e_score_correction_bias = self.create_parameter([self.num_experts], attr=attr)

    def forward(self, x: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [B, L, D] to weights, in float32, and numbers of the chosen experts, both [B, L, k].

        `counted` [B, L] is 1 for tokens and 0 for padding, which the balance does not see.
        """
        with paddle.amp.auto_cast(enable=False):
            logits = paddle.matmul(x.astype("float32"), self.weight.astype("float32"))
            if self.e_score_correction_bias is None:
                scores = F.softmax(logits, -1)
                selection_score = scores.detach()
            else:
                scores = F.sigmoid(logits)
                selection_score = scores.detach() + self.e_score_correction_bias.astype("float32")
            if self.num_groups > 1:
                selection_score = self._in_best_groups(selection_score)
            chosen = paddle.topk(selection_score, self.num_chosen, -1)[1]
            weights = paddle.take_along_axis(scores, chosen, -1)
            if self.is_normed:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
            weights = weights * self.factor
            # a recomputed layer is counted the second time only, when there is a graph
            if self.balance is not None and self.training and paddle.is_grad_enabled():
                weights = self.balance.count(weights, chosen, scores, counted)
            return weights, chosen

    def _in_best_groups(self, selection_score: Tensor) -> Tensor:
        """[B, L, E] with the scores of experts outside the best groups far below all others."""
        groups = selection_score.reshape([0, 0, self.num_groups, self.num_experts // self.num_groups])
        num_best = 1 if self.e_score_correction_bias is None else 2
        best = paddle.topk(groups, num_best, -1)[0].sum(-1)
        outside = 1.0 - _among_best(best, self.num_chosen_groups)
        return (groups - outside.unsqueeze(-1) * 1e9).reshape([0, 0, self.num_experts])


def _among_best(values: Tensor, count: int) -> Tensor:
    """1 for the `count` largest of the last dim, 0 for the others."""
    return F.one_hot(paddle.topk(values, count, -1)[1], values.shape[-1]).sum(-2)


class MoE(nn.Layer):
    """Mixture of experts: routed ones, and shared ones that every token goes through."""

    def __init__(self, config: DeepSeekConfig, ops: Ops):
        super().__init__()
        self.gate = Gate(config)
        self.experts = Experts(config.n_routed_experts, config.hidden_size, config.moe_intermediate_size, ops)
        self.shared_experts = GatedMLP(config.hidden_size, config.shared_size, ops)

    def forward(self, x: Tensor, counted: Tensor | None = None) -> Tensor:
        """[B, L, D] to [B, L, D]; `counted` as in `Gate.forward`."""
        return self.experts(x, *self.gate(x, counted)) + self.shared_experts(x)


class DenseLayer(DecoderLayer):
    """Latent attention and a gated MLP."""

    def __init__(self, config: DeepSeekConfig, ops: Ops):
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, ops)
        super().__init__(_norm(config, ops), Attention(config, ops), _norm(config, ops), mlp)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, *counted: Any, past: LayerCache | None = None
    ) -> tuple[Tensor, LayerCache]:
        """As `DecoderLayer.forward`; a layer without experts ignores `counted`."""
        return super().forward(x, cos, sin, mask, past)

    def forward_train(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, *counted: Any) -> Tensor:
        """`forward` without the cache."""
        return self(x, cos, sin, mask, *counted)[0]


class MoELayer(DecoderLayer):
    """Latent attention and experts."""

    def __init__(self, config: DeepSeekConfig, ops: Ops):
        super().__init__(_norm(config, ops), Attention(config, ops), _norm(config, ops), MoE(config, ops))

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, *counted: Any, past: LayerCache | None = None
    ) -> tuple[Tensor, LayerCache]:
        """As `DecoderLayer.forward`; `counted` as in `Gate.forward`."""
        attended, present = self.self_attn(self.input_layernorm(x), cos, sin, mask, past)
        return self.mlp_block(x + attended, cos, sin, mask, *counted), present

    def forward_train(self, x: Tensor, *context: Any) -> Tensor:
        """`forward` without the cache."""
        return self(x, *context)[0]

    # `forward_train` in two halves: which expert a token goes to depends on values, so the second cannot be compiled

    def attention_block(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, counted: Tensor | None = None
    ) -> Tensor:
        """[B, L, D] to [B, L, D], by the modules in `attention_modules`."""
        return x + self.self_attn(self.input_layernorm(x), cos, sin, mask)[0]

    attention_modules = ("input_layernorm", "self_attn")

    def mlp_block(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, counted: Tensor | None = None
    ) -> Tensor:
        """[B, L, D] to [B, L, D]."""
        return x + self.mlp(self.post_attention_layernorm(x), counted)


class DeepSeek(CausalLM):
    """DeepSeek-V2 and V3; the layers that predict further tokens are no part of it."""

    def __init__(self, config: DeepSeekConfig, ops: Ops):
        kinds = [MoELayer if config.has_experts(i) else DenseLayer for i in range(config.num_hidden_layers)]
        super().__init__(config, ops, [kind(config, ops) for kind in kinds], _norm(config, ops))
        self._frequencies, self._magnitude = config.rope_frequencies(), magnitude(config.rope_scaling)

    def layer_inputs(
        self, start: int, length: int, dtype: Any, document_starts: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        """Rotation, mask, and which tokens count. Attention is computed in this file, so the mask is the plain one on
        every device."""
        counted = None if document_starts is None else (document_starts >= 0).astype("float32")
        if document_starts is not None:
            # marked padding would have positions beyond the row
            document_starts = document_starts.clip(min=0) if bool((document_starts > 0).any()) else None
        cos, sin = rotation(self._frequencies, self._magnitude, start, length, dtype, document_starts)
        packed = document_starts is not None
        mask = document_mask(document_starts, dtype) if packed else causal_mask(length, start + length, dtype)
        return cos, sin, mask, counted

    def layer_inputs_at(self, positions: Tensor, mask: Tensor, dtype: Any) -> tuple[Tensor | None, ...]:
        """Rotation and mask."""
        return (*rotation_at(self._frequencies, self._magnitude, positions, dtype), mask)


def _norm(config: DeepSeekConfig, ops: Ops) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
