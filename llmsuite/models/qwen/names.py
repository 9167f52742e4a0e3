"""Names of Qwen's parameters in each file format. Imports no Paddle.

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
from llmsuite.models.qwen.config import QwenConfig

from_gguf = gguf_names.from_gguf
to_gguf = gguf_names.to_gguf
_IGNORED = re.compile(r".*rotary_emb\.inv_freq")


def parameter_names(config: QwenConfig) -> Iterator[str]:
    """Every parameter of the model, in the order of the layers."""
    yield from parameter_shapes(config)


def parameter_shapes(config: QwenConfig) -> Shapes:
    """Every parameter of the model, in the order of the layers, with its shape."""
    attention = attention_shapes(config, qkv_bias=config.has_qkv_bias, qk_norm=config.has_head_norms)
    mlp = mlp_shapes(config.hidden_size, config.intermediate_size)
    layer = layer_shapes(config.hidden_size, attention, mlp)
    return decoder_shapes(config, lambda number: layer)


def is_linear(name: str) -> bool:
    """True if HF stores this parameter transposed, as [outputs, inputs]."""
    return name.endswith(("_proj.weight", "lm_head.weight", SCORE))


def hf_tensors(name: str, config: QwenConfig) -> HfTensors:
    """The tensor of an HF model that holds a parameter: it has the same name."""
    return HfTensors((name,))


def from_hf(name: str, config: QwenConfig) -> str | None:
    """The full name of a tensor in an HF file; None for one that is computed, not trained."""
    return None if _IGNORED.fullmatch(name) else name


def paddlenlp_prefix(config: QwenConfig) -> str | None:
    """The prefix that PaddleNLP writes instead of `model.`; None for Qwen3, which it does not have."""
    return "qwen2." if config.model_type == "qwen2" else None


def gguf_to_hf(name: str, value: np.ndarray, config: QwenConfig) -> np.ndarray:
    """A GGUF matrix [outputs, inputs], or a bias, in the layout of HF: unchanged."""
    return value


hf_to_gguf = gguf_to_hf
