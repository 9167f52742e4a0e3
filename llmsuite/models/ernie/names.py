"""Names of ERNIE-4.5's parameters in HF's files, which are ours too. Imports no Paddle."""

from __future__ import annotations

from collections.abc import Iterator

from llmsuite.models.decoder_names import Shapes, attention_shapes, decoder_shapes, layer_shapes, mlp_shapes
from llmsuite.models.ernie.config import ErnieConfig
from llmsuite.models.head import SCORE
from llmsuite.models.hf_tensors import HfTensors


def parameter_names(config: ErnieConfig) -> Iterator[str]:
    """Every parameter of the model, in the order of the layers."""
    yield from parameter_shapes(config)


def parameter_shapes(config: ErnieConfig) -> Shapes:
    """Every parameter of the model, in the order of the layers, with its shape."""
    attention = attention_shapes(config, qkv_bias=config.use_bias, o_bias=config.use_bias)
    mlp = mlp_shapes(config.hidden_size, config.intermediate_size, config.use_bias)
    layer = layer_shapes(config.hidden_size, attention, mlp)
    return decoder_shapes(config, lambda number: layer)


def is_linear(name: str) -> bool:
    """True if HF stores this parameter transposed, as [outputs, inputs]."""
    return name.endswith(("_proj.weight", "lm_head.weight", SCORE))


def hf_tensors(name: str, config: ErnieConfig) -> HfTensors:
    """The tensor of an HF model that holds a parameter: it has the same name."""
    return HfTensors((name,))


def from_hf(name: str, config: ErnieConfig) -> str | None:
    """The full name of a tensor in an HF file; None for one that is computed, not trained."""
    return None if name.endswith("rotary_emb.inv_freq") else name


def paddlenlp_prefix(config: ErnieConfig) -> str | None:
    """None: PaddleNLP has no such model."""
    return None
