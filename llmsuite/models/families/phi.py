"""Phi-3, Phi-3.5 and Phi-4: their config, their description and their published sizes. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge

from llmsuite.base.errors import UserError
from llmsuite.base.strict_json import ABOVE_ZERO
from llmsuite.models.decoder_config import (
    SMALL,
    NumLayers,
    PartlyRotatedConfig,
    PositiveFloat,
    PositiveInt,
    RotaryPart,
    TokenId,
    in_written_order,
)
from llmsuite.models.shape_spec import ShapeSpec


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class PhiConfig(PartlyRotatedConfig):
    """Phi-3, Phi-3.5 and Phi-4. Names are those of HF's config.json."""

    family: ClassVar[str] = "phi"
    architectures: ClassVar[Mapping[str, str]] = {"phi3": "Phi3ForCausalLM"}
    without_effect: ClassVar[tuple[str, ...]] = ("embd_pdrop", "resid_pdrop", "original_max_position_embeddings")
    fixed: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu", "attention_bias": False, "lm_head_bias": False}
    rope_kinds: ClassVar[tuple[str, ...]] = ("default", "longrope")
    hf_parts: ClassVar[Mapping[str, str]] = {
        "self_attn.q_proj": "self_attn.qkv_proj",
        "self_attn.k_proj": "self_attn.qkv_proj",
        "self_attn.v_proj": "self_attn.qkv_proj",
        "mlp.gate_proj": "mlp.gate_up_proj",
        "mlp.up_proj": "mlp.gate_up_proj",
    }

    model_type: Literal["phi3"] = "phi3"
    """The only one; Phi-3.5 and Phi-4 have it too."""
    vocab_size: PositiveInt = 32064
    hidden_size: PositiveInt = 3072
    intermediate_size: PositiveInt = 8192
    num_hidden_layers: NumLayers = 32
    num_attention_heads: PositiveInt = 32
    num_key_value_heads: PositiveInt = 32
    max_position_embeddings: PositiveInt = 4096
    """Longest sequence. With a rope_scaling of type longrope that is the original length of the model: longer ones have
    other factors, for all of their tokens, which are not supported."""
    rms_norm_eps: PositiveFloat = 1e-5
    rope_theta: Annotated[float, Ge(1)] = 10000.0
    rope_scaling: dict[str, Any] | None = None
    """Null, or {"rope_type": "longrope", "short_factor", "long_factor", "factor",
    "original_max_position_embeddings"}, with one factor for each pair that is rotated."""
    partial_rotary_factor: RotaryPart = 1.0
    sliding_window: PositiveInt | None = None
    """Size of the attention window, in tokens, with the token itself. Null: full causal attention."""
    bos_token_id: TokenId | None = 1
    eos_token_id: TokenId | list[TokenId] | None = 32000
    pad_token_id: int | None = 32000

    def shape_spec(self) -> ShapeSpec:
        """A Llama of which a part of each head may be rotated, with or without a window."""
        return self.decoder(self.layer(self.grouped_query(window=self.sliding_window)))

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules between the fields, as (field, message)."""
        yield from super().problems()
        scaling = self.rope_scaling or {}
        original = scaling.get("original_max_position_embeddings", self.max_position_embeddings)
        if scaling.get("rope_type") == "longrope" and self.max_position_embeddings > original:
            longest = self.max_position_embeddings
            yield "max_position_embeddings", f"is {longest}; with longrope at most {original} are supported"

    @classmethod
    def hf_fields(cls, data: Mapping[str, Any], default_theta: float) -> dict[str, Any]:
        """The fields that a config.json has, by our names: with longrope, those of the original context."""
        values = super().hf_fields(data, default_theta)
        scaling = values["rope_scaling"]
        if not isinstance(scaling, Mapping) or scaling.get("rope_type", scaling.get("type")) not in _LONGROPE:
            return values
        longest = values.get("max_position_embeddings", cls.max_position_embeddings)
        original = scaling.get(_ORIGINAL, data.get(_ORIGINAL, cls.max_position_embeddings))
        for value in (longest, original):
            if not ABOVE_ZERO.fits(value):
                raise UserError(f"config.json: {value!r} is no length of a context; {ABOVE_ZERO.what} is needed")
        kept = {key: value for key, value in scaling.items() if key not in ("type", "partial_rotary_factor")}
        kept |= {"rope_type": "longrope", "factor": longest / original, _ORIGINAL: original}
        return {**values, "rope_scaling": kept, "max_position_embeddings": min(longest, original)}

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json that HF transformers reads."""
        data = super().to_hf()
        scaling = data["rope_scaling"]
        if scaling is None or scaling["rope_type"] != "longrope":
            return data
        original = scaling.pop(_ORIGINAL)
        return {**data, "max_position_embeddings": round(scaling.pop("factor") * original), _ORIGINAL: original}


_LONGROPE = ("longrope", "su")
"""Its names in config.json; su is that of the first files."""
_ORIGINAL = "original_max_position_embeddings"
"""Key of config.json that rope_scaling has here."""

# huggingface.co/microsoft/Phi-3-mini-4k-instruct, Phi-3-medium-4k-instruct, phi-4, config.json
_MEDIUM: dict[str, Any] = {
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 10,
}
PRESETS: dict[str, dict[str, Any]] = {
    "phi-3-mini-4k": {"sliding_window": 2047},
    "phi-3-medium-4k": {**_MEDIUM, "sliding_window": 2047},
    "phi-4": {
        **_MEDIUM,
        "vocab_size": 100352,
        "max_position_embeddings": 16384,
        "rope_theta": 250000.0,
        "bos_token_id": 100257,
        "eos_token_id": 100265,
        "pad_token_id": 100349,
    },
}
"""Shapes as published."""

SMOKE: dict[str, Any] = {**SMALL, "partial_rotary_factor": 1.0, "sliding_window": None}
"""Small enough for a laptop."""
SMOKE_KEEPS = ("tie_word_embeddings", "partial_rotary_factor")
"""Fields that decide which code runs: `--smoke` keeps them as the recipe has them."""
