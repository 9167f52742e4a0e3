"""Command R7B: its config, its description and its published sizes. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge

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
from llmsuite.models.shape_spec import LayerSpec, ShapeSpec


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class CohereConfig(DenseConfig):
    """Command R7B and Command A. Names are those of HF's config.json, but for rms_norm_eps."""

    family: ClassVar[str] = "cohere"
    network: ClassVar[str] = "llmsuite.models.dense:ScaledLM"
    architectures: ClassVar[Mapping[str, str]] = {"cohere2": "Cohere2ForCausalLM"}
    fixed: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "silu",
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_qk_norm": False,
    }
    without_effect: ClassVar[tuple[str, ...]] = (
        "cache_implementation",
        "use_embedding_sharing",
        "use_parallel_embedding",
    )
    renamed: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "layer_norm_eps"}

    model_type: Literal["cohere2"] = "cohere2"
    """The only one."""
    vocab_size: PositiveInt = 256000
    hidden_size: PositiveInt = 8192
    intermediate_size: PositiveInt = 22528
    num_hidden_layers: NumLayers = 40
    num_attention_heads: PositiveInt = 64
    num_key_value_heads: PositiveInt = 64
    max_position_embeddings: PositiveInt = 8192
    rms_norm_eps: PositiveFloat = 1e-5
    """Term under the root of LayerNorm; layer_norm_eps in config.json."""
    rope_theta: Annotated[float, Ge(1)] = 10000.0
    attention_bias: bool = False
    """True where queries, keys, values and the output of attention have biases."""
    sliding_window: PositiveInt | None = 4096
    """Size of the attention window, in tokens, with the token itself, of the layers that have one."""
    sliding_window_pattern: PositiveInt = 4
    """Every layer of this number has full attention, without positions; the others have the window and positions."""
    layer_types: list[LayerType] | None = None
    """The attention of each layer, instead of the pattern."""
    logit_scale: PositiveFloat = 0.0625
    """Factor of the logits."""
    tie_word_embeddings: bool = True
    bos_token_id: TokenId | None = 5
    eos_token_id: TokenId | list[TokenId] | None = 255001
    pad_token_id: int | None = 0

    def shape_spec(self) -> ShapeSpec:
        """One LayerNorm without a bias before attention and MLP, which are computed from it side by side."""
        of_type = {kind: self._layer(kind == "sliding_attention") for kind in ("sliding_attention", "full_attention")}
        layers = [of_type[kind] for kind in self.attention_types()]
        return self.decoder(layers, norm="layer_gain", logit_scale=self.logit_scale)

    def _layer(self, is_sliding: bool) -> LayerSpec:
        attention = self.grouped_query(
            rotary=is_sliding,
            interleaved=True,
            biased=self.attention_bias,
            output_biased=self.attention_bias,
            window=self.sliding_window if is_sliding else None,
        )
        return self.layer(attention, norm="layer_gain", norms="parallel")

    def attention_types(self) -> list[LayerType]:
        """The attention of each layer."""
        if self.layer_types is not None:
            return self.layer_types
        numbers = range(1, self.num_hidden_layers + 1)
        return ["sliding_attention" if n % self.sliding_window_pattern else "full_attention" for n in numbers]

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules between the fields, as (field, message)."""
        yield from window_problems(self)
        yield from super().problems()

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json that HF transformers reads."""
        return {**super().to_hf(), "layer_types": self.attention_types()}


# huggingface.co/CohereLabs/c4ai-command-r7b-12-2024, config.json
PRESETS: dict[str, dict[str, Any]] = {
    "command-r7b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 50000.0,
        "logit_scale": 0.25,
    },
}
"""Shapes as published."""

SMOKE: dict[str, Any] = {
    **SMALL,
    "sliding_window": 24,
    "sliding_window_pattern": 2,
    "logit_scale": 2.0,
    "tie_word_embeddings": True,
}
"""Small enough for a laptop, with layers of either kind."""
SMOKE_KEEPS = ("tie_word_embeddings", "attention_bias")
"""Fields that decide which code runs: `--smoke` keeps them as the recipe has them."""
