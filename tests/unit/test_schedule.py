"""Pipeline schedules are plain data: they end, do everything once, and hold no more than they promise."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.engine.pipeline import owner_stage, stage_bounds
from llmsuite.engine.schedule import Action, Kind, order, peak_live
from llmsuite.models.llama.config import LlamaConfig
from llmsuite.models.llama.names import parameter_names
from llmsuite.models.llama.shard_plan import PLAN

KINDS: list[Kind] = ["FThenB", "1F1B"]


@given(st.sampled_from(KINDS), st.integers(1, 9), st.integers(1, 17), st.data())
def test_every_pass_happens_once_and_forward_first(kind: Kind, stages: int, micro: int, data: st.DataObject) -> None:
    actions = order(kind, data.draw(st.integers(0, stages - 1)), stages, micro)
    assert sorted(a.micro_batch for a in actions if a.forward) == list(range(micro))
    assert sorted(a.micro_batch for a in actions if not a.forward) == list(range(micro))
    for i in range(micro):
        assert actions.index(Action(True, i)) < actions.index(Action(False, i))


@given(st.sampled_from(KINDS), st.integers(1, 9), st.integers(1, 17))
def test_no_schedule_waits_for_ever(kind: Kind, stages: int, micro: int) -> None:
    peaks = peak_live(kind, stages, micro)
    if kind == "FThenB":
        assert peaks == [micro] * stages
    else:
        assert peaks == [min(stages - stage, micro) for stage in range(stages)]


def test_1f1b_of_the_second_of_three_stages_by_hand() -> None:
    words = ["FB"[not a.forward] + str(a.micro_batch) for a in order("1F1B", 1, 3, 4)]
    assert words == ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"]


def test_a_schedule_that_cannot_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmsuite.engine.schedule.order", lambda kind, s, n, m: order(kind, s, n, m)[::-1])
    with pytest.raises(AssertionError, match="does not end"):
        peak_live("1F1B", 2, 2)


@given(st.integers(1, 64), st.data())
def test_layers_are_dealt_out_evenly(layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, layers))
    bounds = stage_bounds(layers, stages)
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    assert bounds[0] == 0
    assert bounds[-1] == layers
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_has_one_owner(tied: bool) -> None:
    config = LlamaConfig(num_hidden_layers=7, tie_word_embeddings=tied)
    owners = {name: owner_stage(name, PLAN, 7, 3) for name in parameter_names(config)}
    assert owners["model.embed_tokens.weight"] == 0
    assert owners["model.norm.weight"] == 2
    assert owners.get("lm_head.weight", 2) == 2
    assert [owners[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(7)] == [0, 0, 0, 1, 1, 2, 2]
