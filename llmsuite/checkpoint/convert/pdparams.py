"""Reads PaddleNLP's `model_state*.pdparams`: one file, numbered files, or a file per rank (`.tp00_pp01.pdparams`), and
the directories of ranks of PaddleFleetX (`mp_00_sharding_00_pp_01/model.pdparams`).

They are pickles, and are read without running them. The file of a rank holds the layers of its pipeline stage, and its
shard of each matrix that is sharded over tensor parallel ranks. The sharded dim is not in the file; it follows from the
shape of the full matrix.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.base.safe_files import is_file, listed
from llmsuite.checkpoint.convert.blocks import Block, BlockFiles
from llmsuite.checkpoint.convert.pickled import StoredArray, read_pickle, without_paddle_name
from llmsuite.checkpoint.tensors import TensorSource, TensorSpec

_FILE = re.compile(r"model_state(?:-(\d+)-of-(\d+))?(?:\.((?:[a-z]+\d+_?)+))?\.pdparams")
_RANK_DIRECTORY = re.compile(r"mp_(\d+)_sharding_(\d+)_pp_(\d+)")
_IN_RANK_DIRECTORY = ("model.pdparams", "model_state.pdparams")
_NOT_SHARED = re.compile(r".*shared_layers\.\w+\.position_embeddings\.weight")
"""The last stage of PaddleFleetX's pipeline also stores the embedding module; only its word embedding is shared."""
_MAX_FILES = 1 << 16
_AXES = ("tp", "pp", "shard")
_NAMES_OF_PADDLE = "StructuredToParameterName@@"


class PickledTensors:
    """The tensors of one or more .pdparams files that together hold each name once."""

    def __init__(self, paths: Sequence[Path], first_counts: re.Pattern[str] | None = None):
        """
        Args:
            paths: the files.
            first_counts: tensors that are read from the first file, without comparing the others.

        Raises:
            UserError: a file is damaged or would import code, or two files disagree about a tensor.
        """
        self._paths = sorted(paths)
        self._first_counts = first_counts
        self._arrays: dict[str, StoredArray] = {}
        for path in self._paths:
            content = read_pickle(path)
            if not isinstance(content, dict):
                raise UserError(f"{path}: is no dict of tensors")
            for name, value in content.items():
                self._add(path, name, value)

    def _add(self, path: Path, name: Any, value: Any) -> None:
        if name == _NAMES_OF_PADDLE:
            return
        array = without_paddle_name(value)
        if not isinstance(name, str):
            raise UserError(f"{path}: has a tensor whose name is no text")
        if not isinstance(array, StoredArray):
            raise UserError(f"{path}: {name[:300]!r} is no tensor")
        array.spec(name)  # raises for a dtype that no parameter has
        before = self._arrays.setdefault(name, array)
        if before is not array and self._first_counts is not None and self._first_counts.fullmatch(name):
            return
        # tied weights are on the first and the last pipeline stage
        if before is not array and (before.spec(name) != array.spec(name) or before.digest() != array.digest()):
            raise UserError(f"{path}: {name!r} differs from that in {before.path.name}")

    @property
    def names(self) -> list[str]:
        return list(self._arrays)

    @property
    def paths(self) -> list[Path]:
        return self._paths

    def spec(self, name: str) -> TensorSpec:
        return self._arrays[name].spec(name)

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        return self._arrays[name].read(index)


def pdparams_files(directory: Path) -> list[Path]:
    """The files of a model, of all ranks."""
    if of_ranks := [path for rank in _rank_directories(directory) if (path := _file_of_rank(rank)) is not None]:
        return of_ranks
    if _RANK_DIRECTORY.fullmatch(directory.absolute().name):
        found = _file_of_rank(directory)
        return [found] if found is not None else []
    return [path for path in listed(directory, "model_state*.pdparams") if _FILE.fullmatch(path.name)]


def _rank_directories(directory: Path) -> list[Path]:
    return [path for path in listed(directory, "mp_*_sharding_*_pp_*") if _RANK_DIRECTORY.fullmatch(path.name)]


def _file_of_rank(directory: Path) -> Path | None:
    return next((directory / name for name in _IN_RANK_DIRECTORY if is_file(directory / name)), None)


def _open_rank_directories(directories: Sequence[Path]) -> list[PickledTensors]:
    """The tensors of each tensor parallel rank, from directories of ranks. Ranks of the sharding axis have equal
    parameters; the first of them is read."""
    files: dict[tuple[int, int], Path] = {}
    for path in directories:
        match = _RANK_DIRECTORY.fullmatch(path.absolute().name)
        assert match is not None
        found = _file_of_rank(path)
        if int(match[2]) == 0 and found is not None:
            files[int(match[1]), int(match[3])] = found
    mp = max((rank[0] for rank in files), default=0) + 1
    pp = max((rank[1] for rank in files), default=0) + 1
    _check_number(directories[0].absolute().parent, mp * pp)
    grid = itertools.product(range(mp), range(pp))
    if missing := [f"mp_{a:02d}_sharding_00_pp_{b:02d}" for a, b in grid if (a, b) not in files]:
        where = directories[0].absolute().parent
        raise UserError(f"{where}: {_IN_RANK_DIRECTORY[0]} of {len(missing)} ranks are missing: {'; '.join(missing)}")
    opened = []
    for rank in range(mp):
        opened.append(PickledTensors([files[rank, stage] for stage in range(pp)], _NOT_SHARED))
    return opened


def open_pdparams(directory: Path) -> list[PickledTensors]:
    """The tensors of each tensor parallel rank, in order; one entry for files without ranks.

    Raises:
        UserError: a rank's file is missing, or one cannot be read.
    """
    if of_ranks := _rank_directories(directory):
        return _open_rank_directories(of_ranks)
    if _RANK_DIRECTORY.fullmatch(directory.absolute().name):
        count = len(_rank_directories(directory.absolute().parent))
        if count > 1:
            raise UserError(f"{directory}: is one of {count} ranks; name the directory above, which has all of them")
        return _open_rank_directories([directory])
    by_rank: dict[tuple[int, ...], list[Path]] = {}
    numbered: dict[int, tuple[int, Path]] = {}
    paths = pdparams_files(directory)
    for path in paths:
        match = _FILE.fullmatch(path.name)
        assert match is not None
        if match[1]:
            numbered[int(match[1])] = int(match[2]), path
        axes = dict(re.findall(r"([a-z]+)(\d+)", match[3] or ""))
        if unknown := axes.keys() - set(_AXES):
            raise UserError(f"{path}: is sharded over {', '.join(sorted(unknown))}; supported: {', '.join(_AXES)}")
        by_rank.setdefault(tuple(int(axes.get(axis, 0)) for axis in _AXES), []).append(path)
    if numbered:
        total = max(of for of, _ in numbered.values())
        _check_number(directory, total)
        if missing := [f"{i} of {total}" for i in range(1, total + 1) if i not in numbered]:
            raise UserError(f"{directory}: files are missing: {', '.join(missing)}")
    degrees = [max(indices) + 1 for indices in zip(*by_rank)]
    _check_number(directory, math.prod(degrees))
    grid = list(itertools.product(*(range(degree) for degree in degrees)))
    if missing := [_rank(rank, degrees) for rank in grid if rank not in by_rank]:
        raise UserError(
            f"{directory}: the files of {len(missing)} of {len(grid)} ranks are missing: {'; '.join(missing)}"
        )
    opened = []
    for tp in range(degrees[0]):
        paths_of_rank: list[Path] = []
        for rank in grid:
            if rank[0] == tp:
                paths_of_rank += by_rank[rank]
        opened.append(PickledTensors(paths_of_rank))
    return opened


def _check_number(directory: Path, files: int) -> None:
    """Raise UserError for an impossible number of files, according to the numbers in their names."""
    if files > _MAX_FILES:
        raise UserError(f"{directory}: by their names there are {files:,} files; at most {_MAX_FILES:,} are read")


def join_ranks(
    directory: Path, ranks: Sequence[TensorSource], shapes: Mapping[str, Sequence[int]], labels: Sequence[str]
) -> BlockFiles:
    """Join the tensors of tensor parallel ranks to full tensors.

    Args:
        directory: for messages.
        ranks: the tensors of each rank, in order.
        shapes: shape of every full tensor, as PaddleNLP stores it. Others are dropped.
        labels: names of the ranks in messages.

    Raises:
        UserError: a rank lacks a tensor, or has a shard of another size.
    """
    specs: dict[str, TensorSpec] = {}
    parts: dict[str, list[Block]] = {}
    known = [set(rank.names) for rank in ranks]
    for name, shape in shapes.items():
        without = [label for names, label in zip(known, labels) if name not in names]
        if len(without) == len(ranks):
            continue  # the caller checks for missing tensors
        if without:
            raise UserError(f"{directory}: {name!r} is missing in {', '.join(without)}")
        found = [rank.spec(name) for rank in ranks]
        specs[name] = TensorSpec(name, tuple(shape), found[0].dtype)
        if len(set(found)) > 1:
            shown = ", ".join(f"{list(spec.shape)} {spec.dtype} in {label}" for spec, label in zip(found, labels))
            raise UserError(f"{directory}: the parts of {name!r} differ: {shown}")
        parts[name] = _parts(directory, specs[name], found[0].shape, ranks, labels)
    result = BlockFiles(directory, sorted({path for rank in ranks for path in rank.paths}), specs)
    for name, blocks in parts.items():
        result.add(name, blocks)
    return result


def _parts(
    directory: Path, full: TensorSpec, part: tuple[int, ...], ranks: Sequence[TensorSource], labels: Sequence[str]
) -> list[Block]:
    """The blocks of a tensor: one shard of shape `part` per rank, or one block where it is replicated."""

    def block(rank: int, offset: Sequence[int]) -> Block:
        return Block(tuple(offset), part, labels[rank], lambda index: ranks[rank].read(full.name, index))

    if part == full.shape:  # replicated: every rank has all of it
        return [block(0, [0] * len(part))]
    sharded = [d for d, (p, w) in enumerate(zip(part, full.shape)) if p != w]
    if len(part) != len(full.shape) or len(sharded) != 1 or part[sharded[0]] * len(ranks) != full.shape[sharded[0]]:
        raise UserError(
            f"{directory}: {full.name!r} is {list(part)} in {labels[0]}; by config.json it is {list(full.shape)}, "
            f"which cannot be split into {len(ranks)} of those"
        )
    blocks = []
    for rank in range(len(ranks)):
        offset = [0] * len(part)
        offset[sharded[0]] = rank * part[sharded[0]]
        blocks.append(block(rank, offset))
    return blocks


def _rank(rank: Sequence[int], degrees: Sequence[int]) -> str:
    parts = [f"{axis}{index:02d}" for axis, index, degree in zip(_AXES, rank, degrees) if degree > 1]
    return f"model_state.{'_'.join(parts)}.pdparams"
