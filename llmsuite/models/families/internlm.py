"""InternLM3: its config, its description and its published sizes. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le
from typing_extensions import Self

from llmsuite.models.decoder_config import (
    SMALL,
    DenseConfig,
    NumLayers,
    PositiveFloat,
    PositiveInt,
    TokenId,
    in_written_order,
)
from llmsuite.models.rope import frequencies
from llmsuite.models.shape_spec import GatedMLP, ShapeSpec

_IN_TRANSFORMERS = {"attention_bias": "qkv_bias", "mlp_bias": "bias"}
"""Fields by the names that transformers writes; those of the code that was published with the model are kept."""


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class InternlmConfig(DenseConfig):
    """InternLM3. Names are those of its published config.json."""

    family: ClassVar[str] = "internlm"
    architectures: ClassVar[Mapping[str, str]] = {"internlm3": "InternLM3ForCausalLM"}
    rope_kinds: ClassVar[tuple[str, ...]] = ("default", "linear", "dynamic")

    model_type: Literal["internlm3"] = "internlm3"
    """The only one."""
    vocab_size: PositiveInt = 128512
    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 10240
    num_hidden_layers: NumLayers = 48
    num_attention_heads: PositiveInt = 32
    num_key_value_heads: PositiveInt = 2
    head_dim: Annotated[int, Gt(0), Le(4096)] | None = 128
    """Size of a head; null for hidden_size / num_attention_heads."""
    max_position_embeddings: PositiveInt = 32768
    """Longest sequence. With a rope_scaling of type dynamic longer ones would have other frequencies, for all of their
    tokens, which are not supported."""
    rms_norm_eps: PositiveFloat = 1e-5
    rope_theta: Annotated[float, Ge(1)] = 10000.0
    rope_scaling: dict[str, Any] | None = None
    """Null, or {"rope_type", "factor"}: linear, or dynamic, which changes nothing up to max_position_embeddings."""
    qkv_bias: bool = False
    """True where queries, keys and values have biases."""
    bias: bool = False
    """True where the output of attention and the matrices of the MLP have biases."""
    bos_token_id: TokenId | None = 1
    eos_token_id: TokenId | list[TokenId] | None = 2
    pad_token_id: int | None = 2

    def shape_spec(self) -> ShapeSpec:
        """A Llama with or without biases."""
        attention = self.grouped_query(biased=self.qkv_bias, output_biased=self.bias)
        return self.decoder(self.layer(attention, GatedMLP(width=self.intermediate_size, biased=self.bias)))

    def rope_frequencies(self) -> list[float]:
        """Rotary frequency of each pair of elements of a head, in radians a position."""
        if self._is_dynamic:
            return frequencies(self.rotary_size, self.rope_theta, None)
        return super().rope_frequencies()

    @property
    def _is_dynamic(self) -> bool:
        scaling = self.rope_scaling or {}
        return scaling.get("rope_type", scaling.get("type")) == "dynamic"

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules between the fields, as (field, message)."""
        unknown = set(self.rope_scaling or {}) - _OF_DYNAMIC
        if self._is_dynamic and unknown:
            yield "rope_scaling", f"has {', '.join(sorted(unknown))}, which dynamic scaling does not know here"
        yield from super().problems()

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Self:
        """From the content of a config.json, the published one or that of transformers."""
        return super().from_hf({_IN_TRANSFORMERS.get(key, key): value for key, value in data.items()})


_OF_DYNAMIC = {"rope_type", "type", "factor"}

# huggingface.co/internlm/internlm3-8b-instruct, config.json
PRESETS: dict[str, dict[str, Any]] = {
    "internlm3-8b": {"rope_theta": 50000000.0, "rope_scaling": {"rope_type": "dynamic", "factor": 6.0}},
}
"""Shapes as published."""

SMOKE: dict[str, Any] = {**SMALL, "head_dim": 16}
"""Small enough for a laptop."""
SMOKE_KEEPS = ("tie_word_embeddings", "qkv_bias", "bias")
"""Fields that decide which code runs: `--smoke` keeps them as the recipe has them."""
