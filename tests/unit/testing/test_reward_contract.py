"""`assert_reward_contract` accepts the rewards of llmsuite, and names what is wrong with others."""

from __future__ import annotations

import pytest

from llmsuite.contract.registry import ALLOW_LIST
from llmsuite.testing import assert_reward_contract
from tests.conftest import PluginSite

PLUGIN = """
import dataclasses
import itertools

import llmsuite
from llmsuite.contract.hookspecs import RewardSpec, Section

COUNT = itertools.count()


@dataclasses.dataclass(kw_only=True)
class Silent(Section):
    power: float = 1.0


def counted(section):
    return lambda completions: [next(COUNT) for _ in completions]


def short(section):
    return lambda completions: []


def text(section):
    return lambda completions: ["1.0" for _ in completions]


@llmsuite.hookimpl
def llmsuite_register_rewards():
    return [
        RewardSpec(name="silent", help="h", config_cls=Silent, factory=short),
        RewardSpec(name="counted", help="h", factory=counted),
        RewardSpec(name="short", help="h", factory=short),
        RewardSpec(name="text", help="h", factory=text),
    ]
"""


def test_built_in_rewards_keep_it() -> None:
    assert assert_reward_contract("exact", ["4", "5"], columns={"answer": "4"}) == [1.0, 0.0]
    assert assert_reward_contract("format", ["12", "a"], keys={"pattern": "[0-9]+"}) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("silent", "Silent: write a docstring under power"),
        ("counted", "counted gives the same completions other numbers"),
        ("short", r"short: it returned \[\], which is not a list of 1 rewards"),
        ("text", "text: it returned '1.0', which is a text, not a number"),
        ("model", "model needs services of a run, such as a model; test it by a run"),
        ("nothing", "no reward is called 'nothing'"),
    ],
)
def test_what_breaks_it_is_named(reward: str, message: str, site: PluginSite, monkeypatch: pytest.MonkeyPatch) -> None:
    site.install("broken_rewards", PLUGIN)
    monkeypatch.setenv(ALLOW_LIST, "broken_rewards")
    with pytest.raises(AssertionError, match=message):
        assert_reward_contract(reward, ["a", "b"])
