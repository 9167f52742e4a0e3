"""A section declares which of its keys have no effect, and a recipe that sets one of them is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmsuite.base.errors import RecipeError
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.section import (
    Section,
    as_plain,
    changed_keys,
    keys_except,
    keys_in_vain,
    subsections,
    unused_keys,
    value_at,
    violations,
)
from llmsuite.recipe.load import load


@dataclasses.dataclass(kw_only=True)
class Inner(Section):
    size: int = 2
    names: list[str] = dataclasses.field(default_factory=list)

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.size < 0:
            yield "size", "is below 0"

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.size == 0:
            yield "names", "has no effect while size is 0"


@dataclasses.dataclass(kw_only=True)
class Outer(Section):
    path: str = ""
    inner: Inner = dataclasses.field(default_factory=Inner)
    other: Inner = dataclasses.field(default_factory=Inner)

    def unused(self) -> Iterator[tuple[str, str]]:
        if not self.path:
            yield "other", "has no effect without path"


def test_a_section_without_declarations_uses_all_its_keys() -> None:
    @dataclasses.dataclass(kw_only=True)
    class Plain(Section):
        beta: float = 0.1

    assert list(unused_keys(Plain(beta=3.0))) == []
    assert list(violations(Plain(beta=3.0))) == []


def test_a_key_is_unused_whatever_its_own_value_is() -> None:
    section = Outer(path="here", inner=Inner(size=0))
    assert list(unused_keys(section)) == [(("inner", "names"), "has no effect while size is 0")]
    assert list(keys_in_vain(section)) == []  # nothing is set in vain
    section.inner.names = ["a"]
    assert [key for key, _ in keys_in_vain(section)] == [("inner", "names")]


def test_the_name_of_a_section_stands_for_all_its_keys() -> None:
    keys = [("other", "size"), ("other", "names")]
    assert [key for key, _ in unused_keys(Outer())] == keys
    assert [key for key, _ in keys_in_vain(Outer(other=Inner(size=3)))] == keys[:1]


def test_violations_are_rules_and_keys_set_in_vain() -> None:
    section = Outer(inner=Inner(size=-1), other=Inner(size=3))
    assert list(violations(section)) == [
        ("inner.size", "is below 0"),
        ("other.size", "has no effect without path"),
    ]


def test_plain_data_has_all_keys() -> None:
    section = Outer(inner=Inner(names=["a"]))
    assert as_plain(section) == {
        "path": "", "inner": {"size": 2, "names": ["a"]}, "other": {"size": 2, "names": []}
    }  # fmt: skip


def test_values_are_found_by_their_paths() -> None:
    section = Outer(inner=Inner(size=3))
    assert value_at(section, "inner", "size") == 3
    assert value_at(section, "inner") is section.inner
    assert value_at(section, "another", "size") is None
    assert value_at(section, "path", "size") is None
    assert value_at(None, "size") is None


def test_sections_below_are_no_keys() -> None:
    assert subsections(Outer()) == ["inner", "other"]
    assert keys_except(Inner(), "size") == ["names"]
    assert keys_except(Outer(), "other") == ["path"]


def test_changed_keys_are_those_without_their_default() -> None:
    @dataclasses.dataclass(kw_only=True)
    class Required(Section):
        path: str

    assert changed_keys(Inner()) == []
    assert changed_keys(Inner(size=3, names=["a"])) == ["size", "names"]
    assert changed_keys(Inner(size=2, names=["a"])) == ["names"]
    assert changed_keys(Required(path="here")) == ["path"]


def _messages(path: Path, registry: Registry, *words: str) -> dict[str, str]:
    with pytest.raises(RecipeError) as caught:
        load(path, words, registry)
    return {problem.key: problem.message for problem in caught.value.problems}


def test_keys_in_vain_are_reported_with_their_defaults(write_recipe: Callable[..., Path], registry: Registry) -> None:
    path = write_recipe({"lora.alpha": 8.0, "checkpoint.best_is": "highest", "model.load": "any"})
    without = "has no effect while {} is null; set that too, or remove it, or set it to its default: --{}"
    assert _messages(path, registry) == {
        "lora.alpha": without.format("rank", "lora.alpha=16.0"),
        "checkpoint.best_is": without.format("best_metric", "checkpoint.best_is=lowest"),
        "model.load": without.format("weights", "model.load=exact"),
    }
    load(path, ["--lora.alpha=16.0", "--checkpoint.best_is=lowest", "--model.load=exact"], registry)


def test_keys_of_what_is_not_chosen_are_refused(registry: Registry) -> None:
    path = Path("recipes/llama/guess-grpo.json")
    load(path, ["--environment.guess.highest=20", "--rollout.engine=openai", "--rollout.openai.retries=9"], registry)
    found = _messages(
        path, registry, "--environment.name=null", "--environment.guess.highest=20", "--rollout.openai.retries=9",
        "--reward.http.retries=9",
    )  # fmt: skip
    assert found.keys() == {
        "environment.max_turns", "environment.guess.highest", "rollout.openai.retries", "reward.http.retries"
    }  # fmt: skip
    assert found["environment.guess.highest"].startswith(
        "has no effect while environment.name is null; set that to guess"
    )
    assert found["rollout.openai.retries"].startswith("has no effect with engine local; set that to openai")
    assert found["reward.http.retries"].startswith("has no effect without http in reward.functions; add that")
