"""Writes models with int8 matrices after quantisation-aware training; `Int8Tensors` reads them as float32.

config.json                       `quantization_config` names the format, so that it is not taken for a plain model
model-*.safetensors + index       quantised matrices as int8, all others unchanged
quant_scales-*.safetensors        float32, for each int8 tensor NAME.weight:
                                  NAME.weight_scale   [outputs, 1] or [1, outputs], oriented as the matrix: the
                                                      weight is int8 times this
                                  NAME.input_scale    [1]; only where activations are quantised too: x becomes
                                                      clip(round(x / scale), -127, 127) times this
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.base.safe_files import is_file
from llmsuite.checkpoint.finite import OnNonFinite
from llmsuite.checkpoint.model_dir import ModelDirectory
from llmsuite.checkpoint.model_writer import TensorLayout
from llmsuite.checkpoint.stored import INT8
from llmsuite.checkpoint.tensor_writer import ManifestPart, WriteOptions, write_tensors
from llmsuite.checkpoint.tensors import Int8Tensors, TensorSpec
from llmsuite.checkpoint.train_state import load_state
from llmsuite.models.hf_tensors import HfTensors
from llmsuite.models.int8_grid import input_scale, to_int8, weight_scale

SCALES = Int8Tensors.STEM
QUANT_METHOD = "llmsuite int8"


class Int8Weights:
    """Parameters of a model by our names, some matrices as int8."""

    def __init__(self, model: ModelDirectory, rounded: Mapping[str, Sequence[float]]):
        """`rounded`: the quantised layers, see `TrainState.rounded`."""
        self._model = model
        self._scales = {f"{name}.weight": input_scale(observed) for name, observed in rounded.items()}
        self._weight_scale = functools.cache(lambda name: weight_scale(model.read(name)))

    @property
    def names(self) -> list[str]:
        return self._model.names

    @property
    def paths(self) -> list[Path]:
        return self._model.files.paths

    def spec(self, name: str) -> TensorSpec:
        spec = self._model.spec(name)
        if name in self._scales:
            return dataclasses.replace(spec, dtype=INT8)
        return spec

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        value = self._model.read(name, index)
        if name not in self._scales:
            return value
        scale = self._weight_scale(name)
        return to_int8(value, scale if index is None else scale[index[1]])

    def write_scales(
        self, directory: Path, tensor_layout: TensorLayout, on_nonfinite: OnNonFinite | None
    ) -> ManifestPart:
        """Write the scales of the tensors of a layout."""
        scales: dict[str, np.ndarray] = {}
        for spec in tensor_layout.specs:
            if spec.dtype != INT8:
                continue
            parts = tensor_layout.parameters(spec.name)
            layer = spec.name.removesuffix(".weight")
            scale = np.concatenate([self._weight_scale(part) for part in parts])
            shape = [-1, 1] if tensor_layout.is_transposed(spec.name) else [1, -1]
            scales[f"{layer}.weight_scale"] = scale.reshape(shape)
            of_inputs = [found for part in parts if (found := self._scales[part]) is not None]
            if of_inputs:  # parts of one tensor have the same inputs
                scales[f"{layer}.input_scale"] = np.array([max(of_inputs)], "float32")
        specs = [TensorSpec(name, value.shape, "float32") for name, value in scales.items()]
        options = WriteOptions(on_nonfinite=on_nonfinite)
        return write_tensors(directory, SCALES, specs, scales.__getitem__, {"format": QUANT_METHOD}, options)


def quantise_model(model: ModelDirectory, rounded: Mapping[str, Sequence[float]]) -> ModelDirectory:
    """Return a model with int8 matrices, to be written.

    Raises:
        UserError: a tensor of HF's layout holds both quantised and other layers.
    """
    files = Int8Weights(model, rounded)
    specs = [files.spec(name) for name in files.names]
    tensor_layout = TensorLayout(model.family, model.config, specs)
    for name in tensor_layout.names:
        parts = tensor_layout.parameters(name)
        if len({files.spec(part).dtype for part in parts}) > 1:
            raise UserError(
                f"{model.path}: {name} holds {', '.join(parts)}, and qat.target_modules named only some of them; it "
                "can only be int8 if all of them are"
            )
    tensors = {name: HfTensors((name,)) for name in files.names}
    return dataclasses.replace(model, layout="hf", tensors=tensors, files=files, linears_transposed=False)


def rounded_layers(checkpoint: Path) -> dict[str, list[float]]:
    """Return the layers of a checkpoint that were trained for int8, see `TrainState.rounded`.

    Raises:
        UserError: it is no checkpoint of such a run.
    """
    rounded = None
    if is_file(checkpoint / "state.json"):
        rounded = load_state(checkpoint).rounded
    if rounded is None:
        raise UserError(
            f"--dtype int8: {checkpoint} is no checkpoint of a run with qat.weight_bits, which trains a model whose "
            "results int8 does not change; train with it, or choose fp32, bf16 or fp16"
        )
    return rounded


def input_scales(model: ModelDirectory) -> dict[str, float]:
    """Return the input scales of an int8 model by layer; empty for other models."""
    if not isinstance(model.files, Int8Tensors):
        return {}
    found = {name: model.files.input_scale(place.names[0]) for name, place in model.tensors.items()}
    return {name.removesuffix(".weight"): scale for name, scale in found.items() if scale is not None}


def quantization_config() -> dict[str, Any]:
    """Return the `quantization_config` of config.json for an int8 model."""
    return {"quant_method": QUANT_METHOD, "weight_bits": 8}
