"""Ministral 3 for text: its config, its description and its published sizes. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from llmsuite.base.strict_json import ABOVE_ZERO
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
from llmsuite.models.shape_spec import ShapeSpec

_BETA = "llama_4_scaling_beta"
_ORIGINAL = "original_max_position_embeddings"
_OF_YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    _ORIGINAL: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _BETA: 0.1,
}
"""`rope_scaling` of all published sizes, and of a config.json without one."""


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class MinistralConfig(DenseConfig):
    """Ministral 3 without images. Names are those of HF's config.json."""

    family: ClassVar[str] = "ministral"
    architectures: ClassVar[Mapping[str, str]] = {"ministral3": "Ministral3ForCausalLM"}
    rope_kinds: ClassVar[tuple[str, ...]] = ("default", "yarn")

    model_type: Literal["ministral3"] = "ministral3"
    """The only one."""
    vocab_size: PositiveInt = 131072
    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 14336
    num_hidden_layers: NumLayers = 34
    num_attention_heads: PositiveInt = 32
    num_key_value_heads: PositiveInt = 8
    head_dim: Annotated[int, Gt(0), Le(4096)] | None = 128
    """Size of a head; null for hidden_size / num_attention_heads."""
    max_position_embeddings: PositiveInt = 262144
    rms_norm_eps: PositiveFloat = 1e-5
    rope_theta: Annotated[float, Ge(1)] = 1000000.0
    rope_scaling: dict[str, Any] | None = dataclasses.field(default_factory=_OF_YARN.copy)
    """{"rope_type": "yarn", "factor", "original_max_position_embeddings", "llama_4_scaling_beta", …}: queries at
    position p are multiplied by 1 + llama_4_scaling_beta ln(1 + floor(p / original_max_position_embeddings))."""
    sliding_window: PositiveInt | None = None
    """Size of the attention window, in tokens, with the token itself. Null: full causal attention."""
    bos_token_id: TokenId | None = 1
    eos_token_id: TokenId | list[TokenId] | None = 2
    pad_token_id: int | None = 11

    def shape_spec(self) -> ShapeSpec:
        """A Mistral whose queries grow with their position."""
        scaling = self.rope_scaling or {}
        growth = (scaling[_BETA], scaling[_ORIGINAL])
        return self.decoder(self.layer(self.grouped_query(window=self.sliding_window, growth=growth)))

    def rope_frequencies(self) -> list[float]:
        """Rotary frequency of each pair of elements of a head, in radians a position."""
        of_queries = (_BETA, "max_position_embeddings")
        scaling = {key: value for key, value in (self.rope_scaling or {}).items() if key not in of_queries}
        return frequencies(self.rotary_size, self.rope_theta, scaling or None, self.rope_kinds)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules between the fields, as (field, message)."""
        for key in (_BETA, _ORIGINAL):
            value = (self.rope_scaling or {}).get(key)
            if not ABOVE_ZERO.fits(value):
                yield "rope_scaling", f"{key} is {value!r}; {ABOVE_ZERO.what} is needed"
                return
        yield from super().problems()

    @classmethod
    def hf_fields(cls, data: Mapping[str, Any], default_theta: float) -> dict[str, Any]:
        """The fields that a config.json has, by our names; it may omit the scaling."""
        values = super().hf_fields(data, default_theta)
        if values["rope_scaling"] is None and not data.get("rope_parameters"):
            values["rope_scaling"] = dict(_OF_YARN)
        return values


# huggingface.co/mistralai/Ministral-3-8B-Base-2512, text_config of config.json
PRESETS: dict[str, dict[str, Any]] = {"ministral-3-8b": {}}
"""Shapes as published."""

SMOKE: dict[str, Any] = {
    **SMALL,
    "head_dim": 16,
    "sliding_window": None,
    "rope_scaling": {**_OF_YARN, _ORIGINAL: 16},
}
"""Small enough for a laptop; queries grow within its rows."""
SMOKE_KEEPS = ("tie_word_embeddings",)
"""Fields that decide which code runs: `--smoke` keeps them as the recipe has them."""
