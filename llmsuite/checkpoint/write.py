"""Writes sets of tensors as safetensors files with an index, one by one or a part at a time.

So memory is bounded by the largest tensor or part. Each byte is hashed once on its way to the disk: of a file the
header, and each tensor.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.checkpoint.stored import CODES, Stored
from llmsuite.checkpoint.tensors import SUFFIX, TensorSpec
from llmsuite.files import first_fault, fsync, ranges_of, write_json
from llmsuite.threads import run_all

MAX_FILE_BYTES = 4 << 30
_PART_BYTES = 4 << 20
_MOST_PARTS = 32
_JOURNAL = "journal.jsonl"


@dataclasses.dataclass
class ManifestEntry:
    """What a manifest says of tensor files."""

    files: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Size in bytes and sha256 of the header by file."""
    tensors: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Place in the file, size, sha256, shape and dtype by `file:tensor`."""

    def add(self, other: ManifestEntry) -> None:
        self.files.update(other.files)
        self.tensors.update(other.tensors)


class OrderedGather:
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
            self._make_next(made)
        value = self._held[name]
        self._uses[name] -= 1
        if not self._uses[name]:
            del self._held[name]
        return value if index is None else value[tuple(index)]

    def finish(self) -> None:
        """Make those that are left, for others."""
        for made in self._next:
            self._make_next(made)

    def _make_next(self, name: str) -> None:
        value = self._make(name)
        if self._uses[name]:
            self._held[name] = value


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


def _by_writer(
    specs: Sequence[TensorSpec], max_file_bytes: int, writers: Mapping[str, int]
) -> list[tuple[int, list[TensorSpec]]]:
    """The tensors of each file with the rank that writes it. Every rank comes to the same."""
    of_rank: dict[int, list[TensorSpec]] = {}
    for spec in specs:
        of_rank.setdefault(writers.get(spec.name, 0), []).append(spec)
    found = [(rank, group) for rank in sorted(of_rank) for group in in_files(of_rank[rank], max_file_bytes)]
    return found or [(0, [])]


def in_parts(spec: TensorSpec, read: Callable[[Sequence[slice] | None], np.ndarray]) -> Iterator[np.ndarray]:
    """A tensor as parts along its first dim, each read when its turn comes: of some 4 MB, or a 32nd of a large one.

    The first dim may be the last one where it is read from, so small parts of a large tensor would be far from lying
    in one piece.
    """
    size = max(_PART_BYTES, spec.num_bytes // _MOST_PARTS)
    if spec.num_bytes <= size or not spec.shape:
        yield read(None)
        return
    num_rows = max(1, size * spec.shape[0] // spec.num_bytes)
    rest = [slice(0, size) for size in spec.shape[1:]]
    for first in range(0, spec.shape[0], num_rows):
        yield read([slice(first, min(first + num_rows, spec.shape[0])), *rest])


Values = np.ndarray | Iterable[np.ndarray] | Stored
"""Of a tensor that is to be written: whole, as parts along its first dim, or to be copied as it lies in a file."""


def write_tensors(
    directory: Path,
    stem: str,
    specs: Sequence[TensorSpec],
    read: Callable[[str], Values],
    metadata: Mapping[str, str],
    max_file_bytes: int = MAX_FILE_BYTES,
    resumable: bool = False,
    progress: Callable[[int], None] = lambda num_bytes: None,
    threads: int = 1,
    rank: int = 0,
    writers: Mapping[str, int] | None = None,
) -> ManifestEntry:
    """Write `stem-0000i-of-0000N.safetensors` and `stem.safetensors.index.json`.

    Args:
        directory: an existing directory.
        stem: "model" or "optimizer".
        specs: every tensor, in the order of the index; `in_files` says in which order they are read and stored.
        read: gives the values of a tensor by name; called once each.
        metadata: for the header of each file; "format" says whose layout it is.
        max_file_bytes: see `in_files`.
        resumable: whether to keep a journal of what is done, and to skip the files that one in `directory` tells of
            and that are as they were written. The caller sees to it that they are files of the same content.
        progress: is told of every number of bytes that is done.
        threads: how many tensors are read, hashed and written at the same time.
        rank: who this is, where several processes write a part each; what is returned is of that part. The index comes
            from rank 0.
        writers: rank by tensor; rank 0 writes the others.

    Raises:
        OSError: a file cannot be written.
        UserError: a tensor that is copied is not as it was written.
    """
    groups, done, weight_map = _by_writer(specs, max_file_bytes, writers or {}), dict[str, ManifestEntry](), {}
    journal, lock = _Journal(directory / _JOURNAL) if resumable else None, threading.Lock()

    def report(num_bytes: int) -> None:
        with lock:
            progress(num_bytes)

    def write(file: TensorFile, spec: TensorSpec) -> Callable[[], None]:
        def task() -> None:
            file.write(spec, read(spec.name), report)
            with lock:
                file.num_left -= 1
                is_last = not file.num_left
            if is_last:
                written = file.finish()
                with lock:
                    done[file.path.name] = written
                    if journal:
                        journal.add(file.path, written)

        return task

    def tasks() -> Iterator[Callable[[], None]]:
        for number, (writer, group) in enumerate(groups, 1):
            path = directory / f"{stem}-{number:05d}-of-{len(groups):05d}{SUFFIX}"
            weight_map.update({spec.name: path.name for spec in group})
            if writer != rank:
                continue
            if journal and (found := journal.find(path)):
                done[path.name] = found
                report(sum(spec.num_bytes for spec in group))
                continue
            file = TensorFile(path, group, metadata)
            if not group:
                done[path.name] = file.finish()
            yield from (write(file, spec) for spec in group)

    run_all(tasks(), threads)
    written = ManifestEntry()
    for name in sorted(done):
        written.add(done[name])
    if rank == 0:
        index = {"metadata": {"total_size": sum(s.num_bytes for s in specs)}}
        in_order = {spec.name: weight_map[spec.name] for spec in specs}
        write_json(directory / f"{stem}{SUFFIX}.index.json", {**index, "weight_map": in_order})
    if journal:
        journal.path.unlink(missing_ok=True)
    return written


def write_file(
    path: Path, specs: Sequence[TensorSpec], read: Callable[[str], Values], metadata: Mapping[str, str]
) -> ManifestEntry:
    """Write one file, without an index; `read` is called once each, in the order of `specs`."""
    file = TensorFile(path, specs, metadata)
    for spec in specs:
        file.write(spec, read(spec.name), lambda num_bytes: None)
    return file.finish()


class TensorFile:
    """A file that is being written: its tensors come in any order, from any thread."""

    def __init__(self, path: Path, specs: Sequence[TensorSpec], metadata: Mapping[str, str]):
        """Write the header. The tensors are to lie in the order given."""
        self.path, self.num_left = path, len(specs)
        self._lock = threading.Lock()
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        end = 0
        for spec in specs:
            begin, end = end, end + spec.num_bytes
            header[spec.name] = {
                "dtype": CODES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that the data is aligned
        start = len(text).to_bytes(8, "little") + text
        self._starts = {spec.name: len(start) + header[spec.name]["data_offsets"][0] for spec in specs}
        with open(path, "wb") as file:
            file.write(start)
        header_sha256 = hashlib.sha256(start).hexdigest()
        self._written = ManifestEntry({path.name: {"size": len(start) + end, "header_sha256": header_sha256}})
        self._entries: dict[str, dict[str, Any]] = {spec.name: {} for spec in specs}

    def write(self, spec: TensorSpec, values: Values, progress: Callable[[int], None]) -> None:
        """Write a tensor to its place."""
        digest, start = hashlib.sha256(), self._starts[spec.name]
        at = start
        with open(self.path, "r+b", buffering=0) as file:
            file.seek(start)
            for data in _bytes_of(spec, values):
                digest.update(data)
                with self._lock:  # the system would let others wait in a loop that burns their core
                    _write_all(file, data)
                at += len(data)
                progress(len(data))
        assert at - start == spec.num_bytes, f"{spec} was announced, {at - start} bytes came"
        if isinstance(values, Stored):
            values.compare(digest.hexdigest())
        self._entries[spec.name] = {
            "start": start,
            "size": spec.num_bytes,
            "sha256": digest.hexdigest(),
            "shape": list(spec.shape),
            "dtype": spec.dtype,
        }

    def finish(self) -> ManifestEntry:
        """Flush it to disk. Returns what a manifest says of it."""
        fsync(self.path)
        for name, entry in self._entries.items():
            self._written.tensors[f"{self.path.name}:{name}"] = entry
        return self._written


def _write_all(file: Any, data: memoryview) -> None:
    while count := file.write(data):
        data = data[count:]


def _bytes_of(spec: TensorSpec, values: Values) -> Iterator[memoryview]:
    if isinstance(values, Stored):
        found = (values.shape, values.dtype)
        assert found == (spec.shape, spec.dtype), f"{spec} was announced, {found} came"
        yield from values.chunks()
        return
    if isinstance(values, np.ndarray):
        found = (values.shape, values.dtype.name)
        assert found == (spec.shape, spec.dtype), f"{spec} was announced, {found} came"
        values = [values]
    for part in values:
        found = (part.shape[1:], part.dtype.name)
        assert found == (spec.shape[1:], spec.dtype), f"{spec} was announced, parts of {found} came"
        yield np.ascontiguousarray(part).reshape(-1).view("uint8").data


class _Journal:
    """The files of a directory that are complete, a line each, so that a later process need not write them again."""

    def __init__(self, path: Path):
        self.path = path
        self._done: dict[str, ManifestEntry] = {}
        try:
            lines = path.read_bytes().splitlines()
        except FileNotFoundError:
            lines = []
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:  # empty, or the one that was being written
                continue
            self._done[entry["file"]] = ManifestEntry(entry["files"], entry["tensors"])

    def find(self, path: Path) -> ManifestEntry | None:
        """What is known of a file that is there as it was written; None when it has to be written."""
        done = self._done.get(path.name)
        if done is None or not path.is_file():
            return None
        return done if first_fault({path: ranges_of(dataclasses.asdict(done))[path.name]}) is None else None

    def add(self, path: Path, done: ManifestEntry) -> None:
        with open(self.path, "ab") as file:
            file.write(b"\n" + json.dumps({"file": path.name, **dataclasses.asdict(done)}).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
