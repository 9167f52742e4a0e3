"""OLMo 2 and 3: their config, their description and their published sizes. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge
from typing_extensions import Self

from llmsuite.base.errors import UserError
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
from llmsuite.models.rope import frequencies, read_hf_by_layer_type
from llmsuite.models.shape_spec import LayerSpec, ShapeSpec

_PATTERN = 4
"""Every layer of this number has full attention, the others the window, where config.json does not say."""


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class OlmoConfig(DenseConfig):
    """OLMo 2 and 3. Names are those of HF's config.json."""

    family: ClassVar[str] = "olmo"
    architectures: ClassVar[Mapping[str, str]] = {"olmo2": "Olmo2ForCausalLM", "olmo3": "Olmo3ForCausalLM"}
    hf_defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {"olmo3": {"sliding_window": 4096, "rope_theta": 500000.0}}
    rope_kinds: ClassVar[tuple[str, ...]] = ("default", "linear", "llama3", "yarn")
    uncut: ClassVar[str | None] = "an olmo norms all heads of queries, and of keys, together; use pipeline or sharding"
    hf_parts: ClassVar[Mapping[str, str]] = {
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    }

    model_type: Literal["olmo2", "olmo3"] = "olmo2"
    """olmo3: an olmo2 some of whose layers have a window."""
    vocab_size: PositiveInt = 50304
    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 11008
    num_hidden_layers: NumLayers = 32
    num_attention_heads: PositiveInt = 32
    num_key_value_heads: PositiveInt = 32
    max_position_embeddings: PositiveInt = 2048
    rms_norm_eps: PositiveFloat = 1e-5
    rope_theta: Annotated[float, Ge(1)] = 10000.0
    rope_scaling: dict[str, Any] | None = None
    """Null, or {"rope_type", "factor", …} as in HF's config.json; not for layers with a window."""
    sliding_window: PositiveInt | None = None
    """With olmo3: size of the attention window, in tokens, with the token itself, of the layers that have one."""
    layer_types: list[LayerType] | None = None
    """With olmo3: the attention of each layer. Null: every fourth layer has full attention, the others the window."""
    attention_bias: bool = False
    """True where queries, keys, values and the output of attention have biases."""
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = 50279
    pad_token_id: int | None = 1

    def shape_spec(self) -> ShapeSpec:
        """Norms after attention and MLP, and of all queries and all keys."""
        return self.decoder([self._layer(kind == "sliding_attention") for kind in self.attention_types()])

    def _layer(self, is_sliding: bool) -> LayerSpec:
        biased = self.attention_bias
        attention = self.grouped_query(
            rotation=int(is_sliding and self.rope_scaling is not None),
            normed="whole",
            biased=biased,
            output_biased=biased,
            window=self.sliding_window if is_sliding else None,
        )
        return self.layer(attention, norms="after")

    def attention_types(self) -> list[LayerType]:
        """The attention of each layer."""
        numbers = range(1, self.num_hidden_layers + 1)
        if self.model_type == "olmo2":
            return ["full_attention" for _ in numbers]
        if self.layer_types is not None:
            return self.layer_types
        return ["sliding_attention" if number % _PATTERN else "full_attention" for number in numbers]

    def rotations(self) -> list[tuple[list[float], float]]:
        """The rotary table of layers with full attention and, where that is scaled, the plain one of the others."""
        plain = [] if self.rope_scaling is None else [(frequencies(self.rotary_size, self.rope_theta, None), 1.0)]
        return [*super().rotations(), *plain]

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules between the fields, as (field, message)."""
        if self.model_type == "olmo2":
            for key in ("sliding_window", "layer_types"):
                if getattr(self, key) is not None:
                    yield key, f"is {getattr(self, key)}; an olmo2 has no windows: set model_type to olmo3"
        else:
            yield from window_problems(self)
        yield from super().problems()

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Self:
        """From the content of HF's config.json; transformers 5 has the rotary parameters of each type of layer."""
        default = 500000.0
        rope = read_hf_by_layer_type(data, cls.family, (default, default))
        if rope is not None:
            theta, scaling, local = rope
            if local != theta:
                raise UserError(
                    f"config.json: rope_theta is {theta} in layers with full attention and {local} in the others; the "
                    "olmo family has one for all"
                )
            plain = {key: value for key, value in data.items() if key != "rope_parameters"}
            data = {**plain, "rope_theta": theta, "rope_scaling": scaling}
        return super().from_hf(data)

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json that HF transformers reads: 4 takes flat rotary parameters, 5 those of each type
        of layer."""
        data = super().to_hf()
        if self.model_type == "olmo2":
            return {key: value for key, value in data.items() if key not in ("sliding_window", "layer_types")}
        plain = {"rope_type": "default", "rope_theta": self.rope_theta}
        rope = {"full_attention": {**plain, **(self.rope_scaling or {})}, "sliding_attention": plain}
        return {**data, "layer_types": self.attention_types(), "rope_parameters": rope}


def _olmo2(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "vocab_size": 100352,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "eos_token_id": 100257,
        "pad_token_id": 100277,
    }


def _olmo3(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        **_olmo2(hidden, intermediate, layers, heads, kv_heads),
        "model_type": "olmo3",
        "vocab_size": 100278,
        "max_position_embeddings": 65536,
        "sliding_window": 4096,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    }


# huggingface.co/allenai/OLMo-2-0425-1B, OLMo-2-1124-7B, OLMo-2-1124-13B, OLMo-2-0325-32B, Olmo-3-1025-7B,
# Olmo-3-1125-32B, config.json
PRESETS: dict[str, dict[str, Any]] = {
    "olmo-2-1b": _olmo2(2048, 8192, 16, 16, 16),
    "olmo-2-7b": _olmo2(4096, 11008, 32, 32, 32),
    "olmo-2-13b": _olmo2(5120, 13824, 40, 40, 40),
    "olmo-2-32b": _olmo2(5120, 27648, 64, 40, 8),
    "olmo-3-7b": _olmo3(4096, 11008, 32, 32, 32),
    "olmo-3-32b": _olmo3(5120, 27648, 64, 40, 8),
}
"""Shapes as published."""

SMOKE: dict[str, Any] = {**SMALL}
"""Small enough for a laptop."""
SMOKE_KEEPS = ("model_type", "tie_word_embeddings", "attention_bias")
"""Fields that decide which code runs: `--smoke` keeps them as the recipe has them."""
