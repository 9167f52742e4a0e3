"""Which rank holds what of a parameter that a model has placed; tests/multi/test_annotated.py trains such models."""

from __future__ import annotations

import math

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from llmsuite.base.errors import UserError
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.parallel.auto_parallel import AutoParallelShard, held_slices
from llmsuite.parallel.mesh import Mesh

IRREGULAR = dist.ProcessMesh([[2, 4, 5], [0, 1, 3]], dim_names=["x", "y"])


def test_slices_follow_the_order_of_the_ranks_in_the_mesh() -> None:
    """A [4, 3] tensor on 2 x 3 ranks: each has [2, 1]."""
    found = held_slices("w", [4, 3], IRREGULAR, [dist.Shard(0), dist.Shard(1)])
    values = np.arange(12).reshape(4, 3)
    parts = {rank: values[index].tolist() for rank, index in found.items()}
    assert parts == {
        2: [[0], [3]], 4: [[1], [4]], 5: [[2], [5]],
        0: [[6], [9]], 1: [[7], [10]], 3: [[8], [11]],
    }  # fmt: skip


def test_what_no_axis_cuts_is_whole_on_each_rank() -> None:
    found = held_slices("w", [4, 3], IRREGULAR, [dist.Replicate(), dist.Shard(-1)])
    assert found[2] == found[0] == (slice(0, 4), slice(0, 1))
    assert found[5] == found[3] == (slice(0, 4), slice(2, 3))


@pytest.mark.parametrize(
    ("placements", "why"),
    [
        ([dist.Shard(1), dist.Replicate()], "2 ranks cut it along dim 1, which they do not divide"),
        ([dist.Shard(0), dist.Shard(0)], "is cut twice along dim 0"),
        ([dist.Partial(), dist.Replicate()], "is placed as Partial"),
    ],
)
def test_placements_that_cannot_be_saved_are_refused(placements: list[object], why: str) -> None:
    with pytest.raises(UserError, match=f"parameter 'w' .*{why}"):
        held_slices("w", [4, 3], IRREGULAR, placements)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_outside_of_a_mesh_owns_nothing(rank: int) -> None:
    mesh = Mesh(Degrees(1, 1, 1, 2, auto_parallel=True), rank)
    parameter = dist.shard_tensor(
        paddle.nn.Layer().create_parameter([4, 3]), dist.ProcessMesh([0], dim_names=["x"]), [dist.Replicate()]
    )
    shard = AutoParallelShard("w", parameter, mesh)
    assert shard.is_empty is (rank == 1)
    assert shard.replica_count == 1
    assert shard.own_shard(np.zeros([4, 3], "float32")).size == (12 if rank == 0 else 0)
    assert math.prod(shard.main_param.shape) == (12 if rank == 0 else 0)


def test_a_mesh_of_more_ranks_than_there_are_is_refused() -> None:
    """Paddle would compute with the part of the rank that there is."""
    mesh = dist.ProcessMesh([0, 1], dim_names=["x"])
    parameter = dist.shard_tensor(paddle.nn.Layer().create_parameter([4, 2]), mesh, [dist.Shard(0)])
    with pytest.raises(UserError, match=r"parameter 'w' is placed on ranks \[0, 1\], and the run has 1: set launch"):
        AutoParallelShard("w", parameter, Mesh(Degrees(1, 1, 1, 1), 0))


def test_other_values_than_float32_are_refused() -> None:
    parameter = paddle.nn.Layer().create_parameter([4, 3], dtype="float64")
    with pytest.raises(
        UserError, match=r"parameter .w. is .*float64; models with meshes of their own train in float32"
    ):
        AutoParallelShard("w", parameter, Mesh(Degrees(1, 1, 1, 1), 0))
