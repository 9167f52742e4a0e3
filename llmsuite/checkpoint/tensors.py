"""Reads sets of tensors in one or more safetensors files with an index, the layout of HF and PaddleNLP.

Tensors are read one by one, or a slice at a time. `tensor_writer.py` writes them.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from llmsuite.checkpoint.parts import FLOATS, Part, check_scales
from llmsuite.checkpoint.stored import INT8, StoredTensor, read_header
from llmsuite.errors import UserError
from llmsuite.files import (
    MANIFEST,
    NOT_FETCHED,
    Range,
    broken_file,
    read_json_file,
    read_manifest,
    read_weight_map,
    sha256_of,
)
from llmsuite.regular import is_file, listed
from llmsuite.strict_json import TEXT, check_kinds, list_of

SUFFIX = ".safetensors"


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Name, shape and size of a tensor before its values exist."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype="int64")) * np.dtype(self.dtype).itemsize


class TensorSource(Protocol):
    """Tensors that are read on demand, whatever their file format."""

    @property
    def names(self) -> list[str]: ...

    @property
    def paths(self) -> list[Path]:
        """The files that hold tensors, sorted."""

    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype of a tensor, without its values."""

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """The values of a tensor, or of a slice of it (one slice a dim, none empty)."""


class HeldTensors:
    """Tensors in memory, as a `TensorSource`."""

    def __init__(self, values: Mapping[str, np.ndarray], paths: Sequence[Path] = ()):
        """
        Args:
            values: by name.
            paths: the files that they were made of.
        """
        self._values, self._paths = dict(values), sorted(paths)

    @property
    def names(self) -> list[str]:
        return list(self._values)

    @property
    def paths(self) -> list[Path]:
        return self._paths

    def spec(self, name: str) -> TensorSpec:
        return TensorSpec(name, self._values[name].shape, self._values[name].dtype.name)

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        return self._values[name] if index is None else self._values[name][tuple(index)]


class TensorFiles:
    """The tensors of a directory, read on demand."""

    def __init__(self, directory: Path, stem: str, check: bool = False):
        """
        Args:
            directory: where the files are.
            stem: "model" or "optimizer".
            check: whether to compare files with manifest.json, if there is one: each tensor when it is first read,
                headers at once.

        Raises:
            UserError: there is no such set, its index is wrong, or a header is not as it was written.
        """
        self.directory = directory
        self._headers: dict[str, dict[str, StoredTensor]] = {}
        self._manifest: dict[Path, list[Range]] | None = None
        self._checked, self._lock = set[str](), threading.Lock()
        if check and is_file(directory / MANIFEST):
            self._manifest = read_manifest(directory)
            if fault := broken_file(directory, without=SUFFIX):
                raise UserError(f"{fault}; nothing was written")
        self._holes = _not_fetched(directory / NOT_FETCHED)
        index, single = directory / f"{stem}{SUFFIX}.index.json", directory / f"{stem}{SUFFIX}"
        if is_file(index):
            self._file_of = read_weight_map(index)
        elif is_file(single):
            self._file_of = dict.fromkeys(self._header(single.name), single.name)
        else:
            found = f"{directory}: has neither {index.name} nor {single.name}"
            if listed(directory, "**/*.pdparams"):
                found += f"; make them of its .pdparams: llmsuite import {directory} -o DIR --allow-pickle"
            raise UserError(found)

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    @property
    def paths(self) -> list[Path]:
        """The files that hold tensors, sorted."""
        return [self.directory / name for name in sorted(set(self._file_of.values()))]

    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype of a tensor, without its values."""
        found = self.stored(name)
        return TensorSpec(name, found.shape, found.dtype)

    def stored(self, name: str) -> StoredTensor:
        """A tensor in its file."""
        if name not in self._file_of:
            raise UserError(f"{self.directory}: has no tensor {name!r}")
        found = self._header(self._file_of[name]).get(name)
        if found is None:
            path = self.directory / self._file_of[name]
            raise UserError(f"{path}: the index promises tensor {name!r}, it is not there")
        return found

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """A tensor, or a slice of it (one slice a dim, none empty), in its stored dtype."""
        found = self.stored(name)
        assert f"{self._file_of[name]}:{name}" not in self._holes, "a rank reads a tensor that it did not ask for"
        with self._lock:
            is_new = found.sha256 is not None and name not in self._checked
            self._checked.add(name)
        if is_new:
            found.check()
        return found.read(index)

    def _header(self, file_name: str) -> dict[str, StoredTensor]:
        with self._lock:
            if file_name not in self._headers:
                path = self.directory / file_name
                found = read_header(path)
                if self._manifest is not None:
                    found = _with_sha256(path, found, self._manifest.get(path))
                self._headers[file_name] = found
            return self._headers[file_name]


class Renamed:
    """Tensors by other names than those in their files."""

    def __init__(self, source: TensorSource, names: Mapping[str, str]):
        """`names`: the new name of each tensor. Raises UserError when two get the same."""
        self._source, self._theirs = source, {ours: theirs for theirs, ours in names.items()}
        if len(self._theirs) < len(names):
            twice = next(theirs for theirs, ours in names.items() if self._theirs[ours] != theirs)
            raise UserError(f"{source.paths[0]}: {twice!r} and {self._theirs[names[twice]]!r} are the same parameter")

    @property
    def names(self) -> list[str]:
        return list(self._theirs)

    @property
    def paths(self) -> list[Path]:
        return self._source.paths

    def spec(self, name: str) -> TensorSpec:
        return dataclasses.replace(self._source.spec(self._theirs[name]), name=name)

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        return self._source.read(self._theirs[name], index)


class Dequantised:
    """Tensors of which some are stored as int8, read as float32; `int8.py` writes them."""

    STEM = "quant_scales"

    def __init__(self, files: TensorFiles, scales: TensorFiles):
        """Raises UserError when an int8 tensor has no scale."""
        self._files, self._scales = files, scales
        self._known = set(scales.names)
        is_int8 = [name for name in files.names if files.spec(name).dtype == INT8]
        if unscaled := [name for name in is_int8 if _beside(name, "weight_scale") not in self._known]:
            raise UserError(f"{files.directory}: {len(unscaled)} int8 tensors have no scale, such as {unscaled[0]}")
        for name in is_int8:
            shape = files.spec(name).shape
            one_or_all = tuple((1, size) for size in shape)
            scale = scales.spec(_beside(name, "weight_scale"))
            Part(FLOATS, one_or_all).check(scale, scales.directory, f"the scale of a matrix of {list(shape)}")
            if (beside := _beside(name, "input_scale")) in self._known:
                Part(FLOATS, (1,)).check(scales.spec(beside), scales.directory, "the scale of inputs")

    @property
    def names(self) -> list[str]:
        return self._files.names

    @property
    def paths(self) -> list[Path]:
        return sorted([*self._files.paths, *self._scales.paths])

    def spec(self, name: str) -> TensorSpec:
        spec = self._files.spec(name)
        return dataclasses.replace(spec, dtype="float32") if spec.dtype == INT8 else spec

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        value = self._files.read(name, index)
        if value.dtype != INT8:
            return value
        beside = _beside(name, "weight_scale")
        scale = check_scales(self._scales.read(beside), beside, self._scales.stored(beside).path)
        if index is not None:  # along the inputs its size is 1
            scale = scale[tuple(s if size > 1 else slice(None) for s, size in zip(index, scale.shape))]
        return value.astype("float32") * scale

    def input_scale(self, name: str) -> float | None:
        """Scale of the inputs that a matrix is multiplied with; None when they are not rounded."""
        beside = _beside(name, "input_scale")
        if beside not in self._known:
            return None
        scale = float(check_scales(self._scales.read(beside), beside, self._scales.stored(beside).path)[0])
        if scale <= 0:
            raise UserError(f"{self._scales.directory}: {beside!r} is {scale}; the scale of inputs is above 0")
        return scale


def _beside(name: str, kind: str) -> str:
    return f"{name.removesuffix('.weight')}.{kind}"


def _not_fetched(path: Path) -> set[str]:
    """The tensors, as `file:tensor`, that a rank did not ask for, by the file that says so."""
    found = read_json_file(path) if is_file(path) else []
    check_kinds(path, {"the list": found}, {"the list": list_of(TEXT)})
    return set(found)


def _with_sha256(
    path: Path, header: dict[str, StoredTensor], ranges: Sequence[Range] | None
) -> dict[str, StoredTensor]:
    """Add digests of a manifest to the tensors of a file. Raises UserError when its header is not as it was written."""
    if ranges is None:
        raise UserError(f"{path}: manifest.json beside it does not list it; nothing was written")
    first, *others = ranges
    if sha256_of(path, first.start, first.end) != first.sha256:
        raise UserError(f"{path}: does not have the sha256 in its manifest.json; nothing was written")
    by_name = {found.tensor: found.sha256 for found in others}
    return {name: dataclasses.replace(stored, sha256=by_name.get(name)) for name, stored in header.items()}
