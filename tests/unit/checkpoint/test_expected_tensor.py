"""Tensors that are not what their layout says: refused by name, whatever the layout, before anything is computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from llmsuite.base.errors import UserError
from llmsuite.base.files import read_manifest
from llmsuite.checkpoint.convert.rewrite import OutputFormat, Rewrite
from llmsuite.checkpoint.expected_tensor import FLOATS, ExpectedTensor, check_scales
from llmsuite.checkpoint.int8 import input_scales, quantise_model
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.checkpoint.reft_dir import open_interventions
from llmsuite.checkpoint.stored import read_header
from llmsuite.checkpoint.tensors import Int8Tensors, TensorFiles, TensorSpec
from tests.support import awq_files, fp8_model, tiny_llama
from tests.support.gptq_files import publish
from tests.support.tiny_llama import CONFIG, FAMILIES
from tests.tools.lies.tensors import make_reft, packed_safetensors

LAYER = "model.layers.0.mlp.up_proj"


def change(directory: Path, name: str, to: Callable[[np.ndarray], np.ndarray]) -> None:
    """Write one tensor of a model directory anew, in all its files."""
    for path in directory.glob("*.safetensors"):
        tensors = {tensor: stored.read() for tensor, stored in read_header(path).items()}
        if name in tensors:
            tensors[name] = np.ascontiguousarray(to(tensors[name]))
            path.write_bytes(packed_safetensors(tensors))


def read_all(directory: Path) -> None:
    model = open_model(directory, FAMILIES)
    for name in model.names:
        model.read(name)


@pytest.mark.parametrize(
    ("part", "to", "said"),
    [
        ("qweight", lambda v: v.reshape(-1), r"qweight' is \[\d+\]; a matrix of codes has \[\?, \?\]"),
        ("qweight", lambda v: v.astype("float32"), "qweight' is float32; int32 is needed"),
        ("qweight", lambda v: v[:, :-1], "no multiple of 8"),
        ("scales", lambda v: v.astype("int32"), "scales' is int32; float64 or"),
        ("scales", lambda v: v.reshape(1, *v.shape), r"scales' is \[1, 3, 64\]|scales' is \[1, "),
        ("qzeros", lambda v: v.astype("int64"), "qzeros' is int64; int32 is needed"),
        ("g_idx", lambda v: v.astype("float32"), "g_idx' is float32"),
        ("g_idx", lambda v: v + 1000, "g_idx names groups beyond the"),
        ("g_idx", lambda v: v - 1, "g_idx names groups beyond the"),
    ],
)
def test_misshapen_gptq_tensors_are_refused(
    tmp_path: Path, part: str, to: Callable[[np.ndarray], np.ndarray], said: str
) -> None:
    publish(tmp_path / "a", group_size=32)
    change(tmp_path / "a", f"{LAYER}.{part}", to)
    with pytest.raises(UserError, match=said):
        read_all(tmp_path / "a")


@pytest.mark.parametrize("bits", [4.0, True, [4], "4", None, 10**400])
def test_unsupported_bits_of_gptq_are_refused(tmp_path: Path, bits: Any) -> None:
    publish(tmp_path / "a", group_size=32)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    config["quantization_config"]["bits"] = bits
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"quantization_config.bits is|digits"):
        open_model(tmp_path / "a", FAMILIES)


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (np.ones((1, 3), "float32"), r"scale' is \[1, 3\]; the scale of a matrix of \[4, 6\]"),
        (np.ones(6, "float32"), r"scale' is \[6\]"),
        (np.ones((1, 6), "int32"), "scale' is int32"),
    ],
)
def test_misshapen_int8_scales_are_refused(tmp_path: Path, scale: np.ndarray, said: str) -> None:
    safetensors.numpy.save_file({"a.weight": np.ones((4, 6), "int8")}, tmp_path / "model.safetensors")
    safetensors.numpy.save_file({"a.weight_scale": scale}, tmp_path / "quant_scales.safetensors")
    with pytest.raises(UserError, match=said):
        Int8Tensors(TensorFiles(tmp_path, "model"), TensorFiles(tmp_path, Int8Tensors.STEM))


@pytest.mark.parametrize(
    "shape",
    [[0, 10**30], [0] * 9, [1] * 70, [0, 2**70, 2**70], [True], [1.0], ["1"]],
    ids=lambda shape: str(shape)[:20],
)
def test_impossible_shapes_in_a_header_are_refused(tmp_path: Path, shape: list[Any]) -> None:
    size = 4 if shape and all(n == 1 for n in shape) else 0
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    with pytest.raises(UserError, match="is not a readable safetensors file"):
        read_header(tmp_path / "a.safetensors")


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/../../b", "a\0b"])
def test_a_manifest_cannot_name_files_outside_its_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"files": {name: {"size": 1, "sha256": "0"}}}))
    with pytest.raises(
        UserError, match=r"manifest\.json: has no sizes and sha256 of files: .* no file of the directory"
    ):
        read_manifest(tmp_path)


def test_a_size_of_none_allows_any_but_zero() -> None:
    part = ExpectedTensor(FLOATS, (None, (1, 4)))
    for shape in ((3, 1), (3, 4)):
        part.check(TensorSpec("a", shape, "float16"), Path("x"))
    for shape in ((3, 2), (0, 1), (3,), (3, 1, 1)):
        with pytest.raises(UserError, match=r"x: 'a' is \[.*\]; b has \[\?, \(1, 4\)\]"):
            part.check(TensorSpec("a", shape, "float16"), Path("x"), "b")


def _int8(directory: Path) -> None:
    tiny_llama.write(directory.parent / "base")
    model = quantise_model(open_model(directory.parent / "base", FAMILIES), {LAYER: [3.0, 2.0]})
    Rewrite(model, OutputFormat("hf")).write(directory)


SCALED = {
    "gptq": (lambda directory: publish(directory, group_size=32), "scales"),
    "awq": (lambda directory: awq_files.publish(directory, group_size=32), "scales"),
    "fp8": (lambda directory: fp8_model.publish(directory, FAMILIES["llama"], CONFIG, (8, 8)), "weight_scale_inv"),
    "int8": (_int8, "weight_scale"),
    "int8, of inputs": (_int8, "input_scale"),
}
"""How a model with scales is made, and the last word of one of them."""


def read_scales(directory: Path) -> None:
    read_all(directory)
    input_scales(open_model(directory, FAMILIES))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", SCALED)
def test_nonfinite_scales_are_refused_in_every_layout(tmp_path: Path, kind: str, value: float) -> None:
    make, part = SCALED[kind]
    make(tmp_path / "a")
    read_scales(tmp_path / "a")

    def spoil(scales: np.ndarray) -> np.ndarray:
        scales.reshape(-1)[-1] = value
        return scales

    change(tmp_path / "a", f"{LAYER}.{part}", spoil)
    with pytest.raises(UserError, match=rf"{LAYER}\.{part}' has 1 scales that are not finite"):
        read_scales(tmp_path / "a")


def test_a_scale_beyond_float32_is_not_finite() -> None:
    with pytest.raises(UserError, match="a: 't' has 1 scales"):
        check_scales(np.array([1.0, 1e300]), "t", Path("a"))


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_the_scale_of_inputs_is_above_zero(tmp_path: Path, value: float) -> None:
    _int8(tmp_path / "a")
    change(tmp_path / "a", f"{LAYER}.input_scale", lambda scale: scale * 0 + value)
    with pytest.raises(UserError, match=r"input_scale' is -?[01]\.0; the scale of inputs is above 0"):
        input_scales(open_model(tmp_path / "a", FAMILIES))


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_parameters_have_to_be_floats(tmp_path: Path, dtype: str) -> None:
    tiny_llama.write(tmp_path / "a")
    (tmp_path / "a" / "manifest.json").unlink(missing_ok=True)
    change(tmp_path / "a", f"{LAYER}.weight", lambda value: value.astype(dtype))
    with pytest.raises(UserError, match=rf"{LAYER}\.weight' is {dtype}; float64 or"):
        open_model(tmp_path / "a", FAMILIES)


def test_interventions_have_to_be_floats(tmp_path: Path) -> None:
    make_reft(tmp_path / "a", tmp_path)
    assert open_interventions(tmp_path / "a").metadata.rank == 2
    change(tmp_path / "a", "model.layers.0.reft.bias", lambda value: value.astype("int32"))
    with pytest.raises(UserError, match=r"reft\.bias' is int32; float64 or"):
        open_interventions(tmp_path / "a")
