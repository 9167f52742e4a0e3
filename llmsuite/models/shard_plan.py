"""Shard plan of a model family: a table of parameter names, and the modules at which activations change layout."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from llmsuite.models.block_quant import is_nested_part, is_quantised_part


@dataclasses.dataclass(frozen=True)
class ShardPlan:
    """The shard plan of a family. Patterns are those of `fnmatch`, over full parameter or module names."""

    shard_dims: tuple[tuple[str, int], ...]
    """Pairs of (parameter pattern, dim sharded over tp); parameters that no pattern matches are replicated."""
    embedding: str
    """The embedding module; its weight is sharded along the vocabulary."""
    tp_regions: tuple[str, ...]
    """Modules that end with a row-parallel matrix: each rank has a partial sum of their output, which is all-reduced.
    With sequence parallelism their input is all-gathered along the sequence, and their output reduce-scattered."""
    layers: str
    """Name of the list of layers that pipeline stages divide."""
    first: tuple[str, ...]
    """Modules before the layers: on the first pipeline stage."""
    last: tuple[str, ...]
    """Modules after the layers: on the last pipeline stage. One that is also in `first` is tied."""
    last_norm: str
    """The module after which activations are gathered again under sequence parallelism."""
    problems: Callable[[Any, int], Iterator[str]]
    """(config, tp) -> the reasons why a model cannot be sharded over tp ranks. A vocabulary always can (it is padded,
    see `llmsuite.parallel.vocabulary`)."""
    experts: str = ""
    """Modules of routed experts (`models.experts.Experts`); "" for none. Their parameters are stacks: dim 0 is sharded
    over the expert parallel group first, then over tp."""
    num_experts: str = ""
    """Field of the config with the number of experts."""
    gates: str = ""
    """Modules that route tokens to experts. In training they have `balance`, a `models.experts.LoadBalance`."""
    mtp_norms: str = ""
    """The last norms of MTP layers, after which activations are gathered again, as after `last_norm`."""
    mtp_inputs: tuple[str, ...] = ()
    """Modules of MTP layers before attention, which are replicated."""
    is_auto_parallel: bool = False
    """True where the model shards its parameters itself, see `AUTO_PARALLEL`."""
    gate_bias: str = ""
    """Parameter of a gate that affects only the choice of experts, in configs whose `has_gate_bias` is true. It is
    float32 whatever the precision: its updates are small, and 16 bits would round them away."""

    @functools.cache  # noqa: B019  (there are as many plans as families)
    def dim(self, parameter: str) -> int | None:
        """The dim of a parameter of a model without adapters that is sharded over tp; None where it is replicated.

        Codes and scales of a quantised matrix are sharded as the matrix; of a matrix whose scales are quantised, the
        scales of their blocks are replicated. `llmsuite.adapters.parameters.shard_dim` also
        knows the parameters of adapters.
        """
        if is_nested_part(parameter) and not self.is_expert(parameter):
            return None
        if is_quantised_part(parameter):
            return self.dim(parameter.rpartition(".")[0])
        return next((dim for pattern, dim in self.shard_dims if fnmatch.fnmatchcase(parameter, pattern)), None)

    def has_own_dtype(self, parameter: str) -> bool:
        """True if the dtype of a parameter does not depend on the precision: the bias of a gate, codes and scales."""
        return self.is_gate_bias(parameter) or is_quantised_part(parameter)

    @functools.cache  # noqa: B019
    def is_expert(self, parameter: str) -> bool:
        """True if a parameter is a stack of routed experts."""
        return bool(self.experts) and fnmatch.fnmatchcase(parameter, f"{self.experts}.*")

    @functools.cache  # noqa: B019
    def is_gate_bias(self, parameter: str) -> bool:
        """True if a parameter is the bias of a gate."""
        return bool(self.gate_bias) and fnmatch.fnmatchcase(parameter, f"{self.gates}.{self.gate_bias}")

    def is_last_norm(self, module: str) -> bool:
        """True if activations are gathered again after a module under sequence parallelism."""
        return module == self.last_norm or (bool(self.mtp_norms) and fnmatch.fnmatchcase(module, self.mtp_norms))

    def is_tp_region(self, module: str) -> bool:
        """True if a module is one of `tp_regions`."""
        return any(fnmatch.fnmatchcase(module, pattern) for pattern in self.tp_regions)


def indivisible(sizes: Mapping[str, int], tp: int) -> Iterator[str]:
    """The messages of `ShardPlan.problems` for the sizes, by name, that are not multiples of tp."""
    return (f"is {tp}, which does not divide {name} = {size}" for name, size in sizes.items() if size % tp)


def _cannot_be_sharded(config: Any, tp: int) -> Iterator[str]:
    if tp > 1:
        yield f"is {tp}; this family has no shard plan"


UNSHARDED = ShardPlan((), "", (), "", (), (), "", _cannot_be_sharded)
"""The plan of a family without one: all parameters are replicated, and tp has to be 1."""

AUTO_PARALLEL = dataclasses.replace(UNSHARDED, is_auto_parallel=True, problems=lambda config, tp: iter(()))
"""The plan of models that shard their parameters themselves, with `dist.shard_tensor` and `dist.reshard` on their own
meshes (Paddle's auto-parallel API). See docs/guide/auto-parallel.md."""
