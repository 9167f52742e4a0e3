"""The tensors a model is written as in each layout, and the parameters each of them is made of.

`ModelDirectory` goes the other way: from stored tensors to parameters. PaddleNLP's fused matrices are made of, and seen
as, tensors of its plain layout (`fused.py`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np

from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.errors import UserError
from llmsuite.specs import ModelFamily

Layout = Literal["hf", "paddlenlp"]
Read = Callable[[str, Sequence[slice] | None], np.ndarray]
"""A parameter by our name, or a slice of it (one slice a dim), lying as in memory."""


def hf_name(family: ModelFamily, config: Any, theirs: str) -> str | None:
    """HF's full name of a tensor in a file of either layout; None for one that is no parameter."""
    names, prefix = family.names(), family.names().paddlenlp_prefix(config)
    name = f"model.{theirs[len(prefix) :]}" if prefix and theirs.startswith(prefix) else theirs
    found: str | None = names.from_hf(name, config)
    return found


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A parameter as a part of a tensor. Several lie side by side along its last dim."""

    spec: TensorSpec
    index: int | None
    """Of a stacked parameter: which index of its first dim."""
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
        """The tensors HF stores transposed."""
        for spec in specs:
            place = names.hf_tensors(spec.name, config)
            for number, name in enumerate(place.names):
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
        """Our names of what a tensor is made of."""
        return [piece.spec.name for piece in self._pieces[name]]

    def is_transposed(self, name: str) -> bool:
        """Whether a matrix lies [outputs, inputs]."""
        return self._is_transposed and name in self.linears

    def read(self, name: str, read: Read, index: Sequence[slice] | None = None) -> np.ndarray:
        """A tensor, or a slice of it (one slice a dim); nothing that is not needed is read."""
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
