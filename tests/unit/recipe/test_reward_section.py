"""The section `reward`: its functions, and the keys of each registered reward below its name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import RecipeError, UserError
from llmsuite.base.resources import bundled
from llmsuite.contract.given import plugin_from_specs
from llmsuite.contract.registry import PluginInfo, Registry, load_plugins
from llmsuite.contract.schema.reward import RewardSection
from llmsuite.contract.schema.section import Section
from llmsuite.contract.specs import RewardSpec, StageSpec
from llmsuite.recipe.resolve import plan_run


@dataclasses.dataclass(kw_only=True)
class Plain(Section):
    """Nothing."""


@dataclasses.dataclass(kw_only=True)
class Fee(Section):
    """Cost of a token."""

    price: float = 1.0
    """Price of a token."""


@dataclasses.dataclass(kw_only=True)
class Owing(Section):
    price: float
    """Has no default."""


def _never(*given: Any) -> Any:
    raise AssertionError("a recipe is only read here")


def registry_with(*specs: Any) -> Registry:
    registry = load_plugins()
    stage = StageSpec(name="sampled", help="", config_cls=Plain, sections={"reward": RewardSection}, factory=_never)
    registry.require(PluginInfo("test", "a test", "test", plugin=plugin_from_specs([stage, *specs])))
    return registry


def plan(folder: Path, reward: Any, *specs: Any) -> Any:
    recipe = json.loads((bundled("recipes") / "llama" / "sft.json").read_text())
    for section in ("sft", "parallel", "launch"):
        recipe.pop(section, None)
    path = folder / "recipe.json"
    path.write_text(json.dumps({**recipe, "stage": "sampled", "device": "cpu", "reward": reward}))
    words = ["--model.weights=null", "--model.tokenizer=t", "--engine.precision=fp32", "--engine.recompute=none"]
    return plan_run(path, words, registry_with(*specs))


def refused(folder: Path, reward: Any) -> str:
    with pytest.raises(RecipeError) as error:
        plan(folder, reward)
    return str(error.value)


def test_rewards_have_keys_of_their_own(tmp_path: Path) -> None:
    spec = RewardSpec(name="fee", help="", config_cls=Fee, factory=_never)
    found = plan(tmp_path, {"functions": {"exact": 1.0, "fee": -0.1}, "fee": {"price": 2.0}}, spec).recipe.reward
    assert (found.functions, found.fee.price, found.exact.column) == ({"exact": 1.0, "fee": -0.1}, 2.0, "answer")


def test_invalid_rewards_are_named(tmp_path: Path) -> None:
    assert "reward.functions: no reward is called 'exakt'; did you mean 'exact'?" in refused(
        tmp_path, {"functions": {"exakt": 1.0}}
    )
    assert "reward.functions: nowhere/r.py is not a file" in refused(tmp_path, {"functions": {"nowhere/r.py:f": 1.0}})
    assert "reward.exact.colum: unknown key; did you mean 'column'?" in refused(
        tmp_path, {"functions": {"exact": 1.0}, "exact": {"colum": "x"}}
    )
    assert "reward.format.pattern: is not a regular expression" in refused(
        tmp_path, {"functions": {"format": 1.0}, "format": {"pattern": "("}}
    )
    assert "reward.http.url: is 'localhost'" in refused(
        tmp_path, {"functions": {"http": 1.0}, "http": {"url": "localhost"}}
    )
    assert "reward.functions: is empty" in refused(tmp_path, {"functions": {}})
    assert 'reward.functions.exact: expected number, found "much"' in refused(
        tmp_path, {"functions": {"exact": "much"}}
    )
    assert 'reward.functions: expected object, found ["exact"]' in refused(tmp_path, {"functions": ["exact"]})


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("def brief(completions): return 1", "has no function 'breif'; did you mean 'brief'?"),
        ("breif = [1.0", ", line 1: is no Python: '[' was never closed"),
        ("def breif(prompts, completions, **rest): ...", "breif(prompts, completions) is called as breif(completions)"),
        ("def breif(): ...", ", line 1: breif() is called as breif(completions)"),
        ("def breif(completions, *, answer): ...", "breif(completions, answer) is called as breif(completions)"),
    ],
)
def test_a_function_that_a_file_does_not_have_is_refused_before_a_run(tmp_path: Path, code: str, why: str) -> None:
    (tmp_path / "mine.py").write_text(code)
    said = refused(tmp_path, {"functions": {f"{tmp_path}/mine.py:breif": 1.0}})
    assert f"reward.functions: {tmp_path}/mine.py" in said
    assert why in said


@pytest.mark.parametrize(
    "code",
    [
        "def f(completions, **rest): ...",
        "def f(*all): ...",
        "async def f(completions, scale=1): ...",
        "if True:\n    def f(): ...",
        "def of(g): return g\n@of\ndef f(): ...",
        "from elsewhere import f",
        "from elsewhere import *",
        "import functools\nf = functools.partial(max, 3)",
        "class f: ...",
    ],
)
def test_errors_that_only_running_a_file_shows_are_left_to_the_run(tmp_path: Path, code: str) -> None:
    (tmp_path / "mine.py").write_text(code)
    plan(tmp_path, {"functions": {f"{tmp_path}/mine.py:f": 1.0}})


@pytest.mark.parametrize(
    ("name", "key"), [("format", "pattern"), ("length", "target"), ("http", "url"), ("model", "weights")]
)
def test_required_keys_of_rewards(tmp_path: Path, name: str, key: str) -> None:
    why = f"reward.{name}.{key}: is required with the reward {name}; set it to "
    assert why in refused(tmp_path, {"functions": {name: 1.0}})
    plan(tmp_path, {"functions": {"exact": 1.0}})


def test_a_function_in_a_file_needs_no_plugin(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def score(completions):\n    return [1.0]\n")
    key = f"{tmp_path}/r.py:score"
    assert plan(tmp_path, {"functions": {key: 1.0}}).recipe.reward.names() == {key: "score"}


@pytest.mark.parametrize(
    ("name", "config_cls", "why"),
    [
        ("functions", None, "cannot be called 'functions'"),
        ("a-b", None, "cannot be called 'a-b'"),
        ("owing", Owing, "every key needs a default"),
        ("odd", dict, "derived from llmsuite.contract.schema.section.Section"),
        ("exact", None, "cannot replace a built-in name"),
    ],
)
def test_rewards_that_would_break_the_section(name: str, config_cls: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        registry_with(RewardSpec(name=name, help="", config_cls=config_cls, factory=_never))


@pytest.mark.parametrize("name", ["rollout", "reward", "environment"])
def test_a_section_of_another_kind_under_a_shared_name_is_refused(name: str) -> None:
    """Rules and the engine would not see it."""
    stage = StageSpec(name="own", help="", config_cls=Plain, sections={name: Owing}, factory=_never)
    plugin = PluginInfo("test", "a test", "test", plugin=plugin_from_specs([stage]))
    with pytest.raises(UserError, match=rf"section '{name}' of stage 'own' is a Owing; it has to be, or derive from"):
        load_plugins().require(plugin)
