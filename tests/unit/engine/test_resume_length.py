"""A run resumes with another length if the finished steps would have had the same learning rates."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.engine.run_record import check_length, is_restated
from llmsuite.parallel.learning_rate import LearningRate, Schedule

AT = Path("runs/x/checkpoints/step-10")
COSINE = Schedule(total_steps=10, learning_rate=1e-3, lr_schedule="cosine")


def but(schedule: Schedule, **keys: Any) -> Schedule:
    return dataclasses.replace(schedule, **keys)


def rates(schedule: Schedule, count: int) -> list[float]:
    made = LearningRate(schedule, schedule.total_steps)
    return [made.at(step) for step in range(1, count + 1)]


SCHEDULES = st.builds(
    Schedule,
    total_steps=st.integers(1, 40),
    learning_rate=st.just(3e-4),
    lr_schedule=st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    decay_ratio=st.sampled_from([None, 0.1, 0.25, 0.5]),
    decay_type=st.sampled_from([None, "linear", "cosine", "sqrt"]),
    warmup_ratio=st.sampled_from([0.0, 0.1, 0.3]),
    warmup_steps=st.sampled_from([None, None, 1, 3]),
    warmup_from_zero=st.booleans(),
    min_lr_ratio=st.sampled_from([0.0, 0.1, 1.0]),
)


@given(SCHEDULES, SCHEDULES, st.data())
def test_a_run_resumes_only_if_it_equals_one_with_the_new_length_from_the_start(
    then: Schedule, other: Schedule, data: st.DataObject
) -> None:
    now = data.draw(st.sampled_from([other, but(then, total_steps=other.total_steps)]))
    step = data.draw(st.integers(1, then.total_steps))
    try:
        check_length(then, now, step, AT, False)
    except UserError:
        assert now.total_steps < step or rates(now, step) != rates(then, step)
    else:
        assert now.total_steps >= step
        assert rates(now, step) == rates(then, step)


@given(SCHEDULES, st.integers(1, 40), st.data())
def test_a_run_with_a_constant_rate_so_far_resumes_with_another_length(
    then: Schedule, more: int, data: st.DataObject
) -> None:
    then = but(then, lr_schedule=data.draw(st.sampled_from(["constant", "wsd"])), warmup_ratio=0.0)
    whole = LearningRate(then, then.total_steps)
    flat = [step for step in range(1, then.total_steps + 1) if whole.at(step) >= then.learning_rate]
    if flat:  # else it is the warm-up to the end
        check_length(then, but(then, total_steps=then.total_steps + more), flat[-1], AT, False)


@given(SCHEDULES, SCHEDULES, st.data())
def test_a_longer_run_resumes_with_a_restated_schedule(then: Schedule, now: Schedule, data: st.DataObject) -> None:
    now = but(now, total_steps=then.total_steps + data.draw(st.integers(1, 9)))
    check_length(then, now, data.draw(st.integers(1, then.total_steps)), AT, True)


def test_the_error_for_cosine_has_the_reason_and_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    longer = but(COSINE, total_steps=20)
    with pytest.raises(UserError) as error:
        check_length(COSINE, longer, 10, AT, False)
    assert str(error.value) == (
        f"{AT}: the run had 10 steps and is to have 20; its learning rate was computed for 10 steps with cosine: step "
        "2 had 0.0009755 and would have had 0.0009938; to resume anyway, restate the schedule: with "
        "--train.lr_schedule=cosine step 11 gets the 0.0005 of a run of 20 steps, and constant, linear, cosine or wsd "
        "may stand there; or resume it with 10 steps and the schedule it had"
    )
    check_length(COSINE, longer, 10, AT, True)
    assert "learning rate: 2.447e-05 at step 10, 0.0005 at step 11, as restated" in capsys.readouterr().out
    check_length(COSINE, longer, 1, AT, False)  # the first step has the peak in both


def test_a_warm_up_that_is_a_share_of_all_steps_may_be_given_in_steps() -> None:
    then = Schedule(total_steps=10, learning_rate=1e-3, lr_schedule="constant", warmup_ratio=0.4)
    with pytest.raises(UserError, match=r"it was: --train.warmup_steps=4 --train.warmup_ratio=0; or resume it with 10"):
        check_length(then, but(then, total_steps=20), 10, AT, False)
    check_length(then, but(then, total_steps=20, warmup_ratio=0.0, warmup_steps=4), 10, AT, False)


def test_a_run_cannot_end_before_its_checkpoint() -> None:
    constant = but(COSINE, lr_schedule="constant")
    check_length(constant, but(constant, total_steps=10), 10, AT, False)
    with pytest.raises(
        UserError, match=f"^{AT}: has step 10, and the run is to have 9 steps now; raise train.max_steps"
    ):
        check_length(constant, but(constant, total_steps=9), 10, AT, True)


def test_a_restated_schedule_needs_a_longer_run() -> None:
    with pytest.raises(UserError, match=r"train.lr_schedule was cosine and is linear; .*; resume it with 10 steps"):
        check_length(COSINE, but(COSINE, lr_schedule="linear"), 5, AT, True)


@pytest.mark.parametrize(
    ("origin", "wanted"),
    [
        ("--train.lr_schedule=wsd", True),
        ('--train={"lr_schedule": "wsd"}', True),
        ("x.json:3:4", False),
        ("--smoke", False),
    ],
)
def test_only_the_command_line_restates_the_schedule(origin: str, wanted: bool) -> None:
    others = {("train", "warmup_ratio"): "--train.warmup_ratio=0", ("train", "max_steps"): "--train.max_steps=20"}
    assert is_restated({**others, ("train", "lr_schedule"): origin}) is wanted
    assert not is_restated(others)
