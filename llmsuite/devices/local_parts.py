"""Kernels on distributed tensors: each rank computes its local shard.

Paddle 3.3.1 shards an operation over ranks only where it has an SPMD rule for it. For an operation without one, such as
its fused RMS norm, every rank gathers the full input and computes the full output: sequence parallelism and sharded
heads are lost. So shards that a rank can compute alone are passed to kernels as plain tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local, dtensor_to_local

from llmsuite.base.typing import Tensor

_in_step_program = [False]


@contextlib.contextmanager
def tracing_step_program() -> Iterator[None]:
    """Context in which static programs that are traced are those of `dist.to_static`, of full steps."""
    before = _in_step_program[0]
    _in_step_program[0] = True
    try:
        yield
    finally:
        _in_step_program[0] = before


def is_tracing_step_program() -> bool:
    """True while the program of a full step is traced: all its tensors are distributed ones."""
    return _in_step_program[0] and not paddle.in_dynamic_mode()


def is_split(x: Tensor) -> bool:
    """True if ranks can compute alone with their shard or copy of a distributed tensor: not where it is a partial sum,
    and not in a program of `paddle.jit.to_static`, where local tensors have no gradient (Paddle 3.3.1)."""
    has_shards = x.is_dist() and (paddle.in_dynamic_mode() or _in_step_program[0])
    return has_shards and not any(place.is_partial() for place in x.placements)


def have_same_layout(tensors: Sequence[Tensor]) -> bool:
    """True if distributed tensors have the same placements."""
    first = tensors[0]
    return all(t.is_dist() and t.placements == first.placements for t in tensors)


def on_local_shards(kernel: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Apply `kernel` to the local shards of distributed tensors with the same placements (`is_split`,
    `have_same_layout`). Its output gets these placements too. Its gradients have to be contiguous, as those of kernels
    are."""
    mesh = tensors[0].process_mesh
    placements = tensors[0].placements
    local = kernel(*(dtensor_to_local(t, mesh, placements) for t in tensors))
    return _to_global(local, mesh, placements)


def local_constant(x: Tensor) -> Tensor:
    """This rank's shard, as a plain tensor, of a tensor without a gradient."""
    if not x.is_dist():
        return x
    if paddle.in_dynamic_mode():
        return x._local_value()
    return dtensor_to_local(x, x.process_mesh, x.placements)


def on_local_rows(kernel: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
    """Apply `kernel` to the local rows of a distributed tensor, sharded (`is_split`) along any dim but its last, and to
    a replicated weight. The gradient of the weight is a partial sum on each rank: over its own rows."""
    mesh = x.process_mesh
    placements = x.placements
    assert not any(place.is_shard(x.ndim - 1) for place in placements), "rows must not be sharded"
    shares = [dist.Partial() if place.is_shard() else dist.Replicate() for place in placements]
    local = kernel(dtensor_to_local(x, mesh, placements), dtensor_to_local(weight, mesh, shares))
    return _to_global(local, mesh, placements)


def _to_global(local: Tensor, mesh: Any, placements: Sequence[Any]) -> Tensor:
    if not paddle.in_dynamic_mode():
        return dtensor_from_local(local, mesh, placements)
    # Paddle 3.3.1: `dtensor_from_local` ignores the strides of a view, such as a transposed tensor
    return dtensor_from_local(local.contiguous(), mesh, placements)
