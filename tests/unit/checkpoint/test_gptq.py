"""Checkpoints of GPTQ: read as their bytes say, of every kind that is published, a slice at a time."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmsuite.checkpoint.gptq import GptqFormat
from llmsuite.checkpoint.gptq_writer import codes_of
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.checkpoint.model_writer import Arrangement
from llmsuite.checkpoint.tensor_writer import write_tensors
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.errors import UserError
from llmsuite.models.block_quant import BlockFormat
from tests.unit import tiny_llama
from tests.unit.tiny_llama import FAMILIES, FAMILY

CONFIG = dataclasses.replace(tiny_llama.CONFIG, hidden_size=64, intermediate_size=96, head_dim=16)
KINDS: dict[str, dict[str, Any]] = {
    "4 bit": {"group_size": 32},
    "8 bit": {"group_size": 32, "bits": 8},
    "last group smaller": {"group_size": 40},
    "by activation": {"group_size": 32, "desc_act": True, "sym": False},
    "one group": {"group_size": -1, "checkpoint_format": "gptq_v2"},
    "without g_idx": {"group_size": 32, "checkpoint_format": "gptq", "g_idx": False},
}


def of_bytes(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes [n, m * 32 / bits] that lie in numbers [n, m] with the first one in the lowest bits."""
    found = np.ascontiguousarray(words).view("uint8")
    return found if bits == 8 else np.stack([found & 15, found >> 4], 2).reshape(len(found), -1)


def publish(
    directory: Path, bits: int = 4, g_idx: bool = True, lacking: str = "", **config: Any
) -> dict[str, np.ndarray]:
    """Write a model with random codes; returns the values of its matrices by our names."""
    directory.mkdir()
    rng, files, expected = np.random.default_rng(0), dict[str, np.ndarray](), dict[str, np.ndarray]()
    parameters = tiny_llama.values(CONFIG)
    specs = [TensorSpec(name, value.shape, "float32") for name, value in parameters.items()]
    arrangement = Arrangement(FAMILY, CONFIG, specs)
    for name in arrangement.names:
        if not name.endswith("proj.weight"):
            files[name] = arrangement.read(name, lambda ours, _: parameters[ours])
            continue
        (num_outputs, num_inputs), layer = arrangement.spec(name).shape, name.removesuffix(".weight")
        size = config["group_size"] if config["group_size"] > 0 else num_inputs
        groups = np.arange(num_inputs) // size
        groups = rng.permutation(groups) if config.get("desc_act") else groups
        count = groups.max() + 1
        words = rng.integers(0, 2**32, (num_outputs, num_inputs * bits // 32), dtype="uint32").view("int32")
        zeros = rng.integers(0, 2**32, (count, num_outputs * bits // 32), dtype="uint32").view("int32")
        scales = rng.standard_normal((count, num_outputs)).astype("float16")
        parts = {"qweight": words.T, "qzeros": zeros, "scales": scales}
        if g_idx:
            parts["g_idx"] = groups.astype("int32")
        files |= {f"{layer}.{part}": np.ascontiguousarray(value) for part, value in parts.items()}
        zero = of_bytes(zeros, bits).astype(int) + (config.get("checkpoint_format") != "gptq_v2")
        codes = of_bytes(words, bits).astype(int).T
        expected[name] = (codes - zero[groups] % 2**bits) * scales[groups].astype("float32")
    files.pop(lacking, None)
    stored = [TensorSpec(name, value.shape, value.dtype.name) for name, value in files.items()]
    write_tensors(directory, "model", stored, files.__getitem__, {"format": "pt"})
    told = {**CONFIG.to_hf(), "quantization_config": {"quant_method": "gptq", "bits": bits, **config}}
    (directory / "config.json").write_text(json.dumps(told))
    return expected


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_slices(tmp_path: Path, kind: str) -> None:
    expected = publish(tmp_path / "a", **KINDS[kind])
    model = open_model(tmp_path / "a", FAMILIES)
    assert len(expected) == 7 * CONFIG.num_hidden_layers
    for name, values in expected.items():
        assert model.spec(name).shape == values.shape
        assert np.array_equal(model.read(name), values.astype("float32")), name
        for index in ((slice(0, 16), slice(8, 24)), (slice(33, 61), slice(3, 5)), (slice(7, 8), slice(0, 1))):
            assert np.array_equal(model.read(name, index), values[index].astype("float32")), (name, index)


@pytest.mark.parametrize("group", [32, 64])
def test_what_is_written_is_read_as_it_was(group: int) -> None:
    form, values = GptqFormat(4, group), np.random.default_rng(1).standard_normal((128, 24)).astype("float32")
    parts, blocks = codes_of(values, form), BlockFormat("int4", group)
    codes = of_bytes(parts["qweight"].T, 4).astype(int).T
    assert (of_bytes(parts["qzeros"], 4) == 7).all(), "8, less 1: what kernels for symmetric codes suppose"
    found = (codes - 8) * parts["scales"][parts["g_idx"]].astype("float32")
    step = np.abs(values).reshape(-1, group, 24).max(1, keepdims=True) / 8
    error = np.abs(found - values).reshape(-1, group, 24)
    assert (error <= step * 1.002).all(), "half a step, and a whole one where the other side has one level less"
    assert (error > step * 0.502).mean() < 0.05
    assert np.abs(found - blocks.rounded(values)).max() < 2e-3, "but for the scales' float16"


def test_what_is_refused(tmp_path: Path) -> None:
    layer = "model.layers.0.mlp.up_proj"
    for number, (words, message) in enumerate(
        (
            ({"bits": 3}, "quantization_config.bits is 3; GPTQ is read with 4 or 8"),
            ({"group_size": "64"}, "quantization_config.group_size is '64'"),
            ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; GPTQ is read as gptq or gptq_v2"),
            ({"group_size": 16}, r"is \[3, 64\]; codes of \[64, 96\] in groups of 16 has \[6, 64\]"),
        )
    ):
        publish(tmp_path / str(number), group_size=32)
        told = json.loads((tmp_path / str(number) / "config.json").read_text())
        told["quantization_config"] |= words
        (tmp_path / str(number) / "config.json").write_text(json.dumps(told))
        with pytest.raises(UserError, match=message):
            open_model(tmp_path / str(number), FAMILIES)
    publish(tmp_path / "lacking", group_size=32, lacking=f"{layer}.scales")
    with pytest.raises(UserError, match=f"{layer}.qweight has no {layer}.scales"):
        open_model(tmp_path / "lacking", FAMILIES)
