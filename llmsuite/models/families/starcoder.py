"""StarCoder2: its config, its description and its published sizes. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge

from llmsuite.models.decoder_config import (
    SMALL,
    DenseConfig,
    NumLayers,
    PositiveFloat,
    PositiveInt,
    TokenId,
    in_written_order,
)
from llmsuite.models.shape_spec import GeluMLP, ShapeSpec


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class StarcoderConfig(DenseConfig):
    """StarCoder2. Names are those of HF's config.json, but for rms_norm_eps."""

    family: ClassVar[str] = "starcoder"
    architectures: ClassVar[Mapping[str, str]] = {"starcoder2": "Starcoder2ForCausalLM"}
    fixed: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "gelu_pytorch_tanh",
        "mlp_type": "default",
        "norm_type": "layer_norm",
        "scale_attn_weights": True,
    }
    written: ClassVar[Mapping[str, Any]] = {"hidden_act": "gelu_pytorch_tanh"}
    without_effect: ClassVar[tuple[str, ...]] = (
        "activation_function",
        "attention_softmax_in_fp32",
        "embedding_dropout",
        "layer_norm_epsilon",
        "residual_dropout",
        "scale_attention_softmax_in_fp32",
    )
    renamed: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "norm_epsilon"}
    hf_parts: ClassVar[Mapping[str, str]] = {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}

    model_type: Literal["starcoder2"] = "starcoder2"
    """The only one."""
    vocab_size: PositiveInt = 49152
    hidden_size: PositiveInt = 3072
    intermediate_size: PositiveInt = 12288
    num_hidden_layers: NumLayers = 30
    num_attention_heads: PositiveInt = 24
    num_key_value_heads: PositiveInt = 2
    max_position_embeddings: PositiveInt = 4096
    rms_norm_eps: PositiveFloat = 1e-5
    """Term under the root of LayerNorm; norm_epsilon in config.json."""
    rope_theta: Annotated[float, Ge(1)] = 10000.0
    use_bias: bool = True
    """True where the matrices of attention and MLP have biases. Norms always have them."""
    sliding_window: PositiveInt | None = None
    """Size of the attention window, in tokens, with the token itself. Null: full causal attention."""
    initializer_range: PositiveFloat = 0.018042
    tie_word_embeddings: bool = True
    bos_token_id: TokenId | None = 50256
    eos_token_id: TokenId | list[TokenId] | None = 50256

    def shape_spec(self) -> ShapeSpec:
        """The MLP and the norms of GPT around grouped-query attention with rotary positions."""
        attention = self.grouped_query(biased=self.use_bias, output_biased=self.use_bias, window=self.sliding_window)
        mlp = GeluMLP(width=self.intermediate_size, biased=self.use_bias)
        return self.decoder(self.layer(attention, mlp, norm="layer"), norm="layer")


# huggingface.co/bigcode/starcoder2-3b, starcoder2-7b, config.json
_2: dict[str, Any] = {"max_position_embeddings": 16384, "sliding_window": 4096, "bos_token_id": 0, "eos_token_id": 0}
PRESETS: dict[str, dict[str, Any]] = {
    "starcoder2-3b": {**_2, "rope_theta": 999999.4420358813},
    "starcoder2-7b": {
        **_2,
        "hidden_size": 4608,
        "intermediate_size": 18432,
        "num_hidden_layers": 32,
        "num_attention_heads": 36,
        "num_key_value_heads": 4,
        "rope_theta": 1000000.0,
    },
}
"""Shapes as published."""

SMOKE: dict[str, Any] = {**SMALL, "sliding_window": None, "tie_word_embeddings": True}
"""Small enough for a laptop."""
SMOKE_KEEPS = ("tie_word_embeddings", "use_bias")
"""Fields that decide which code runs: `--smoke` keeps them as the recipe has them."""
