"""Steps after which the model is evaluated or saved."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from llmsuite.engine.cadence import Cadence, evaluation_interval, total_steps
from tests.support import dpo_case


def cadence(**keys: Any) -> Cadence:
    defaults = {"total_steps": 10, "global_batch_size": 4, "log_steps": 1, "num_samples": 10}
    return Cadence(**{**defaults, "eval_steps": None, "save_steps": None, **keys})


def test_a_share_of_the_steps_is_rounded_up() -> None:
    train = dataclasses.replace(dpo_case.train_section(), max_steps=None, num_epochs=3, global_batch_size=4)
    for share, steps in ((0.25, 2), (0.3, 3), (1 / 12, 1), (0.9, 8)):
        section = dataclasses.replace(train, eval_steps=share)
        assert total_steps(section.max_steps, section.num_epochs, 10, 4) == 8
        assert evaluation_interval(section, 8) == steps
    assert evaluation_interval(dataclasses.replace(train, eval_steps="epoch"), 8) == "epoch"


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
