"""The split of a pipeline: every layer is in one part, and every parameter has one owner."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.models.dense_plan import PLAN
from llmsuite.models.families.llama import LlamaConfig
from llmsuite.parallel.pipeline_split import keep_part, layer_costs, owner_stage, part_bounds
from tests.support import tiny_llama


def sizes(costs: Sequence[int], bounds: Sequence[int]) -> list[int]:
    return [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]


@given(st.integers(1, 64), st.data())
def test_layers_are_dealt_out_evenly(layers: int, data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, layers))
    found = sizes([1] * layers, part_bounds("layers", [1] * layers, parts))
    assert (len(found), sum(found)) == (parts, layers)
    assert max(found) - min(found) <= 1
    assert found == sorted(found, reverse=True)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.data())
def test_the_largest_part_is_as_small_as_can_be(costs: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    bounds = part_bounds("parameters", costs, parts)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(costs), parts + 1)
    assert all(a < b for a, b in itertools.pairwise(bounds))
    every = ([0, *cuts, len(costs)] for cuts in itertools.combinations(range(1, len(costs)), parts - 1))
    assert max(sizes(costs, bounds)) == min(max(sizes(costs, other)) for other in every)


def test_a_large_vocabulary_takes_layers_from_the_ends() -> None:
    costs = [100 + 250, *[100] * 14, 100 + 250]
    assert sizes([1] * 16, part_bounds("parameters", costs, 4)) == [3, 5, 5, 3]
    assert sizes([1] * 16, part_bounds("layers", costs, 4)) == [4, 4, 4, 4]


def test_named_layers_begin_the_parts() -> None:
    assert part_bounds([1, 5, 6], [1] * 8, 4) == [0, 1, 5, 6, 8]


def seven_layers(tied: bool) -> LlamaConfig:
    return dataclasses.replace(tiny_llama.CONFIG, num_hidden_layers=7, tie_word_embeddings=tied)


def shapes(config: LlamaConfig) -> dict[str, list[int]]:
    return {name: list(p.shape) for name, p in tiny_llama.model(config).named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
def test_costs_are_counted_once_but_for_a_tied_embedding(tied: bool) -> None:
    config = seven_layers(tied)
    found = shapes(config)
    total = sum(math.prod(shape) for shape in found.values())
    costs = layer_costs(found, PLAN, 7, tied)
    embedding = 19 * 24
    assert sum(costs) == total + (embedding if tied else 0)
    assert len(set(costs[1:-1])) == 1
    assert costs[0] == costs[1] + embedding
    assert costs[-1] == costs[1] + embedding + 24  # the head, or the embedding again; and the last norm


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("cut", ["layers", "parameters"])
def test_parts_have_every_parameter_where_its_owner_is(cut: str, chunks: int, tied: bool) -> None:
    config = seven_layers(tied)
    stages = 3
    whole = shapes(config)
    bounds = part_bounds(cut, layer_costs(whole, PLAN, 7, tied), stages * chunks)
    held: dict[str, set[int]] = {}
    for part in range(stages * chunks):
        model = tiny_llama.model(config)
        keep_part(model, PLAN, part, bounds, tied)
        for name, _ in model.named_parameters():
            held.setdefault(name, set()).add(part % stages)
    assert held.keys() == whole.keys()
    embedding = held.pop("model.embed_tokens.weight")
    assert embedding == ({0, stages - 1} if tied else {0})
    assert owner_stage("model.embed_tokens.weight", PLAN, bounds, stages) == 0
    for name, stages_with_it in held.items():
        assert stages_with_it == {owner_stage(name, PLAN, bounds, stages)}, name
