"""Steps after which the model is evaluated or saved."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from llmsuite.engine.cadence import Cadence


def cadence(**keys: Any) -> Cadence:
    defaults = {"total_steps": 10, "global_batch_size": 4, "log_steps": 1, "num_samples": 10}
    return Cadence(**{**defaults, "eval_steps": None, "save_steps": None, **keys})


def test_cadence_in_steps() -> None:
    found = cadence(eval_steps=4, save_steps=None, log_steps=3)
    steps = range(1, 11)
    assert [step for step in steps if found.evaluates(step)] == [4, 8, 10]
    assert [step for step in steps if found.saves(step)] == [10]
    assert [step for step in steps if found.logs(step)] == [3, 6, 9, 10]


@given(num_samples=st.integers(1, 50), size=st.integers(1, 20), total=st.integers(1, 60))
def test_cadence_in_epochs(num_samples: int, size: int, total: int) -> None:
    """The step that takes the last sample of an epoch, which may be the last one of several."""
    found = cadence(
        eval_steps="epoch", save_steps="epoch", num_samples=num_samples, global_batch_size=size, total_steps=total
    )
    last_samples = range(num_samples - 1, total * size, num_samples)
    expected = {last // size + 1 for last in last_samples} | {total}
    assert {step for step in range(1, total + 1) if found.evaluates(step)} == expected
    assert {step for step in range(1, total + 1) if found.saves(step)} == expected
