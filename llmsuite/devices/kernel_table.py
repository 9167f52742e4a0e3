"""Operations from a table of kernels: each kernel by the name of its operation, in whichever group of `Ops` that is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from llmsuite.devices.decoding_ops import DecodingOps, PackedOps
from llmsuite.devices.expert_ops import ExpertOps
from llmsuite.devices.matmul_ops import MatmulOps
from llmsuite.devices.ops import Ops
from llmsuite.devices.optimizer_ops import OptimizerOps

Kernels = Mapping[str, Callable[..., Any]]
"""Kernels by the names of their operations."""

_GROUPS = (Ops, MatmulOps, ExpertOps, DecodingOps, PackedOps, OptimizerOps)
_NO_OPERATIONS = {"matmuls", "experts", "decoding", "packed", "heads_first"}
"""Fields of the groups that are no operations."""


def ops_of(kernels: Kernels) -> Ops:
    """The operations of a device with these kernels, and plain forms of those without one.

    Raises:
        TypeError: a name is none of an operation, or a group that comes as a whole lacks a kernel.
    """
    _check_names(kernels)
    return Ops(
        **_those_of(Ops, kernels),
        matmuls=MatmulOps(**_those_of(MatmulOps, kernels)),
        experts=ExpertOps(**_those_of(ExpertOps, kernels)),
        decoding=DecodingOps(**_those_of(DecodingOps, kernels), packed=_packed_of(kernels)),
    )


def optimizer_ops_of(kernels: Kernels) -> OptimizerOps:
    """The operations of an optimizer on a device with these kernels; as `ops_of`."""
    _check_names(kernels)
    return OptimizerOps(**_those_of(OptimizerOps, kernels))


def forms(ops: Ops, optimizer_ops: OptimizerOps) -> dict[str, Callable[..., Any] | None]:
    """The function of every operation, by its name in a table of kernels; None where the device computes it by
    others."""
    decoding = ops.decoding
    groups = (ops, ops.matmuls, ops.experts, decoding, decoding.packed, optimizer_ops)
    found: dict[str, Callable[..., Any] | None] = {}
    for kind, group in zip(_GROUPS, groups, strict=True):
        for name in _operations(kind):
            found[name] = None if group is None else getattr(group, name)
    return found


def _operations(kind: type[Any]) -> list[str]:
    """Names of the operations of a group."""
    return [field.name for field in dataclasses.fields(kind) if field.name not in _NO_OPERATIONS]


def _those_of(kind: type[Any], kernels: Kernels) -> dict[str, Any]:
    return {name: kernels[name] for name in _operations(kind) if name in kernels}


def _packed_of(kernels: Kernels) -> PackedOps | None:
    """The group that a device has as a whole or not at all."""
    given = _those_of(PackedOps, kernels)
    if not given:
        return None
    missing = [name for name in _operations(PackedOps) if name not in given]
    if missing:
        raise TypeError(f"the device has a kernel for {', '.join(given)}, and none for {', '.join(missing)}")
    return PackedOps(**given)


def _check_names(kernels: Kernels) -> None:
    known = {name for kind in _GROUPS for name in _operations(kind)}
    if unknown := sorted(kernels.keys() - known):
        raise TypeError(f"no operations: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
