"""Workarounds for errors of `dist.shard_tensor` and `dist.reshard` (Paddle 3.3.1) in models that call them.

Each context is active while such a model computes; its first sentence gives the reason. Where Paddle would compute with
wrong numbers, or end the process, a `UserError` says what to do instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from llmsuite.base.errors import UserError
from llmsuite.base.typing import Tensor
from llmsuite.parallel import collective


def check_ranks(what: str, ranks: Sequence[int], num_ranks: int) -> None:
    """Raise UserError for a mesh with ranks that the run does not have: Paddle would silently compute with the parts of
    the ranks that exist."""
    if max(ranks) >= num_ranks:
        raise UserError(
            f"{what} on ranks {sorted(ranks)}, and the run has {num_ranks}: set launch.num_devices to the number of "
            "ranks in the model's meshes, or let the meshes follow dist.get_world_size()"
        )


def check_rows(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> None:
    """Raise UserError where a rank has no rows: Paddle would end the process."""
    for parts, placement in zip(mesh.shape, placements):
        if not placement.is_shard():
            continue
        size = shape[placement.get_dim()]
        if size < parts:
            raise UserError(
                f"dist.shard_tensor: {parts} ranks cut a tensor of {list(shape)} along dim {placement.get_dim()}, and "
                f"some of them would have none of {size}: raise train.micro_batch_size, or evaluate on more rows"
            )


@contextlib.contextmanager
def _replaced(module: Any, **functions: Any) -> Iterator[None]:
    """Replace functions of a module until the context ends."""
    before = {name: getattr(module, name) for name in functions}
    vars(module).update(functions)
    try:
        yield
    finally:
        vars(module).update(before)


@contextlib.contextmanager
def checked_eager() -> Iterator[list[Any]]:
    """Checks of eager calls: Paddle would compute with a part of the rows where ranks of a mesh do not exist, or would
    end the process where a rank has no rows, or sends to itself, as it is in both meshes of a reshard.

    Yields the list of meshes that the model uses meanwhile.
    """
    shard_tensor = dist.shard_tensor
    reshard = dist.reshard
    named_meshes = list[Any]()

    def checked_shard_tensor(data: Any, mesh: Any, placements: Any, *arguments: Any, **named: Any) -> Tensor:
        check_ranks("dist.shard_tensor: the mesh is", mesh.process_ids, collective.num_ranks())
        check_rows(np.shape(data), mesh, placements)
        named_meshes.append(mesh)
        return shard_tensor(data, mesh, placements, *arguments, **named)

    def checked_reshard(tensor: Tensor, mesh: Any, *arguments: Any, **named: Any) -> Tensor:
        ours = tensor.process_mesh.process_ids
        theirs = mesh.process_ids
        check_ranks("dist.reshard: the mesh is", theirs, collective.num_ranks())
        staying = [rank for rank, other in zip(ours, theirs) if rank == other]
        if staying and ours != theirs:
            raise UserError(
                f"dist.reshard: from the mesh of ranks {ours} to that of {theirs}, rank {staying[0]} stays in its "
                "place, which Paddle cannot do; let all ranks of a mesh stay where they are, or none"
            )
        named_meshes.append(mesh)
        return reshard(tensor, mesh, *arguments, **named)

    with _replaced(dist, shard_tensor=checked_shard_tensor, reshard=checked_reshard):
        yield named_meshes


@contextlib.contextmanager
def checked_static() -> Iterator[None]:
    """Replacements for programs: there Paddle takes the full value given to `dist.shard_tensor` for this rank's part,
    and skips a reshard between meshes that share some ranks. The operations that both functions call are replaced, so
    it does not matter how a model imports the functions."""
    shard_tensor = paddle._C_ops.shard_tensor
    reshard = paddle._C_ops.reshard

    def place(value: Any, mesh: Any, placements: Any) -> Any:
        check_ranks("dist.shard_tensor: the mesh is", mesh.process_ids, collective.num_ranks())
        _check_even(value.shape, mesh, placements)
        # a copy, because a value that is placed can have no other use; in two steps, because one cannot shard it
        replicated = shard_tensor(paddle.assign(value), mesh, [dist.Replicate() for _ in mesh.shape])
        return reshard(replicated, mesh, placements)

    def move(value: Any, mesh: Any, placements: Any) -> Any:
        check_ranks("dist.reshard: the mesh is", mesh.process_ids, collective.num_ranks())
        _check_even(value.shape, mesh, placements)
        before = value.process_mesh
        if before != mesh and ({*before.process_ids} & {*mesh.process_ids} or before.shape != mesh.shape):
            raise UserError(
                f"dist.reshard: from the mesh {_shown(before)} to {_shown(mesh)}, which engine.program step does not "
                "have; let a mesh be the same, or one of the same shape on other ranks, or set engine.mode to dynamic"
            )
        return reshard(value, mesh, placements)

    with _replaced(paddle._C_ops, shard_tensor=place, reshard=move):
        yield


def _check_even(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> None:
    """Raise UserError for parts of unequal size, which programs cannot have."""
    for parts, placement in zip(mesh.shape, placements):
        if not placement.is_shard():
            continue
        size = shape[placement.get_dim()]
        if size % parts:
            raise UserError(
                f"dist.shard_tensor: {parts} ranks cut a tensor of {list(shape)} along dim {placement.get_dim()}, and "
                f"engine.program step takes equal parts of {size}: change train.micro_batch_size or the mesh, or set "
                "engine.mode to dynamic"
            )


def _shown(mesh: Any) -> str:
    return str(np.array(mesh.process_ids).reshape(mesh.shape).tolist())
