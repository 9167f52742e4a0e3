"""The critic of a run as a run of its own: the same strategy and steps, other weights, head and learning rate."""

from __future__ import annotations

import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

from llmsuite.recipe.resolve import RunPlan
from llmsuite.recipe.shape import local_weights
from llmsuite.schema.lora import LoraSection
from llmsuite.schema.section import Section
from llmsuite.specs import PrePass, StageProfile


def critic_weights(plan: RunPlan) -> Path | None:
    """The directory of the weights that the critic begins with; None to initialise it from the seed."""
    assert plan.profile.critic is not None
    given = plan.profile.critic.weights
    return plan.weights if given is None else local_weights(given)


def critic_plan(plan: RunPlan) -> RunPlan:
    """The plan by which the critic is built, trained and counted. It has no adapters: it is trained whole."""
    critic, recipe = plan.profile.critic, plan.recipe
    assert critic is not None
    rate = recipe.train.learning_rate if critic.learning_rate is None else critic.learning_rate
    named = recipe.model.weights if critic.weights is None else critic.weights
    changed = _changed(
        recipe,
        model=_changed(recipe.model, weights=named),
        train=_changed(recipe.train, learning_rate=rate),
        lora=LoraSection(),
    )
    return dataclasses.replace(
        plan,
        loaded=dataclasses.replace(plan.loaded, recipe=changed),
        stage=dataclasses.replace(plan.stage, head="score", profile=functools.partial(_profile, plan.profile)),
        model_config=dataclasses.replace(plan.model_config, head="score"),
        weights=critic_weights(plan),
    )


def _profile(of_run: StageProfile, section: Any) -> StageProfile:
    """What a critic sums up, and the one pre-pass in which it judges a rollout."""
    assert of_run.critic is not None
    prepasses = (PrePass(kind="model"),)
    return StageProfile(sums=of_run.critic.sums, prepasses=prepasses, updates=of_run.updates)


def _changed(section: Any, **values: Any) -> Any:
    """A section with other values. `dataclasses.replace` would read all its keys, which counts as using them."""
    assert isinstance(section, Section)
    changed = copy.copy(section)
    changed.__dict__.update(values, _read=set())
    return changed
