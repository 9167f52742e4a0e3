"""Kernels on distributed tensors: each rank computes its own part.

Paddle 3.3.1 splits an operation over ranks only where it knows a rule for it. Of an operation without one, such as its
fused RMS norm, every rank gets the whole input and makes the whole output: sequence parallel and split heads are lost.
So what a rank can compute alone is given to kernels as plain tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local, dtensor_to_local

from llmsuite.typing import Tensor

_whole_steps = [False]


@contextlib.contextmanager
def whole_steps() -> Iterator[None]:
    """While active, programs that are made are those of `dist.to_static`."""
    before, _whole_steps[0] = _whole_steps[0], True
    try:
        yield
    finally:
        _whole_steps[0] = before


def in_whole_step() -> bool:
    """Whether a program of a whole step is being made: all its tensors are distributed ones."""
    return _whole_steps[0] and not paddle.in_dynamic_mode()


def is_split(x: Tensor) -> bool:
    """Whether ranks hold a distributed tensor in parts, or as copies, that they can compute with by themselves: not
    where each holds a summand, and not in a program of `paddle.jit.to_static`, where local parts have no gradient
    (Paddle 3.3.1)."""
    has_parts = x.is_dist() and (paddle.in_dynamic_mode() or _whole_steps[0])
    return has_parts and not any(place.is_partial() for place in x.placements)


def are_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether distributed tensors are split in the same way."""
    first = tensors[0]
    return all(t.is_dist() and t.placements == first.placements for t in tensors)


def on_parts(kernel: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`kernel` of distributed tensors that are split in the same way (`is_split`, `are_alike`), part by part. Its
    output is split in this way too. The gradients it makes have to be contiguous, as those of kernels are."""
    mesh, placements = tensors[0].process_mesh, tensors[0].placements
    local = kernel(*(dtensor_to_local(t, mesh, placements) for t in tensors))
    return _whole(local, mesh, placements)


def constant_part(x: Tensor) -> Tensor:
    """This rank's part of a tensor that has no gradient, for kernels."""
    if not x.is_dist():
        return x
    return x._local_value() if paddle.in_dynamic_mode() else dtensor_to_local(x, x.process_mesh, x.placements)


def on_rows(kernel: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
    """`kernel` of a distributed tensor, split (`is_split`) along any dim but its last, and of a weight that all ranks
    have. A rank makes its share of the weight's gradient: the sum over its own rows."""
    mesh, placements = x.process_mesh, x.placements
    assert not any(place.is_shard(x.ndim - 1) for place in placements), "a row has to be whole"
    shares = [dist.Partial() if place.is_shard() else dist.Replicate() for place in placements]
    local = kernel(dtensor_to_local(x, mesh, placements), dtensor_to_local(weight, mesh, shares))
    return _whole(local, mesh, placements)


def _whole(local: Tensor, mesh: Any, placements: Sequence[Any]) -> Tensor:
    if not paddle.in_dynamic_mode():
        return dtensor_from_local(local, mesh, placements)
    # of a view, such as a transposed tensor, `dtensor_from_local` would take the memory as it lies (Paddle 3.3.1)
    return dtensor_from_local(local.contiguous(), mesh, placements)
