"""A Llama of a few thousand parameters, as values, as a directory and as a live model."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.builtin import llmsuite_register_models
from llmsuite.checkpoint.model_dir import Layout, open_model
from llmsuite.checkpoint.model_writer import write_model
from llmsuite.checkpoint.tensor_writer import WriteOptions
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.models.dense_names import GGUF_NAMES as names
from llmsuite.models.families.llama import LlamaConfig
from llmsuite.models.initial_values import initial_values
from tests.support.paths import DATA

FAMILIES = {family.name: family for family in llmsuite_register_models()}
FAMILY = FAMILIES["llama"]
TOKENIZER = DATA / "tokenizer"

# no two dimensions are equal, so that a transposed matrix cannot pass for a right one
CONFIG = LlamaConfig(
    vocab_size=19,
    hidden_size=24,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=64,
)


def values(config: LlamaConfig = CONFIG, seed: int = 0, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Random parameters by our names, linear weights [inputs, outputs], large enough to tell tokens apart."""
    width = config.head_size * config.num_attention_heads
    kv_width = config.head_size * config.num_key_value_heads
    d = config.hidden_size
    f = config.intermediate_size
    linears = {"q_proj": (d, width), "k_proj": (d, kv_width), "v_proj": (d, kv_width), "o_proj": (width, d)}
    linears |= {
        "gate_proj": (d, f),
        "up_proj": (d, f),
        "down_proj": (f, d),
        "lm_head": (d, config.vocab_size),
        "score": (d, 1),
    }
    result = {}
    for name in names.parameter_names(config):
        part = name.split(".")[-2]
        shape = linears.get(part, (config.vocab_size, d) if part == "embed_tokens" else (d,))
        value = initial_values(seed, name, shape, 0.3) + (len(shape) == 1)
        result[name] = value.astype(dtype)
    return result


def to_paddlenlp(name: str) -> str:
    """PaddleNLP's name of a parameter."""
    return re.sub(r"^model\.", "llama.", name)


def write(
    directory: Path, config: LlamaConfig = CONFIG, layout: Layout = "hf", tokenizer: Path | None = None, **options: Any
) -> dict[str, np.ndarray]:
    """Make a model directory; returns its parameters."""
    directory.mkdir(parents=True, exist_ok=True)
    parameters = values(config, **options)
    specs = [TensorSpec(name, value.shape, value.dtype.name) for name, value in parameters.items()]
    options = WriteOptions(max_file_bytes=4096)
    write_model(directory, FAMILY, config, parameters.__getitem__, specs, layout, tokenizer, options)
    return parameters


def read(directory: Path) -> dict[str, np.ndarray]:
    """All tensors of a model directory."""
    model = open_model(directory, FAMILIES)
    return {name: np.ascontiguousarray(model.read(name)) for name in model.names}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    """Whether the tensors are equal bit by bit."""
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and a[n].tobytes() == b[n].tobytes() for n in a)


def model(config: LlamaConfig = CONFIG, seed: int = 0, generates: bool = False) -> Any:
    """The live model with these parameters, in evaluation mode; the plain one, or that for generation. Imports
    Paddle."""
    from llmsuite.devices.ops import Ops
    from llmsuite.inference.attention import with_cached_attention

    built = FAMILY.factory()(config, with_cached_attention(Ops()) if generates else Ops())
    parameters = values(config, seed)
    for name, parameter in built.named_parameters():
        parameter.set_value(parameters[name])
    built.eval()
    return built


def tied(config: LlamaConfig = CONFIG) -> LlamaConfig:
    """The same shape with the embedding as output projection."""
    return dataclasses.replace(config, tie_word_embeddings=True)
