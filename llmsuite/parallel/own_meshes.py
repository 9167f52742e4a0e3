"""What `dist.shard_tensor` and `dist.reshard` of Paddle 3.3.1 get wrong for models that call them, in one place.

Each context is active while such a model computes, and says why in its first sentence. Where Paddle would compute with
wrong numbers, or end the process, a `UserError` says what would be right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from llmsuite.errors import UserError
from llmsuite.parallel import collective
from llmsuite.typing import Tensor


def check_ranks(what: str, ranks: Sequence[int], num_ranks: int) -> None:
    """Raise UserError for a mesh with ranks that the run does not have: Paddle computes with the parts of those it has,
    and says nothing."""
    if max(ranks) >= num_ranks:
        raise UserError(
            f"{what} on ranks {sorted(ranks)}, and the run has {num_ranks}: set launch.num_devices to the number of "
            "ranks in the model's meshes, or let the meshes follow dist.get_world_size()"
        )


def check_rows(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> None:
    """Raise UserError where a rank has no rows: Paddle would end the process."""
    for parts, placement in zip(mesh.shape, placements):
        if placement.is_shard() and (size := shape[placement.get_dim()]) < parts:
            raise UserError(
                f"dist.shard_tensor: {parts} ranks cut a tensor of {list(shape)} along dim {placement.get_dim()}, and "
                f"some of them would have none of {size}: raise train.micro_batch_size, or evaluate on more rows"
            )


@contextlib.contextmanager
def _replaced(module: Any, **functions: Any) -> Iterator[None]:
    """Let a module have other functions, until the context ends."""
    before = {name: getattr(module, name) for name in functions}
    vars(module).update(functions)
    try:
        yield
    finally:
        vars(module).update(before)


@contextlib.contextmanager
def op_by_op() -> Iterator[list[Any]]:
    """Paddle would compute with a part of the rows, as the ranks that have the others are not there, or would end the
    process: where a rank has no rows, or stays in its place, so that it sends to itself and nobody receives that.

    Gives the meshes that the model has named meanwhile.
    """
    shard_tensor, reshard, named_meshes = dist.shard_tensor, dist.reshard, list[Any]()

    def checked_shard_tensor(data: Any, mesh: Any, placements: Any, *arguments: Any, **named: Any) -> Tensor:
        check_ranks("dist.shard_tensor: the mesh is", mesh.process_ids, collective.num_ranks())
        check_rows(np.shape(data), mesh, placements)
        named_meshes.append(mesh)
        return shard_tensor(data, mesh, placements, *arguments, **named)

    def checked_reshard(tensor: Tensor, mesh: Any, *arguments: Any, **named: Any) -> Tensor:
        ours, theirs = tensor.process_mesh.process_ids, mesh.process_ids
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
def in_programs() -> Iterator[None]:
    """In a program `dist.shard_tensor` takes a whole value for this rank's part, and a reshard between meshes that
    share some ranks is left undone. What both call is replaced, so it does not matter how a model imports them."""
    shard_tensor, reshard = paddle._C_ops.shard_tensor, paddle._C_ops.reshard

    def place(value: Any, mesh: Any, placements: Any) -> Any:
        check_ranks("dist.shard_tensor: the mesh is", mesh.process_ids, collective.num_ranks())
        _check_even(value.shape, mesh, placements)
        # of a copy: a value that is placed can have no other use; in two steps, as it could not be cut in one
        whole = shard_tensor(paddle.assign(value), mesh, [dist.Replicate() for _ in mesh.shape])
        return reshard(whole, mesh, placements)

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
    """Raise UserError for parts that are not equal, which no program has."""
    for parts, placement in zip(mesh.shape, placements):
        if placement.is_shard() and (size := shape[placement.get_dim()]) % parts:
            raise UserError(
                f"dist.shard_tensor: {parts} ranks cut a tensor of {list(shape)} along dim {placement.get_dim()}, and "
                f"engine.program step takes equal parts of {size}: change train.micro_batch_size or the mesh, or set "
                "engine.mode to dynamic"
            )


def _shown(mesh: Any) -> str:
    return str(np.array(mesh.process_ids).reshape(mesh.shape).tolist())
