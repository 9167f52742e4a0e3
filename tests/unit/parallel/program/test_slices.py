"""Parameters that data ranks share out in slices, on every rank of a mesh at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.contract.schema.degrees import Degrees
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.program.optimizer import ProgramOptimizer, ZeroGroup
from llmsuite.parallel.program.slices import SlicedShard, slice_dim
from llmsuite.parallel.sharding import ShardOptions
from tests.support import many
from tests.support.step_programs import ADAMW

DEGREES = Degrees(1, 1, 2, 1)
SHAPES = {"even": [6, 4], "odd rows": [5, 4], "odd": [5, 3]}


def _values(name: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *name.encode()]).standard_normal(SHAPES[name]).astype("float32")


def _shard(name: str, mesh: Mesh, is_frozen: bool = False) -> SlicedShard:
    parameter = paddle.create_parameter(SHAPES[name], "float32")
    parameter.set_value(_values(name))
    return SlicedShard(name, parameter, mesh, None, ShardOptions(is_frozen=is_frozen))


@pytest.mark.parametrize(("name", "dim"), [("even", 0), ("odd rows", 1), ("odd", None)])
def test_a_rank_keeps_its_slice_only(name: str, dim: int | None) -> None:
    whole = _values(name)
    later = _values(name, 1)

    def work(mesh: Mesh) -> dict[str, Any]:
        shard = _shard(name, mesh)
        found = {"empty": not shard.parameter._is_initialized(), "stored": shard.stored.numpy().copy()}
        shard.gather()
        found["gathered"] = shard.parameter.numpy().copy()
        shard.free()
        found["whole"] = shard.gather_parameter().numpy()
        part = shard.own_shard(later)
        found["of state"] = shard.gather_shard(paddle.to_tensor(part)).numpy()
        shard.load(later)
        found["loaded"] = shard.gather_parameter().numpy()
        kept = shard.copy_of_stored()
        shard.swap_stored(shard.stored_form(whole))
        found["swapped"] = shard.gather_parameter().numpy()
        assert kept.shape == shard.stored.shape == list(part.shape)
        return found

    ranks = many.run(DEGREES, work)
    for rank, found in enumerate(ranks):
        expected = whole if dim is None else np.split(whole, 2, dim)[rank]
        assert np.array_equal(found["stored"], expected)
        assert found["empty"] == (dim is not None)
        for what, values in (("gathered", whole), ("whole", whole), ("of state", later), ("loaded", later)):
            assert np.array_equal(found[what], values), what
        assert np.array_equal(found["swapped"], whole)


def test_what_is_frozen_is_shared_out_too() -> None:
    stored = many.run(DEGREES, lambda mesh: _shard("even", mesh, is_frozen=True).stored.shape)
    assert stored == [[3, 4]] * 2


def test_the_state_is_that_of_the_slice() -> None:
    """It is brought together, and taken over, as the parameter is."""
    whole = {name: _values(name, 2) for name in SHAPES}

    def work(mesh: Mesh) -> dict[str, Any]:
        shards = [_shard(name, mesh) for name in SHAPES]
        optimizer = ProgramOptimizer(shards, ADAMW, 4, ZeroGroup(2, mesh.data_rank, mesh.data_group))
        optimizer.load_state(
            lambda entry: np.ones([1], "float32") if entry.is_scalar else entry.shard.own_shard(whole[entry.shard.name])
        )
        slots = [entry for entry in optimizer.state() if entry.slot == "moment1"]
        return {
            entry.shard.name: (entry.value.shape, entry.shard.gather_shard(entry.on_device()).numpy())
            for entry in slots
        }

    for found in many.run(DEGREES, work):
        assert {name: shape for name, (shape, _) in found.items()} == {
            "even": [3, 4],
            "odd rows": [5, 2],
            "odd": [5, 3],
        }
        for name, (_, values) in found.items():
            assert np.array_equal(values, whole[name])


def test_a_slice_is_where_the_program_leaves_it() -> None:
    """One tensor is read by all: a program may put its results into other memory."""

    def work(mesh: Mesh) -> np.ndarray:
        shard = _shard("even", mesh)
        elsewhere = paddle.full([3, 4], float(mesh.rank))
        shard.stored.get_tensor()._share_data_with(elsewhere.get_tensor())
        return shard.gather_parameter().numpy()

    expected = np.repeat([[0.0], [1.0]], 3, 0) * np.ones([1, 4])
    assert all(np.array_equal(found, expected) for found in many.run(DEGREES, work))


def test_a_table_of_two_pipeline_stages_is_not_cut() -> None:
    def work(mesh: Mesh) -> list[bool]:
        found = []
        for is_tied in (False, True):
            parameter = paddle.create_parameter([6, 4], "float32")
            found.append(SlicedShard("even", parameter, mesh, None, ShardOptions(is_tied)).is_sliced)
        return found

    assert many.run(dataclasses.replace(DEGREES, pp=2), work) == [[True, False]] * 4


def test_alone_nothing_is_cut() -> None:
    shard = _shard("even", Mesh(dataclasses.replace(DEGREES, sharding=1), 0))
    assert not shard.is_sliced
    assert slice_dim([4], [], 1) is None
