"""Reads sets of tensors from one or more safetensors files with an index, the layout of HF and PaddleNLP.

Tensors are read one by one, or a slice at a time. `tensor_writer.py` writes them.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.base.files import (
    MANIFEST,
    NOT_FETCHED,
    Range,
    broken_file,
    read_json_file,
    read_manifest,
    read_weight_map,
    sha256_of,
)
from llmsuite.base.safe_files import is_file, listed
from llmsuite.base.strict_json import TEXT, check_kinds, list_of
from llmsuite.checkpoint.expected_tensor import FLOATS, ExpectedTensor, check_scales
from llmsuite.checkpoint.stored import INT8, StoredTensor, read_header

SUFFIX = ".safetensors"


def sliced(values: np.ndarray, index: Sequence[slice] | None) -> np.ndarray:
    """A slice of an array, one `slice` a dim; all of it where `index` is None."""
    if index is None:
        return values
    return values[tuple(index)]


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of a tensor."""

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
        """Return shape and dtype of a tensor, without reading its values."""

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """Read the values of a tensor, or of a slice of it (one slice a dim, none empty)."""


@runtime_checkable
class MergedSource(Protocol):
    """A `TensorSource` of a model with an adapter that was merged into it."""

    @property
    def added(self) -> TensorSource:
        """The adapter's own tensors."""


class InMemoryTensors:
    """Tensors in memory, as a `TensorSource`."""

    def __init__(self, values: Mapping[str, np.ndarray], paths: Sequence[Path] = ()):
        """
        Args:
            values: by name.
            paths: the files that they were made from.
        """
        self._values = dict(values)
        self._paths = sorted(paths)

    @property
    def names(self) -> list[str]:
        return list(self._values)

    @property
    def paths(self) -> list[Path]:
        return self._paths

    def spec(self, name: str) -> TensorSpec:
        return TensorSpec(name, self._values[name].shape, self._values[name].dtype.name)

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        if index is None:
            return self._values[name]
        return self._values[name][tuple(index)]


class TensorFiles:
    """Tensors of a directory, read on demand."""

    def __init__(self, directory: Path, stem: str, check: bool = False):
        """
        Args:
            directory: where the files are.
            stem: "model" or "optimizer".
            check: True to compare files with manifest.json, if there is one: headers when a file is opened, each tensor
                when it is first read.

        Raises:
            UserError: there is no such set, its index is wrong, or a header is damaged.
        """
        self.directory = directory
        self._headers: dict[str, dict[str, StoredTensor]] = {}
        self._manifest: dict[Path, list[Range]] | None = None
        self._checked = set[str]()
        self._lock = threading.Lock()
        if check and is_file(directory / MANIFEST):
            self._manifest = read_manifest(directory)
            fault = broken_file(directory, without=SUFFIX)
            if fault:
                raise UserError(f"{fault}; nothing was written")
        self._not_fetched = _read_not_fetched(directory / NOT_FETCHED)
        index = directory / f"{stem}{SUFFIX}.index.json"
        single = directory / f"{stem}{SUFFIX}"
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
        """Return shape and dtype of a tensor, without reading its values."""
        found = self.stored(name)
        return TensorSpec(name, found.shape, found.dtype)

    def stored(self, name: str) -> StoredTensor:
        """Return a tensor in its file."""
        if name not in self._file_of:
            raise UserError(f"{self.directory}: has no tensor {name!r}")
        found = self._header(self._file_of[name]).get(name)
        if found is None:
            path = self.directory / self._file_of[name]
            raise UserError(f"{path}: the index lists tensor {name!r}, but the file does not have it")
        return found

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """Read a tensor, or a slice of it (one slice a dim, none empty), in its stored dtype."""
        found = self.stored(name)
        assert f"{self._file_of[name]}:{name}" not in self._not_fetched, "a rank reads a tensor that it did not fetch"
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


class RenamedTensors:
    """Tensors under other names than those in their files."""

    def __init__(self, source: TensorSource, names: Mapping[str, str]):
        """`names`: the new name of each tensor. Raises UserError when two get the same."""
        self._source = source
        self._theirs = {ours: theirs for theirs, ours in names.items()}
        if len(self._theirs) < len(names):
            first = next(theirs for theirs, ours in names.items() if self._theirs[ours] != theirs)
            raise UserError(f"{source.paths[0]}: {first!r} and {self._theirs[names[first]]!r} are the same parameter")

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


class Int8Tensors:
    """Tensors of a directory; those in int8 are read as float32. `int8.py` writes them."""

    STEM = "quant_scales"

    def __init__(self, files: TensorFiles, scales: TensorFiles):
        """Raises UserError when an int8 tensor has no scale."""
        self._files = files
        self._scales = scales
        self._scale_names = set(scales.names)
        int8_names = [name for name in files.names if files.spec(name).dtype == INT8]
        unscaled = [name for name in int8_names if _scale_name(name, "weight_scale") not in self._scale_names]
        if unscaled:
            raise UserError(f"{files.directory}: {len(unscaled)} int8 tensors have no scale, such as {unscaled[0]}")
        for name in int8_names:
            shape = files.spec(name).shape
            one_or_all = tuple((1, size) for size in shape)
            scale = scales.spec(_scale_name(name, "weight_scale"))
            ExpectedTensor(FLOATS, one_or_all).check(scale, scales.directory, f"the scale of a matrix of {list(shape)}")
            of_inputs = _scale_name(name, "input_scale")
            if of_inputs in self._scale_names:
                ExpectedTensor(FLOATS, (1,)).check(scales.spec(of_inputs), scales.directory, "the scale of inputs")

    @property
    def names(self) -> list[str]:
        return self._files.names

    @property
    def paths(self) -> list[Path]:
        return sorted([*self._files.paths, *self._scales.paths])

    def spec(self, name: str) -> TensorSpec:
        spec = self._files.spec(name)
        if spec.dtype == INT8:
            return dataclasses.replace(spec, dtype="float32")
        return spec

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        value = self._files.read(name, index)
        if value.dtype != INT8:
            return value
        of_weight = _scale_name(name, "weight_scale")
        scale = check_scales(self._scales.read(of_weight), of_weight, self._scales.stored(of_weight).path)
        if index is not None:  # the scale has size 1 along the inputs
            scale = scale[tuple(s if size > 1 else slice(None) for s, size in zip(index, scale.shape))]
        return value.astype("float32") * scale

    def input_scale(self, name: str) -> float | None:
        """Return the scale of a matrix's activations; None if they are not quantised."""
        of_inputs = _scale_name(name, "input_scale")
        if of_inputs not in self._scale_names:
            return None
        scale = float(check_scales(self._scales.read(of_inputs), of_inputs, self._scales.stored(of_inputs).path)[0])
        if scale <= 0:
            raise UserError(f"{self._scales.directory}: {of_inputs!r} is {scale}; the scale of inputs is above 0")
        return scale


def _scale_name(name: str, kind: str) -> str:
    return f"{name.removesuffix('.weight')}.{kind}"


def _read_not_fetched(path: Path) -> set[str]:
    """Read the list of tensors, as `file:tensor`, that a rank has not fetched; empty if there is no such file."""
    found = read_json_file(path) if is_file(path) else []
    check_kinds(path, {"the list": found}, {"the list": list_of(TEXT)})
    return set(found)


def _with_sha256(
    path: Path, header: dict[str, StoredTensor], ranges: Sequence[Range] | None
) -> dict[str, StoredTensor]:
    """Add digests of a manifest to the tensors of a file. Raises UserError when its header is damaged."""
    if ranges is None:
        raise UserError(f"{path}: manifest.json next to it does not list it; nothing was written")
    first, *others = ranges
    if sha256_of(path, first.start, first.end) != first.sha256:
        raise UserError(f"{path}: does not have the sha256 in its manifest.json; nothing was written")
    by_name = {found.tensor: found.sha256 for found in others}
    return {name: dataclasses.replace(stored, sha256=by_name.get(name)) for name, stored in header.items()}
