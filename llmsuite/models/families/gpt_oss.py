"""gpt-oss: its config, its description and its published sizes. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from llmsuite.models.decoder_config import (
    SMALL,
    DenseConfig,
    LayerType,
    NumLayers,
    PositiveFloat,
    PositiveInt,
    TokenId,
    in_written_order,
    window_problems,
)
from llmsuite.models.shape_spec import LayerSpec, MoE, ShapeSpec

_CLAMP = (1.702, 7.0)
"""Slope and limit of its SwiGLU."""
_GATE_UP = "mlp.experts.gate_up_proj"


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class GptOssConfig(DenseConfig):
    """gpt-oss. Names are those of HF's config.json."""

    family: ClassVar[str] = "gpt_oss"
    network: ClassVar[str] = "llmsuite.models.sparse:SparseLM"
    experts_key: ClassVar[str] = "num_local_experts"
    chosen_key: ClassVar[str] = "num_experts_per_tok"
    architectures: ClassVar[Mapping[str, str]] = {"gpt_oss": "GptOssForCausalLM"}
    fixed: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "silu",
        "attention_bias": True,
        "swiglu_alpha": _CLAMP[0],
        "swiglu_limit": _CLAMP[1],
    }
    written: ClassVar[Mapping[str, Any]] = fixed
    without_effect: ClassVar[tuple[str, ...]] = ("experts_per_token", "initial_context_length")
    hf_parts: ClassVar[Mapping[str, str]] = {
        "mlp.gate": "mlp.router",
        "mlp.experts.gate_proj.weight": _GATE_UP,
        "mlp.experts.up_proj.weight": _GATE_UP,
        "mlp.experts.down_proj.weight": "mlp.experts.down_proj",
        "mlp.experts.gate_proj.bias": f"{_GATE_UP}_bias",
        "mlp.experts.up_proj.bias": f"{_GATE_UP}_bias",
        "mlp.experts.down_proj.bias": "mlp.experts.down_proj_bias",
    }
    hf_alternating: ClassVar[tuple[str, ...]] = (_GATE_UP, f"{_GATE_UP}_bias")
    names: ClassVar[str] = "llmsuite.models.dense_names:PLAIN_STACK_NAMES"
    rope_kinds: ClassVar[tuple[str, ...]] = ("default", "linear", "yarn")

    model_type: Literal["gpt_oss"] = "gpt_oss"
    """The only one."""
    vocab_size: PositiveInt = 201088
    hidden_size: PositiveInt = 2880
    intermediate_size: PositiveInt = 2880
    """Width of an expert."""
    num_hidden_layers: NumLayers = 36
    num_local_experts: PositiveInt = 128
    """Experts a token can be sent to."""
    num_experts_per_tok: PositiveInt = 4
    """Experts of a token."""
    num_attention_heads: PositiveInt = 64
    num_key_value_heads: PositiveInt = 8
    head_dim: Annotated[int, Gt(0), Le(4096)] | None = 64
    """Size of a head; null for hidden_size / num_attention_heads."""
    max_position_embeddings: PositiveInt = 131072
    rms_norm_eps: PositiveFloat = 1e-5
    rope_theta: Annotated[float, Ge(1)] = 150000.0
    sliding_window: PositiveInt | None = 128
    """Size of the attention window, in tokens, with the token itself, of the layers that have one."""
    layer_types: list[LayerType] | None = None
    """The attention of each layer. Null: the first layer and every other one have the window, the rest full
    attention."""
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = 200002
    pad_token_id: Annotated[int, Ge(-1)] | None = 199999

    has_gate_bias: ClassVar[bool] = False
    """True where experts are chosen with a bias for balance, which has no gradient."""

    def shape_spec(self) -> ShapeSpec:
        """Sinks and biases in each attention, experts with biases and a clamped SwiGLU in each layer."""
        return self.decoder([self._layer(kind == "sliding_attention") for kind in self.attention_types()])

    def _layer(self, is_sliding: bool) -> LayerSpec:
        window = self.sliding_window if is_sliding else None
        attention = self.grouped_query(biased=True, output_biased=True, sinks=True, window=window)
        mixture = MoE(
            experts=self.num_local_experts,
            chosen=self.num_experts_per_tok,
            width=self.intermediate_size,
            shared_width=0,
            normed=True,  # HF has the softmax of the chosen logits, which is the same
            gate_biased=True,
            biased=True,
            clamp=_CLAMP,
        )
        return self.layer(attention, mixture)

    def attention_types(self) -> list[LayerType]:
        """The attention of each layer."""
        if self.layer_types is not None:
            return self.layer_types
        return ["full_attention" if i % 2 else "sliding_attention" for i in range(self.num_hidden_layers)]

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules between the fields, as (field, message)."""
        yield from window_problems(self)
        yield from super().problems()

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json that HF transformers reads."""
        return {**super().to_hf(), "layer_types": self.attention_types()}


_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}

# huggingface.co/openai/gpt-oss-20b, gpt-oss-120b, config.json
PRESETS: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": {"num_hidden_layers": 24, "num_local_experts": 32, "rope_scaling": _YARN},
    "gpt-oss-120b": {"rope_scaling": _YARN},
}
"""Shapes as published."""

SMOKE: dict[str, Any] = {
    **SMALL,
    "intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "sliding_window": 24,
    "rope_scaling": None,
    "pad_token_id": None,
}
"""Small enough for a laptop."""
SMOKE_KEEPS = ("tie_word_embeddings",)
"""Fields that decide which code runs: `--smoke` keeps them as the recipe has them."""
