"""DeepSeek: its config, its description and its published sizes. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le

from llmsuite.base.errors import UserError
from llmsuite.models.decoder_config import (
    NonNegativeInt,
    NumLayers,
    PositiveFloat,
    PositiveInt,
    RotaryConfig,
    TokenId,
    group_problems,
    in_written_order,
)
from llmsuite.models.head import with_head
from llmsuite.models.hf_config import check_keys
from llmsuite.models.rope import yarn_mscale
from llmsuite.models.shape_spec import Latent, MoE, ShapeSpec

_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rope_interleave": True, "use_fp8": False}
# derived from other keys; a loss that is not computed; settings of other programs for speculative decoding
_WITHOUT_EFFECT = (
    *("num_key_value_heads", "head_dim", "qk_head_dim", "scoring_func", "aux_loss_alpha", "seq_aux"),
    *("ep_size", "num_nextn_predict_lambda", "speculate_model_type"),
)


@in_written_order
@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSeekConfig(RotaryConfig):
    """DeepSeek-V2 and V3, and Kimi K2. Names are those of HF's config.json."""

    network: ClassVar[str] = "llmsuite.models.sparse:SparseLM"
    names: ClassVar[str] = "llmsuite.models.dense_names:MTP_NAMES"
    rope_kinds: ClassVar[tuple[str, ...]] = ("default", "yarn")
    experts_key: ClassVar[str] = "n_routed_experts"

    model_type: Literal["deepseek_v2", "deepseek_v3", "kimi_k2"] = "deepseek_v3"
    """deepseek_v2: experts are scored by softmax. deepseek_v3: by sigmoid, chosen with a bias for balance. kimi_k2: the
    same network in other sizes."""
    vocab_size: PositiveInt = 129280
    hidden_size: PositiveInt = 7168
    intermediate_size: PositiveInt = 18432
    """Width of the MLP of layers without experts."""
    moe_intermediate_size: PositiveInt = 2048
    """Width of an expert."""
    num_hidden_layers: NumLayers = 61
    first_k_dense_replace: NonNegativeInt = 3
    """Number of layers at the beginning that have no experts."""
    moe_layer_freq: PositiveInt = 1
    """Layers after the first ones have experts if their number is a multiple of this."""
    n_routed_experts: PositiveInt = 256
    """Experts a token can be sent to."""
    n_shared_experts: PositiveInt = 1
    """Experts every token goes through, computed as one MLP."""
    num_experts_per_tok: PositiveInt = 8
    """Routed experts of a token."""
    n_group: PositiveInt = 8
    """Groups the routed experts are in."""
    topk_group: PositiveInt = 4
    """Number of groups that the experts of a token can be in."""
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"] = "noaux_tc"
    """Method of choosing experts: noaux_tc with deepseek_v3, one of the others with deepseek_v2."""
    norm_topk_prob: bool = True
    """True where the weights of the chosen experts are made to add up to 1."""
    routed_scaling_factor: PositiveFloat = 2.5
    """Factor of the weights of the chosen experts."""
    num_attention_heads: PositiveInt = 128
    """Heads."""
    q_lora_rank: PositiveInt | None = 1536
    """Width queries are compressed to; null for no compression."""
    kv_lora_rank: PositiveInt = 512
    """Width keys and values are compressed to."""
    qk_nope_head_dim: PositiveInt = 128
    """Part of a query and key head that is not rotated."""
    qk_rope_head_dim: PositiveInt = 64
    """Part that is rotated; of keys it is the same for all heads."""
    v_head_dim: PositiveInt = 128
    """Size of a value head."""
    max_position_embeddings: PositiveInt = 163840
    num_nextn_predict_layers: Annotated[int, Ge(0), Le(64)] = 0
    """Number of multi-token prediction layers after the others (DeepSeek-V3, arXiv 2412.19437, section 2.2). One is
    trained with train.mtp_loss_weight; else they are copied unchanged from the source."""
    mtp: bool = False
    """True where these layers are a part of the model; see `llmsuite.models.mtp`."""
    rope_scaling: dict[str, Any] | None = None
    """Null, or {"rope_type": "yarn", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim"}."""
    bos_token_id: TokenId | None = 0
    eos_token_id: TokenId | list[TokenId] | None = 1

    @property
    def rotary_size(self) -> int:
        """Part of a query and key head that is rotated."""
        return self.qk_rope_head_dim

    @property
    def has_gate_bias(self) -> bool:
        """True if experts are chosen with a bias."""
        return self.model_type != "deepseek_v2"

    @property
    def score_factor(self) -> float:
        """Factor of attention scores, in addition to 1 / sqrt(head size)."""
        if not self.rope_scaling or not self.rope_scaling.get("mscale_all_dim"):
            return 1.0
        return yarn_mscale(self.rope_scaling["factor"], self.rope_scaling["mscale_all_dim"]) ** 2

    def has_experts(self, layer: int) -> bool:
        """True if a layer, counted from 0, has experts."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    def shape_spec(self) -> ShapeSpec:
        """Latent attention, experts in groups after the first layers, and layers for multi-token prediction."""
        attention = Latent(
            heads=self.num_attention_heads,
            q_rank=self.q_lora_rank,
            kv_rank=self.kv_lora_rank,
            nope=self.qk_nope_head_dim,
            rope=self.qk_rope_head_dim,
            value=self.v_head_dim,
            score_factor=self.score_factor,
        )
        mixture = MoE(
            experts=self.n_routed_experts,
            chosen=self.num_experts_per_tok,
            width=self.moe_intermediate_size,
            shared_width=self.n_shared_experts * self.moe_intermediate_size,
            normed=self.norm_topk_prob,
            scores="sigmoid" if self.has_gate_bias else "softmax",
            choice_biased=self.has_gate_bias,
            groups=1 if self.topk_method == "greedy" else self.n_group,
            chosen_groups=self.topk_group,
            factor=self.routed_scaling_factor,
        )
        return self.decoder(self.some_with_experts(attention, mixture))

    @property
    def paddlenlp_prefix(self) -> str | None:
        """None for Kimi K2, which PaddleNLP does not have."""
        return None if self.model_type == "kimi_k2" else f"{self.model_type}."

    def problems(self) -> Iterator[tuple[str, str]]:
        """Rules between the fields, as (field, message)."""
        methods = ("noaux_tc",) if self.has_gate_bias else ("greedy", "group_limited_greedy")
        if self.topk_method not in methods:
            yield "topk_method", f"is {self.topk_method}; {self.model_type} has {' and '.join(methods)}"
        if self.model_type == "deepseek_v2" and self.norm_topk_prob:
            yield (
                "norm_topk_prob",
                "is true; no deepseek_v2 is made so, and the published codes differ about it",
            )
        yield from group_problems(self, least=2 if self.has_gate_bias else 1)
        if self.qk_rope_head_dim % 2:
            yield "qk_rope_head_dim", f"is {self.qk_rope_head_dim}; rotary positions need an even size"
        yield from super().problems()

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> DeepSeekConfig:
        """From the content of a config.json, HF's or PaddleNLP's.

        Raises:
            UserError: it asks for something this family does not have, or has keys it does not know.
        """
        fields = (f.name for f in dataclasses.fields(cls))
        check_keys(data, "deepseek", {*fields, "rope_parameters", *_WITHOUT_EFFECT}, _FIXED)
        if data.get("model_type") == "kimi_k2":
            data = {**_OF_KIMI, **data}
        is_v3 = data.get("model_type") != "deepseek_v2"
        scores = "sigmoid" if is_v3 else "softmax"
        if data.get("scoring_func", scores) != scores:
            raise UserError(f"config.json: scoring_func is {data['scoring_func']!r}; {data['model_type']} has {scores}")
        heads = data.get("num_attention_heads")
        if data.get("num_key_value_heads") not in (None, heads):
            raise UserError(f"config.json: num_key_value_heads is not num_attention_heads = {heads}")
        values = cls.hf_fields(data, cls.rope_theta)
        scaling = values["rope_scaling"]
        if isinstance(scaling, Mapping) and "type" in scaling:  # the older name; there may be both
            kind = scaling.get("rope_type", scaling["type"])
            scaling = {"rope_type": kind, **{k: v for k, v in scaling.items() if k not in ("type", "rope_type")}}
        values["rope_scaling"] = scaling
        values.setdefault("topk_method", "noaux_tc" if is_v3 else "greedy")
        values["num_nextn_predict_layers"] = data.get("num_nextn_predict_layers") or 0
        for key in ("n_group", "topk_group"):
            if values.get(key) is None:
                values[key] = 1
        return cls(**values)

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json that HF transformers and PaddleNLP read."""
        architecture = "DeepseekV3ForCausalLM" if self.has_gate_bias else "DeepseekV2ForCausalLM"
        scores = "sigmoid" if self.has_gate_bias else "softmax"
        scaling = self.rope_scaling
        if scaling is not None:
            kind = scaling.get("rope_type", scaling.get("type"))
            scaling = {**scaling, "rope_type": kind, "type": kind}  # PaddleNLP looks for the older name
        return with_head(
            self,
            {
                "architectures": [architecture],
                "hidden_act": "silu",
                "attention_bias": False,
                "num_key_value_heads": self.num_attention_heads,
                "scoring_func": scores,
                **dataclasses.asdict(self),
                "rope_scaling": scaling,
                "torch_dtype": "float32",
            },
        )


def _yarn(mscale: float, factor: int = 40, beta_fast: int = 32) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": 4096,
        "beta_fast": beta_fast,
        "beta_slow": 1,
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }


_V2 = {
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "norm_topk_prob": False,
    "rope_scaling": _yarn(0.707),
    "bos_token_id": 100000,
    "eos_token_id": 100001,
}

_OF_KIMI: dict[str, Any] = {
    "vocab_size": 163840,
    "first_k_dense_replace": 1,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "num_attention_heads": 64,
    "max_position_embeddings": 131072,
    "rope_theta": 50000.0,
}
"""Values of Kimi K2 where they differ from DeepSeek-V3's; also of keys that its config.json omits."""

PRESETS: dict[str, dict[str, Any]] = {
    # huggingface.co/deepseek-ai/DeepSeek-V2-Lite, config.json
    "deepseek-v2-lite": {
        **_V2,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "n_routed_experts": 64,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
        "num_attention_heads": 16,
        "q_lora_rank": None,
    },
    # huggingface.co/deepseek-ai/DeepSeek-V2, config.json
    "deepseek-v2": {
        **_V2,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 60,
        "n_routed_experts": 160,
        "n_group": 8,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 16.0,
        "num_attention_heads": 128,
    },
    # huggingface.co/deepseek-ai/DeepSeek-V3, config.json
    "deepseek-v3": {"rope_scaling": _yarn(1.0)},
    # huggingface.co/moonshotai/Kimi-K2-Base and Kimi-K2-Instruct, config.json
    "kimi-k2": {
        "model_type": "kimi_k2",
        **_OF_KIMI,
        "rope_scaling": _yarn(1.0, factor=32, beta_fast=1),
        "bos_token_id": 163584,
        "eos_token_id": 163585,
    },
}
"""Shapes as published."""

SMOKE: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Small enough for a laptop; its vocabulary is that of data/tokenizer."""
SMOKE_KEEPS = ("model_type", "topk_method", "norm_topk_prob", "q_lora_rank")
"""Fields that decide which code runs: `--smoke` keeps them as the recipe has them."""
