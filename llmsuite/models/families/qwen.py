"""Qwen without experts: its config, its description and its published sizes. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le
from typing_extensions import Self

from llmsuite.base.errors import UserError
from llmsuite.models.decoder_config import SMALL, DenseConfig, NumLayers, PositiveInt, TokenId, in_written_order
from llmsuite.models.head import with_head
from llmsuite.models.hf_config import check_keys
from llmsuite.models.shape_spec import ShapeSpec

_FIXED = {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": False, "mlp_bias": False}
_FIXED |= {"rope_scaling_type": None, "rope_scaling_factor": 1.0}  # PaddleNLP's
_WINDOW = ("sliding_window", "max_window_layers", "layer_types")


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenShape(DenseConfig):
    """Fields that Qwen models with and without experts share. Names are those of HF's config.json."""

    family: ClassVar[str] = "qwen"
    rope_kinds: ClassVar[tuple[str, ...]] = ("default", "linear", "yarn")

    model_type: str
    vocab_size: PositiveInt = 151936
    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 12288
    num_hidden_layers: NumLayers = 36
    num_attention_heads: PositiveInt = 32
    num_key_value_heads: PositiveInt = 8
    head_dim: Annotated[int, Gt(0), Le(4096)] | None = None
    """Size of a head; null for 128 with qwen3, for hidden_size / num_attention_heads with qwen2."""
    max_position_embeddings: PositiveInt = 32768
    rope_theta: Annotated[float, Ge(1)] = 1000000.0
    rope_scaling: dict[str, Any] | None = None
    """Null, or {"rope_type": "yarn", "factor", "original_max_position_embeddings"} for longer contexts."""
    bos_token_id: TokenId | None = 151643
    eos_token_id: TokenId | list[TokenId] | None = 151645

    @property
    def has_qkv_bias(self) -> bool:
        """True if queries, keys and values have biases."""
        return self.model_type.startswith("qwen2")

    @property
    def has_head_norms(self) -> bool:
        """True if each head of queries and keys is normed."""
        return not self.has_qkv_bias

    @property
    def head_size(self) -> int:
        if self.head_dim is not None:
            return self.head_dim
        return 128 if self.has_head_norms else self.hidden_size // self.num_attention_heads

    def head_problems(self) -> Iterator[tuple[str, str]]:
        """Rules for the size of a head, as (field, message)."""
        heads = self.num_attention_heads
        if self.has_qkv_bias and self.head_size * heads != self.hidden_size:
            if self.head_dim is None:
                yield "hidden_size", f"is {self.hidden_size}, not a multiple of num_attention_heads = {heads}"
            else:
                size = f"hidden_size / num_attention_heads = {self.hidden_size / heads:g}"
                yield "head_dim", f"is {self.head_dim}; with {self.model_type} it is {size}, leave it out"
        elif self.head_size % 2:
            yield "head_dim", f"is {self.head_size}; rotary positions need an even head size"

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Self:
        """From the content of a config.json, HF's or PaddleNLP's.

        Raises:
            UserError: it asks for something this family does not have, or has keys it does not know.
        """
        known = (f.name for f in dataclasses.fields(cls))
        check_keys(data, cls.family, {*known, "rope_parameters", *_WINDOW}, _FIXED)
        if set(data.get("layer_types") or ()) - {"full_attention"}:
            raise UserError(f"config.json: layer_types is not full_attention only, as the {cls.family} family is")
        return cls(**cls.hf_fields(data, default_theta=10000.0))

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json that HF transformers and PaddleNLP read."""
        shape = dataclasses.asdict(self)
        if self.has_qkv_bias:
            del shape["head_dim"]
        else:
            shape |= {"head_dim": self.head_size, "attention_bias": False}
        return with_head(
            self,
            {
                "architectures": ["".join(word.title() for word in self.model_type.split("_")) + "ForCausalLM"],
                "hidden_act": "silu",
                "use_sliding_window": False,
                **shape,
                "torch_dtype": "float32",
            },
        )


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenConfig(QwenShape):
    """Qwen2, Qwen2.5 and dense Qwen3. Names are those of HF's config.json."""

    model_type: Literal["qwen2", "qwen3"] = "qwen3"
    """qwen2 (2.5 too): biases on q, k and v. qwen3: a norm on each head of q and k instead."""

    def shape_spec(self) -> ShapeSpec:
        """A pre-norm decoder."""
        attention = self.grouped_query(biased=self.has_qkv_bias, normed="heads" if self.has_head_norms else None)
        return self.decoder(self.layer(attention))

    @property
    def paddlenlp_prefix(self) -> str | None:
        """None for Qwen3, which PaddleNLP does not have."""
        return "qwen2." if self.model_type == "qwen2" else None


def _qwen2(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int, tied: bool = False
) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
    }


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool = False) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": tied,
    }


_LONG = {"max_position_embeddings": 262144, "rope_theta": 5000000.0}

# huggingface.co/Qwen/Qwen2-SIZE-Instruct, Qwen2.5-SIZE-Instruct, Qwen3-SIZE, config.json
PRESETS: dict[str, dict[str, Any]] = {
    "qwen2-0.5b": _qwen2(896, 4864, 24, 14, 2, 151936, tied=True),
    "qwen2-1.5b": _qwen2(1536, 8960, 28, 12, 2, 151936, tied=True),
    "qwen2-7b": _qwen2(3584, 18944, 28, 28, 4, 152064),
    "qwen2-72b": _qwen2(8192, 29568, 80, 64, 8, 152064),
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, 151936, tied=True),
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, 2, 151936, tied=True),
    "qwen2.5-3b": _qwen2(2048, 11008, 36, 16, 2, 151936, tied=True),
    "qwen2.5-7b": _qwen2(3584, 18944, 28, 28, 4, 152064),
    "qwen2.5-14b": _qwen2(5120, 13824, 48, 40, 8, 152064),
    "qwen2.5-32b": _qwen2(5120, 27648, 64, 40, 8, 152064),
    "qwen2.5-72b": _qwen2(8192, 29568, 80, 64, 8, 152064),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
    # huggingface.co/Qwen/Qwen3-4B-Instruct-2507, Qwen3-4B-Thinking-2507, config.json
    "qwen3-4b-2507": _qwen3(2560, 9728, 36, 32, tied=True) | _LONG,
}
"""Shapes as published."""

SMOKE: dict[str, Any] = {
    **SMALL,
    "head_dim": 16,
    "model_type": "qwen3",
    "tie_word_embeddings": False,
}
"""Small enough for a laptop; its vocabulary is that of data/tokenizer."""
SMOKE_KEEPS = ("model_type", "tie_word_embeddings")
"""Fields that decide which code runs: `--smoke` keeps them as the recipe has them."""
