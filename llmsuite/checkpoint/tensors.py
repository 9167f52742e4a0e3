"""Sets of tensors in one or more safetensors files with an index, as HF and PaddleNLP lay them out.

Tensors are written a file at a time and read one by one, so memory is bounded by the largest file on writing and
by the largest tensor on reading.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (teaches numpy, and so safetensors, what bfloat16 is)
import numpy as np
import safetensors
import safetensors.numpy

from llmsuite.checkpoint.files import read_json_file, write_json
from llmsuite.errors import UserError

MAX_FILE_BYTES = 4 << 30
SUFFIX = ".safetensors"
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Name, shape and size of a tensor before its values exist."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype="int64")) * np.dtype(self.dtype).itemsize


def write_tensors(
    directory: Path,
    stem: str,
    specs: Iterable[TensorSpec],
    read: Callable[[str], np.ndarray],
    metadata: Mapping[str, str],
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write `stem-0000i-of-0000N.safetensors` and `stem.safetensors.index.json`.

    Args:
        directory: an existing directory.
        stem: "model" or "optimizer".
        specs: every tensor, in the order they are to be stored.
        read: gives the values of a tensor by name; called once each.
        metadata: for the header of each file; "format" says whose layout it is.
        max_file_bytes: a file is closed before it would grow larger; a larger tensor gets a file of its own.

    Raises:
        OSError: a file cannot be written.
    """
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if groups[-1] and size + spec.num_bytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.num_bytes
    weight_map = {}
    for number, group in enumerate(groups, 1):
        file_name = f"{stem}-{number:05d}-of-{len(groups):05d}{SUFFIX}"
        values = {}
        for spec in group:
            value = np.asarray(read(spec.name), order="C")
            found = (value.shape, value.dtype.name)
            assert found == (spec.shape, spec.dtype), f"{spec} was announced, {found} came"
            values[spec.name] = value
            weight_map[spec.name] = file_name
        try:
            safetensors.numpy.save_file(values, directory / file_name, metadata=dict(metadata))
        except safetensors.SafetensorError as error:  # such as a full disk
            raise OSError(f"{file_name}: {error}") from error
    total = sum(spec.num_bytes for group in groups for spec in group)
    write_json(directory / f"{stem}{SUFFIX}.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


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
