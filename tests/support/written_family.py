"""A directory with a small model of any family and a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.checkpoint.model_writer import write_model
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.inference.load import parameter_shapes
from llmsuite.models.initial_values import initial_values
from tests.support.families import FAMILIES
from tests.support.tiny_llama import TOKENIZER


def write_family(directory: Path, family: str, seed: int = 3, **shape: Any) -> Path:
    """The smoke shape of a family, or a variation of it, with random weights and the embedded tokenizer."""
    spec = FAMILIES[family]
    config = spec.config_cls(**{**spec.smoke, **shape})
    shapes = parameter_shapes(spec, config)

    def value(name: str) -> np.ndarray:
        return initial_values(seed, name, shapes[name], 0.15) + (len(shapes[name]) == 1)

    specs = [TensorSpec(name, shape, "float32") for name, shape in shapes.items()]
    directory.mkdir(parents=True)
    write_model(directory, spec, config, value, specs, "hf", TOKENIZER)
    return directory
