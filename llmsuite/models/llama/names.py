"""Names of Llama's parameters, and the layout of its matrices, in each file format. Imports no Paddle.

Our own names are HF's. In memory a linear weight is [inputs, outputs], as Paddle has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from llmsuite.models import gguf_names
from llmsuite.models.decoder_names import Shapes, attention_shapes, decoder_shapes, layer_shapes, mlp_shapes
from llmsuite.models.head import SCORE
from llmsuite.models.hf_tensors import HfTensors
from llmsuite.models.llama.config import LlamaConfig

from_gguf = gguf_names.from_gguf
to_gguf = gguf_names.to_gguf
_IGNORED = re.compile(r".*rotary_emb\.inv_freq")


def parameter_names(config: LlamaConfig) -> Iterator[str]:
    """Every parameter of the model, in the order of the layers."""
    yield from parameter_shapes(config)


def parameter_shapes(config: LlamaConfig) -> Shapes:
    """Every parameter of the model, in the order of the layers, with its shape."""
    attention = attention_shapes(config, qkv_bias=config.attention_bias, o_bias=config.attention_bias)
    mlp = mlp_shapes(config.hidden_size, config.intermediate_size, config.mlp_bias)
    layer = layer_shapes(config.hidden_size, attention, mlp)
    return decoder_shapes(config, lambda number: layer)


def is_linear(name: str) -> bool:
    """True if HF stores this parameter transposed, as [outputs, inputs]."""
    return name.endswith(("_proj.weight", "lm_head.weight", SCORE))


def hf_tensors(name: str, config: LlamaConfig) -> HfTensors:
    """The tensor of an HF model that holds a parameter: it has the same name."""
    return HfTensors((name,))


def from_hf(name: str, config: LlamaConfig) -> str | None:
    """The full name of a tensor in an HF file; None for one that is computed, not trained."""
    return None if _IGNORED.fullmatch(name) else name


def paddlenlp_prefix(config: LlamaConfig) -> str | None:
    """The prefix that PaddleNLP writes instead of `model.`; None with biases, which its Llama does not have."""
    return None if config.attention_bias or config.mlp_bias else f"{config.model_type}."


def gguf_to_hf(name: str, value: np.ndarray, config: LlamaConfig) -> np.ndarray:
    """A GGUF matrix [outputs, inputs], or a bias, as HF has it: GGUF interleaves the rotary halves of q and k. `name`
    is ours."""
    heads = _rotated_heads(name, config)
    if heads is None:
        return value
    pairs = value.reshape(heads, value.shape[0] // heads // 2, 2, *value.shape[1:])
    return pairs.swapaxes(1, 2).reshape(value.shape)


def hf_to_gguf(name: str, value: np.ndarray, config: LlamaConfig) -> np.ndarray:
    """The inverse of `gguf_to_hf`."""
    heads = _rotated_heads(name, config)
    if heads is None:
        return value
    halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
    return halves.swapaxes(1, 2).reshape(value.shape)


def _rotated_heads(name: str, config: LlamaConfig) -> int | None:
    """Heads of a parameter whose outputs are rotated; None for others."""
    return {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
