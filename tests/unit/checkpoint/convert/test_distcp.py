"""Directories of dist.save_state_dict: read without running them, and what is wrong with them is named."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.distributed.flex_checkpoint.dcp.metadata import LocalTensorIndex, LocalTensorMetadata, Metadata

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.convert.distcp import open_distcp
from llmsuite.checkpoint.convert.sources import open_source
from llmsuite.checkpoint.model_dir import ModelDirectory
from llmsuite.inference.load import parameter_shapes
from tests.support import tiny_llama
from tests.support.tiny_llama import CONFIG, FAMILIES


def open_(path: Path, **options: Any) -> ModelDirectory:
    return open_source(path, FAMILIES, parameter_shapes, **options)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Save as a run in one process does."""
    state = {tiny_llama.to_paddlenlp(name): paddle.to_tensor(value) for name, value in tiny_llama.values().items()}
    slots = {f"{name}_moment1_0": value for name, value in state.items()}
    dist.save_state_dict({"model": state, "optimizer": slots}, str(tmp_path / "run/dist_ckpt"))
    (tmp_path / "run/config.json").write_text(json.dumps(CONFIG.to_hf()))
    return tmp_path / "run"


def test_the_model_of_a_save_in_one_process(saved: Path, tmp_path: Path) -> None:
    for path, options in ((saved, {}), (saved / "dist_ckpt", {}), (saved / "dist_ckpt", {"config": saved})):
        model = open_(path, **options)
        assert {n: model.read(n).tobytes() for n in model.names} == {
            n: v.tobytes() for n, v in tiny_llama.values().items()
        }
    (saved / "config.json").rename(tmp_path / "config.json")
    with pytest.raises(UserError, match=r"has no config\.json, nor has the directory above; name one with --config"):
        open_(saved)
    assert open_(saved, config=tmp_path).names


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_form_with_safetensors(tmp_path: Path, dtype: str) -> None:
    values = tiny_llama.values()
    state = {tiny_llama.to_paddlenlp(name): paddle.to_tensor(value).astype(dtype) for name, value in values.items()}
    dist.save_state_dict(state, str(tmp_path), safetensors=True)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["0_0.safetensors"]
    model = open_(tmp_path)
    for name in model.names:
        expected = values[name].astype(dtype)
        assert model.read(name).dtype.name == dtype
        assert model.read(name).tobytes() == expected.tobytes()
    (tmp_path / "0_0.safetensors").write_bytes((tmp_path / "0_0.safetensors").read_bytes()[:-1])
    with pytest.raises(UserError, match=r"0_0\.safetensors: is not a readable safetensors file"):
        open_(tmp_path)


def with_metadata(directory: Path, change: Callable[[Metadata], None]) -> None:
    """Change metadata we have written ourselves."""
    path = directory / "0.metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata, protocol=4))


NORM = "model.llama.norm.weight"


def in_two(metadata: Metadata, second: tuple[int, int]) -> None:
    """The last norm in two blocks: 10 elements from 0, and `second` as (first, number)."""
    blocks = [(0, 10), second]
    (old,) = [key for key in metadata.storage_metadata if key.tensor_key == NORM]
    del metadata.storage_metadata[old]
    metadata.state_dict_metadata[NORM] = [LocalTensorMetadata((at,), (n,), "float32", (24,)) for at, n in blocks]
    for i, (at, n) in enumerate(blocks):
        metadata.storage_metadata[LocalTensorIndex(NORM, (at,), local_shape=(n,))] = f"{i + 1}_0.distcp"


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ((10, 14), None),
        ((12, 12), r"'llama.norm.weight' of shape \[24\]: \[10:12\] is in no file"),
        ((8, 16), r"\[0:10\] in 1_0.distcp and \[8:24\] in 2_0.distcp overlap"),
        ((20, 14), r"\[20:34\] in 2_0.distcp does not lie in it"),
    ],
)
def test_gaps_and_overlaps_are_named(saved: Path, second: tuple[int, int], message: str | None) -> None:
    directory = saved / "dist_ckpt"
    value = tiny_llama.values()["model.norm.weight"]
    with_metadata(directory, lambda metadata: in_two(metadata, second))
    for i, (at, n) in enumerate([(0, 10), second]):
        part = np.resize(value[at : at + n], n)
        (directory / f"{i + 1}_0.distcp").write_bytes(pickle.dumps({NORM: part}, protocol=4))
    if message is None:
        assert np.array_equal(open_(saved).read("model.norm.weight"), value)
        return
    with pytest.raises(UserError, match=message):
        open_(saved)


def test_missing_files_are_listed(saved: Path) -> None:
    with_metadata(saved / "dist_ckpt", lambda metadata: in_two(metadata, (10, 14)))
    with pytest.raises(UserError, match=r"2 of its 3 files are missing: 1_0\.distcp, 2_0\.distcp"):
        open_(saved)


def test_a_tensor_without_blocks(saved: Path) -> None:
    with_metadata(saved / "dist_ckpt", lambda metadata: metadata.state_dict_metadata[NORM].clear())
    with pytest.raises(UserError, match=rf"0\.metadata: .*'{NORM}' has no blocks"):
        open_(saved)


def test_a_file_that_lacks_a_tensor_of_the_metadata(saved: Path) -> None:
    content = pickle.loads((saved / "dist_ckpt/0_0.distcp").read_bytes())
    short = {**content, NORM: content[NORM][:20]}
    for changed, message in (
        ({k: v for k, v in content.items() if k != NORM}, rf"0_0\.distcp: has no tensor '{NORM}'"),
        (short, r"0_0\.distcp: 'model.llama.norm.weight' is \(20,\) f4, which differs from 0.metadata"),
        ([1, 2], "is no dict of tensors"),
    ):
        (saved / "dist_ckpt/0_0.distcp").write_bytes(pickle.dumps(changed, protocol=4))
        with pytest.raises(UserError, match=message):
            open_(saved)


@pytest.mark.parametrize("file", ["../0_0.distcp", "/etc/passwd", "", "a/b"])
def test_a_file_name_that_leads_elsewhere(saved: Path, file: str) -> None:
    def change(metadata: Metadata) -> None:
        metadata.storage_metadata = dict.fromkeys(metadata.storage_metadata, file)

    with_metadata(saved / "dist_ckpt", change)
    with pytest.raises(UserError, match="not a plain file name"):
        open_(saved)


class Touch:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("file", ["0.metadata", "0_0.distcp"])
def test_code_in_a_file_is_refused_and_not_run(saved: Path, tmp_path: Path, file: str) -> None:
    path = saved / "dist_ckpt" / file
    content = pickle.loads(path.read_bytes())
    if isinstance(content, Metadata):
        content.flat_mapping["x"] = Touch(tmp_path / "mark")
    else:
        content["x"] = Touch(tmp_path / "mark")
    path.write_bytes(pickle.dumps(content, protocol=4))
    with pytest.raises(UserError, match=rf"{file}: asks for posix.system, which is not data of a checkpoint"):
        open_(saved)
    assert not (tmp_path / "mark").exists()
    pickle.loads(path.read_bytes())  # it would have run
    assert (tmp_path / "mark").exists()


def test_metadata_of_something_else(tmp_path: Path) -> None:
    for content in ({}, [], 3, {"a": 1}, Metadata({}, {}, {}), Metadata({"a": [1]}, {1: 2}, None)):
        (tmp_path / "0.metadata").write_bytes(pickle.dumps(content, protocol=4))
        with pytest.raises(UserError, match=r"0\.metadata"):
            open_distcp(tmp_path)


def test_the_newest_save_of_a_directory_is_read(saved: Path) -> None:
    directory = saved / "dist_ckpt"
    doubled = {tiny_llama.to_paddlenlp(n): paddle.to_tensor(2 * v) for n, v in tiny_llama.values().items()}
    dist.save_state_dict({"model": doubled}, str(directory), unique_id=10)
    assert np.array_equal(open_(saved).read("model.norm.weight"), 2 * tiny_llama.values()["model.norm.weight"])
