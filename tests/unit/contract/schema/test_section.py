"""A section remembers which of its keys were read, so that a key without effect is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.section import Section, as_plain, forget_reads, unread
from llmsuite.recipe.load import LoadedRecipe, load
from llmsuite.recipe.unread import unread_keys


@dataclasses.dataclass(kw_only=True)
class Inner(Section):
    a: int = 1
    b: list[int] = dataclasses.field(default_factory=list)

    def twice(self) -> int:
        return 2 * self.a


@dataclasses.dataclass(kw_only=True)
class Outer(Section):
    inner: Inner = dataclasses.field(default_factory=Inner)
    c: int = 3


def test_reading_marks_a_key() -> None:
    outer = Outer()
    assert list(unread(outer)) == [("inner", "a"), ("inner", "b"), ("c",)]
    assert outer.c == 3
    assert outer.inner is not None  # going through a section reads none of its keys
    assert list(unread(outer)) == [("inner", "a"), ("inner", "b")]
    outer.inner.twice()  # its own methods read as well as anybody
    assert list(unread(outer)) == [("inner", "b")]


def test_instances_count_for_themselves() -> None:
    first = Outer()
    second = Outer()
    assert first.c == 3
    assert ("c",) in unread(second)


def test_forgetting_starts_afresh() -> None:
    outer = Outer()
    assert (outer.c, outer.inner.a) == (3, 1)
    forget_reads(outer)
    assert len(list(unread(outer))) == 3


def test_plain_data_is_no_reading() -> None:
    outer = Outer(inner=Inner(b=[1, 2]))
    assert as_plain(outer) == {"inner": {"a": 1, "b": [1, 2]}, "c": 3}
    assert len(list(unread(outer))) == 3


def test_marking_leaves_no_trace_in_the_value() -> None:
    outer = Outer()
    assert outer.c == 3
    assert outer == Outer()
    assert repr(outer) == repr(Outer())


@pytest.fixture
def loaded(write_recipe: Callable[..., Path], registry: Registry) -> LoadedRecipe:
    changes: dict[str, Any] = {
        "dpo": {"beta": 0.2},
        "model.config": {"hidden_size": 64, "rope_scaling": {"rope_type": "default"}},
        "parallel": {},
        "loggers": [],
    }
    return load(write_recipe(changes), ["--checkpoint.save_steps=5"], registry)


def test_every_written_key_is_unread_after_loading(loaded: LoadedRecipe) -> None:
    assert loaded.unread() == [
        "checkpoint.save_steps",
        "data.train",
        "dpo.beta",  # but not loggers, which is given its default
        "model.config.hidden_size",
        "model.config.rope_scaling.rope_type",
        "model.family",
        "model.preset",
        "model.tokenizer",
        "output_dir",
        "stage",
        "train.global_batch_size",
        "train.learning_rate",
        "train.max_steps",
        "train.micro_batch_size",
    ]


def test_read_and_absent_keys_are_not_listed(loaded: LoadedRecipe) -> None:
    recipe = loaded.recipe
    assert recipe.model.config
    assert recipe.train.max_steps == 10
    assert recipe.checkpoint.save_steps == 5
    as_plain(recipe)
    idle = loaded.unread()
    assert not {"model.config.hidden_size", "train.max_steps", "checkpoint.save_steps"} & set(idle)
    assert {"model.family", "dpo.beta", "train.learning_rate"} <= set(idle)
    assert "dpo.label_smoothing" not in idle  # has its default: nobody expects an effect
    assert recipe.dpo.beta == 0.2  # type: ignore[attr-defined]
    assert "dpo.beta" not in loaded.unread()


def test_keys_without_effect_are_reported_with_their_defaults(
    loaded: LoadedRecipe, write_recipe: Callable[..., Path], registry: Registry
) -> None:
    messages = {problem.key: problem.message for problem in unread_keys(loaded)}
    unread = "nothing in this run reads it; remove it"
    assert messages["dpo.beta"] == f"{unread}, or set it to its default: --dpo.beta=0.1"
    assert messages["model.preset"] == f"{unread}, or set it to its default: --model.preset=null"
    assert messages["train.learning_rate"] == messages["model.config.hidden_size"] == unread  # neither has one
    idle = load(write_recipe({"dpo": {"beta": 0.2}}), ["--dpo.beta=0.1"], registry)
    assert "dpo.beta" not in {problem.key for problem in unread_keys(idle)}


def test_rules_are_asked_for_without_counting_as_reading(write_recipe: Callable[..., Path], registry: Registry) -> None:
    path = write_recipe({"dpo": {"beta": 0.2, "label_smoothing": 0.1}})
    assert {"dpo.beta", "dpo.label_smoothing"} <= set(load(path, [], registry).unread())


def test_no_rules_by_default() -> None:
    assert list(Outer().problems()) == []
