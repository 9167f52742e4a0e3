"""Early stopping stops where a count by hand stops, also after a resume and a return to an earlier step."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.engine.early_stopping import EarlyStopping

NAME = "eval/loss"


def stopping(patience: int | None = 2, min_delta: float = 0.0, is_highest: bool = False) -> EarlyStopping:
    return EarlyStopping(NAME, is_highest, patience, min_delta)


def stop_step(found: EarlyStopping, values: list[float], begin: int = 1) -> int | None:
    for step, value in enumerate(values, begin):
        found.evaluated(step, {NAME: value, "eval/other": 0.0})
        if found.is_over:
            return step
    return None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3, 2, 1, 0], None),
        ([3, 3, 3], 3),  # equal is no improvement
        ([3, 4, 2, 3, 4], 5),
        ([3, 4, 2, 3, 1, 2], None),
        ([math.nan, math.nan], 2),
        ([math.nan, 1, math.inf, math.nan], 4),
        ([1, -math.inf, 2], 3),  # not finite: no improvement
    ],
)
def test_it_counts_evaluations_without_an_improvement(values: list[float], expected: int | None) -> None:
    assert stop_step(stopping(), values) == expected
    assert stop_step(stopping(is_highest=True), [-value for value in values]) == expected


def test_an_improvement_is_larger_than_min_delta() -> None:
    assert stop_step(stopping(min_delta=0.5), [3, 2.5, 2.25]) is None  # 3 - 2.25 is more than 0.5, since step 1
    assert stop_step(stopping(min_delta=0.5), [3, 2.5, 2.5]) == 3
    assert stop_step(stopping(patience=None), [1, 1, 1, 1]) is None


@given(
    st.lists(st.floats(-2, 2) | st.just(math.nan), min_size=1, max_size=20),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.25]),
    st.data(),
)
def test_a_resumed_run_stops_at_the_same_step(
    values: list[float], patience: int, min_delta: float, data: st.DataObject
) -> None:
    whole = stopping(patience, min_delta)
    expected = stop_step(whole, values)
    cut = data.draw(st.integers(0, (expected or len(values)) - 1))
    before = stopping(patience, min_delta)
    assert stop_step(before, values[:cut]) is None
    resumed = stopping(patience, min_delta)
    resumed.load_state(before.state())
    for step in range(1, cut + 1):  # evaluations that have counted
        resumed.evaluated(step, {NAME: -99.0})
    assert stop_step(resumed, values[cut:], cut + 1) == expected
    assert resumed.state() == whole.state()


def test_a_run_that_returns_to_a_step_counts_again_from_there() -> None:
    found = stopping(patience=3)
    assert stop_step(found, [3, 2, 4, 4]) is None
    found.rewind(3)
    assert found.last_step == 3
    assert stop_step(found, [5, 5], 4) == 5
    found.rewind(0)
    assert stop_step(found, [1], 1) is None
    assert found.state() == {"metric": NAME, "step": 1, "best": 1, "best_step": 1, "waited": 0}


def test_a_state_of_another_metric_does_not_count() -> None:
    found = stopping()
    found.load_state({"metric": "eval/other", "step": 3, "best": 0.0, "best_step": 1, "waited": 2})
    assert not found.is_over
    assert stopping(patience=None).state() == {}
    found.load_state({})
    assert found.last_step == 0


def test_the_reason_names_the_best_step() -> None:
    found = stopping()
    stop_step(found, [3, 2, 4, 4])
    assert found.reason == ("early stopping: eval/loss has not improved in 2 evaluations; its best is 2 at step 2")
    never = stopping()
    stop_step(never, [math.nan, math.nan])
    assert never.reason.endswith("; it was never a number")


def test_an_unknown_metric_is_named() -> None:
    with pytest.raises(UserError, match=r"metric: is 'eval/loss'; the evaluation has eval/bleu, eval/los"):
        stopping().evaluated(1, {"eval/los": 1.0, "eval/bleu": 1.0})


def test_a_recorded_evaluation_without_the_metric_counts_for_nothing() -> None:
    """The run was begun without this metric, such as one of generated answers."""
    found = stopping()
    found.evaluated(2, {"eval/los": 1.0}, is_recorded=True)
    assert found.last_step == 0
    found.evaluated(2, {NAME: 1.0}, is_recorded=True)
    assert found.last_step == 2
    assert stop_step(found, [1, 1], 3) == 4
