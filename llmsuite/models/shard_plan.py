"""How a family of models is cut: a table of parameter names, and the modules where activations change their form."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Iterator
from typing import Any

FIRST_FACTOR, SECOND_FACTOR = "lora_A", "lora_B"
"""What the factors of an adapter are called, beside the `weight` of their module."""


@dataclasses.dataclass(frozen=True)
class ShardPlan:
    """One per family. Patterns are those of `fnmatch`, over full parameter or module names."""

    cut: tuple[tuple[str, int], ...]
    """(parameter, dim that is cut over tp); parameters that no pattern names are held whole by every rank."""
    embedding: str
    """The embedding module; its weight is cut along the vocabulary."""
    regions: tuple[str, ...]
    """Modules that end with a row-parallel matrix: their output is a partial sum on each rank, to be added up. Under
    sequence parallel their input is gathered along the sequence, and their output cut along it."""
    layers: str
    """The list of layers a pipeline is cut in."""
    first: tuple[str, ...]
    """Modules in front of the layers: on the first pipeline stage."""
    last: tuple[str, ...]
    """Modules behind the layers: on the last pipeline stage. One that is in `first` too is tied."""
    last_norm: str
    """The module behind which activations are whole again under sequence parallel."""
    problems: Callable[[Any, int], Iterator[str]]
    """Why a shape (first argument) cannot be cut into so many parts."""
    experts: str = ""
    """Modules of routed experts (`models.experts.Experts`); none in most families. Their parameters are stacks, and
    dim 0 is dealt over the ranks of an expert parallel group, before tp cuts what each of them has."""
    num_experts: str = ""
    """Key of the shape that says how many there are."""
    gates: str = ""
    """Modules that choose among them. They have `balance`, a `models.experts.Balance` in training."""
    gate_bias: str = ""
    """Parameter of a gate that counts for the choice only, in the shapes whose `has_gate_bias` is true. It lies in
    float32 whatever the precision: what it is moved by is small."""

    @functools.cache  # noqa: B019  (there are as many plans as families)
    def dim(self, parameter: str) -> int | None:
        """The dim of a parameter that is cut over tp; None when it is not.

        Of an adapter x A B, a matrix that is cut by its inputs cuts A, one that is cut by its outputs cuts B.
        """
        module, _, kind = parameter.rpartition(".")
        if kind in (FIRST_FACTOR, SECOND_FACTOR):
            dim = self.dim(f"{module}.weight")
            return dim if dim == (FIRST_FACTOR, SECOND_FACTOR).index(kind) else None
        return next((dim for pattern, dim in self.cut if fnmatch.fnmatchcase(parameter, pattern)), None)

    @functools.cache  # noqa: B019
    def is_expert(self, parameter: str) -> bool:
        """Whether a parameter is a stack of routed experts."""
        return bool(self.experts) and fnmatch.fnmatchcase(parameter, f"{self.experts}.*")

    @functools.cache  # noqa: B019
    def is_gate_bias(self, parameter: str) -> bool:
        """Whether a parameter is the bias of a gate."""
        return bool(self.gate_bias) and fnmatch.fnmatchcase(parameter, f"{self.gates}.{self.gate_bias}")

    def is_region(self, module: str) -> bool:
        return any(fnmatch.fnmatchcase(module, pattern) for pattern in self.regions)


def _cannot_be_cut(config: Any, tp: int) -> Iterator[str]:
    if tp > 1:
        yield f"is {tp}; this family has no table of how its parameters are cut"


WHOLE = ShardPlan((), "", (), "", (), (), "", _cannot_be_cut)
"""The plan of a family that has none."""
