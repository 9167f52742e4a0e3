"""Mixtral: its config, its description and its published sizes. Imports no Paddle."""

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
from llmsuite.models.shape_spec import MoE, ShapeSpec


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtralConfig(DenseConfig):
    """Mixtral. Names are those of HF's config.json."""

    family: ClassVar[str] = "mixtral"
    network: ClassVar[str] = "llmsuite.models.sparse:SparseLM"
    experts_key: ClassVar[str] = "num_local_experts"
    chosen_key: ClassVar[str] = "num_experts_per_tok"
    architectures: ClassVar[Mapping[str, str]] = {"mixtral": "MixtralForCausalLM"}
    # noise on the inputs of gates in training, which no published Mixtral has
    fixed: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu", "router_jitter_noise": 0.0}
    hf_parts: ClassVar[Mapping[str, str]] = {
        "mlp.gate": "block_sparse_moe.gate",
        "mlp.experts.gate_proj": "block_sparse_moe.experts.{}.w1",
        "mlp.experts.up_proj": "block_sparse_moe.experts.{}.w3",
        "mlp.experts.down_proj": "block_sparse_moe.experts.{}.w2",
    }
    rope_kinds: ClassVar[tuple[str, ...]] = ("default", "linear", "yarn")

    model_type: Literal["mixtral"] = "mixtral"
    """The only one."""
    vocab_size: PositiveInt = 32000
    hidden_size: PositiveInt = 4096
    intermediate_size: PositiveInt = 14336
    """Width of an expert."""
    num_hidden_layers: NumLayers = 32
    num_local_experts: PositiveInt = 8
    """Experts a token can be sent to."""
    num_experts_per_tok: PositiveInt = 2
    """Experts of a token."""
    num_attention_heads: PositiveInt = 32
    num_key_value_heads: PositiveInt = 8
    max_position_embeddings: PositiveInt = 131072
    rms_norm_eps: PositiveFloat = 1e-5
    rope_theta: Annotated[float, Ge(1)] = 1000000.0
    sliding_window: PositiveInt | None = None
    """Size of the attention window, in tokens, with the token itself. Null: full causal attention."""
    bos_token_id: TokenId | None = 1
    eos_token_id: TokenId | list[TokenId] | None = 2

    has_gate_bias: ClassVar[bool] = False
    """True where experts are chosen with a bias."""

    def shape_spec(self) -> ShapeSpec:
        """A Mistral with experts in each layer; the weights of a token's experts add up to 1."""
        mixture = MoE(
            experts=self.num_local_experts,
            chosen=self.num_experts_per_tok,
            width=self.intermediate_size,
            shared_width=0,
            normed=True,
        )
        return self.decoder(self.layer(self.grouped_query(window=self.sliding_window), mixture))

    @property
    def paddlenlp_prefix(self) -> str | None:
        """Mixtral is one of PaddleNLP's models."""
        return "mixtral."


# huggingface.co/mistralai/Mixtral-8x7B-v0.1 and Mixtral-8x7B-Instruct-v0.1, Mixtral-8x22B-v0.1, config.json
PRESETS: dict[str, dict[str, Any]] = {
    "mixtral-8x7b-v0.1": {"max_position_embeddings": 32768},
    "mixtral-8x22b-v0.1": {
        "hidden_size": 6144,
        "intermediate_size": 16384,
        "num_hidden_layers": 56,
        "num_attention_heads": 48,
        "max_position_embeddings": 65536,
    },
}
"""Shapes as published."""

SMOKE: dict[str, Any] = {
    **SMALL,
    "intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
"""Small enough for a laptop; its vocabulary is that of data/tokenizer."""
SMOKE_KEEPS = ("tie_word_embeddings",)
"""Fields that decide which code runs: `--smoke` keeps them as the recipe has them."""
