"""Capabilities and profiles of stages are held against their classes, in both directions for the built-in ones."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.contract.registry import Registry
from llmsuite.contract.specs import CriticProfile, StageProfile, StageSpec
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.engine.batch import Batch, BatchLayout
from llmsuite.engine.data import make_stage
from llmsuite.engine.row_reader import PackingReader
from llmsuite.engine.stage import (
    CriticStage,
    GeneratingStage,
    LossTerms,
    RolloutStage,
    Stage,
    StatefulStage,
    shown_capabilities,
)
from llmsuite.recipe.resolve import RunPlan, plan_run
from llmsuite.stages.dpo import DpoStage
from tests.conftest import TRAINING_STAGES
from tests.support.paths import DATA, ROOT

SHOWN = {"async_rollout", "generation", "step_programs"}
"""Capabilities that are bases and methods of a class."""

SAMPLING = {"gkd": {"on_policy": 0.5}}
"""Keys with which a stage has rollouts, where it has none by default."""


def spec_of(registry: Registry, name: str) -> StageSpec:
    spec = registry.stages[name]
    assert isinstance(spec, StageSpec)
    return spec


def made(registry: Registry, name: str, key: str = "", value: Any = None) -> tuple[Stage[Any], RunPlan]:
    """The stage of a recipe in which a key is set, whether or not the stage claims to support it."""
    plan = plan_run(ROOT / "recipes" / "llama" / f"{name}.json", [], registry, smoke=True)
    if key:
        section, _, field = key.partition(".")
        plan.recipe.__dict__[section].__dict__[field] = value
    tokenizer = TextTokenizer(DATA / "tokenizer")
    return make_stage(plan.model, plan.data, plan.parallel, plan.train, registry, lambda: "", tokenizer), plan


def first_batches(registry: Registry, name: str, key: str = "", value: Any = None) -> list[Batch]:
    """Batches of one sample each; none of a stage with rollouts, whose samples have no completions yet."""
    stage, plan = made(registry, name, key, value)
    if plan.train.profile.updates:
        return []
    samples = stage.reader.read(plan.data.train_path)
    return [stage.collate([sample]) for sample in itertools.islice(samples, 3)]


@pytest.mark.parametrize("name", TRAINING_STAGES)
def test_a_stage_claims_what_its_class_shows(name: str, registry: Registry) -> None:
    spec = spec_of(registry, name)
    cls = spec.factory()
    profile = spec.profile(spec.config_cls(**SAMPLING.get(name, {})))
    assert spec.capabilities & SHOWN == shown_capabilities(cls)
    assert issubclass(cls, RolloutStage) == (profile.updates > 0)
    assert issubclass(cls, StatefulStage) == ("reward" in spec.sections)  # which rewards have no signal is counted
    assert issubclass(cls, CriticStage) == (profile.critic is not None)


@pytest.mark.parametrize("name", TRAINING_STAGES)
def test_a_stage_packs_if_it_claims_to(name: str, registry: Registry) -> None:
    stage, _ = made(registry, name, "data.packing", "best_fit")
    assert isinstance(stage.reader, PackingReader) == ("packing" in spec_of(registry, name).capabilities)


@pytest.mark.parametrize("name", TRAINING_STAGES)
@pytest.mark.parametrize(
    ("capability", "key", "value", "entry"),
    [
        ("mtp", "train.mtp_loss_weight", 0.3, "mtp_targets"),
        ("prompt_lengths", "reft.rank", 4, "prompt_lengths"),
    ],
)
def test_batches_have_what_a_key_needs_if_the_stage_claims_it(
    name: str, capability: Any, key: str, value: Any, entry: str, registry: Registry
) -> None:
    batches = first_batches(registry, name, key, value)
    claims = capability in spec_of(registry, name).capabilities
    assert [entry in batch for batch in batches] == [claims] * len(batches)
    assert batches or not claims


@pytest.mark.parametrize("name", TRAINING_STAGES)
def test_sequences_and_logits_are_as_claimed(name: str, registry: Registry) -> None:
    spec = spec_of(registry, name)
    batches = first_batches(registry, name)
    _, plan = made(registry, name)
    length = plan.recipe.data.max_length
    has_length = {batch["input_ids"].shape[1] == length for batch in batches}
    assert has_length <= {"fixed_length" in spec.capabilities}
    assert {"positions" not in batch for batch in batches} <= {"all_logits" in spec.capabilities}
    assert batches or not spec.capabilities & {"fixed_length", "all_logits"}


@pytest.mark.parametrize("name", TRAINING_STAGES)
def test_quantised_training_and_prefixes_use_one_model(name: str, registry: Registry) -> None:
    spec = spec_of(registry, name)
    if spec.capabilities & {"qat", "prefix"}:
        profile = spec.profile(spec.config_cls())
        assert not profile.prepasses
        assert profile.critic is None
        assert spec.factory().before_training is Stage.before_training, "it would need the initial model"


class Plain(Stage[Any]):
    """A stage with nothing but a loss."""

    row_kind = "preference"

    def collate(self, samples: Sequence[Any]) -> Batch:
        return {"num_tokens": 0, "num_supervised": 0}

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        raise AssertionError("nothing is trained")


class Sampling(Plain, RolloutStage[Any]):
    """A stage with rollouts and no critic."""

    def roll_out(self, step: int, samples: Any, rollouts: Any) -> Any:
        raise AssertionError("nothing is sampled")

    def evaluate_rollouts(self, samples: Any, rollouts: Any) -> Any:
        raise AssertionError("nothing is sampled")


def critic(section: Any) -> StageProfile:
    return StageProfile(updates=1, critic=CriticProfile(key="dpo"))


@pytest.mark.parametrize(
    ("cls", "changed", "said"),
    [
        (Plain, {"capabilities": {"generation"}}, "it has the capability generation, .*engine.stage.GeneratingStage"),
        (Sampling, {"capabilities": {"async_rollout"}}, "the capability async_rollout, .*stage.AsyncRolloutStage"),
        (Plain, {"capabilities": {"step_programs"}}, "its class Plain has to define `batch_layout`"),
        (
            Plain,
            {"profile": lambda section: StageProfile(updates=1)},
            "it has rollouts in its profile, so its class Plain has to derive from llmsuite.engine.stage.RolloutStage",
        ),
        (Sampling, {"profile": critic}, "it has a critic in its profile, .*stage.CriticStage"),
    ],
)
def test_a_claim_without_its_class_is_refused(
    registry: Registry, cls: type, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=f"^stage dpo: .*{said}"):
        stage_with(registry, lambda: cls, changed)


def stage_with(registry: Registry, factory: Callable[[], Any], changed: dict[str, Any]) -> Stage[Any]:
    plan = plan_run(ROOT / "recipes" / "llama" / "dpo.json", [], registry, smoke=True)
    assert isinstance(plan.train.stage, StageSpec)
    spec = dataclasses.replace(plan.train.stage, factory=factory, **{"capabilities": set(), **changed})
    train_plan = dataclasses.replace(plan.train, stage=spec)
    return make_stage(
        plan.model, plan.data, plan.parallel, train_plan, registry, lambda: "", TextTokenizer(DATA / "tokenizer")
    )


def test_a_class_may_do_more_than_its_spec_claims(registry: Registry) -> None:
    """A plugin may derive from a stage, and have a loss that supports less."""
    stage = stage_with(registry, lambda: DpoStage, {})
    assert isinstance(stage, GeneratingStage)
    assert isinstance(stage.batch_layout, BatchLayout)


def test_a_layout_may_be_an_attribute() -> None:
    attributes = {"batch_layout": BatchLayout(rows=["x"])}
    assert shown_capabilities(type("Rows", (Plain,), attributes)) == {"step_programs"}
    assert shown_capabilities(Plain) == frozenset()
