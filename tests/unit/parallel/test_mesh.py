"""Ranks as a grid: each has one place, and every group is the ranks that differ in its axes only."""

from __future__ import annotations

import itertools
from typing import Any

import paddle.distributed as dist
import pytest

from llmsuite.contract.schema.degrees import Degrees
from llmsuite.parallel.mesh import AXES, Mesh
from tests.support.many import EXPERT_MESHES, MESHES

GROUPS = {
    "tensor_group": ("tp",),
    "data_group": ("dp", "sharding"),
    "dp_group": ("dp",),
    "sharding_group": ("sharding",),
    "pipeline_group": ("pp",),
}
every_mesh = pytest.mark.parametrize("degrees", [*MESHES, *EXPERT_MESHES], ids=str)


def all_ranks(degrees: Degrees) -> list[Mesh]:
    return [Mesh(degrees, rank) for rank in range(degrees.num_ranks)]


@every_mesh
def test_each_rank_has_a_place_of_its_own(degrees: Degrees) -> None:
    places = [tuple(mesh.coordinate[axis] for axis in AXES) for mesh in all_ranks(degrees)]
    sizes = [1 if axis == "ep" else getattr(degrees, axis) for axis in AXES]
    # row by row: neighbours along tp, which talk most, are neighbours on the machine
    assert places == list(itertools.product(*map(range, sizes)))


def test_places_by_hand() -> None:
    places = {"pp": 1, "dp": 1, "sharding": 0, "ep": 0, "tp": 1}
    assert Mesh(Degrees(pp=2, dp=2, sharding=2, tp=2), 13).coordinate == places
    places = {"pp": 0, "dp": 1, "sharding": 1, "ep": 0, "tp": 0}
    assert Mesh(Degrees(pp=1, dp=2, sharding=3, tp=2), 8).coordinate == places


@every_mesh
def test_each_part_of_a_batch_is_counted_once(degrees: Degrees) -> None:
    by_data_rank: dict[int, list[Mesh]] = {}
    for mesh in all_ranks(degrees):
        by_data_rank.setdefault(mesh.data_rank, []).append(mesh)
    assert sorted(by_data_rank) == list(range(degrees.num_data_ranks))
    for alike in by_data_rank.values():
        # the ranks of one copy of the model, of which one has the loss and books it
        assert len(alike) == degrees.pp * degrees.tp
        assert len({(mesh.coordinate["dp"], mesh.coordinate["sharding"]) for mesh in alike}) == 1
        (counting,) = (mesh for mesh in alike if mesh.counts_losses)
        assert (counting.coordinate["pp"], counting.coordinate["tp"]) == (degrees.pp - 1, 0)


@every_mesh
@pytest.mark.parametrize("axes", GROUPS.values(), ids="-".join)
def test_ranks_of_a_row_differ_in_its_axes_only(degrees: Degrees, axes: tuple[str, ...]) -> None:
    rows = Mesh(degrees, 0).rows(*axes)
    assert sorted(rank for row in rows for rank in row) == list(range(degrees.num_ranks)), "each rank in one row"
    sizes = [range(getattr(degrees, axis)) for axis in axes]
    for row in rows:
        places = [Mesh(degrees, int(rank)).coordinate for rank in row]
        assert len({tuple(place[axis] for axis in AXES if axis not in axes) for place in places}) == 1
        # all of them, and in the order of their coordinates: parts are joined in it
        assert [tuple(place[axis] for axis in axes) for place in places] == list(itertools.product(*sizes))


@every_mesh
def test_a_data_group_is_in_the_order_of_the_data_ranks(degrees: Degrees) -> None:
    for row in Mesh(degrees, 0).rows("dp", "sharding"):
        assert [Mesh(degrees, int(rank)).data_rank for rank in row] == list(range(degrees.num_data_ranks))


@every_mesh
def test_all_ranks_make_all_groups_in_the_same_order(degrees: Degrees, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else some would wait for others that are busy with another group."""
    made: list[list[int]] = []

    def new_group(ranks: list[int]) -> list[int]:
        made.append(ranks)
        return ranks

    monkeypatch.setattr(dist, "new_group", new_group)
    orders = []
    for mesh in all_ranks(degrees):
        mesh.make_groups()
        orders.append(list(made))
        made.clear()
        for name, axes in GROUPS.items():
            own: Any = getattr(mesh, name)
            (row,) = (row.tolist() for row in mesh.rows(*axes) if mesh.rank in row)
            assert own == (row if len(row) > 1 else None), name
        ends = mesh.pipeline_group and [mesh.pipeline_group[0], mesh.pipeline_group[-1]]
        assert mesh.tied_group == (ends if ends and mesh.rank in ends else None)
        if degrees.tp > 1:
            assert (mesh.tensor.process_ids, mesh.tensor.dim_names) == (mesh.tensor_group, ["tp"])
        else:
            assert mesh.tensor is None
        assert made == [], "a group is made once"
    assert all(order == orders[0] for order in orders)
    assert all(len(ranks) > 1 for ranks in orders[0])


@pytest.mark.parametrize("degrees", EXPERT_MESHES, ids=str)
def test_neighbours_on_the_data_axes_share_the_experts(degrees: Degrees) -> None:
    meshes = all_ranks(degrees)
    for row in meshes[0].expert_mesh.rows("ep"):
        members = [meshes[rank] for rank in row]
        first = members[0].data_rank
        assert first % degrees.ep == 0
        assert [mesh.data_rank for mesh in members] == list(range(first, first + degrees.ep))
        assert len({(mesh.coordinate["pp"], mesh.coordinate["tp"]) for mesh in members}) == 1
    for mesh in meshes:
        experts = mesh.expert_mesh
        assert experts.coordinate["ep"] == mesh.data_rank % degrees.ep
        assert {axis: experts.coordinate[axis] for axis in ("pp", "tp")} == {
            axis: mesh.coordinate[axis] for axis in ("pp", "tp")
        }
    # those that have the same experts, and those of them that share the optimizer's state, which are on the same axis
    for row in meshes[0].expert_mesh.rows("dp", "sharding"):
        assert len({meshes[rank].data_rank % degrees.ep for rank in row}) == 1
        assert len(row) == degrees.num_data_ranks // degrees.ep
    for row in meshes[0].expert_mesh.rows("sharding"):
        assert len({meshes[rank].coordinate["dp"] for rank in row}) == 1
        assert len(row) == max(1, degrees.sharding // degrees.ep)
