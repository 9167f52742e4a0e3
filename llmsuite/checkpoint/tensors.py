"""Sets of tensors in one or more safetensors files with an index, as HF and PaddleNLP lay them out.

Tensors are written and read one by one, or a part at a time, so memory is bounded by the largest tensor or part. What
is written is hashed on its way to the disk.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes  # noqa: F401  (teaches numpy, and so safetensors, what bfloat16 is)
import numpy as np
import safetensors

from llmsuite.checkpoint.files import read_json_file, sha256_of, write_json
from llmsuite.errors import UserError

MAX_FILE_BYTES = 4 << 30
SUFFIX = ".safetensors"
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_PART_BYTES = 32 << 20
_JOURNAL = "journal.jsonl"


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
    """Tensors that are read on demand, whatever they are stored in."""

    @property
    def names(self) -> list[str]: ...

    @property
    def paths(self) -> list[Path]:
        """The files that hold tensors, sorted."""

    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype of a tensor, without its values."""

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """The values of a tensor, or of a slice of it (one a dim, none empty)."""


@dataclasses.dataclass
class Written:
    """What a manifest says of tensor files."""

    files: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Size in bytes and sha256 by file."""
    tensors: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Size, sha256, shape and dtype by `file:tensor`."""

    def add(self, other: Written) -> None:
        self.files.update(other.files)
        self.tensors.update(other.tensors)


class InTurn:
    """Tensors that are made once each, whole and in a given order, whatever the order they are asked for in.

    So each rank that holds a part of them knows when to give it.
    """

    def __init__(self, specs: Iterable[TensorSpec], make: Callable[[str], np.ndarray], uses: Iterable[str]):
        """`uses` has the name of a tensor as often as it will be read; it is held until the last time."""
        self._next, self._make = iter([spec.name for spec in specs]), make
        self._uses = collections.Counter(uses)
        self._held: dict[str, np.ndarray] = {}

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """A tensor, or a slice of it."""
        while name not in self._held:
            made = next(self._next)
            self._held[made] = self._make(made)
        value = self._held[name]
        self._uses[name] -= 1
        if not self._uses[name]:
            del self._held[name]
        return value if index is None else value[tuple(index)]


def in_files(specs: Iterable[TensorSpec], max_file_bytes: int) -> list[list[TensorSpec]]:
    """The tensors of each file, in the order they lie in it: those of wide dtypes first, so that all are aligned.

    A file is closed before it would grow larger than `max_file_bytes`; a larger tensor gets a file of its own.
    """
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if groups[-1] and size + spec.num_bytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.num_bytes
    return [sorted(group, key=lambda spec: -np.dtype(spec.dtype).itemsize) for group in groups]


def in_parts(spec: TensorSpec, read: Callable[[Sequence[slice] | None], np.ndarray]) -> Iterator[np.ndarray]:
    """A tensor as parts of some 32 MB along its first dim, each read when its turn comes."""
    if spec.num_bytes <= _PART_BYTES or not spec.shape:
        yield read(None)
        return
    num_rows = max(1, _PART_BYTES * spec.shape[0] // spec.num_bytes)
    rest = [slice(0, size) for size in spec.shape[1:]]
    for first in range(0, spec.shape[0], num_rows):
        yield read([slice(first, min(first + num_rows, spec.shape[0])), *rest])


def write_tensors(
    directory: Path,
    stem: str,
    specs: Sequence[TensorSpec],
    read: Callable[[str], np.ndarray | Iterable[np.ndarray]],
    metadata: Mapping[str, str],
    max_file_bytes: int = MAX_FILE_BYTES,
    resumable: bool = False,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> Written:
    """Write `stem-0000i-of-0000N.safetensors` and `stem.safetensors.index.json`.

    Args:
        directory: an existing directory.
        stem: "model" or "optimizer".
        specs: every tensor, in the order of the index; `in_files` says in which order they are read and stored.
        read: gives the values of a tensor by name, whole or as parts along its first dim; called once each.
        metadata: for the header of each file; "format" says whose layout it is.
        max_file_bytes: see `in_files`.
        resumable: whether to keep a journal of what is done, and to skip the files that one in `directory` tells of
            and that are as they were written. The caller sees to it that they are files of the same content.
        progress: is told of every number of bytes that is done.

    Raises:
        OSError: a file cannot be written.
    """
    groups, written, weight_map = in_files(specs, max_file_bytes), Written(), {}
    journal = _Journal(directory / _JOURNAL) if resumable else None
    for number, group in enumerate(groups, 1):
        path = directory / f"{stem}-{number:05d}-of-{len(groups):05d}{SUFFIX}"
        weight_map.update({spec.name: path.name for spec in group})
        done = journal.find(path) if journal else None
        if done is None:
            done = _write_file(path, group, read, metadata, progress)
            if journal:
                journal.add(path, done)
        else:
            progress(sum(spec.num_bytes for spec in group))
        written.add(done)
    index = {"metadata": {"total_size": sum(s.num_bytes for s in specs)}}
    in_order = {spec.name: weight_map[spec.name] for spec in specs}
    write_json(directory / f"{stem}{SUFFIX}.index.json", {**index, "weight_map": in_order})
    if journal:
        journal.path.unlink(missing_ok=True)
    return written


def write_file(
    path: Path, specs: Sequence[TensorSpec], read: Callable[[str], np.ndarray], metadata: Mapping[str, str]
) -> Written:
    """Write one file, without an index; `read` is called once each, in the order of `specs`."""
    return _write_file(path, specs, read, metadata, lambda num_bytes: None)


def _write_file(
    path: Path,
    specs: Sequence[TensorSpec],
    read: Callable[[str], np.ndarray | Iterable[np.ndarray]],
    metadata: Mapping[str, str],
    progress: Callable[[int], None],
) -> Written:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for spec in specs:
        begin, end = end, end + spec.num_bytes
        header[spec.name] = {
            "dtype": _CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    written, whole = Written(), hashlib.sha256()
    with open(path, "wb") as file:
        start = len(text).to_bytes(8, "little") + text
        file.write(start)
        whole.update(start)
        for spec in specs:
            digest, size = hashlib.sha256(), 0
            for part in _parts(spec, read(spec.name)):
                data = np.ascontiguousarray(part).reshape(-1).view("uint8").data
                file.write(data)
                whole.update(data)
                digest.update(data)
                size += len(data)
                progress(len(data))
            assert size == spec.num_bytes, f"{spec} was announced, {size} bytes came"
            written.tensors[f"{path.name}:{spec.name}"] = {
                "size": size,
                "sha256": digest.hexdigest(),
                "shape": list(spec.shape),
                "dtype": spec.dtype,
            }
        file.flush()
        os.fsync(file.fileno())
    written.files[path.name] = {"size": len(start) + end, "sha256": whole.hexdigest()}
    return written


def _parts(spec: TensorSpec, values: np.ndarray | Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    if isinstance(values, np.ndarray):
        found = (values.shape, values.dtype.name)
        assert found == (spec.shape, spec.dtype), f"{spec} was announced, {found} came"
        yield values
        return
    for part in values:
        found = (part.shape[1:], part.dtype.name)
        assert found == (spec.shape[1:], spec.dtype), f"{spec} was announced, parts of {found} came"
        yield part


class _Journal:
    """The files of a directory that are complete, a line each, so that a later process need not write them again."""

    def __init__(self, path: Path):
        self.path = path
        self._done: dict[str, Written] = {}
        try:
            lines = path.read_bytes().splitlines()
        except FileNotFoundError:
            lines = []
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:  # empty, or the one that was being written
                continue
            self._done[entry["file"]] = Written(entry["files"], entry["tensors"])

    def find(self, path: Path) -> Written | None:
        """What is known of a file that is there as it was written; None when it has to be written."""
        done = self._done.get(path.name)
        if done is None or not path.is_file() or path.stat().st_size != done.files[path.name]["size"]:
            return None
        return done if sha256_of(path) == done.files[path.name]["sha256"] else None

    def add(self, path: Path, done: Written) -> None:
        with open(self.path, "ab") as file:
            file.write(b"\n" + json.dumps({"file": path.name, **dataclasses.asdict(done)}).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


class TensorFiles:
    """The tensors of a directory, read on demand."""

    def __init__(self, directory: Path, stem: str):
        """Raises UserError when there is no such set, or its index is wrong."""
        self.directory = directory
        index, single = directory / f"{stem}{SUFFIX}.index.json", directory / f"{stem}{SUFFIX}"
        if index.is_file():
            content = read_json_file(index)
            weight_map = content.get("weight_map") if isinstance(content, dict) else None
            if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
                raise UserError(f"{index}: has no weight_map of names to files")
            for file_name in set(weight_map.values()):
                if Path(file_name).name != file_name:  # a path could leave the directory
                    raise UserError(f"{index}: {file_name!r} is not a plain file name")
            self._file_of = dict(weight_map)
        elif single.is_file():
            self._file_of = dict.fromkeys(self._open(single.name).keys(), single.name)
        else:
            raise UserError(f"{directory}: has neither {index.name} nor {single.name}")

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    @property
    def paths(self) -> list[Path]:
        """The files that hold tensors, sorted."""
        return [self.directory / name for name in sorted(set(self._file_of.values()))]

    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype of a tensor, without its values."""
        with self._lookup(name) as file:
            view = file.get_slice(name)
            return TensorSpec(name, tuple(view.get_shape()), _DTYPES[view.get_dtype()])

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """The values of a tensor, or of a slice of it (one a dim, none empty), in the dtype they are stored in."""
        with self._lookup(name) as file:
            return file.get_tensor(name) if not index else file.get_slice(name)[tuple(index)]

    def _lookup(self, name: str) -> Any:
        file, path = self._open(self._file_of[name]), self.directory / self._file_of[name]
        if name not in file.keys():  # noqa: SIM118  (a safetensors handle is no mapping)
            raise UserError(f"{path}: the index promises tensor {name!r}, it is not there")
        dtype = file.get_slice(name).get_dtype()
        if dtype not in _DTYPES:
            raise UserError(f"{path}: {name!r} has dtype {dtype}; supported: {', '.join(_DTYPES)}")
        return file

    def _open(self, file_name: str) -> Any:
        path = self.directory / file_name
        try:
            return safetensors.safe_open(path, framework="np")
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f"{path}: is not a readable safetensors file: {error}") from error


def damaged_tensors(directory: Path) -> list[str]:
    """The tensors, as `file:tensor`, whose values are not those its manifest.json tells of, or cannot be read."""
    told = read_json_file(directory / "manifest.json").get("tensors", {})
    damaged = []
    for name, entry in told.items():
        file, _, tensor = name.partition(":")
        try:
            with safetensors.safe_open(directory / file, framework="np") as opened:
                value = opened.get_tensor(tensor)
        except (OSError, safetensors.SafetensorError):
            damaged.append(name)
            continue
        if hashlib.sha256(value.reshape(-1).view("uint8").data).hexdigest() != entry["sha256"]:
            damaged.append(name)
    return damaged
