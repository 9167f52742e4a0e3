"""Gemma 2 and 3 for text: their config, their description and their published sizes. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge
from typing_extensions import Self

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
from llmsuite.models.shape_spec import GatedMLP, LayerSpec, ShapeSpec


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaConfig(DenseConfig):
    """Gemma 2 and 3. Names are those of HF's config.json."""

    family: ClassVar[str] = "gemma"
    network: ClassVar[str] = "llmsuite.models.dense:ScaledLM"
    architectures: ClassVar[Mapping[str, str]] = {"gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}
    fixed: ClassVar[Mapping[str, Any]] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "attention_bias": False,
        "use_bidirectional_attention": False,
    }
    written: ClassVar[Mapping[str, Any]] = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
    without_effect: ClassVar[tuple[str, ...]] = ("cache_implementation", "sliding_window_size")
    hf_defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "gemma2": {
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window_pattern": 2,
            "rope_local_base_freq": None,
        }
    }
    hf_parts: ClassVar[Mapping[str, str]] = {
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    }
    rope_kinds: ClassVar[tuple[str, ...]] = ("default", "linear")

    model_type: Literal["gemma2", "gemma3_text"] = "gemma3_text"
    """gemma2: caps of scores and logits. gemma3_text: a norm on each head of q and k instead, and another base of the
    rotary frequencies in layers with a window."""
    vocab_size: PositiveInt = 262208
    hidden_size: PositiveInt = 2304
    intermediate_size: PositiveInt = 9216
    num_hidden_layers: NumLayers = 26
    num_attention_heads: PositiveInt = 8
    num_key_value_heads: PositiveInt = 4
    head_dim: PositiveInt | None = 256
    """Size of a head; null for hidden_size / num_attention_heads."""
    max_position_embeddings: PositiveInt = 131072
    query_pre_attn_scalar: PositiveInt = 256
    """Scores are divided by its root."""
    attn_logit_softcapping: PositiveFloat | None = None
    """With gemma2: C of scores s that become C tanh(s / C). Null: they stay as they are."""
    final_logit_softcapping: PositiveFloat | None = None
    """C of logits z that become C tanh(z / C). Null: they stay as they are."""
    sliding_window: PositiveInt | None = 4096
    """Size of the attention window, in tokens, with the token itself, of the layers that have one."""
    sliding_window_pattern: PositiveInt = 6
    """Every layer of this number has full attention, the others the window."""
    layer_types: list[LayerType] | None = None
    """The attention of each layer, instead of the pattern."""
    rope_theta: Annotated[float, Ge(1)] = 1000000.0
    rope_scaling: dict[str, Any] | None = None
    """Null, or {"rope_type": "linear", "factor"}; not for layers with a window and their own base."""
    rope_local_base_freq: Annotated[float, Ge(1)] | None = 10000.0
    """Base of the rotary frequencies of layers with a window; null for rope_theta."""
    tie_word_embeddings: bool = True
    bos_token_id: TokenId | None = 2
    eos_token_id: TokenId | list[TokenId] | None = 1
    pad_token_id: int | None = 0

    def shape_spec(self) -> ShapeSpec:
        """Norms before and after attention and MLP, with gains of 1 + weight; an embedding times the root of its
        width."""
        of_type = {kind: self._layer(kind == "sliding_attention") for kind in ("sliding_attention", "full_attention")}
        layers = [of_type[kind] for kind in self.attention_types()]
        return self.decoder(
            layers,
            norm="offset_rms",
            embedding_scale=self.hidden_size**0.5,
            logit_cap=self.final_logit_softcapping,
        )

    def _layer(self, is_sliding: bool) -> LayerSpec:
        attention = self.grouped_query(
            rotation=int(is_sliding and self.rope_local_base_freq is not None),
            normed="heads" if self.model_type == "gemma3_text" else None,
            window=self.sliding_window if is_sliding else None,
            scale=self.query_pre_attn_scalar**-0.5,
            score_cap=self.attn_logit_softcapping,
        )
        mlp = GatedMLP(width=self.intermediate_size, activation="gelu_tanh")
        return self.layer(attention, mlp, norm="offset_rms", norms="both")

    def attention_types(self) -> list[LayerType]:
        """The attention of each layer."""
        if self.layer_types is not None:
            return self.layer_types
        pattern = self.sliding_window_pattern
        return [
            "full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(self.num_hidden_layers)
        ]

    def rotations(self) -> list[tuple[list[float], float]]:
        """The rotary table of layers with full attention, and that of layers with a window."""
        local = [] if self.rope_local_base_freq is None else [(self._local_frequencies(), 1.0)]
        return [*super().rotations(), *local]

    def _local_frequencies(self) -> list[float]:
        assert self.rope_local_base_freq is not None
        return frequencies(self.head_size, self.rope_local_base_freq, None)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules between the fields, as (field, message)."""
        yield from window_problems(self)
        if self.model_type == "gemma3_text" and self.attn_logit_softcapping is not None:
            yield "attn_logit_softcapping", f"is {self.attn_logit_softcapping}; a gemma3_text has none"
        if self.model_type == "gemma2" and self.rope_local_base_freq is not None:
            yield "rope_local_base_freq", f"is {self.rope_local_base_freq}; a gemma2 has none"
        yield from super().problems()

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Self:
        """From the content of HF's config.json; transformers 5 has the rotary parameters of each type of layer."""
        rope = read_hf_by_layer_type(data, cls.family, (cls.rope_theta, 10000.0))
        if rope is not None:
            theta, scaling, local = rope
            flat = {"rope_theta": theta, "rope_scaling": scaling, "rope_local_base_freq": local}
            data = {**{key: value for key, value in data.items() if key != "rope_parameters"}, **flat}
        elif data.get("model_type") == "gemma2":
            data = {"rope_theta": 10000.0, **data}
        return super().from_hf(data)

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json that HF transformers reads."""
        return {**super().to_hf(), "layer_types": self.attention_types()}


def _gemma2(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "gemma2",
        "vocab_size": 256000,
        **_sizes(hidden, intermediate, layers, heads, kv_heads),
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window_pattern": 2,
        "rope_theta": 10000.0,
        "rope_local_base_freq": None,
        **more,
    }


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


_GEMMA3 = {"vocab_size": 262144, "max_position_embeddings": 32768, "sliding_window": 512}

# huggingface.co/google/gemma-2-2b-it, gemma-2-9b-it, gemma-2-27b-it, gemma-3-270m-it, gemma-3-1b-it, config.json
PRESETS: dict[str, dict[str, Any]] = {
    "gemma-2-2b": _gemma2(2304, 9216, 26, 8, 4),
    "gemma-2-9b": _gemma2(3584, 14336, 42, 16, 8),
    "gemma-2-27b": _gemma2(4608, 36864, 46, 32, 16, head_dim=128, query_pre_attn_scalar=144),
    "gemma-3-270m": {**_GEMMA3, **_sizes(640, 2048, 18, 4, 1)},
    "gemma-3-1b": {**_GEMMA3, **_sizes(1152, 6912, 26, 4, 1)},
}
"""Shapes as published."""

SMOKE: dict[str, Any] = {
    **SMALL,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 24,
    "sliding_window_pattern": 2,
    "tie_word_embeddings": True,
}
"""Small enough for a laptop, with layers of either kind."""
SMOKE_KEEPS = (
    "model_type",
    "tie_word_embeddings",
    "rope_local_base_freq",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
"""Fields that decide which code runs: `--smoke` keeps them as the recipe has them."""
