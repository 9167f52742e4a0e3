"""Names of the parameters of Qwen with experts in each file format. Imports no Paddle.

Our own names are HF's, except for routed experts: HF has a tensor for each, we stack them as [E, inputs, outputs].
"""

from __future__ import annotations

from collections.abc import Iterator

from llmsuite.models.decoder_names import (
    Shapes,
    attention_shapes,
    decoder_shapes,
    expert_shapes,
    expert_tensors,
    layer_shapes,
    mlp_shapes,
)
from llmsuite.models.head import SCORE
from llmsuite.models.hf_tensors import HfTensors
from llmsuite.models.qwen_moe.config import QwenMoeConfig


def parameter_names(config: QwenMoeConfig) -> Iterator[str]:
    """Every parameter of the model, in the order of the layers."""
    yield from parameter_shapes(config)


def parameter_shapes(config: QwenMoeConfig) -> Shapes:
    """Every parameter of the model, in the order of the layers, with its shape."""
    hidden = config.hidden_size
    qk_norms = (config.head_size, config.head_size) if config.has_head_norms else None
    attention = attention_shapes(config, qkv_bias=config.has_qkv_bias, qk_norms=qk_norms)
    routed: Shapes = {
        "gate.weight": (hidden, config.num_experts),
        **expert_shapes(hidden, config.moe_intermediate_size, config.num_experts),
    }
    if config.shared_size:
        routed |= {f"shared_expert.{part}": shape for part, shape in mlp_shapes(hidden, config.shared_size).items()}
        routed["shared_expert_gate.weight"] = (hidden, 1)
    dense = mlp_shapes(hidden, config.intermediate_size)

    def layer(number: int) -> Shapes:
        mlp = routed if config.has_experts(number) else dense
        return layer_shapes(hidden, attention, mlp)

    return decoder_shapes(config, layer)


def is_linear(name: str) -> bool:
    """True if HF stores this parameter transposed, as [outputs, inputs]; if it is a stack, each of its matrices."""
    return name.endswith(("_proj.weight", ".mlp.gate.weight", "_expert_gate.weight", "lm_head.weight", SCORE))


def hf_tensors(name: str, config: QwenMoeConfig) -> HfTensors:
    """The tensor of an HF model that holds a parameter, or those that are stacked in it."""
    return expert_tensors(name, config.num_experts) or HfTensors((name,))


def from_hf(name: str, config: QwenMoeConfig) -> str | None:
    """The full name of a tensor in an HF file; None for one that is computed, not trained."""
    return None if name.endswith("rotary_emb.inv_freq") else name


def paddlenlp_prefix(config: QwenMoeConfig) -> str | None:
    """The prefix that PaddleNLP writes instead of `model.`; None for Qwen3-MoE, which it does not have."""
    return "qwen2_moe." if config.model_type == "qwen2_moe" else None
