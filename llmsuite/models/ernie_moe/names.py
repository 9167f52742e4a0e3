"""Names of the parameters of ERNIE-4.5 with experts in HF's files. Imports no Paddle.

Our own names are HF's, except for routed experts: HF has a tensor for each, we stack them as [E, inputs, outputs]; and
except for the bias of the gate, which HF keeps in a separate module.
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
from llmsuite.models.ernie_moe.config import ErnieMoeConfig
from llmsuite.models.head import SCORE
from llmsuite.models.hf_tensors import HfTensors

_OUR_BIAS = ".mlp.gate.e_score_correction_bias"
_THEIR_BIAS = ".mlp.moe_statics.e_score_correction_bias"


def parameter_names(config: ErnieMoeConfig) -> Iterator[str]:
    """Every parameter of the model, in the order of the layers."""
    yield from parameter_shapes(config)


def parameter_shapes(config: ErnieMoeConfig) -> Shapes:
    """Every parameter of the model, in the order of the layers, with its shape."""
    hidden = config.hidden_size
    experts = config.moe_num_experts
    routed: Shapes = {
        "gate.weight": (hidden, experts),
        "gate.e_score_correction_bias": (1, experts),
        **expert_shapes(hidden, config.moe_intermediate_size, experts),
    }
    if config.shared_size:
        routed |= {f"shared_experts.{part}": shape for part, shape in mlp_shapes(hidden, config.shared_size).items()}
    attention = attention_shapes(config)
    dense = mlp_shapes(hidden, config.intermediate_size)

    def layer(number: int) -> Shapes:
        mlp = routed if config.has_experts(number) else dense
        return layer_shapes(hidden, attention, mlp)

    return decoder_shapes(config, layer)


def is_linear(name: str) -> bool:
    """True if HF stores this parameter transposed, as [outputs, inputs]; if it is a stack, each of its matrices."""
    return name.endswith(("_proj.weight", ".mlp.gate.weight", "lm_head.weight", SCORE))


def hf_tensors(name: str, config: ErnieMoeConfig) -> HfTensors:
    """The tensor of an HF model that holds a parameter, or those that are stacked in it."""
    return expert_tensors(name, config.moe_num_experts) or HfTensors((name.replace(_OUR_BIAS, _THEIR_BIAS),))


def from_hf(name: str, config: ErnieMoeConfig) -> str | None:
    """The full name of a tensor in an HF file; None for one that is computed, or of an MTP layer."""
    return None if name.endswith("rotary_emb.inv_freq") or name.startswith("model.mtp_") else name


def paddlenlp_prefix(config: ErnieMoeConfig) -> str | None:
    """None: PaddleNLP has no such model."""
    return None
