"""Names of Llama's parameters, and the layout of its matrices, in each file format. Imports no Paddle.

Our own names are HF's. In memory a linear weight is [inputs, outputs], as Paddle has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from llmsuite.models.decoder_names import Shapes, attention_shapes, decoder_shapes, layer_shapes, mlp_shapes
from llmsuite.models.head import SCORE
from llmsuite.models.hf_tensors import HfTensors
from llmsuite.models.llama.config import LlamaConfig

_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IGNORED = re.compile(r".*rotary_emb\.inv_freq|rope_freqs\.weight")


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
    """Whether HF stores this parameter transposed, as [outputs, inputs]."""
    return name.endswith(("_proj.weight", "lm_head.weight", SCORE))


def hf_tensors(name: str, config: LlamaConfig) -> HfTensors:
    """The tensor of an HF model that holds a parameter: it has the same name."""
    return HfTensors((name,))


def from_hf(name: str, config: LlamaConfig) -> str | None:
    """The full name of a tensor in an HF file; None for one that is computed, not trained."""
    return None if _IGNORED.fullmatch(name) else name


def paddlenlp_prefix(config: LlamaConfig) -> str | None:
    """The prefix that PaddleNLP writes in place of `model.`; its Llama has no biases."""
    return None if config.attention_bias or config.mlp_bias else f"{config.model_type}."


def from_gguf(name: str) -> str | None:
    """Our name of a GGUF tensor; None for one that is computed, not trained."""
    if _IGNORED.fullmatch(name):
        return None
    base, _, suffix = name.rpartition(".")
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)", base):
        part = _GGUF_LAYER.get(match[2])
        return f"model.layers.{match[1]}.{part}.{suffix}" if part else name
    return f"{_GGUF_TOP[base]}.{suffix}" if base in _GGUF_TOP else name


def gguf_to_hf(name: str, value: np.ndarray, config: LlamaConfig) -> np.ndarray:
    """A GGUF matrix [outputs, inputs], or a bias, as HF has it: GGUF interleaves the rotary halves of q and k. `name`
    is ours."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return value
    pairs = value.reshape(heads, value.shape[0] // heads // 2, 2, *value.shape[1:])
    return pairs.swapaxes(1, 2).reshape(value.shape)
