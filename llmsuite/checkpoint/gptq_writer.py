"""Writes a model in the layout of GPTQ checkpoints, see `gptq.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.base.files import committed_directory, write_json
from llmsuite.checkpoint.finite_model import nonfinite_handler
from llmsuite.checkpoint.gptq import GptqFormat, packed
from llmsuite.checkpoint.model_dir import ModelDirectory
from llmsuite.checkpoint.model_writer import TensorLayout
from llmsuite.checkpoint.tensor_writer import WriteOptions, write_tensors
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.checkpoint.tokenizer_files import copy_tokenizer
from llmsuite.models.block_quant import BlockFormat

_OTHERS = "float16"
"""Dtype of tensors without codes, as in published models."""
_ZERO = 8
"""The code of 0."""


def write_gptq(
    model: ModelDirectory,
    target: Path,
    matrices: Collection[str],
    group: int,
) -> None:
    """Write a model whose matrices have values of int4 blocks; other values are rounded to them.

    Args:
        model: to be written.
        target: directory.
        matrices: parameters to store as codes, by our names.
        group: inputs of a block.

    Raises:
        UserError: a value of another tensor is too large for float16.
    """
    form = GptqFormat(4, group)
    tensor_layout = TensorLayout(model.family, model.config, [model.spec(name) for name in model.names])
    has_codes = {name for name in tensor_layout.names if set(tensor_layout.parameters(name)) <= set(matrices)}
    specs: list[TensorSpec] = []
    for spec in tensor_layout.specs:
        specs += _parts(spec, form) if spec.name in has_codes else [dataclasses.replace(spec, dtype=_OTHERS)]
    made: dict[str, np.ndarray] = {}

    def read(name: str) -> np.ndarray:
        layer = name.rpartition(".")[0]
        if f"{layer}.weight" not in has_codes:
            return _half(model.path, name, tensor_layout.read(name, model.read))
        if name not in made:
            values = tensor_layout.read(f"{layer}.weight", model.read).T
            made.update({f"{layer}.{part}": value for part, value in codes_of(values, form).items()})
        return made.pop(name)

    with committed_directory(target, manifest := {"format": 1}) as directory:
        options = WriteOptions(on_nonfinite=nonfinite_handler(model, lambda name: []))
        written = write_tensors(directory, "model", specs, read, {"format": "pt"}, options)
        config = {**model.config.to_hf(), "torch_dtype": _OTHERS, "quantization_config": form.to_hf()}
        write_json(directory / "config.json", config)
        copy_tokenizer(model.tokenizer_directory, directory)
        manifest.update(dataclasses.asdict(written))


def _parts(spec: TensorSpec, form: GptqFormat) -> list[TensorSpec]:
    num_outputs, num_inputs = spec.shape
    layer = spec.name.removesuffix(".weight")
    groups = num_inputs // form.group
    return [
        TensorSpec(f"{layer}.qweight", (num_inputs // form.per_word, num_outputs), "int32"),
        TensorSpec(f"{layer}.qzeros", (groups, num_outputs // form.per_word), "int32"),
        TensorSpec(f"{layer}.scales", (groups, num_outputs), "float16"),
        TensorSpec(f"{layer}.g_idx", (num_inputs,), "int32"),
    ]


def codes_of(values: np.ndarray, form: GptqFormat) -> dict[str, np.ndarray]:
    """Return the stored tensors of a matrix [I, O]."""
    pairs, scales = BlockFormat("int4", form.group).quantise(values.astype("float32", copy=False))
    codes = np.stack([pairs >> 4, pairs & 15], 1).reshape(values.shape)
    zeros = np.full((len(scales), values.shape[1]), _ZERO - form.offset)
    return {
        "qweight": packed(codes, form),
        "qzeros": np.ascontiguousarray(packed(zeros.T, form).T),
        "scales": (scales / -_ZERO).astype("float16"),
        "g_idx": (np.arange(len(values)) // form.group).astype("int32"),
    }


def _half(path: Path, name: str, value: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # an overflow is reported below, with the name of the tensor
        half = value.astype(_OTHERS)
    if not np.array_equal(np.isfinite(half), np.isfinite(value.astype("float32"))):
        raise UserError(f"{path}: {name!r} has values too large for float16, which GPTQ checkpoints have")
    return half
