"""SmolLM3: its config, its description and its published size. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le
from typing_extensions import Self

from llmsuite.base.errors import UserError
from llmsuite.models.decoder_config import SMALL, DenseConfig, NumLayers, PositiveInt, TokenId, in_written_order
from llmsuite.models.shape_spec import GatedMLP, ShapeSpec


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolLM3Config(DenseConfig):
    """SmolLM3. Names are those of HF's config.json."""

    family: ClassVar[str] = "smollm3"
    architectures: ClassVar[Mapping[str, str]] = {"smollm3": "SmolLM3ForCausalLM"}
    fixed: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu", "use_sliding_window": False}
    without_effect: ClassVar[tuple[str, ...]] = ("sliding_window", "layer_types", "max_window_layers")
    rope_kinds: ClassVar[tuple[str, ...]] = ("default", "linear", "yarn")

    model_type: Literal["smollm3"] = "smollm3"
    """The only one."""
    vocab_size: PositiveInt = 128256
    hidden_size: PositiveInt = 2048
    intermediate_size: PositiveInt = 11008
    num_hidden_layers: NumLayers = 36
    num_attention_heads: PositiveInt = 16
    num_key_value_heads: PositiveInt = 4
    max_position_embeddings: PositiveInt = 32768
    rope_theta: Annotated[float, Ge(1)] = 2000000.0
    rope_scaling: dict[str, Any] | None = None
    """Null, or {"rope_type": "yarn", "factor", "original_max_position_embeddings"} for longer contexts."""
    no_rope_layer_interval: PositiveInt = 4
    """Every layer of this number has attention without positions."""
    no_rope_layers: list[Annotated[int, Ge(0), Le(1)]] | None = None
    """1 for each layer with rotary positions, 0 for each without, instead of the interval."""
    attention_bias: bool = False
    """True where queries, keys, values and the output of attention have biases."""
    mlp_bias: bool = False
    """True where the matrices of the MLP have biases."""
    tie_word_embeddings: bool = True
    bos_token_id: TokenId | None = 128000
    eos_token_id: TokenId | list[TokenId] | None = 128001
    pad_token_id: int | None = 128004

    def shape_spec(self) -> ShapeSpec:
        """A Llama some of whose layers have no positions."""
        mlp = GatedMLP(width=self.intermediate_size, biased=self.mlp_bias)
        biased = self.attention_bias
        kinds = [self.grouped_query(rotary=r, biased=biased, output_biased=biased) for r in (False, True)]
        return self.decoder([self.layer(kinds[rotated], mlp) for rotated in self.rotated_layers()])

    def rotated_layers(self) -> list[int]:
        """1 for each layer with rotary positions, else 0."""
        if self.no_rope_layers is not None:
            return self.no_rope_layers
        return [int((i + 1) % self.no_rope_layer_interval != 0) for i in range(self.num_hidden_layers)]

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules between the fields, as (field, message)."""
        layers = self.num_hidden_layers
        if self.no_rope_layers is not None and len(self.no_rope_layers) != layers:
            yield "no_rope_layers", f"has {len(self.no_rope_layers)} layers; num_hidden_layers is {layers}"
            return
        yield from super().problems()

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Self:
        """From the content of HF's config.json; it may name more layers than the model has."""
        if set(data.get("layer_types") or ()) - {"full_attention"}:
            raise UserError("config.json: layer_types is not full_attention only, as the smollm3 family is")
        listed = data.get("no_rope_layers")
        if isinstance(listed, list):
            data = {**data, "no_rope_layers": listed[: data.get("num_hidden_layers", cls.num_hidden_layers)]}
        return super().from_hf(data)


# huggingface.co/HuggingFaceTB/SmolLM3-3B, config.json
PRESETS: dict[str, dict[str, Any]] = {
    "smollm3-3b": {"max_position_embeddings": 65536, "rope_theta": 5000000.0, "eos_token_id": 128012}
}
"""Shape as published."""

SMOKE: dict[str, Any] = {**SMALL, "no_rope_layer_interval": 2, "tie_word_embeddings": True}
"""Small enough for a laptop, with layers of either kind."""
SMOKE_KEEPS = ("tie_word_embeddings", "attention_bias", "mlp_bias")
"""Fields that decide which code runs: `--smoke` keeps them as the recipe has them."""
