"""docs/guide/rewards.md: what it says to write works."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from llmsuite.contract.given import load_file
from llmsuite.contract.registry import load_plugins
from llmsuite.contract.schema.keys import walk
from llmsuite.contract.schema.reward import RewardSection
from llmsuite.contract.specs import StageSpec
from llmsuite.recipe.recipe_class import recipe_type
from llmsuite.rl.completion import Completion
from llmsuite.rl.rewards import Rewards
from tests.support.paths import ROOT

TEXT = (ROOT / "docs" / "guide" / "rewards.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def section_type(registry: Any) -> Any:
    spec = StageSpec(
        name="t", help="", config_cls=RewardSection, sections={"reward": RewardSection}, factory=lambda: object
    )
    registry.stages["t"] = spec
    cls, problems = recipe_type({"stage": "t", "model": {"family": "llama"}}, registry)
    assert not problems
    return {info.dotted for info in walk(cls)}, cls.__annotations__["reward"]


def completion(text: str, number: int = 0) -> Completion:
    more: dict[str, Any] = {"finish_reason": "stop", "columns": {"answer": 42}, "group": 0, "number": number}
    return Completion(prompt_ids=[1], ids=[2] * (len(text) + 1), logprobs=[-1.0] * (len(text) + 1), text=text, **more)


def test_the_examples_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for code in blocks("python"):
        name = re.match(r"# (\w+\.py)", code)
        assert name is not None
        (tmp_path / name[1]).write_text(code)
    registry = load_plugins()
    monkeypatch.setattr(sys, "path", [*sys.path])
    registry.require(load_file(tmp_path / "shortest.py"))
    _, cls = section_type(registry)
    functions = {"rewards.py:brief": 0.2, "rewards.py:contains_answer": 1.0, "shortest": 0.1}
    rewards = Rewards(cls(functions=functions, workers=1), registry.rewards)
    try:
        found = rewards.score([completion("it is 42"), completion("no", 1)])
    finally:
        rewards.close()
        del sys.modules["shortest"]
    assert rewards.names == ("brief", "contains_answer", "shortest", "shortest/tokens")
    assert found.tolist() == [[1, 1, 3 / 9, 9], [1, 0, 1, 3]]
    assert rewards.first_failure == ""


def test_the_recipe_has_keys_that_exist() -> None:
    registry = load_plugins()
    keys, cls = section_type(registry)
    first = blocks("json")[0]
    section = json.loads("{" + first + "}")["reward"]
    pattern = section["format"]["pattern"]
    assert re.fullmatch(pattern, r"so \boxed{4}.", re.DOTALL)
    assert not re.fullmatch(pattern, "so 4.", re.DOTALL)
    assert list(cls(functions=section["functions"]).problems()) == []
    for name, own in re.findall(r"^\| `(\w+)` \| .* \| (`.*`) \|$", TEXT, re.MULTILINE):
        listed = {f"reward.{name}.{key}" for key in re.findall(r"`(\w+)`", own)}
        if name in registry.rewards:
            assert listed == {key for key in keys if key.startswith(f"reward.{name}.")}


def test_the_list_names_each_built_in_reward() -> None:
    named = re.findall(r"^\| `(\w+)` \|", TEXT.partition("## A function")[0], re.MULTILINE)
    assert set(named) == set(load_plugins().rewards)
