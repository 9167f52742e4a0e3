"""Writes sets of tensors as safetensors files with an index, one by one or a chunk at a time.

So memory is bounded by the largest tensor or chunk. Each byte is hashed once on its way to the disk: the header of a
file, and each of its tensors, have their own digest.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.base.files import first_fault, fsync, ranges_of, write_json
from llmsuite.base.safe_files import is_file
from llmsuite.base.threads import run_all
from llmsuite.checkpoint.finite import OnNonFinite, count_nonfinite
from llmsuite.checkpoint.stored import CODES, StoredTensor
from llmsuite.checkpoint.tensors import SUFFIX, TensorSpec

MAX_FILE_BYTES = 4 << 30
_CHUNK_BYTES = 4 << 20
_MAX_CHUNKS = 32
_JOURNAL = "journal.jsonl"


@dataclasses.dataclass
class ManifestPart:
    """Entries of a manifest for some tensor files and their tensors."""

    files: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Size in bytes and sha256 of the header by file."""
    tensors: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Offset in the file, size, sha256, shape and dtype by `file:tensor`."""

    def add(self, other: ManifestPart) -> None:
        self.files.update(other.files)
        self.tensors.update(other.tensors)


def group_into_files(specs: Iterable[TensorSpec], max_file_bytes: int) -> list[list[TensorSpec]]:
    """Return the tensors of each file, in its order: those of wide dtypes first, so that all are aligned.

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


def _by_writer(specs: Sequence[TensorSpec], options: WriteOptions) -> list[tuple[int, list[TensorSpec]]]:
    """Return the tensors of each file with the rank that writes it; the same on every rank."""
    of_rank: dict[int, list[TensorSpec]] = {}
    for spec in specs:
        of_rank.setdefault(options.writers.get(spec.name, 0), []).append(spec)
    found = [
        (rank, group) for rank in sorted(of_rank) for group in group_into_files(of_rank[rank], options.max_file_bytes)
    ]
    return found or [(0, [])]


def read_in_chunks(spec: TensorSpec, read: Callable[[Sequence[slice] | None], np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the chunks of a tensor by `chunk_slices`, each read on demand."""
    return (read(index) for index in chunk_slices(spec))


def chunk_slices(spec: TensorSpec) -> Iterator[list[slice] | None]:
    """Yield slices of a tensor along its first dim: about 4 MB, or a 32nd of a large tensor; None for a small one.

    The first dim may be the last one in the source (transposed matrices), where a small chunk would be scattered over
    the full tensor.
    """
    size = max(_CHUNK_BYTES, spec.num_bytes // _MAX_CHUNKS)
    if spec.num_bytes <= size or not spec.shape:
        yield None
        return
    num_rows = max(1, size * spec.shape[0] // spec.num_bytes)
    rest = [slice(0, size) for size in spec.shape[1:]]
    for first in range(0, spec.shape[0], num_rows):
        yield [slice(first, min(first + num_rows, spec.shape[0])), *rest]


Values = np.ndarray | Iterable[np.ndarray] | StoredTensor
"""Values to be written: a full tensor, its chunks along the first dim, or a tensor to be copied from a file."""


def _no_progress(num_bytes: int) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class WriteOptions:
    """Options of `write_tensors`."""

    max_file_bytes: int = MAX_FILE_BYTES
    """Size limit of a file, see `group_into_files`."""
    resumable: bool = False
    """True to keep a journal of finished files, and to skip intact files that a journal in the directory lists. The
    caller makes sure that they have the same content."""
    progress: Callable[[int], None] = _no_progress
    """Called with the number of bytes of each chunk that is done."""
    threads: int = 1
    """Number of tensors that are read, hashed and written at the same time."""
    rank: int = 0
    """This process, where several write a part each. Rank 0 writes the index."""
    writers: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Rank by tensor; rank 0 writes those that are not named."""
    on_nonfinite: OnNonFinite | None = None
    """Called with each tensor that has values that are NaN or infinite. With None they are not counted, as for the
    checkpoints of a run, which has its own checks."""


def write_tensors(
    directory: Path,
    stem: str,
    specs: Sequence[TensorSpec],
    read: Callable[[str], Values],
    metadata: Mapping[str, str],
    options: WriteOptions | None = None,
) -> ManifestPart:
    """Write `stem-0000i-of-0000N.safetensors` and `stem.safetensors.index.json`.

    Args:
        directory: an existing directory.
        stem: "model" or "optimizer".
        specs: every tensor, in the order of the index; `group_into_files` has the order of reads and of the files.
        read: returns the values of a tensor by name; called once each.
        metadata: for the header of each file; "format" names the layout.
        options: see `WriteOptions`.

    Returns:
        The manifest's entries for the files that this rank has written.

    Raises:
        OSError: a file cannot be written.
        UserError: a tensor that is copied is damaged, or `options.on_nonfinite` refuses one.
    """
    options = options or WriteOptions()
    groups = _by_writer(specs, options)
    paths = [directory / f"{stem}-{number:05d}-of-{len(groups):05d}{SUFFIX}" for number in range(1, len(groups) + 1)]
    own = [(path, group) for path, (writer, group) in zip(paths, groups) if writer == options.rank]
    journal = None
    if options.resumable:
        journal = _Journal(directory / _JOURNAL)
    written = _FileSet(read, metadata, options, journal).write(own)
    if options.rank == 0:
        index = {"metadata": {"total_size": sum(s.num_bytes for s in specs)}}
        file_of = {spec.name: path.name for path, (_, group) in zip(paths, groups) for spec in group}
        weight_map = {spec.name: file_of[spec.name] for spec in specs}
        write_json(directory / f"{stem}{SUFFIX}.index.json", {**index, "weight_map": weight_map})
    if journal:
        journal.path.unlink(missing_ok=True)
    return written


class _FileSet:
    """Several files that are written by one or more threads, one task for each tensor."""

    def __init__(
        self,
        read: Callable[[str], Values],
        metadata: Mapping[str, str],
        options: WriteOptions,
        journal: _Journal | None,
    ):
        self._read = read
        self._metadata = metadata
        self._options = options
        self._journal = journal
        self._done: dict[str, ManifestPart] = {}
        self._lock = threading.Lock()

    def write(self, files: Sequence[tuple[Path, Sequence[TensorSpec]]]) -> ManifestPart:
        """Write the files, each with its tensors; on return all of them are flushed to disk."""
        run_all(self._tasks(files), self._options.threads)
        written = ManifestPart()
        for name in sorted(self._done):
            written.add(self._done[name])
        return written

    def _tasks(self, files: Sequence[tuple[Path, Sequence[TensorSpec]]]) -> Iterator[Callable[[], None]]:
        """Yield a task for each tensor. A file is created when the first of its tasks is taken."""
        for path, group in files:
            found = None
            if self._journal:
                found = self._journal.find(path)
            if found is not None:
                self._done[path.name] = found
                self._progress(sum(spec.num_bytes for spec in group))
                continue
            file = TensorFile(path, group, self._metadata)
            if not group:
                self._done[path.name] = file.finish()
            yield from (functools.partial(self._write_tensor, file, spec) for spec in group)

    def _write_tensor(self, file: TensorFile, spec: TensorSpec) -> None:
        file.write(spec, self._read(spec.name), self._progress, self._options.on_nonfinite)
        with self._lock:
            file.num_left -= 1
            is_last = not file.num_left
        if is_last:
            written = file.finish()
            with self._lock:
                self._done[file.path.name] = written
                if self._journal:
                    self._journal.add(file.path, written)

    def _progress(self, num_bytes: int) -> None:
        with self._lock:
            self._options.progress(num_bytes)


def write_file(
    path: Path, specs: Sequence[TensorSpec], read: Callable[[str], Values], metadata: Mapping[str, str]
) -> ManifestPart:
    """Write one file of any values, without an index; `read` is called once each, in the order of `specs`."""
    file = TensorFile(path, specs, metadata)
    for spec in specs:
        file.write(spec, read(spec.name), _no_progress)
    return file.finish()


class TensorFile:
    """A file being written: its tensors may come in any order, from any thread."""

    def __init__(self, path: Path, specs: Sequence[TensorSpec], metadata: Mapping[str, str]):
        """Write the header; the tensors are stored in the order of `specs`."""
        self.path = path
        self.num_left = len(specs)
        self._lock = threading.Lock()
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        end = 0
        for spec in specs:
            begin = end
            end = end + spec.num_bytes
            header[spec.name] = {
                "dtype": CODES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # aligns the data to 8 bytes, as the format requires
        start = len(text).to_bytes(8, "little") + text
        self._starts = {spec.name: len(start) + header[spec.name]["data_offsets"][0] for spec in specs}
        with open(path, "wb") as file:
            file.write(start)
        header_sha256 = hashlib.sha256(start).hexdigest()
        self._written = ManifestPart({path.name: {"size": len(start) + end, "header_sha256": header_sha256}})
        self._entries: dict[str, dict[str, Any]] = {spec.name: {} for spec in specs}

    def write(
        self,
        spec: TensorSpec,
        values: Values,
        progress: Callable[[int], None],
        on_nonfinite: OnNonFinite | None = None,
    ) -> None:
        """Write a tensor at its offset; then call `on_nonfinite` if it has values that are not finite."""
        digest = hashlib.sha256()
        start = self._starts[spec.name]
        at = start
        num_nonfinite = 0
        with open(self.path, "r+b", buffering=0) as file:
            file.seek(start)
            for data in _bytes_of(spec, values):
                digest.update(data)
                if on_nonfinite is not None and len(data):
                    num_nonfinite += count_nonfinite(np.frombuffer(data, spec.dtype))
                with self._lock:  # concurrent writes to one file spin in the kernel: waiting here leaves the core free
                    _write_all(file, data)
                at += len(data)
                progress(len(data))
        assert at - start == spec.num_bytes, f"{spec} was announced, {at - start} bytes came"
        if isinstance(values, StoredTensor):
            values.compare(digest.hexdigest())
        if on_nonfinite is not None and num_nonfinite:
            on_nonfinite(spec.name, num_nonfinite, int(np.prod(spec.shape, dtype="int64")))
        self._entries[spec.name] = {
            "start": start,
            "size": spec.num_bytes,
            "sha256": digest.hexdigest(),
            "shape": list(spec.shape),
            "dtype": spec.dtype,
        }

    def finish(self) -> ManifestPart:
        """Flush the file to disk, and return its entries of the manifest."""
        fsync(self.path)
        for name, entry in self._entries.items():
            self._written.tensors[f"{self.path.name}:{name}"] = entry
        return self._written


def _write_all(file: Any, data: memoryview) -> None:
    while count := file.write(data):
        data = data[count:]


def _bytes_of(spec: TensorSpec, values: Values) -> Iterator[memoryview]:
    if isinstance(values, StoredTensor):
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
    """Journal of the finished files of a directory, one line each, so that a later process can skip them."""

    def __init__(self, path: Path):
        self.path = path
        self._done: dict[str, ManifestPart] = {}
        try:
            lines = path.read_bytes().splitlines()
        except FileNotFoundError:
            lines = []
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:  # an empty line, or a partial one of a killed process
                continue
            self._done[entry["file"]] = ManifestPart(entry["files"], entry["tensors"])

    def find(self, path: Path) -> ManifestPart | None:
        """Return the entries of a file that is intact; None if it has to be written."""
        done = self._done.get(path.name)
        if done is None or not is_file(path):
            return None
        if first_fault({path: ranges_of(dataclasses.asdict(done))[path.name]}) is None:
            return done
        return None

    def add(self, path: Path, done: ManifestPart) -> None:
        # a line end first: the last line may be a partial one of a killed process
        with open(self.path, "ab") as file:
            file.write(b"\n" + json.dumps({"file": path.name, **dataclasses.asdict(done)}).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
