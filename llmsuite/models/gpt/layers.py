"""The GPT decoder for one card: learned positions, LayerNorm, biases. The forward pass: `llmsuite.models.blocks`.

Shapes: B batch, L length, S length with the cache, D hidden, H heads, K head size.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn

from llmsuite.base.typing import Tensor
from llmsuite.devices.ops import Ops
from llmsuite.models.blocks import (
    ZEROS,
    CausalLM,
    DecoderLayer,
    GeluMLP,
    LayerCache,
    LayerNorm,
    WithCore,
    apply_linears,
    extend_cache,
    linear,
)
from llmsuite.models.gpt.config import GPTConfig
from llmsuite.models.rotation import positions


class Attention(nn.Layer, WithCore):
    """Self-attention with biases and no rotation."""

    def __init__(self, config: GPTConfig, ops: Ops):
        super().__init__()
        self.head_size = config.head_size
        self.core = ops.attention
        self.heads_first = ops.decoding.heads_first
        self.apply_linears = apply_linears
        self.q_proj = linear(config.hidden_size, config.hidden_size, bias=True)
        self.k_proj = linear(config.hidden_size, config.hidden_size, bias=True)
        self.v_proj = linear(config.hidden_size, config.hidden_size, bias=True)
        self.o_proj = linear(config.hidden_size, config.hidden_size, bias=True)

    def forward(self, x: Tensor, mask: Tensor | None, past: LayerCache | None = None) -> tuple[Tensor, LayerCache]:
        """x [B, L, D] to [B, L, D]; the cache holds keys and values, each [B, S, H, K], or [B, H, S, K]."""
        heads = [0, 0, -1, self.head_size]
        q, k, v = (part.reshape(heads) for part in self.apply_linears([self.q_proj, self.k_proj, self.v_proj], x))
        k, v = extend_cache(k, v, past, self.heads_first)
        return self.o_proj(self.core(q, k, v, mask).reshape([0, 0, -1])), (k, v)


class GPTLayer(DecoderLayer):
    """Pre-norm attention and MLP, each around a residual."""

    def __init__(self, config: GPTConfig, ops: Ops):
        mlp = GeluMLP(config.hidden_size, config.mlp_size, bias=True)
        super().__init__(_norm(config), Attention(config, ops), _norm(config), mlp)

    def forward(  # type: ignore[override]
        self, x: Tensor, mask: Tensor | None, past: LayerCache | None = None
    ) -> tuple[Tensor, LayerCache]:
        """x [B, L, D] to [B, L, D] and the layer's cache."""
        attended, present = self.self_attn(self.input_layernorm(x), mask, past)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), present


class GPT(CausalLM):
    """GPT-2 and GPT-3 (every layer with full attention)."""

    def __init__(self, config: GPTConfig, ops: Ops):
        layers = [GPTLayer(config, ops) for _ in range(config.num_hidden_layers)]
        super().__init__(config, ops, layers, _norm(config))
        positions = nn.Embedding(config.max_position_embeddings, config.hidden_size, weight_attr=ZEROS)
        self.model.embed_positions = positions

    def embed(self, input_ids: Tensor, start: int = 0, document_starts: Tensor | None = None) -> Tensor:
        """Input ids [B, L] at the positions from `start`, or from there in their documents, to the input of the first
        layer, [B, L, D]."""
        end = start + input_ids.shape[1]
        # a row of several documents may be longer than any of them
        assert document_starts is not None or end <= self.config.max_position_embeddings, f"no positions up to {end}"
        at = paddle.arange(start, end).unsqueeze(0) if document_starts is None else start + positions(document_starts)
        return self.model.embed_tokens(input_ids) + self.model.embed_positions(at)

    def embed_at(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Input ids [B, L] at the positions [B, L] to the input of the first layer, [B, L, D]."""
        return self.model.embed_tokens(input_ids) + self.model.embed_positions(positions)

    def layer_inputs_at(self, positions: Tensor, mask: Tensor, dtype: Any) -> tuple[Tensor | None, ...]:
        """The mask."""
        return (mask,)

    def layer_inputs(
        self, start: int, length: int, dtype: Any, document_starts: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        """The mask."""
        return tuple(self.masks(start, length, dtype, document_starts))


def _norm(config: GPTConfig) -> LayerNorm:
    return LayerNorm(config.hidden_size, config.layer_norm_eps)
