"""The plans of a run's critic: the same strategy and steps as the model; other weights, head and learning rate."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from llmsuite.contract.schema.lora import LoraSection
from llmsuite.contract.specs import PrePass, StageProfile, StageSpec
from llmsuite.recipe.plans import ModelPlan, ParallelPlan, TrainPlan
from llmsuite.recipe.shape import local_weights


@dataclasses.dataclass(frozen=True)
class CriticPlans:
    """The plans by which a critic is built, trained and estimated. It has no adapters: all parameters are trained."""

    model: ModelPlan
    parallel: ParallelPlan
    train: TrainPlan


def critic_plans(model_plan: ModelPlan, parallel_plan: ParallelPlan, train_plan: TrainPlan) -> CriticPlans | None:
    """Derive the plans of the critic from those of the run; None without a critic."""
    profile = train_plan.profile
    critic = profile.critic
    if critic is None:
        return None
    rate = train_plan.section.learning_rate if critic.learning_rate is None else critic.learning_rate
    named = model_plan.section.weights if critic.weights is None else critic.weights
    weights = model_plan.weights if critic.weights is None else local_weights(critic.weights)
    assert isinstance(train_plan.stage, StageSpec), "only stages have a critic"
    stage = dataclasses.replace(
        train_plan.stage,
        capabilities=train_plan.stage.capabilities | {"score_head"},
        profile=functools.partial(_profile, profile),
    )
    engine = parallel_plan.engine
    if engine.compiles_steps:  # of the model only; the critic is trained in eager mode
        engine = dataclasses.replace(engine, mode="dynamic", program="layers")
    return CriticPlans(
        model=dataclasses.replace(
            model_plan,
            section=dataclasses.replace(model_plan.section, weights=named),
            config=dataclasses.replace(model_plan.config, head="score"),
            weights=weights,
            lora=LoraSection(),
        ),
        parallel=dataclasses.replace(parallel_plan, engine=engine),
        train=dataclasses.replace(
            train_plan, section=dataclasses.replace(train_plan.section, learning_rate=rate), stage=stage
        ),
    )


def _profile(run_profile: StageProfile, section: Any) -> StageProfile:
    """Return the profile of the critic: its metrics, and the one pre-pass that computes the values of a rollout."""
    assert run_profile.critic is not None
    prepasses = (PrePass(kind="model"),)
    return StageProfile(sums=run_profile.critic.sums, prepasses=prepasses, updates=run_profile.updates)
