"""Adapters of routed experts as HF PEFT saves them with transformers 5, read as a pair of factors for each expert.

There the experts of a layer are two parameters, `experts.gate_up_proj` [E, 2 I, H] and `experts.down_proj` [E, H, I].
PEFT 0.21 has one pair for each adapted parameter (`ParamWrapper` in peft/tuners/lora/layer.py):

    A [E R, inputs]       R rows of each expert, expert by expert
    B [outputs, R E]      for each of the R ranks a column of each expert

with the name `experts.lora_A`, or for one of two `experts.base_layer.lora_A`. The update of expert e is
B[:, e::E] A[e R:(e + 1) R] times the scale. That of gate_up_proj consists of updates of gate_proj and of up_proj, which
share A.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.tensors import TensorSource, TensorSpec, sliced

_STACK = re.compile(r"(.*\.experts)((?:\.base_layer)?)\.lora_([AB])(?:\.default)?\.weight")


@dataclasses.dataclass(frozen=True)
class _Part:
    """The location of a factor of one expert in a stored tensor."""

    stored: str
    spec: TensorSpec
    expert: slice
    """The rows of A, or the columns of B."""
    outputs: slice | None = None
    """The rows of B; None for an A."""
    parameter: str = ""
    """The last part of the name of the parameter that PEFT has adapted."""


class ExpertsOfStacks:
    """The tensors of an adapter, with stacks replaced by a pair of factors for each matrix of each expert."""

    def __init__(self, path: Path, files: TensorSource, shape: Callable[[str], tuple[int, ...] | None]):
        """
        Args:
            path: of the adapter, for messages.
            files: its tensors.
            shape: returns the shape [inputs, outputs] of a matrix of the base by its name in the adapter, or None.

        Raises:
            UserError: a stack does not fit the experts of the base.
        """
        self._files = files
        self._parts = dict[str, _Part]()
        self._held: tuple[str, np.ndarray] | None = None
        stacks: dict[tuple[str, str], dict[str, str]] = {}
        for name in files.names:
            if match := _STACK.fullmatch(name):
                stacks.setdefault((match[1], match[2]), {})[match[3]] = name
        taken = set[str]()
        for (module, _), names in stacks.items():
            first = shape(f"{module}.0.gate_proj.weight")
            if first is None:  # the base has no experts there: reported as unknown tensors by the caller
                continue
            if names.keys() != {"A", "B"}:
                raise UserError(f"{path}: {next(iter(names.values()))!r} lacks the other factor")
            count = next(n for n in itertools.count() if shape(f"{module}.{n}.gate_proj.weight") is None)
            parts = dict(_parts(module, files.spec(names["A"]), files.spec(names["B"]), first, count))
            if not parts:
                shown = " and ".join(f"{name!r} {list(files.spec(name).shape)}" for name in names.values())
                raise UserError(
                    f"{path}: {shown} are no factors of the {count} experts of the base, whose gate_proj is "
                    f"{list(first)}"
                )
            if again := parts.keys() & self._parts.keys():
                raise UserError(f"{path}: has two adapters of {min(again)!r}")
            self._parts |= parts
            taken.update(names.values())
        self._others = [name for name in files.names if name not in taken]

    @property
    def names(self) -> list[str]:
        return [*self._others, *self._parts]

    @property
    def paths(self) -> list[Path]:
        return self._files.paths

    def configured(self, name: str, module: str) -> str:
        """The name of a tensor's module in PEFT's rank_pattern and alpha_pattern, given its name in the base."""
        part = self._parts.get(name)
        if part is None:
            return module
        return re.sub(r"\.\d+\.\w+$", f".{part.parameter}", module)

    def spec(self, name: str) -> TensorSpec:
        if name in self._parts:
            return self._parts[name].spec
        return self._files.spec(name)

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        if name not in self._parts:
            return self._files.read(name, index)
        part = self._parts[name]
        if part.outputs is None:
            value = self._files.read(part.stored, [part.expert, slice(None)])
        else:
            value = self._second(part.stored)[part.outputs, part.expert]
        return sliced(value, index)

    def _second(self, stored: str) -> np.ndarray:
        """A full B. The columns of an expert are not contiguous in it, so the last B is kept for the next expert."""
        held = self._held
        if held is None or held[0] != stored:
            held = self._held = stored, self._files.read(stored)
        return held[1]


def _parts(
    module: str, first: TensorSpec, second: TensorSpec, gate: tuple[int, ...], count: int
) -> Iterator[tuple[str, _Part]]:
    """The factors of each expert in a stack's A and B, with their names; none where the shapes do not fit.

    Args:
        module: the name of the experts.
        first: A.
        second: B.
        gate: H and I.
        count: number of experts.
    """
    if len(gate) != 2 or len(first.shape) != 2 or len(second.shape) != 2:
        return
    hidden, inner = gate
    members = {
        (hidden, 2 * inner): ("gate_up_proj", {"gate_proj": slice(0, inner), "up_proj": slice(inner, 2 * inner)}),
        (inner, hidden): ("down_proj", {"down_proj": slice(0, hidden)}),
    }
    rows = first.shape[0]
    columns = second.shape[-1]
    if rows != columns or rows % count or not rows:
        return
    parameter, outputs = members.get((first.shape[1], second.shape[0]), ("", {}))
    rank = rows // count
    for matrix, place in outputs.items():
        for expert in range(count):
            name = f"{module}.{expert}.{matrix}"
            a = f"{name}.lora_A.weight"
            b = f"{name}.lora_B.weight"
            own = slice(expert * rank, (expert + 1) * rank)
            yield a, _Part(first.name, TensorSpec(a, (rank, first.shape[1]), first.dtype), own, None, parameter)
            shape = (place.stop - place.start, rank)
            every = slice(expert, None, count)
            yield b, _Part(second.name, TensorSpec(b, shape, second.dtype), every, place, parameter)
