"""Gradients of several parameters in one call: who is with whom, and that each gets its own sum."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsuite.contract.schema.degrees import Degrees
from llmsuite.parallel import collective
from llmsuite.parallel.buckets import assign_buckets
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.partition import Partition, buckets, shard_range
from llmsuite.parallel.sharding import ParameterShard
from tests.support import many
from tests.support.sharding_case import Case

SHAPES = {"a": (5, 3), "b": (7,), "c": (2, 2, 2), "experts.d": (3, 4), "e": (1,), "experts.f": (6,)}
DEGREES = [Degrees(1, 2, 1, 1), Degrees(1, 1, 2, 1), Degrees(1, 2, 3, 1), Degrees(1, 1, 4, 1)]


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.integers(1, 20)), max_size=30), st.integers(0, 50))
def test_each_is_in_one_bucket_with_others_of_its_kind(sizes: list[tuple[str, int]], limit: int) -> None:
    found = buckets(sizes, limit)
    assert sorted(itertools.chain(*found)) == list(range(len(sizes)))
    for bucket in found:
        assert bucket == sorted(bucket, reverse=True)
        assert len({sizes[i][0] for i in bucket}) == 1
        assert len(bucket) == 1 or sum(sizes[i][1] for i in bucket) <= limit
    for kind in "xyz":  # none could have been put into the one before
        small = [b for b in found if sizes[b[0]][0] == kind and sizes[b[0]][1] <= limit]
        for before, after in itertools.pairwise(small):
            assert sum(sizes[i][1] for i in before) + sizes[after[0]][1] > limit


def test_large_gradients_are_by_themselves_and_small_ones_together() -> None:
    assert buckets([("x", 9), ("x", 1), ("x", 9), ("x", 2), ("y", 1), ("x", 3)], 5) == [[5, 3], [4], [2], [1], [0]]
    assert buckets([("x", 9), ("x", 1), ("x", 9), ("x", 2), ("y", 1), ("x", 3)], 0) == [[5], [4], [3], [2], [1], [0]]


def model(mesh: Mesh, stage: int, limit: int) -> tuple[dict[str, Case], dict[str, ParameterShard]]:
    cases = {name: Case(mesh.degrees, stage, shape, None) for name, shape in SHAPES.items()}
    shards = {name: case.shard(mesh, name) for name, case in cases.items()}
    assign_buckets(list(shards.values()), lambda name: name.startswith("experts."), limit)
    return cases, shards


def learn(cases: dict[str, Case], shards: dict[str, ParameterShard], mesh: Mesh, seed: int, names: Any) -> None:
    """A backward pass through some of the parameters."""
    for shard in shards.values():
        shard.gather()
    terms = []
    for name in names:
        gradient = cases[name].gradient(mesh.data_rank, seed + len(name))
        terms.append((shards[name].parameter * paddle.to_tensor(gradient)).sum())
    paddle.add_n(terms).backward()


@settings(max_examples=40)
@given(
    st.sampled_from(DEGREES),
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(0, 400),
    st.sampled_from(["GLOO", "NCCL"]),
    st.sets(st.sampled_from(list(SHAPES)), min_size=1),
    st.booleans(),
)
def test_each_parameter_gets_its_own_sum(
    degrees: Degrees, stage: int, passes: int, limit: int, backend: str, used: set[str], outputs: bool
) -> None:
    """Also where some get no gradient, and those with them in a bucket do; whole numbers, so sums are exact."""

    def work(mesh: Mesh) -> None:
        cases, shards = model(mesh, stage, limit)
        for step in range(2):
            for seed in range(passes):
                for shard in shards.values():
                    shard.is_last_pass = outputs and seed == passes - 1
                learn(cases, shards, mesh, seed, sorted(used))
            with paddle.no_grad():
                for name, shard in shards.items():
                    own = shard.finish_gradient()
                    total = sum(cases[name].sum_of_gradients(seed + len(name)) for seed in range(passes))
                    expected = cases[name].own_part(total, mesh) if name in used else np.zeros(0)
                    assert (own is None) == (expected.size == 0), (step, name)
                    if own is not None:
                        assert np.array_equal(own.numpy(), expected), (step, name)
                    shard.drop_gradient()
            assert all(shard.parameter.grad is None for shard in shards.values())

    many.run(degrees, work, backend)


@pytest.mark.parametrize("stage", range(4))
def test_how_many_calls_there_are(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what they carry: all that is alike, but not of experts with others."""
    sizes: dict[int, list[tuple[str, int]]] = {0: [], 1: []}
    start_all_reduce = collective.start_all_reduce
    scatter = collective.start_reduce_scatter

    def noted(what: str, call: Any) -> Any:
        def made(tensor: Any, group: Any) -> Any:
            if group is not None:
                sizes[collective.rank()].append((what, tensor.size))
            return call(tensor, group)

        return made

    monkeypatch.setattr(collective, "start_all_reduce", noted("sum", start_all_reduce))
    monkeypatch.setattr(collective, "start_reduce_scatter", noted("scatter", scatter))
    degrees = Degrees(1, 1, 2, 1)

    def work(mesh: Mesh) -> None:
        cases, shards = model(mesh, stage, 1 << 20)
        for seed in range(2):
            for shard in shards.values():
                shard.is_last_pass = seed == 1
            learn(cases, shards, mesh, seed, SHAPES)
        for shard in shards.values():
            shard.finish_gradient()

    many.run(degrees, work)
    kinds = [[n for n in SHAPES if n.startswith("experts.") == expert] for expert in (False, True)]
    if stage < 2:
        expected = [("sum", sum(math.prod(SHAPES[n]) for n in names)) for names in kinds]
    else:  # in each pass, with what makes the pieces equal
        expected = [("scatter", sum(-(-math.prod(SHAPES[n]) // 2) * 2 for n in names)) for names in kinds] * 2
    assert [sorted(sizes[rank]) for rank in (0, 1)] == [sorted(expected)] * 2


@pytest.mark.parametrize(
    ("stage", "calls"),
    [
        (0, [("data", "all_reduce", False, 5 + 7)]),
        (1, [("data", "all_reduce", False, 5 + 7)]),
        (2, [("sharding", "reduce_scatter", True, 6 + 8), ("dp", "all_reduce", False, 3 + 4)]),
        (3, [("sharding", "reduce_scatter", True, 6 + 8), ("dp", "all_reduce", False, 3 + 4)]),
    ],
)
def test_the_calls_of_a_bucket_are_declared(stage: int, calls: list[tuple[str, str, bool, int]]) -> None:
    """For parameters of 5 and 7 elements on two ranks of the sharding axis, whose shards are padded."""
    mesh = Mesh(Degrees(1, 2, 2, 1), 0)
    bucket = []
    for size in (5, 7):
        own = shard_range(size, mesh, stage, is_frozen=False)
        bucket.append(Partition(size, stage, own.num_shards, own.size, own.num_owned, False, False, False))
    found = [(r.group, r.operation, r.in_each_pass, r.size(bucket)) for r in bucket[0].reductions]
    assert found == calls
    assert all(mesh.group_size(group) > 1 for group, *_ in calls)
