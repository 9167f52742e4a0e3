"""What a DeepSeek parameter is called in each layout. Imports no Paddle.

Our own names are HF's, but for the routed experts: HF has a tensor for each, we have them stacked [E, inputs, outputs].
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from llmsuite.checkpoint.hf_tensors import HfTensors
from llmsuite.models.deepseek.config import DeepSeekConfig
from llmsuite.models.head import SCORE, head_parameters

_MLP = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
_STACKED = re.compile(r"(.*\.mlp\.experts)\.((?:gate|up|down)_proj\.weight)")
_LAYER = re.compile(r"model\.layers\.(\d+)\..*")


def parameter_names(config: DeepSeekConfig) -> Iterator[str]:
    """Every parameter of the model, in the order of the layers."""
    queries = ("q_proj",) if config.q_lora_rank is None else ("q_a_proj", "q_a_layernorm", "q_b_proj")
    yield "model.embed_tokens.weight"
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight"
        for part in (*queries, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"):
            yield f"{layer}.self_attn.{part}.weight"
        yield f"{layer}.post_attention_layernorm.weight"
        if config.has_experts(i):
            yield f"{layer}.mlp.gate.weight"
            if config.model_type == "deepseek_v3":
                yield f"{layer}.mlp.gate.e_score_correction_bias"
            yield from (f"{layer}.mlp.{which}.{part}" for which in ("experts", "shared_experts") for part in _MLP)
        else:
            yield from (f"{layer}.mlp.{part}" for part in _MLP)
    yield "model.norm.weight"
    yield from head_parameters(config)


def is_linear(name: str) -> bool:
    """Whether HF stores this parameter transposed, as [outputs, inputs]; of stacked ones, each of them."""
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight", ".mlp.gate.weight", "lm_head.weight", SCORE))


def hf_tensors(name: str, config: DeepSeekConfig) -> HfTensors:
    """Where a parameter lies in an HF model."""
    if match := _STACKED.fullmatch(name):
        names = tuple(f"{match[1]}.{expert}.{match[2]}" for expert in range(config.n_routed_experts))
        return HfTensors(names, stacked=True)
    return HfTensors((name,))


def from_hf(name: str, config: DeepSeekConfig) -> str | None:
    """The full name of a tensor in an HF file; None for one that is derived, or of a layer that predicts further
    tokens."""
    if name.endswith("rotary_emb.inv_freq"):
        return None
    match = _LAYER.fullmatch(name)
    return None if match and int(match[1]) >= config.num_hidden_layers else name


def paddlenlp_prefix(config: DeepSeekConfig) -> str | None:
    """What PaddleNLP writes for `model.`."""
    return f"{config.model_type}."
