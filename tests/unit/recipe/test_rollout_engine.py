"""Rollout engines in recipes: the keys of each below its name, and those that plugins bring."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from llmsuite.base.errors import RecipeError, UserError
from llmsuite.contract.given import plugin_from_specs
from llmsuite.contract.registry import PluginInfo, Registry, load_plugins
from llmsuite.contract.schema.section import Section
from llmsuite.contract.specs import RolloutEngineSpec
from llmsuite.recipe.resolve import RunPlan, plan_run
from tests.support.paths import ROOT

RECIPE = ROOT / "recipes" / "llama" / "grpo.json"


@dataclasses.dataclass(kw_only=True)
class Slow(Section):
    """Takes its time."""

    seconds: float = 1.0
    """For a token."""


@dataclasses.dataclass(kw_only=True)
class Owing(Section):
    seconds: float
    """Has no default."""


def _never(context: Any) -> Any:
    raise AssertionError("a recipe is only read here")


def registry_with(name: str = "slow", config_cls: Any = Slow, remote: bool = False) -> Registry:
    registry = load_plugins()
    spec = RolloutEngineSpec(name=name, help="", factory=_never, config_cls=config_cls, remote=remote)
    registry.require(PluginInfo("test", "a test", "test", plugin=plugin_from_specs([spec])))
    return registry


def plan(registry: Registry, *words: str) -> RunPlan:
    return plan_run(RECIPE, words, registry, smoke=True)


def test_a_plugin_brings_an_engine_with_keys_of_its_own() -> None:
    found = plan(registry_with(), "--rollout.engine=slow", "--rollout.slow.seconds=2.5")
    recipe: Any = found.recipe
    assert recipe.rollout.slow.seconds == 2.5
    assert found.train.rollout_engine is not None
    assert found.train.rollout_engine.name == "slow"
    with pytest.raises(RecipeError, match=r"rollout\.slow\.minutes"):
        plan(registry_with(), "--rollout.slow.minutes=1")


def test_the_run_itself_draws_by_default(registry: Registry) -> None:
    found = plan(registry)
    assert found.train.rollout_engine is registry.rollout_engines["local"]
    assert plan_run(ROOT / "recipes" / "llama" / "sft.json", [], registry, smoke=True).train.rollout_engine is None


def test_only_remote_engines_draw_ahead() -> None:
    words = ("--rollout.engine=slow", "--rollout.max_staleness=2", "--grpo.rollout_correction=mis")
    plan(registry_with(remote=True), *words)
    with pytest.raises(RecipeError, match="engine slow samples in the training process"):
        plan(registry_with(), *words)


@pytest.mark.parametrize(
    ("name", "config_cls", "says"),
    [
        ("temperature", None, "cannot be called 'temperature'"),
        ("a-b", None, "cannot be called 'a-b'"),
        ("slow", Owing, "rollout engine 'slow': every key needs a default"),
        ("slow", dict, "config_cls of rollout engine 'slow' has to be a dataclass"),
        ("local", None, "cannot replace a built-in name"),
    ],
)
def test_an_engine_that_would_break_recipes_is_refused(name: str, config_cls: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        registry_with(name, config_cls)
