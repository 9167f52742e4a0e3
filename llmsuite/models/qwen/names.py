"""What a Qwen parameter is called in each layout. Imports no Paddle.

Our own names are HF's. In memory a linear weight is [inputs, outputs], as Paddle has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from llmsuite.checkpoint.hf_tensors import HfTensors
from llmsuite.models.head import SCORE, head_parameters
from llmsuite.models.qwen.config import QwenConfig

_IGNORED = re.compile(r".*rotary_emb\.inv_freq")
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def parameter_names(config: QwenConfig) -> Iterator[str]:
    """Every parameter of the model, in the order of the layers."""
    kinds = ("weight", "bias") if config.model_type == "qwen2" else ("weight",)
    yield "model.embed_tokens.weight"
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight"
        yield from (f"{layer}.{part}.{kind}" for part in _PROJECTIONS for kind in kinds)
        yield f"{layer}.self_attn.o_proj.weight"
        if config.model_type == "qwen3":
            yield from (f"{layer}.self_attn.{part}_norm.weight" for part in "qk")
        yield f"{layer}.post_attention_layernorm.weight"
        yield from (f"{layer}.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
    yield "model.norm.weight"
    yield from head_parameters(config)


def is_linear(name: str) -> bool:
    """Whether HF stores this parameter transposed, as [outputs, inputs]."""
    return name.endswith(("_proj.weight", "lm_head.weight", SCORE))


def hf_tensors(name: str, config: QwenConfig) -> HfTensors:
    """Where a parameter lies in an HF model: they have the same names."""
    return HfTensors((name,))


def from_hf(name: str, config: QwenConfig) -> str | None:
    """The full name of a tensor in an HF file; None for one that is derived, not learnt."""
    return None if _IGNORED.fullmatch(name) else name


def paddlenlp_prefix(config: QwenConfig) -> str | None:
    """What PaddleNLP writes for `model.`; it has no Qwen3."""
    return "qwen2." if config.model_type == "qwen2" else None
