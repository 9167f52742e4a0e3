"""Writes a model directory: the tensors of each layout, and the parameters that each of them is made of.

`ModelDirectory` goes the other way, from stored tensors to parameters. PaddleNLP's fused matrices are written and read
as tensors of its plain layout, see `fused.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.checkpoint.finite_model import nonfinite_of
from llmsuite.checkpoint.model_dir import Layout, ModelDirectory
from llmsuite.checkpoint.tensor_writer import ManifestPart, WriteOptions, in_parts, write_tensors
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.checkpoint.tokenizer_files import copy_tokenizer
from llmsuite.errors import UserError
from llmsuite.files import write_json
from llmsuite.specs import ModelFamily

Read = Callable[[str, Sequence[slice] | None], np.ndarray]
"""A parameter by our name, or a slice of it (one slice a dim), lying as in memory."""


class OrderedGather:
    """Tensors that are gathered once each, whole and in a given order, whatever the order they are read in.

    So every rank that holds a part of them takes part in the same collectives in the same order.
    """

    def __init__(self, specs: Iterable[TensorSpec], gather: Callable[[str], np.ndarray], uses: Iterable[str]):
        """`uses` has the name of a tensor as often as it will be read; it is held until the last time."""
        self._next, self._gather = iter([spec.name for spec in specs]), gather
        self._uses = collections.Counter(uses)
        self._held: dict[str, np.ndarray] = {}

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """A tensor, or a slice of it."""
        while name not in self._held:
            self._gather_one(next(self._next))
        value = self._held[name]
        self._uses[name] -= 1
        if not self._uses[name]:
            del self._held[name]
        return value if index is None else value[tuple(index)]

    def finish(self) -> None:
        """Gather those that are left, for other ranks."""
        for name in self._next:
            self._gather_one(name)

    def _gather_one(self, name: str) -> None:
        value = self._gather(name)
        if self._uses[name]:
            self._held[name] = value


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A parameter as a part of a stored tensor; several lie side by side along its last dim."""

    spec: TensorSpec
    index: int | None
    """Index into the first dim of a stacked parameter; None for one that is not stacked."""
    part: int


class Arrangement:
    """A model's parameters as the tensors of a layout."""

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
            layout: whose names and orientation the tensors have.
            as_in_memory: whether matrices lie [inputs, outputs] in any layout.

        Raises:
            UserError: the model has no such layout.
        """
        names, prefix = family.names(), family.names().paddlenlp_prefix(config)
        if layout == "paddlenlp" and prefix is None:
            raise UserError(
                f"a {config.to_hf()['model_type']} has no PaddleNLP layout that we know; write the hf layout"
            )
        self.specs: list[TensorSpec] = []
        """Name, shape and dtype of each tensor, as it lies in a file, in order."""
        self._pieces: dict[str, list[_Piece]] = {}
        self._is_transposed = layout == "hf" and not as_in_memory
        self.linears: set[str] = set()
        """Tensors that HF stores transposed."""
        for spec in specs:
            place = names.hf_tensors(spec.name, config)
            for number, name in enumerate((*place.names, *place.copies)):
                theirs = name if layout == "hf" else re.sub(r"^model\.", str(prefix), name)
                pieces = self._pieces.setdefault(theirs, [])
                pieces.append(_Piece(spec, number if place.stacked else None, place.part))
                if len(pieces) < place.num_parts:
                    continue
                pieces.sort(key=lambda piece: piece.part)
                shape = spec.shape[1:] if place.stacked else (*spec.shape[:-1], sum(p.spec.shape[-1] for p in pieces))
                if names.is_linear(spec.name):
                    self.linears.add(theirs)
                self.specs.append(
                    TensorSpec(
                        theirs, shape[::-1] if self._is_transposed and theirs in self.linears else shape, spec.dtype
                    )
                )
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
        """Our names of the parameters that a tensor is made of."""
        return [piece.spec.name for piece in self._pieces[name]]

    def stack_index(self, name: str) -> int | None:
        """Which matrix of a stacked parameter a tensor is; None for others."""
        pieces = self._pieces[name]
        return pieces[0].index if len(pieces) == 1 else None

    def is_transposed(self, name: str) -> bool:
        """Whether a matrix lies [outputs, inputs]."""
        return self._is_transposed and name in self.linears

    def read(self, name: str, read: Read, index: Sequence[slice] | None = None) -> np.ndarray:
        """A tensor, or a slice of it (one slice a dim); only the parameters of the slice are read."""
        pieces, transposed = self._pieces[name], self.is_transposed(name)
        if index is None and len(pieces) == 1 and pieces[0].index is None:
            value = read(pieces[0].spec.name, None)
            return value.T if transposed else value
        shape = self._by_name[name].shape
        bounds = [s.indices(n) for s, n in zip(index or [slice(None)] * len(shape), shape)]
        *outer, (first, last, _) = bounds[::-1] if transposed else bounds
        parts, start = [], 0
        for piece in pieces:
            size = piece.spec.shape[-1]
            low, high = max(first - start, 0), min(last - start, size)
            start += size
            if low >= high:
                continue
            own = [*(slice(a, b) for a, b, _ in outer), slice(low, high)]
            if piece.index is None:
                parts.append(read(piece.spec.name, own))
            else:
                parts.append(read(piece.spec.name, [slice(piece.index, piece.index + 1), *own])[0])
        value = parts[0] if len(parts) == 1 else np.concatenate(parts, -1)
        return value.T if transposed else value


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

    Each parameter is read once, in the order given: where it lies in parts on several ranks, all of them take part,
    whichever of them writes it.

    Args:
        directory: where to; the caller commits it.
        family: the model's family.
        config: its shape.
        read: values of a parameter by our name, [inputs, outputs].
        specs: name (ours), in-memory shape and dtype of every parameter, in order.
        layout: whose names and orientation the files get.
        tokenizer: directory whose tokenizer files are copied along.
        options: `writers` is by parameter. Those that are stored as one tensor have the same writer.
    """
    specs, options = list(specs), options or WriteOptions()
    arrangement = Arrangement(family, config, specs, layout)
    writers = {theirs: options.writers.get(arrangement.parameters(theirs)[0], 0) for theirs in arrangement.names}
    own = [theirs for theirs in arrangement.names if writers[theirs] == options.rank]
    in_order = OrderedGather(specs, read, [name for theirs in own for name in arrangement.parameters(theirs)])

    def read_stored(theirs: str) -> np.ndarray:
        return arrangement.read(theirs, in_order.read)

    # "pt" and "np" are how transformers and PaddleNLP recognise the orientation of the matrices
    metadata = {"format": "pt" if layout == "hf" else "np"}
    options = dataclasses.replace(options, writers=writers)
    written = write_tensors(directory, "model", arrangement.specs, read_stored, metadata, options)
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
    arrangement = Arrangement(model.family, model.config, specs, layout)

    def read(theirs: str) -> Iterator[np.ndarray]:
        spec = arrangement.spec(theirs)
        parts = in_parts(spec, lambda index: arrangement.read(theirs, model.read, index))
        return (part.astype(spec.dtype, copy=False) for part in parts)

    metadata = {"format": "pt" if layout == "hf" else "np"}
    for_each = nonfinite_of(model, arrangement.parameters)
    write_tensors(directory, "model", arrangement.specs, read, metadata, WriteOptions(on_nonfinite=for_each))
    write_json(directory / "config.json", {**model.config.to_hf(), "torch_dtype": specs[0].dtype})
    copy_tokenizer(model.tokenizer_directory, directory)
