"""The Llama decoder for one card. `llmsuite.models.blocks` explains the shapes and the forward pass."""

from __future__ import annotations

from typing import Any

from llmsuite.devices.ops import Ops
from llmsuite.models.blocks import Attention, CausalLM, DecoderLayer, GatedMLP, RMSNorm, rotation, rotation_at
from llmsuite.models.llama.config import LlamaConfig
from llmsuite.models.rope import magnitude
from llmsuite.typing import Tensor


class LlamaLayer(DecoderLayer):
    """Grouped-query attention and a gated MLP."""

    def __init__(self, config: LlamaConfig, ops: Ops):
        super().__init__(
            RMSNorm(config.hidden_size, config.rms_norm_eps, ops),
            Attention(config, ops, qkv_bias=config.attention_bias, o_bias=config.attention_bias),
            RMSNorm(config.hidden_size, config.rms_norm_eps, ops),
            GatedMLP(config.hidden_size, config.intermediate_size, ops, bias=config.mlp_bias),
        )


class Llama(CausalLM):
    """Llama 1, 2, 3.x and what shares their code."""

    def __init__(self, config: LlamaConfig, ops: Ops):
        layers = [LlamaLayer(config, ops) for _ in range(config.num_hidden_layers)]
        super().__init__(config, ops, layers, RMSNorm(config.hidden_size, config.rms_norm_eps, ops))
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
