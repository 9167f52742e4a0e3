"""The loss watchdog ends a run at the step at which Axolotl's ends it."""

from __future__ import annotations

import json

import pytest

from llmsuite.engine.early_stopping import LossWatchdog


def ends(losses: list[float], evaluated: tuple[int, ...] = (), patience: int = 3) -> int | None:
    """The step at which a run with these losses ends; it is resumed after each step."""
    found = LossWatchdog(5.0, patience)
    for step, loss in enumerate(losses, 1):
        found.step_ended(loss, step in evaluated)
        if found.is_over:
            return step
        state = json.loads(json.dumps(found.state()))
        found = LossWatchdog(5.0, patience)
        found.load_state(state)
    return None


@pytest.mark.parametrize(
    ("losses", "evaluated", "expected"),
    [
        ([6.0, 6.0, 6.0, 1.0], (), 4),  # `LossWatchDogCallback` sees a loss when the next step ends
        ([6.0, 6.0, 6.0], (), None),
        ([6.0, 6.0, 5.0, 6.0, 6.0, 6.0, 6.0], (), 7),
        ([6.0, 6.0, 6.0, 6.0, 6.0], (2,), 5),  # the last record of step 2 is that of the evaluation
        ([6.0, 6.0, 1.0, 6.0, 6.0], (3,), 5),
        ([6.0, 6.0, float("nan"), 6.0, 6.0], (), None),
    ],
)
def test_the_run_ends_after_steps_in_a_row(
    losses: list[float], evaluated: tuple[int, ...], expected: int | None
) -> None:
    assert ends(losses, evaluated) == expected


def test_without_a_threshold_there_is_no_end() -> None:
    found = LossWatchdog()
    for _ in range(9):
        found.step_ended(1e9, False)
    assert not found.is_over
    assert found.state() == {}


def test_its_reason() -> None:
    found = LossWatchdog(5.0, 1)
    found.step_ended(6.0, False)
    found.step_ended(6.0, False)
    assert found.is_over
    assert found.reason == "the loss of 1 steps was above train.loss_watchdog.threshold 5"
