"""Models with experts in MXFP4, as gpt-oss is published: read as they are defined, a slice at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.checkpoint.model_writer import write_hf
from llmsuite.checkpoint.mxfp4 import dequantise
from llmsuite.checkpoint.tensors import TensorFiles
from tests.support.families import FAMILIES
from tests.support.written_family import write_family

LEVELS = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
STACK = "model.layers.1.mlp.experts.gate_up_proj"


def publish(target: Path, **changes: Any) -> dict[str, np.ndarray]:
    """Write a small gpt-oss with random codes. Returns the stacks [E, I, O] by their names in files.

    Args:
        target: a new directory.
        changes: tensors by name; None for one that is left out.
    """
    write_family(target, "gpt_oss")
    tensors = {}
    for path in target.glob("model*"):  # files and their index
        if path.suffix == ".safetensors":
            tensors |= safetensors.numpy.load_file(path)
        path.unlink()
    generator = np.random.default_rng(0)
    expected = {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = generator.integers(0, 256, [experts, outputs, inputs // 32, 16], "uint8")
        scales = generator.integers(118, 130, [experts, outputs, inputs // 32], "uint8")
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        codes = np.stack([blocks % 16, blocks // 16], -1).reshape(experts, outputs, -1)
        values = np.array([*LEVELS, *(-level for level in LEVELS)])[codes]
        expected[name] = (values * 2.0 ** (scales.repeat(32, -1) - 127.0)).transpose(0, 2, 1)
    tensors = {name: value for name, value in {**tensors, **changes}.items() if value is not None}
    safetensors.numpy.save_file(tensors, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (target / "config.json").write_text(json.dumps(config))
    return expected


def test_codes_are_the_published_ones() -> None:
    """The one with the even number is in the lower half of a byte; the upper bit of each is its sign."""
    codes = np.full([1, 1, 1, 16], 0x97, "uint8")
    found = dequantise(codes, np.array([[[128]]], "uint8"))
    assert found.shape == (1, 1, 32)
    assert found[0, 0, :4].tolist() == [12.0, -1.0, 12.0, -1.0]


def test_values_and_slices_are_exact(tmp_path: Path) -> None:
    expected = publish(tmp_path / "a")
    model = open_model(tmp_path / "a", FAMILIES)
    for name, whole in expected.items():
        module = name.replace("gate_up_proj", "{}_proj")
        parts = {name: whole}
        if "gate_up" in name:
            parts = {module.format("gate"): whole[..., ::2], module.format("up"): whole[..., 1::2]}
        for part, values in parts.items():
            ours = f"{part}.weight"
            assert model.spec(ours).dtype == "bfloat16"
            assert model.spec(ours).shape == values.shape
            assert np.array_equal(model.read(ours).astype("float64"), values), ours
            for index in (
                (slice(2, 5), slice(0, 32), slice(3, 21)),
                (slice(0, 8), slice(7, 9), slice(0, 32)),
                (slice(1, 2), slice(31, 32), slice(5, 6)),
            ):
                assert np.array_equal(model.read(ours, index).astype("float64"), values[index]), (ours, index)


def test_it_is_written_in_bfloat16(tmp_path: Path) -> None:
    expected = publish(tmp_path / "a")
    (tmp_path / "b").mkdir()
    write_hf(open_model(tmp_path / "a", FAMILIES), tmp_path / "b")
    files = TensorFiles(tmp_path / "b", "model")
    assert "quantization_config" not in json.loads((tmp_path / "b" / "config.json").read_text())
    assert not [name for name in files.names if name.endswith(("_blocks", "_scales"))]
    for name, values in expected.items():
        assert files.spec(name).dtype == "bfloat16"
        assert np.array_equal(files.read(name).astype("float64"), values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{STACK}_scales": None}, f"{STACK}_blocks has no {STACK}_scales"),
        ({f"{STACK}_scales": np.zeros([8, 64, 3], "uint8")}, r"is \[8, 64, 3\]; exponents of codes of .* has"),
        ({f"{STACK}_blocks": np.zeros([8, 64, 2, 15], "uint8")}, "the codes of a stack in blocks of 32 inputs has"),
        ({f"{STACK}_blocks": np.zeros([8, 64, 2, 16], "int8")}, "is int8; uint8 is needed"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    publish(tmp_path / "a", **changes)
    with pytest.raises(UserError, match=message):
        open_model(tmp_path / "a", FAMILIES)


def test_an_exponent_that_is_no_number_is_refused(tmp_path: Path) -> None:
    publish(tmp_path / "a", **{f"{STACK}_scales": np.full([8, 64, 2], 255, "uint8")})
    model = open_model(tmp_path / "a", FAMILIES)
    with pytest.raises(UserError, match="has exponents that stand for NaN"):
        model.read("model.layers.1.mlp.experts.up_proj.weight")


def test_mxfp4_without_its_quantization_config_is_refused(tmp_path: Path) -> None:
    publish(tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"unexpected 16: .*_blocks"):
        open_model(tmp_path / "a", FAMILIES)
