"""Tensor files: what is written is read back, and what is damaged is refused by the name of its file."""

from __future__ import annotations

import json
import os
import resource
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (numpy's bfloat16)
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from llmsuite.base.errors import UserError
from llmsuite.base.files import committed_directory
from llmsuite.checkpoint.tensor_writer import WriteOptions, write_tensors
from llmsuite.checkpoint.tensors import TensorFiles, TensorSpec

DTYPES = ["float32", "float16", "bfloat16", "int64", "int32", "float64"]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


@st.composite
def tensors(draw: st.DrawFn) -> np.ndarray:
    """Any bits, so that NaN payloads, infinities and subnormals occur too."""
    shape = draw(SHAPES)
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype).reshape(shape)


def write(directory: Path, values: dict[str, np.ndarray], **options: Any) -> list[TensorSpec]:
    specs = [TensorSpec(name, value.shape, value.dtype.name) for name, value in values.items()]
    write_tensors(directory, "model", specs, values.__getitem__, {"format": "pt"}, WriteOptions(**options))
    return specs


def numbers(*sizes: int) -> dict[str, np.ndarray]:
    return {f"t{i}": np.arange(size, dtype="float32") for i, size in enumerate(sizes)}


@settings(max_examples=50)
@given(values=st.dictionaries(st.text(min_size=1, max_size=8), tensors(), max_size=5), limit=st.integers(1, 200))
def test_every_tensor_comes_back_bit_by_bit(values: dict[str, np.ndarray], limit: int) -> None:
    values.pop("__metadata__", None)  # the one name the file format has taken
    with tempfile.TemporaryDirectory() as name:
        specs = write(Path(name), values, max_file_bytes=limit)
        files = TensorFiles(Path(name), "model")
        assert files.names == list(values)
        for spec in specs:
            assert files.spec(spec.name) == spec
            read = files.read(spec.name)
            assert (read.shape, read.dtype) == (spec.shape, values[spec.name].dtype)
            assert read.tobytes() == values[spec.name].tobytes()


@st.composite
def tensors_and_slices(draw: st.DrawFn) -> tuple[np.ndarray, list[slice]]:
    value = draw(tensors().filter(lambda made: made.size > 0))
    starts = [draw(st.integers(0, size - 1)) for size in value.shape]
    return value, [slice(start, draw(st.integers(start + 1, size))) for start, size in zip(starts, value.shape)]


@settings(max_examples=100)
@given(tensors_and_slices())
def test_a_slice_equals_that_of_the_full_tensor(case: tuple[np.ndarray, list[slice]]) -> None:
    value, index = case
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), {"t": value})
        read = TensorFiles(Path(name), "model").read("t", index)
        expected = value[tuple(index)]
        assert (read.shape, read.dtype) == (expected.shape, expected.dtype)
        assert read.tobytes() == expected.tobytes()


def test_a_transposed_view_is_stored_in_its_own_order(tmp_path: Path) -> None:
    value = np.arange(6, dtype="float32").reshape(2, 3).T
    write(tmp_path, {"x": value})
    assert np.array_equal(TensorFiles(tmp_path, "model").read("x"), value)


@pytest.mark.parametrize(
    ("limit", "groups"),
    [
        (1, [["t0"], ["t1"], ["t2"], ["t3"], ["t4"]]),
        (40, [["t0", "t1"], ["t2"], ["t3", "t4"]]),
        (39, [["t0"], ["t1"], ["t2"], ["t3", "t4"]]),
        (4000, [["t0", "t1", "t2", "t3", "t4"]]),
    ],
)
def test_a_file_is_closed_before_it_grows_too_large(tmp_path: Path, limit: int, groups: list[list[str]]) -> None:
    values = numbers(5, 5, 100, 1, 5)  # 20, 20, 400, 4 and 20 bytes
    write(tmp_path, values, max_file_bytes=limit)
    names = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    assert TensorFiles(tmp_path, "model").paths == [tmp_path / name for name in names]
    for name, group in zip(names, groups):
        with safetensors.safe_open(tmp_path / name, framework="np") as file:
            assert sorted(file.keys()) == group
            assert file.metadata() == {"format": "pt"}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 464}
    assert index["weight_map"] == {tensor: name for name, group in zip(names, groups) for tensor in group}


def test_a_single_file_without_index_is_read(tmp_path: Path) -> None:
    safetensors.numpy.save_file(numbers(2, 3), tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path, "model")
    assert sorted(files.names) == ["t0", "t1"]
    assert files.read("t1").tolist() == [0, 1, 2]
    assert files.paths == [tmp_path / "model.safetensors"]


def test_the_index_takes_precedence_over_a_single_file(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"old": np.zeros(1)}, tmp_path / "model.safetensors")
    write(tmp_path, numbers(2))
    assert TensorFiles(tmp_path, "model").names == ["t0"]


def test_a_directory_without_tensors_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"neither model\.safetensors\.index\.json nor model\.safetensors"):
        TensorFiles(tmp_path, "model")


def refuses(directory: Path, file: str, *words: str) -> None:
    """Opening or reading fails by a UserError that names the file."""

    def read_all() -> None:
        files = TensorFiles(directory, "model")
        for name in files.names:
            files.read(name)

    with pytest.raises(UserError) as caught:
        read_all()
    for word in (str(directory / file), *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["../model-00001-of-00001.safetensors", "/etc/passwd", "a/b", "..", ".", "", "a\0b"])
def test_an_index_with_paths_outside_is_refused(tmp_path: Path, name: str) -> None:
    inside = tmp_path / "model"
    inside.mkdir()
    write(tmp_path, numbers(2))  # a readable file lies where "../" would find it
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t0": name}}))
    refuses(inside, "")


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_invalid_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refuses(tmp_path, "model.safetensors.index.json")


def test_a_tensor_missing_in_its_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, numbers(2))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("t0", "t7"))
    refuses(tmp_path, "model-00001-of-00001.safetensors", "'t7'", "does not have it")


def test_a_file_missing_on_disk_is_named(tmp_path: Path) -> None:
    write(tmp_path, numbers(2))
    (tmp_path / "model-00001-of-00001.safetensors").unlink()
    refuses(tmp_path, "model-00001-of-00001.safetensors")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path, numbers(4))
    path = tmp_path / "model-00001-of-00001.safetensors"
    content = path.read_bytes()
    for length in [0, 1, 7, 8, 9, len(content) // 2, len(content) - 1]:
        path.write_bytes(content[:length])
        refuses(tmp_path, path.name)
    path.write_bytes(content + b"\0")
    refuses(tmp_path, path.name)


def with_header(path: Path, header: bytes, data: bytes, length: int | None = None) -> None:
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [([4], [0, 12]), ([4], [4, 20]), ([4], [0, 20]), ([5], [0, 16]), ([4], [16, 0]), ([2**62, 8], [0, 16]), ([4], [0])],
)
def test_wrong_offsets_in_a_header_are_refused(tmp_path: Path, shape: list[int], offsets: list[int]) -> None:
    header = {"t": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}
    with_header(tmp_path / "model.safetensors", json.dumps(header).encode(), bytes(16))
    refuses(tmp_path, "model.safetensors")


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    tensor = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    with_header(tmp_path / "model.safetensors", json.dumps({"a": tensor, "b": tensor}).encode(), bytes(16))
    refuses(tmp_path, "model.safetensors")


@pytest.mark.parametrize("length", [2**63, 2**40, 101 << 20, 17])
def test_a_header_of_huge_size_is_refused(tmp_path: Path, length: int) -> None:
    with_header(tmp_path / "model.safetensors", b"{}", bytes(14), length)
    refuses(tmp_path, "model.safetensors")


@pytest.mark.parametrize("header", [b"", b"[]", b"{", b'{"t": 1}', b"\xff" * 8])
def test_an_invalid_header_is_refused(tmp_path: Path, header: bytes) -> None:
    with_header(tmp_path / "model.safetensors", header, bytes(16))
    refuses(tmp_path, "model.safetensors")


@pytest.mark.parametrize(("dtype", "size"), [("F8_E5M2", 1), ("U16", 2), ("BOOL", 1), ("C64", 8)])
def test_a_dtype_that_no_parameter_has_is_refused(tmp_path: Path, dtype: str, size: int) -> None:
    header = {"t": {"dtype": dtype, "shape": [2], "data_offsets": [0, 2 * size]}}
    with_header(tmp_path / "model.safetensors", json.dumps(header).encode(), bytes(2 * size))
    refuses(tmp_path, "model.safetensors", dtype, "'t'")


def test_a_disk_that_fills_up_is_a_user_error(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)  # files may not grow beyond: a disk that is full
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        with pytest.raises(UserError, match="nothing was changed"), committed_directory(tmp_path / "out") as directory:
            write(directory, numbers(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == []


def test_a_tensor_that_differs_from_its_spec_is_a_bug(tmp_path: Path) -> None:
    specs = [TensorSpec("x", (2,), "float32")]
    for value in (np.zeros(3, "float32"), np.zeros(2, "float64"), np.zeros((2, 1), "float32")):
        with pytest.raises(AssertionError, match="announced"):
            write_tensors(tmp_path, "model", specs, lambda name, value=value: value, {})
