"""How a family of models is cut: a table of parameter names, and the modules at which activations change layout."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from llmsuite.models.block_quant import is_quantised_part
from llmsuite.models.prefix_shapes import INNER, INNER_BIAS, OUTER, PREFIX_KEY, PREFIX_VALUE, TABLE
from llmsuite.models.reft_shapes import BIAS, ROTATION, SOURCE

FIRST_FACTOR, SECOND_FACTOR = "lora_A", "lora_B"
"""Names of the factors of an adapter, beside the `weight` of their module."""
MIXER, MAGNITUDE = "lora_AB", "lora_magnitude"
"""Names of the matrix between the factors of a mixer, and of the lengths of DoRA's columns."""
START_FIRST, START_SECOND = "lora_A0", "lora_B0"
"""Names of two factors that are not trained: what those of PiSSA and LoRA-GA began with, and those of VeRA."""
BETWEEN, BEHIND = "lora_d", "lora_b"
"""Names of VeRA's vectors, between the factors and behind them."""
SQUARE = "lora_square"
"""Name of the matrix of MoRA, which every rank has whole."""
KRON_OUTER, KRON_INNER, KRON_INNER_FIRST, KRON_INNER_SECOND = "lokr_w1", "lokr_w2", "lokr_w2_a", "lokr_w2_b"
"""Names of the factors of LoKr, which every rank has whole; the inner one may be a product of two."""
STRUCTURES = SQUARE, KRON_OUTER, KRON_INNER, KRON_INNER_FIRST, KRON_INNER_SECOND
"""Those of adapters that are no pair of factors."""
FACTORS: Mapping[str, tuple[int | None, int | None]] = {
    FIRST_FACTOR: (0, None),
    MIXER: (None, None),
    SECOND_FACTOR: (None, 1),
    MAGNITUDE: (None, 0),
    START_FIRST: (0, None),
    START_SECOND: (None, 1),
    BETWEEN: (None, None),
    BEHIND: (None, 0),
    **dict.fromkeys(STRUCTURES, (None, None)),
    **dict.fromkeys((ROTATION, SOURCE, BIAS), (None, None)),
    **dict.fromkeys((PREFIX_KEY, PREFIX_VALUE), (None, 1)),
    **{kind: (None, 1 if kind.endswith("weight") else 0) for kind in OUTER},
    **dict.fromkeys((TABLE, INNER, INNER_BIAS), (None, None)),
}
"""Every parameter of an adapter: the dim that is cut with a matrix cut along its inputs, and along its outputs."""


@dataclasses.dataclass(frozen=True)
class ShardPlan:
    """The shard plan of a family. Patterns are those of `fnmatch`, over full parameter or module names."""

    cut: tuple[tuple[str, int], ...]
    """(parameter, dim that is cut over tp); every rank holds the whole of parameters that no pattern matches."""
    embedding: str
    """The embedding module; its weight is cut along the vocabulary."""
    regions: tuple[str, ...]
    """Modules that end with a row-parallel matrix: each rank has a partial sum of their output, which is to be reduced.
    Under sequence parallel their input is gathered along the sequence, and their output cut along it."""
    layers: str
    """The list of layers that a pipeline is cut in."""
    first: tuple[str, ...]
    """Modules before the layers: on the first pipeline stage."""
    last: tuple[str, ...]
    """Modules after the layers: on the last pipeline stage. One that is in `first` too is tied."""
    last_norm: str
    """The module after which activations are whole again under sequence parallel."""
    problems: Callable[[Any, int], Iterator[str]]
    """(config, tp) -> the reasons why the shape cannot be cut into tp parts. A vocabulary can in any case, see
    `llmsuite.parallel.vocabulary`."""
    experts: str = ""
    """Modules of routed experts (`models.experts.Experts`); none in most families. Their parameters are stacks:
    the ranks of an expert parallel group divide dim 0 among them, before tp cuts what each has."""
    num_experts: str = ""
    """Field of the config with the number of experts."""
    gates: str = ""
    """Modules that route tokens to experts. They have `balance`, a `models.experts.Balance` in training."""
    mtp_norms: str = ""
    """As `last_norm`, of layers that predict further tokens."""
    mtp_inputs: tuple[str, ...] = ()
    """Modules of such layers in front of attention, which every rank holds whole."""
    is_annotated: bool = False
    """Whether the model says it all itself, see `ANNOTATED`."""
    gate_bias: str = ""
    """Parameter of a gate that affects only which experts are chosen, in shapes whose `has_gate_bias` is true. It is
    float32 whatever the precision, as its updates are small."""

    @functools.cache  # noqa: B019  (there are as many plans as families)
    def dim(self, parameter: str) -> int | None:
        """The dim of a parameter that is cut over tp; None when it is not.

        Those of an adapter are cut with its matrix, see `FACTORS`: in x A B, A along its inputs, B along its outputs;
        those of a stack of experts along the experts, as the stack. Prefixes are cut by heads, as the matrix of keys.
        Codes and scales of a quantised matrix are cut as the matrix.
        """
        module, _, kind = parameter.rpartition(".")
        if is_quantised_part(parameter):
            return self.dim(module)
        if kind in FACTORS:
            beside = ".k_proj" if kind in (PREFIX_KEY, PREFIX_VALUE, *OUTER) else ""
            dim = self.dim(f"{module}{beside}.weight")
            return dim if dim is None or self.is_expert(parameter) else FACTORS[kind][dim]
        return next((dim for pattern, dim in self.cut if fnmatch.fnmatchcase(parameter, pattern)), None)

    def has_own_dtype(self, parameter: str) -> bool:
        """Whether a parameter has a dtype of its own, whatever the precision: the bias of a gate, codes and scales."""
        return self.is_gate_bias(parameter) or is_quantised_part(parameter)

    @functools.cache  # noqa: B019
    def is_expert(self, parameter: str) -> bool:
        """Whether a parameter is a stack of routed experts."""
        return bool(self.experts) and fnmatch.fnmatchcase(parameter, f"{self.experts}.*")

    @functools.cache  # noqa: B019
    def is_gate_bias(self, parameter: str) -> bool:
        """Whether a parameter is the bias of a gate."""
        return bool(self.gate_bias) and fnmatch.fnmatchcase(parameter, f"{self.gates}.{self.gate_bias}")

    def is_last_norm(self, module: str) -> bool:
        """Whether activations are whole again behind a module under sequence parallel."""
        return module == self.last_norm or (bool(self.mtp_norms) and fnmatch.fnmatchcase(module, self.mtp_norms))

    def is_region(self, module: str) -> bool:
        """Whether a module is one of `regions`."""
        return any(fnmatch.fnmatchcase(module, pattern) for pattern in self.regions)


def indivisible(sizes: Mapping[str, int], tp: int) -> Iterator[str]:
    """`ShardPlan.problems` of a family: its sizes by name that have to be multiples of tp."""
    return (f"is {tp}, which does not divide {name} = {size}" for name, size in sizes.items() if size % tp)


def _cannot_be_cut(config: Any, tp: int) -> Iterator[str]:
    if tp > 1:
        yield f"is {tp}; this family has no table of how its parameters are cut"


WHOLE = ShardPlan((), "", (), "", (), (), "", _cannot_be_cut)
"""The plan of a family that has none."""

ANNOTATED = dataclasses.replace(WHOLE, is_annotated=True, problems=lambda config, tp: iter(()))
"""In place of a plan, for models that place their parameters themselves: with `dist.shard_tensor` and `dist.reshard`,
on meshes of their own. See docs/guide/auto-parallel.md."""
