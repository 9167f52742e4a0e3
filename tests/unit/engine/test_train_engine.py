"""What an engine keeps in a checkpoint, besides the tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

from llmsuite.checkpoint.train_state import TrainState
from llmsuite.engine.eager_engine import EagerEngine
from llmsuite.engine.guard import Guard
from llmsuite.engine.rules import LossScale, StepRules

NOTHING: Any = None
START = TrainState(step=3, samples=12, seed=0, recipe_sha256="")


def engine(guard: Guard, scale: LossScale) -> EagerEngine:
    """One without a model, whose state are numbers."""
    return EagerEngine(NOTHING, NOTHING, StepRules(guard, scale))


def saved() -> TrainState:
    """The state of an engine after three steps, of which one was bad."""
    used = engine(Guard(spike_factor=2.0, norms=[0.5, 0.25], bad_steps=1, max_step=3), LossScale(64.0, 7))
    return dataclasses.replace(START, **used.state_dict())


def test_a_resumed_engine_has_the_numbers_of_the_checkpoint() -> None:
    resumed = engine(Guard(spike_factor=2.0), LossScale())
    resumed.load_state_dict(saved())
    assert resumed.rules.guard == Guard(spike_factor=2.0, norms=[0.5, 0.25], bad_steps=1, max_step=3)
    assert resumed.rules.loss_scale == LossScale(64.0, 7)
    assert dataclasses.replace(START, **resumed.state_dict()) == saved()


def test_bad_steps_stay_counted_after_a_roll_back() -> None:
    rolled_back = engine(Guard(spike_factor=2.0, norms=[9.0], bad_steps=4, max_step=5), LossScale(8.0, 0))
    rolled_back.roll_back(saved())
    assert rolled_back.rules.guard == Guard(spike_factor=2.0, norms=[0.5, 0.25], bad_steps=4, max_step=5)
    assert rolled_back.rules.loss_scale == LossScale(64.0, 7)


def test_with_rules_leaves_the_engine_itself_alone() -> None:
    own = engine(Guard(), LossScale())
    other = own.with_rules(StepRules(may_be_empty=True))
    assert other.rules.may_be_empty
    assert not own.rules.may_be_empty
