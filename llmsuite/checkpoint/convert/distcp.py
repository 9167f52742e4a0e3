"""Reads directories of `paddle.distributed.save_state_dict`: `N.metadata`, and `R_N.distcp` of each rank R.

The metadata has the file and the offset of every block. Both are pickles, and are read without running them. With
`safetensors=True` Paddle writes `R_N.safetensors` instead of `R_N.distcp`.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.base.safe_files import is_file, is_local_name, listed
from llmsuite.base.strict_json import NULL, TEXT, Kind, check_kinds, integer
from llmsuite.checkpoint.convert.blocks import Block, BlockFiles, Index
from llmsuite.checkpoint.convert.pickled import StoredArray, read_pickle, without_paddle_name
from llmsuite.checkpoint.stored import StoredTensor, read_header
from llmsuite.checkpoint.tensors import SUFFIX, TensorSpec

_METADATA = re.compile(r"(\d+)\.metadata")
_MODEL = "model"
Place = tuple[str, tuple[int, ...], tuple[int, ...] | None]
_SIZE = integer(0, 1 << 60)
_SIZES = Kind(
    "at most 8 whole numbers",
    lambda value: isinstance(value, list | tuple) and len(value) <= 8 and all(map(_SIZE.fits, value)),
)
_PLACE_KINDS = {"global_offset": _SIZES, "flattened_range": _SIZES | NULL}
_INDEX_KINDS = {**_PLACE_KINDS, "tensor_key": TEXT}
"""Fields that locate a block."""
_BLOCK_KINDS = {**_PLACE_KINDS, "local_shape": _SIZES, "global_shape": _SIZES | NULL, "dtype": TEXT}
"""Fields that describe a block."""


def metadata_file(directory: Path) -> Path | None:
    """The metadata of the newest save in a directory; None when there is none."""
    found = [(int(m[1]), path) for path in listed(directory, "*.metadata") if (m := _METADATA.fullmatch(path.name))]
    return max(found)[1] if found else None


def open_distcp(directory: Path) -> BlockFiles:
    """The tensors of the model in such a directory, by their names in the model, without optimizer state.

    Raises:
        UserError: it is damaged, a file is missing, or the blocks of a tensor overlap or leave a gap.
    """
    path = metadata_file(directory)
    assert path is not None, "the caller has checked"
    metadata = read_pickle(path)
    try:
        return _open(directory, path, metadata.fields)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: is not the metadata of dist.save_state_dict: {error!r}") from error


def _open(directory: Path, path: Path, metadata: Mapping[str, Any]) -> BlockFiles:
    places = _files_of(path, metadata["storage_metadata"])
    names = _model_names(metadata)
    needed = sorted({file for (key, _, _), file in places.items() if key in names})
    missing = [file for file in needed if not is_file(directory / file)]
    if missing:
        raise UserError(f"{path}: {len(missing)} of its {len(needed)} files are missing: {', '.join(missing)}")
    if not names:
        raise UserError(f"{path}: has no tensors")

    @cache
    def shard(file: str) -> Mapping[str, Any]:
        if file.endswith(SUFFIX):
            return read_header(directory / file)
        content = read_pickle(directory / file)
        if not isinstance(content, dict):
            raise UserError(f"{directory / file}: is no dict of tensors")
        return content

    def array(file: str, key: str) -> StoredArray | StoredTensor:
        value = shard(file).get(key)
        if isinstance(value, StoredTensor):
            if value.code == "U16":  # Paddle stores the bits of bfloat16 as uint16
                return dataclasses.replace(value, code="BF16")
            return value
        value = without_paddle_name(value)
        if not isinstance(value, StoredArray):
            raise UserError(f"{directory / file}: has no tensor {key!r}, which {path.name} lists there")
        return value

    specs = {}
    blocks = {}
    for key, name in names.items():
        parts = [record.fields for record in metadata["state_dict_metadata"][key]]
        _check_blocks(path, key, parts)
        spec = TensorSpec(name, _full_shape(parts), np.dtype(str(parts[0]["dtype"])).name)
        specs[name] = spec
        pieces: dict[tuple[Any, Any], list[tuple[range, StoredArray | StoredTensor, str]]] = {}
        for part in parts:
            _, offset, flat = place = _place(key, part)
            shape = tuple(part["local_shape"])
            file = places[place]
            found = array(file, key)
            span = range(*flat) if flat else range(math.prod(shape))
            stored = (len(span),) if flat else shape
            if _spec(found, name) != TensorSpec(name, stored, spec.dtype):
                raise UserError(
                    f"{directory / file}: {key!r} is {found.shape} {found.code}, which differs from {path.name}"
                )
            pieces.setdefault((offset, shape), []).append((span, found, file))
        blocks[name] = [_block(directory, key, *place, pieces[place]) for place in pieces]
    result = BlockFiles(directory, [path, *(directory / file for file in needed)], specs)
    for name in specs:
        result.add(name, blocks[name])
    return result


def _check_blocks(path: Path, key: str, parts: Sequence[Mapping[str, Any]]) -> None:
    if not parts:
        raise ValueError(f"{key!r} has no blocks")
    for part in parts:
        check_kinds(path, part, _BLOCK_KINDS)


def _spec(found: StoredArray | StoredTensor, name: str) -> TensorSpec:
    if isinstance(found, StoredTensor):
        return TensorSpec(name, found.shape, found.dtype)
    return found.spec(name)


def _model_names(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Names in the model by key of the file, without those of the optimizer.

    The saved object is a dict of tensors, or a dict of dicts such as {"model": …, "optimizer": …}.
    """
    paths = metadata.get("flat_mapping") or {key: (key,) for key in metadata["state_dict_metadata"]}
    for key, path in paths.items():
        if not all(isinstance(part, str) for part in (key, *path)):
            raise ValueError("a name is no text")
    if any(len(path) > 1 and path[0] == _MODEL for path in paths.values()):
        return {key: ".".join(path[1:]) for key, path in paths.items() if len(path) > 1 and path[0] == _MODEL}
    return {key: key for key in metadata["state_dict_metadata"]}


def _full_shape(parts: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Shape of the full tensor. Paddle before 3.1 did not write it: then it is the extent of the blocks."""
    if parts[0].get("global_shape") is not None:
        return tuple(parts[0]["global_shape"])
    ends = [tuple(map(operator.add, part["global_offset"], part["local_shape"])) for part in parts]
    return tuple(max(end) for end in zip(*ends))


def _block(
    directory: Path,
    key: str,
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    pieces: list[tuple[range, StoredArray | StoredTensor, str]],
) -> Block:
    """A block that is stored in one file, or flattened and split over several, as by Paddle's sharding stage 1."""
    pieces = sorted(pieces, key=lambda piece: piece[0].start)
    if len(pieces[0][1].shape) == len(shape) and len(pieces) == 1 and len(pieces[0][0]) == math.prod(shape):
        _, array, file = pieces[0]
        return Block(offset, shape, file, lambda index: array.read(index).reshape([s.stop - s.start for s in index]))
    at = 0
    for span, _, file in pieces:
        if span.start != at:
            raise UserError(
                f"{directory}: {key!r}: elements {at} to {span.start} of the block in {file} are missing or double"
            )
        at = span.stop
    if at != math.prod(shape):
        raise UserError(f"{directory}: {key!r}: elements {at} to {math.prod(shape)} of a block are in no file")

    def read(index: Index) -> np.ndarray:
        return np.concatenate([array.read() for _, array, _ in pieces]).reshape(shape)[tuple(index)]

    return Block(offset, shape, ", ".join(file for _, _, file in pieces), read)


def _files_of(path: Path, storage: Mapping[Any, Any]) -> dict[Place, str]:
    """The file of each block; of equal copies the first one is read."""
    places = {}
    for key, file in storage.items():
        check_kinds(path, key.fields, _INDEX_KINDS)
        if not key.fields.get("replica_id"):
            places[_place(key.fields["tensor_key"], key.fields)] = _plain(path, file)
    return places


def _place(key: str, fields: Mapping[str, Any]) -> Place:
    """The key of a block: its tensor, its offset, and the range of its flattened elements, where it is not all."""
    flat = fields.get("flattened_range")
    return key, tuple(fields["global_offset"]), None if flat is None else tuple(flat)


def _plain(path: Path, file: Any) -> str:
    if not is_local_name(file):
        raise UserError(f"{path}: names a file that is not a plain file name")
    return file
