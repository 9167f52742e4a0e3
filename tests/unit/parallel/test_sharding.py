"""Optimizer states in parts, on every rank of a mesh at once: together they are the whole, and learn the same."""

from __future__ import annotations

import gc
import itertools
import math
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsuite.contract.schema.degrees import Degrees
from llmsuite.contract.schema.recipe import TrainSection
from llmsuite.parallel.buckets import assign_buckets
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.optimizer import Optimizer
from llmsuite.parallel.sharding import ParameterShard
from tests.support import alone, many
from tests.support.sharding_case import Case

Arrays = dict[str, np.ndarray]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    degrees = draw(st.sampled_from([d for d in many.MESHES if d.pp == 1]))
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    cut = draw(st.sampled_from([None, *range(len(shape))]))
    if cut is not None:
        shape[cut] *= degrees.tp
    return Case(degrees, draw(st.integers(0, 3)), tuple(shape), cut, draw(st.sampled_from(["GLOO", "NCCL"])))


def flat(shard: ParameterShard) -> list[float]:
    return list(shard.main_param.numpy().ravel())


@settings(max_examples=60)
@given(cases())
def test_the_parts_are_the_whole(case: Case) -> None:
    def work(mesh: Mesh) -> tuple[list[float], bool]:
        shard = case.shard(mesh)
        return flat(shard), shard.is_empty

    found = many.run(case.degrees, work)
    assert [empty for _, empty in found] == [not part for part, _ in found]
    for row in Mesh(case.degrees, 0).rows("sharding"):
        local = list(case.slice_of(case.values(0), Mesh(case.degrees, int(row[0]))).ravel())
        parts = [found[rank][0] for rank in row]
        if case.stage:  # each element once, in order, and equal parts but for the last ones
            assert list(itertools.chain(*parts)) == local
            assert max(map(len, parts)) == math.ceil(len(local) / len(row))
        else:
            assert parts == [local] * len(row)


@settings(max_examples=60)
@given(cases())
def test_gathering_undoes_cutting(case: Case) -> None:
    whole = case.values(1)

    def work(mesh: Mesh) -> tuple[np.ndarray, np.ndarray]:
        shard = case.shard(mesh)
        part = shard.own_shard(case.slice_of(whole, mesh))
        assert np.array_equal(part, case.own_part(whole, mesh))
        return shard.gather_shard(paddle.to_tensor(part)).numpy(), shard.gather_parameter().numpy()

    for part, parameter in many.run(case.degrees, work):
        assert np.array_equal(part, whole)
        assert np.array_equal(parameter, case.values(0))


@settings(max_examples=60)
@given(cases())
def test_gradients_are_added_up_into_the_own_part(case: Case) -> None:
    total = case.sum_of_gradients()

    def work(mesh: Mesh) -> float:
        shard = case.shard(mesh)
        case.give_gradient(shard, mesh)
        expected = case.own_part(total, mesh)
        with paddle.no_grad():
            own = shard.finish_gradient()
            assert (own is None) == shard.is_empty == (expected.size == 0)
            if own is not None:
                assert np.array_equal(own.numpy(), expected)
            shard.drop_gradient()
        # the full gradient is not kept in addition to the shard
        assert shard.parameter.grad is None
        return float((expected.astype("float64") ** 2).sum()) / shard.replica_count

    squares = sum(many.run(case.degrees, work, case.backend))
    assert squares == pytest.approx(float((total.astype("float64") ** 2).sum()), rel=1e-12), "each element counts once"


@settings(max_examples=40)
@given(cases())
def test_updates_reach_every_rank_and_loaded_values_every_part(case: Case) -> None:
    loaded = case.values(3)

    def work(mesh: Mesh) -> np.ndarray:
        shard = case.shard(mesh)
        with paddle.no_grad():
            shard.main_param.add_(paddle.full_like(shard.main_param, 2.0))
            shard.write_back()
            published = shard.gather_parameter().numpy()
            shard.load(case.slice_of(loaded, mesh))
        assert np.array_equal(shard.main_param.numpy(), case.own_part(loaded, mesh))
        return published

    for published in many.run(case.degrees, work):
        assert np.array_equal(published, case.values(0) + np.float32(2))


@settings(max_examples=60)
@given(cases(), st.integers(1, 3), st.booleans())
def test_tensors_kept_between_micro_batches(case: Case, num_micro_batches: int, marks_last: bool) -> None:
    """From stage 2 on no gradient outlives its backward pass, in stage 3 no parameter; the sums are the same, whether
    `is_last_pass` was set or not. Sums over data ranks start in the last pass."""
    total = sum(case.sum_of_gradients(seed) for seed in range(num_micro_batches))

    def work(mesh: Mesh) -> None:
        shard = case.shard(mesh)
        is_cut = mesh.degrees.sharding > 1
        part = math.ceil(case.slice_of(total, mesh).size / mesh.degrees.sharding)
        early = is_cut and case.stage >= 2
        for seed in range(num_micro_batches):
            shard.is_last_pass = marks_last and seed == num_micro_batches - 1
            case.give_gradient(shard, mesh, seed)
            has_started = shard.is_last_pass and not early and mesh.degrees.num_data_ranks > 1
            assert bool(shard.bucket._reducing) == has_started
            assert (shard.parameter.grad is None) == early
            shard.bucket._reduce_scatters.settle()
            assert (shard._sum.shape == [part]) if early else shard._sum is None
            assert shard.parameter._is_initialized() != (is_cut and case.stage == 3)
        own = shard.finish_gradient()
        assert shard._sum is None
        assert not shard.bucket._reducing
        if own is not None:
            assert np.array_equal(own.numpy(), case.own_part(total, mesh))

    many.run(case.degrees, work, case.backend)


def live_bytes() -> int:
    return int(paddle.base.core.host_memory_stat_current_value("Allocated", 0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", range(4))
def test_bytes_of_parameters_of_a_rank(stage: int, dtype: str) -> None:
    case = Case(Degrees(pp=1, dp=1, sharding=4, tp=1), stage, (1001, 7), None, dtype=dtype)
    elements = 7007
    part = 1752
    size = 4 if dtype == "float32" else 2

    def work(mesh: Mesh) -> tuple[int, int]:
        before = live_bytes()
        shard = case.shard(mesh)
        made = live_bytes() - before
        shard.gather()
        gathered = live_bytes()
        shard.free()
        return made, gathered - live_bytes()

    gc.collect()  # what other tests have left would be counted as freed here
    for rank, (made, whole) in enumerate(many.run(case.degrees, work)):
        own = min(part, elements - rank * part)
        stored = size * (own if stage == 3 else elements)
        # stages 1 and 2 update a copy of the own part; a float32 parameter in parts is what is updated
        updated = 0 if size == 4 and stage in (0, 3) else 4 * (own if stage else elements)
        assert (rank, made, whole) == (rank, stored + updated, size * 4 * part if stage == 3 else 0)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("degrees", [d for d in many.MESHES if d.pp == 1], ids=str)
def test_16_bit_gradients_are_added_up_in_float32(degrees: Degrees, stage: int) -> None:
    """2,048 and then ones: bfloat16 has 8 bits, so 2,048 + 1 is 2,048 there, over micro-batches as over ranks."""
    case = Case(degrees, stage, (5, 3), None, dtype="bfloat16")
    section = TrainSection(
        **{**TRAIN["sgd"], "max_grad_norm": None},
        max_steps=1,
        global_batch_size=1,
        micro_batch_size=1,
        lr_schedule="constant",
    )

    def work(mesh: Mesh) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        shard = case.shard(mesh)
        optimizer = Optimizer([shard], section, 1)
        before = shard.gather_shard(shard.main_param.detach()).numpy()
        for factor in (2048.0, 1.0, 1.0) if mesh.data_rank == 0 else (1.0, 1.0, 1.0):
            shard.gather()
            (shard.parameter.astype("float32") * factor).sum().backward()
        optimizer.finish_gradients(64.0)
        optimizer.step(1)
        after = shard.gather_shard(shard.main_param.detach()).numpy()
        return before, after, shard.gather_parameter().astype("float32").numpy()

    start = paddle.to_tensor(case.values(0)).astype("bfloat16").astype("float32").numpy()
    gradient = (2050.0 + 3.0 * (degrees.num_data_ranks - 1)) / 64.0
    for before, after, published in many.run(degrees, work):
        assert np.array_equal(before, start)
        np.testing.assert_allclose(after, start - np.float32(0.05 * gradient), rtol=1e-6)
        assert np.array_equal(published, paddle.to_tensor(after).astype("bfloat16").astype("float32").numpy())


def test_no_gradient_is_no_gradient() -> None:
    for stage in range(4):
        case = Case(Degrees(1, 1, 2, 1), stage, (3,), None)
        assert many.run(case.degrees, lambda mesh, case=case: case.shard(mesh).finish_gradient()) == [None, None]


# the optimizer over them

LAYERS = {
    "embedding": ((6, 5), 0),
    "column": ((5, 4), 1),
    "row": ((4, 5), 0),
    "norm": ((5,), None),
    "small": ((2,), None),
}
TRAIN: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "learning_rate": 0.05, "max_grad_norm": 1.0},
    "adamw": {"optimizer": "adamw", "learning_rate": 0.05, "weight_decay": 0.1, "max_grad_norm": None},
}


TrainResult = tuple[Arrays, Arrays, list[float]]


def train(degrees: Degrees, stage: int, name: str, backend: str, samples: int, limit: int = 0) -> list[TrainResult]:
    """Four steps whose samples are dealt out to the data ranks; parameters, state and norms, by rank. `limit` is that
    of a bucket of gradients."""
    section = TrainSection(max_steps=4, global_batch_size=1, micro_batch_size=1, lr_schedule="constant", **TRAIN[name])

    def work(mesh: Mesh) -> TrainResult:
        cases = {name: Case(degrees, stage, shape, cut) for name, (shape, cut) in LAYERS.items()}
        shards = [case.shard(mesh, name, seed=len(name)) for name, case in cases.items()]
        assign_buckets(shards, lambda name: False, limit)
        optimizer = Optimizer(shards, section, 4)
        norms = []
        for step in range(1, 5):
            for sample in range(mesh.data_rank, samples, degrees.num_data_ranks):
                # in the first steps no pass is marked as the last one
                optimizer.begin_backward(is_last=step > 2 and sample + degrees.num_data_ranks >= samples)
                for shard in shards:
                    gradient = cases[shard.name].slice_of(cases[shard.name].gradient(sample, step), mesh)
                    shard.gather()
                    (shard.parameter * paddle.to_tensor(gradient)).sum().backward()
            norms.append(optimizer.finish_gradients(float(samples)))
            optimizer.step(step)
        parameters = {shard.name: shard.gather_parameter().numpy() for shard in shards}
        state = {e.name: (e.value if e.is_scalar else e.shard.gather_shard(e.value)).numpy() for e in optimizer.state()}
        return parameters, state, norms

    return many.run(degrees, work, backend)


@pytest.mark.parametrize("name", TRAIN)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("degrees", [d for d in many.MESHES if d.pp == 1 and d.num_ranks > 1], ids=str)
def test_any_mesh_learns_what_one_rank_learns(degrees: Degrees, stage: int, name: str) -> None:
    samples = 12
    ((parameters, state, norms),) = train(alone.MESH.degrees, 0, name, "GLOO", samples)
    assert len(state) == (4 * len(LAYERS) if name == "adamw" else 0)
    backend = "NCCL" if degrees.dp > 1 else "GLOO"  # which have different ways to the own part of a sum
    limit = 0 if degrees.tp > 1 else (1 << 20 if stage % 2 else 100)  # each by itself, all together, some together
    for rank, (theirs, their_state, their_norms) in enumerate(train(degrees, stage, name, backend, samples, limit)):
        assert their_norms == pytest.approx(norms, rel=1e-6)
        for key, value in parameters.items():
            np.testing.assert_allclose(theirs[key], value, rtol=2e-6, atol=2e-6, err_msg=key)
        for key, value in state.items():
            # a rank that owns nothing of a parameter does not count its steps, and does not write its number
            if not key.endswith("pow_acc") or Mesh(degrees, rank).coordinate["sharding"] == 0:
                np.testing.assert_allclose(their_state[key], value, rtol=2e-6, atol=1e-7, err_msg=key)
