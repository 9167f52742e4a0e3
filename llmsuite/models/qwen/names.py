"""Names of Qwen's parameters in each file format. Imports no Paddle.

Our own names are HF's. In memory a linear weight is [inputs, outputs], as Paddle has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from llmsuite.models.head import SCORE, head_shapes
from llmsuite.models.hf_tensors import HfTensors
from llmsuite.models.qwen.config import QwenConfig

_IGNORED = re.compile(r".*rotary_emb\.inv_freq")
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def parameter_names(config: QwenConfig) -> Iterator[str]:
    """Every parameter of the model, in the order of the layers."""
    yield from parameter_shapes(config)


def parameter_shapes(config: QwenConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model, in the order of the layers, with its shape."""
    hidden, width = config.hidden_size, config.intermediate_size
    queries, keys = (heads * config.head_size for heads in (config.num_attention_heads, config.num_key_value_heads))
    layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for part, size in zip(_PROJECTIONS, (queries, keys, keys)):
        layer[f"{part}.weight"] = (hidden, size)
        if config.model_type == "qwen2":
            layer[f"{part}.bias"] = (size,)
    layer["self_attn.o_proj.weight"] = (queries, hidden)
    if config.model_type == "qwen3":
        layer |= {f"self_attn.{part}_norm.weight": (config.head_size,) for part in "qk"}
    layer["post_attention_layernorm.weight"] = (hidden,)
    layer |= {f"mlp.{part}_proj.weight": (hidden, width) for part in ("gate", "up")}
    layer["mlp.down_proj.weight"] = (width, hidden)
    layers = ((f"model.layers.{i}.{part}", s) for i in range(config.num_hidden_layers) for part, s in layer.items())
    top = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    return {**top, **dict(layers), "model.norm.weight": (hidden,), **head_shapes(config)}


def is_linear(name: str) -> bool:
    """Whether HF stores this parameter transposed, as [outputs, inputs]."""
    return name.endswith(("_proj.weight", "lm_head.weight", SCORE))


def hf_tensors(name: str, config: QwenConfig) -> HfTensors:
    """The tensor of an HF model that holds a parameter: it has the same name."""
    return HfTensors((name,))


def from_hf(name: str, config: QwenConfig) -> str | None:
    """The full name of a tensor in an HF file; None for one that is computed, not trained."""
    return None if _IGNORED.fullmatch(name) else name


def paddlenlp_prefix(config: QwenConfig) -> str | None:
    """The prefix that PaddleNLP writes in place of `model.`; it has no Qwen3."""
    return "qwen2." if config.model_type == "qwen2" else None
