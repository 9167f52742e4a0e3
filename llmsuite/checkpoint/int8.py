"""Models with int8 matrices: written after quantisation-aware training, read as float32.

config.json                       `quantization_config` names the format, so that it is not taken for a plain model
model-*.safetensors + index       quantised matrices as int8, all others unchanged
quant_scales-*.safetensors        float32, for each int8 tensor NAME.weight:
                                  NAME.weight_scale   [outputs, 1] or [1, outputs], oriented as the matrix: the
                                                      weight is int8 times this
                                  NAME.input_scale    [1]; only where inputs are rounded too: x becomes
                                                      clip(round(x / scale), -127, 127) times this
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.checkpoint.finite import OnNonFinite
from llmsuite.checkpoint.model_dir import ModelDirectory
from llmsuite.checkpoint.model_writer import Arrangement
from llmsuite.checkpoint.stored import INT8
from llmsuite.checkpoint.tensor_writer import ManifestPart, WriteOptions, write_tensors
from llmsuite.checkpoint.tensors import Dequantised, TensorSpec
from llmsuite.checkpoint.train_state import load_state
from llmsuite.errors import UserError
from llmsuite.models.hf_tensors import HfTensors
from llmsuite.models.int8_grid import input_scale, to_int8, weight_scale
from llmsuite.regular import is_file

SCALES = Dequantised.STEM
QUANT_METHOD = "llmsuite int8"


class Int8Weights:
    """The parameters of a model by our names, some matrices as int8."""

    def __init__(self, model: ModelDirectory, rounded: Mapping[str, Sequence[float]]):
        """`rounded`: the quantised layers, as `TrainState.rounded` has them."""
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
        return dataclasses.replace(spec, dtype=INT8) if name in self._scales else spec

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        value = self._model.read(name, index)
        if name not in self._scales:
            return value
        scale = self._weight_scale(name)
        return to_int8(value, scale if index is None else scale[index[1]])

    def write_scales(self, directory: Path, arrangement: Arrangement, on_nonfinite: OnNonFinite | None) -> ManifestPart:
        """Write the scales of the tensors of an arrangement."""
        scales: dict[str, np.ndarray] = {}
        for spec in arrangement.specs:
            if spec.dtype != INT8:
                continue
            parts, layer = arrangement.parameters(spec.name), spec.name.removesuffix(".weight")
            scale = np.concatenate([self._weight_scale(part) for part in parts])
            scales[f"{layer}.weight_scale"] = scale.reshape(
                [-1, 1] if arrangement.is_transposed(spec.name) else [1, -1]
            )
            of_inputs = [found for part in parts if (found := self._scales[part]) is not None]
            if of_inputs:  # parts of one tensor have the same inputs
                scales[f"{layer}.input_scale"] = np.array([max(of_inputs)], "float32")
        specs = [TensorSpec(name, value.shape, "float32") for name, value in scales.items()]
        options = WriteOptions(on_nonfinite=on_nonfinite)
        return write_tensors(directory, SCALES, specs, scales.__getitem__, {"format": QUANT_METHOD}, options)


def quantised(model: ModelDirectory, rounded: Mapping[str, Sequence[float]]) -> ModelDirectory:
    """A model with int8 matrices, to be written.

    Raises:
        UserError: a tensor of HF's layout holds both quantised and other layers.
    """
    files = Int8Weights(model, rounded)
    specs = [files.spec(name) for name in files.names]
    arrangement = Arrangement(model.family, model.config, specs)
    for name in arrangement.names:
        parts = arrangement.parameters(name)
        if len({files.spec(part).dtype for part in parts}) > 1:
            raise UserError(
                f"{model.path}: {name} holds {', '.join(parts)}, of which qat.target_modules has named some only; it "
                "can be int8 as a whole, or not at all"
            )
    tensors = {name: HfTensors((name,)) for name in files.names}
    return dataclasses.replace(model, layout="hf", tensors=tensors, files=files, linears_transposed=False)


def rounded_layers(checkpoint: Path) -> dict[str, list[float]]:
    """The layers of a checkpoint that were trained for int8, see `TrainState.rounded`.

    Raises:
        UserError: it is no checkpoint of such a run.
    """
    rounded = load_state(checkpoint).rounded if is_file(checkpoint / "state.json") else None
    if rounded is None:
        raise UserError(
            f"--dtype int8: {checkpoint} is no checkpoint of a run with qat.weight_bits, which is what makes the "
            "model one that int8 leaves as it is; train it so, or choose fp32, bf16 or fp16"
        )
    return rounded


def input_scales(model: ModelDirectory) -> dict[str, float]:
    """Input scales of an int8 model, by the names of the layers that have one; empty for other models."""
    if not isinstance(model.files, Dequantised):
        return {}
    found = {name: model.files.input_scale(place.names[0]) for name, place in model.tensors.items()}
    return {name.removesuffix(".weight"): scale for name, scale in found.items() if scale is not None}


def quantization_config() -> dict[str, Any]:
    """The entry of config.json for an int8 model."""
    return {"quant_method": QUANT_METHOD, "weight_bits": 8}
