"""Names of DeepSeek's parameters in each file format. Imports no Paddle.

Our own names are HF's, except for routed experts: HF has a tensor for each, we stack them as [E, inputs, outputs].
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from llmsuite.models.deepseek.config import DeepSeekConfig
from llmsuite.models.head import SCORE, head_shapes
from llmsuite.models.hf_tensors import HfTensors

_MLP = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
_STACKED = re.compile(r"(.*\.mlp\.experts)\.((?:gate|up|down)_proj\.weight)")
_LAYER = re.compile(r"model\.layers\.(\d+)\..*")


def parameter_names(config: DeepSeekConfig) -> Iterator[str]:
    """Every parameter of the model, in the order of the layers."""
    yield from parameter_shapes(config)


def parameter_shapes(config: DeepSeekConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model, in the order of the layers, with its shape."""
    hidden, heads, latent, rope = (
        config.hidden_size,
        config.num_attention_heads,
        config.kv_lora_rank,
        config.qk_rope_head_dim,
    )
    width = heads * (config.qk_nope_head_dim + rope)
    rank = config.q_lora_rank
    attention: dict[str, tuple[int, ...]] = (
        {"q_proj": (hidden, width)}
        if rank is None
        else {"q_a_proj": (hidden, rank), "q_a_layernorm": (rank,), "q_b_proj": (rank, width)}
    )
    attention |= {
        "kv_a_proj_with_mqa": (hidden, latent + rope),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (latent, heads * (config.qk_nope_head_dim + config.v_head_dim)),
        "o_proj": (heads * config.v_head_dim, hidden),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    experts = config.n_routed_experts
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes |= {f"{layer}.self_attn.{part}.weight": shape for part, shape in attention.items()}
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if config.has_experts(i):
            shapes[f"{layer}.mlp.gate.weight"] = (hidden, experts)
            if config.model_type == "deepseek_v3":
                shapes[f"{layer}.mlp.gate.e_score_correction_bias"] = (experts,)
            routed, shared = _mlp(hidden, config.moe_intermediate_size), _mlp(hidden, config.shared_size)
            shapes |= {f"{layer}.mlp.experts.{part}": (experts, *shape) for part, shape in routed.items()}
            shapes |= {f"{layer}.mlp.shared_experts.{part}": shape for part, shape in shared.items()}
        else:
            dense = _mlp(hidden, config.intermediate_size)
            shapes |= {f"{layer}.mlp.{part}": shape for part, shape in dense.items()}
    return {**shapes, "model.norm.weight": (hidden,), **head_shapes(config)}


def _mlp(hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return dict(zip(_MLP, ((hidden, width), (hidden, width), (width, hidden))))


def is_linear(name: str) -> bool:
    """Whether HF stores this parameter transposed, as [outputs, inputs]; if it is a stack, each of its matrices."""
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight", ".mlp.gate.weight", "lm_head.weight", SCORE))


def hf_tensors(name: str, config: DeepSeekConfig) -> HfTensors:
    """The tensor of an HF model that holds a parameter, or those that are stacked in it."""
    if match := _STACKED.fullmatch(name):
        names = tuple(f"{match[1]}.{expert}.{match[2]}" for expert in range(config.n_routed_experts))
        return HfTensors(names, stacked=True)
    return HfTensors((name,))


def from_hf(name: str, config: DeepSeekConfig) -> str | None:
    """The full name of a tensor in an HF file; None for one that is computed, or of a layer behind the last."""
    if name.endswith("rotary_emb.inv_freq"):
        return None
    match = _LAYER.fullmatch(name)
    return None if match and int(match[1]) >= config.num_hidden_layers + config.num_nextn_predict_layers else name


def is_carried(name: str, config: DeepSeekConfig) -> bool:
    """Whether a tensor of an HF file belongs to a layer that predicts further tokens."""
    match = _LAYER.fullmatch(name)
    return match is not None and int(match[1]) >= config.num_hidden_layers


def paddlenlp_prefix(config: DeepSeekConfig) -> str | None:
    """The prefix that PaddleNLP writes in place of `model.`."""
    return f"{config.model_type}."
