"""Writes a model directory: maps the tensors of each layout to the parameters that they are made of.

`ModelDirectory` maps stored tensors to parameters. PaddleNLP's fused matrices are written and read as tensors of its
plain layout, see `fused.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.base.files import write_json
from llmsuite.checkpoint.finite_model import nonfinite_handler
from llmsuite.checkpoint.model_dir import Layout, ModelDirectory
from llmsuite.checkpoint.tensor_writer import ManifestPart, WriteOptions, read_in_chunks, write_tensors
from llmsuite.checkpoint.tensors import TensorSpec, sliced
from llmsuite.checkpoint.tokenizer_files import copy_tokenizer
from llmsuite.contract.specs import ModelFamily
from llmsuite.models.hf_tensors import HfTensors

Read = Callable[[str, Sequence[slice] | None], np.ndarray]
"""Returns a parameter by our name, or a slice of it (one slice a dim), oriented as in memory."""
FORMATS: Mapping[Layout, str] = {"hf": "pt", "paddlenlp": "np"}
"""The value of `format` in the metadata of files: transformers and PaddleNLP recognise the orientation of matrices by
it."""


class OrderedGather:
    """Gathers each tensor once, in a given order, for any order of reads.

    So all ranks that hold shards call the same collectives in the same order: another order would deadlock.
    """

    def __init__(self, specs: Iterable[TensorSpec], gather: Callable[[str], np.ndarray], uses: Iterable[str]):
        """
        Args:
            specs: the tensors in the order of the collectives.
            gather: returns the full values of a tensor.
            uses: the name of a tensor once for each time that it will be read; it is held until the last time.
        """
        self._next = iter([spec.name for spec in specs])
        self._gather = gather
        self._uses = collections.Counter(uses)
        self._held: dict[str, np.ndarray] = {}

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """Return a tensor, or a slice of it."""
        while name not in self._held:
            self._gather_one(next(self._next))
        value = self._held[name]
        self._uses[name] -= 1
        if not self._uses[name]:
            del self._held[name]
        return sliced(value, index)

    def finish(self) -> None:
        """Gather the remaining tensors, which other ranks write: their collectives need this rank too."""
        for name in self._next:
            self._gather_one(name)

    def _gather_one(self, name: str) -> None:
        value = self._gather(name)
        if self._uses[name]:
            self._held[name] = value


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A parameter as a part of a stored tensor; several are concatenated along its last dim."""

    spec: TensorSpec
    index: int | None
    """Index into the first dim of a stacked parameter; None for one that is not stacked."""
    place: HfTensors


class TensorLayout:
    """Tensors of a layout, made of a model's parameters."""

    def __init__(
        self,
        family: ModelFamily,
        config: Any,
        specs: Iterable[TensorSpec],
        layout: Layout = "hf",
        as_in_memory: bool = False,
    ):
        """
        Args:
            family: the model's family.
            config: its shape.
            specs: name (ours), in-memory shape and dtype of every parameter, in order.
            layout: names and orientation of the tensors.
            as_in_memory: True if matrices are [inputs, outputs] in any layout.

        Raises:
            UserError: the model has no such layout.
        """
        names = family.names()
        prefix = family.names().paddlenlp_prefix(config)
        if layout == "paddlenlp" and prefix is None:
            raise UserError(
                f"a {config.to_hf()['model_type']} has no PaddleNLP layout that we know; write the hf layout"
            )
        self.specs: list[TensorSpec] = []
        """Name, shape in the file and dtype of each tensor, in order."""
        self._pieces: dict[str, list[_Piece]] = {}
        self._is_transposed = layout == "hf" and not as_in_memory
        self.linears: set[str] = set()
        """Tensors that HF stores transposed."""
        self._alternating: set[str] = set()
        """Tensors whose columns are of each of their parameters in turn."""
        for spec in specs:
            place = names.hf_tensors(spec.name, config)
            for number, name in enumerate((*place.names, *place.copies)):
                theirs = name
                if layout != "hf":
                    theirs = re.sub(r"^model\.", str(prefix), name)
                pieces = self._pieces.setdefault(theirs, [])
                pieces.append(_Piece(spec, number if place.stacked else None, place))
                if len(pieces) < place.num_parts:
                    continue
                pieces.sort(key=lambda piece: piece.place.part)
                if place.stacked:
                    shape = spec.shape[1:]
                else:
                    shape = (*spec.shape[:-1], sum(piece.spec.shape[-1] for piece in pieces))
                if names.is_linear(spec.name):
                    self.linears.add(theirs)
                if place.alternates:
                    self._alternating.add(theirs)
                if self.is_transposed(theirs):
                    shape = place.transposed_dims(shape)
                self.specs.append(TensorSpec(theirs, shape, spec.dtype))
        assert len(self.specs) == len(self._pieces), "a tensor lacks a part"
        self._by_name = {spec.name: spec for spec in self.specs}

    @property
    def names(self) -> list[str]:
        return list(self._pieces)

    def __contains__(self, name: str | None) -> bool:
        return name in self._pieces

    def spec(self, name: str) -> TensorSpec:
        return self._by_name[name]

    def parameters(self, name: str) -> list[str]:
        """Return our names of the parameters that a tensor is made of."""
        return [piece.spec.name for piece in self._pieces[name]]

    def stack_index(self, name: str) -> int | None:
        """Return the index of a tensor in a stacked parameter; None for others."""
        pieces = self._pieces[name]
        if len(pieces) == 1:
            return pieces[0].index
        return None

    def is_transposed(self, name: str) -> bool:
        """Return True if a matrix is [outputs, inputs]."""
        return self._is_transposed and name in self.linears

    def read(self, name: str, read: Read, index: Sequence[slice] | None = None) -> np.ndarray:
        """Return a tensor, or a slice of it (one slice a dim); only the parameters of the slice are read."""
        pieces = self._pieces[name]
        place = pieces[0].place
        is_transposed = self.is_transposed(name)
        if index is None and len(pieces) == 1 and pieces[0].index is None:
            value = read(pieces[0].spec.name, None)
            return place.transposed(value) if is_transposed else value
        shape = self._by_name[name].shape
        bounds = [s.indices(n) for s, n in zip(index or [slice(None)] * len(shape), shape)]
        *outer, (first, last, _) = place.transposed_dims(bounds) if is_transposed else bounds
        if name in self._alternating:
            value = _in_turn(pieces, read, [slice(a, b) for a, b, _ in outer], first, last)
            return place.transposed(value) if is_transposed else value
        parts = []
        start = 0
        for piece in pieces:
            size = piece.spec.shape[-1]
            low = max(first - start, 0)
            high = min(last - start, size)
            start += size
            if low >= high:
                continue
            own = [*(slice(a, b) for a, b, _ in outer), slice(low, high)]
            if piece.index is None:
                parts.append(read(piece.spec.name, own))
            else:
                parts.append(read(piece.spec.name, [slice(piece.index, piece.index + 1), *own])[0])
        value = parts[0] if len(parts) == 1 else np.concatenate(parts, -1)
        return place.transposed(value) if is_transposed else value


def _in_turn(pieces: Sequence[_Piece], read: Read, outer: Sequence[slice], first: int, last: int) -> np.ndarray:
    """The columns from `first` to `last` of a tensor that has those of each of its parameters in turn.

    Args:
        pieces: the parameters.
        read: returns a slice of one.
        outer: slices of the dims before the last.
        first: number of the first column.
        last: number of the column after the last.
    """
    count = len(pieces)
    own = slice(first // count, -(-last // count))
    value = np.stack([read(piece.spec.name, [*outer, own]) for piece in pieces], -1)
    start = own.start * count
    return value.reshape(*value.shape[:-2], -1)[..., first - start : last - start]


def write_model(
    directory: Path,
    family: ModelFamily,
    config: Any,
    read: Callable[[str], np.ndarray],
    specs: Iterable[TensorSpec],
    layout: Layout = "hf",
    tokenizer: Path | None = None,
    options: WriteOptions | None = None,
) -> ManifestPart:
    """Write a model, or this rank's part of it, into an existing directory. Returns its entries of the manifest.

    Each parameter is read once, in the order of `specs`: reading gathers its shards by a collective of all ranks that
    hold one, whichever of them writes it.

    Args:
        directory: target; the caller commits it.
        family: the model's family.
        config: its shape.
        read: returns the values of a parameter by our name, [inputs, outputs].
        specs: name (ours), in-memory shape and dtype of every parameter, in order.
        layout: names and orientation of the files.
        tokenizer: directory whose tokenizer files are copied; None for none.
        options: `writers` is by parameter. Parameters that are stored as one tensor have the same writer.
    """
    specs = list(specs)
    options = options or WriteOptions()
    tensor_layout = TensorLayout(family, config, specs, layout)
    writers = {theirs: options.writers.get(tensor_layout.parameters(theirs)[0], 0) for theirs in tensor_layout.names}
    own = [theirs for theirs in tensor_layout.names if writers[theirs] == options.rank]
    in_order = OrderedGather(specs, read, [name for theirs in own for name in tensor_layout.parameters(theirs)])

    def read_stored(theirs: str) -> np.ndarray:
        return tensor_layout.read(theirs, in_order.read)

    metadata = {"format": FORMATS[layout]}
    options = dataclasses.replace(options, writers=writers)
    written = write_tensors(directory, "model", tensor_layout.specs, read_stored, metadata, options)
    in_order.finish()
    if options.rank:
        return written
    write_json(directory / "config.json", {**config.to_hf(), "torch_dtype": specs[0].dtype})
    if tokenizer is not None:
        copy_tokenizer(tokenizer, directory)
    return written


def write_hf(model: ModelDirectory, directory: Path) -> None:
    """Exporter `hf`: a directory for HF transformers."""
    _rewrite(model, directory, "hf")


def write_paddlenlp(model: ModelDirectory, directory: Path) -> None:
    """Exporter `paddlenlp`: a directory for PaddleNLP."""
    _rewrite(model, directory, "paddlenlp")


def _rewrite(model: ModelDirectory, directory: Path, layout: Layout) -> None:
    specs = [model.spec_to_write(name) for name in model.names]
    tensor_layout = TensorLayout(model.family, model.config, specs, layout)

    def read(theirs: str) -> Iterator[np.ndarray]:
        spec = tensor_layout.spec(theirs)
        parts = read_in_chunks(spec, lambda index: tensor_layout.read(theirs, model.read, index))
        return (part.astype(spec.dtype, copy=False) for part in parts)

    metadata = {"format": FORMATS[layout]}
    options = WriteOptions(on_nonfinite=nonfinite_handler(model, tensor_layout.parameters))
    write_tensors(directory, "model", tensor_layout.specs, read, metadata, options)
    write_json(directory / "config.json", {**model.config.to_hf(), "torch_dtype": specs[0].dtype})
    copy_tokenizer(model.tokenizer_directory, directory)
