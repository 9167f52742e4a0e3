"""The shape of an ERNIE-4.5 model, and its published size. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge
from typing_extensions import Self

from llmsuite.models.decoder_config import (
    GroupedQueryConfig,
    NumLayers,
    PositiveFloat,
    PositiveInt,
    TokenId,
    in_written_order,
)
from llmsuite.models.head import with_head
from llmsuite.models.hf_config import check_keys

# settings of other programs for training and serving
_WITHOUT_EFFECT = (
    *("use_flash_attention", "use_sparse_flash_attn", "use_recompute", "fuse_rope", "fuse_rms_norm", "fuse_swiglu"),
    *("fuse_linear", "fuse_attn_ffn", "compression_ratio", "ignored_index", "max_sequence_length"),
)


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class ErnieShape(GroupedQueryConfig):
    """Fields that ERNIE-4.5 models with and without experts share. Names are those of HF's config.json."""

    family: ClassVar[str] = "ernie"
    architecture: ClassVar[str] = "Ernie4_5ForCausalLM"
    fixed: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu", "use_rmsnorm": True, "rope_reorder": False}
    """Keys of config.json that have only one supported value."""
    without_effect: ClassVar[tuple[str, ...]] = _WITHOUT_EFFECT
    """Keys of config.json that change no logit."""

    model_type: str
    vocab_size: PositiveInt = 103424
    max_position_embeddings: PositiveInt = 131072
    rms_norm_eps: PositiveFloat = 1e-5
    rope_theta: Annotated[float, Ge(1)] = 500000.0
    rope_scaling: dict[str, Any] | None = None
    """Null, or {"rope_type": "linear", "factor"}."""
    tie_word_embeddings: bool = True
    bos_token_id: TokenId | None = 1
    eos_token_id: TokenId | list[TokenId] | None = 2
    pad_token_id: int | None = 0

    rope_kinds: ClassVar[tuple[str, ...]] = ("default", "linear")

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules between the fields, as (field, message)."""
        heads = self.num_attention_heads
        if self.head_dim is None and self.hidden_size % heads:
            yield "hidden_size", f"is {self.hidden_size}, not a multiple of num_attention_heads = {heads}"
        elif self.head_size % 2:
            yield "head_dim", f"is {self.head_size}; rotary positions need an even head size"
        yield from super().problems()

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Self:
        """From the content of HF's config.json.

        Raises:
            UserError: it asks for something this family does not have, or has keys it does not know.
        """
        known = (f.name for f in dataclasses.fields(cls))
        check_keys(data, cls.family, {*known, "rope_parameters", *cls.without_effect}, cls.fixed)
        defaults = {f.name: f.default for f in dataclasses.fields(cls)}
        own = {key: defaults[key] for key in ("num_key_value_heads", "head_dim")}  # where it has no such key
        return cls(**cls.hf_fields({**own, **data}, cls.rope_theta))

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json that HF transformers reads."""
        return with_head(
            self,
            {
                "architectures": [self.architecture],
                "hidden_act": "silu",
                **dataclasses.asdict(self),
                "torch_dtype": "float32",
            },
        )


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class ErnieConfig(ErnieShape):
    """ERNIE-4.5 without experts. Names are those of HF's config.json."""

    model_type: Literal["ernie4_5"] = "ernie4_5"
    """The only one."""
    hidden_size: PositiveInt = 1024
    intermediate_size: PositiveInt = 3072
    num_hidden_layers: NumLayers = 18
    num_attention_heads: PositiveInt = 16
    num_key_value_heads: PositiveInt = 2
    head_dim: PositiveInt | None = 128
    """Size of a head; null for hidden_size / num_attention_heads."""
    use_bias: bool = False
    """True where the matrices of attention and MLP have biases."""


# huggingface.co/baidu/ERNIE-4.5-0.3B-PT, config.json
PRESETS: dict[str, dict[str, Any]] = {"ernie-4.5-0.3b": {}}
"""Shapes as published."""

SMOKE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Small enough for a laptop; its vocabulary is that of data/tokenizer."""
SMOKE_KEEPS = ("tie_word_embeddings", "use_bias")
"""Fields that decide which code runs: `--smoke` keeps them as the recipe has them."""
