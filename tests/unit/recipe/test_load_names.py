"""A recipe's stage and family decide which keys it may have; a wrong name does not hide what else is wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import llmsuite
from llmsuite.base.errors import Problem, RecipeError, UserError
from llmsuite.contract.hookspecs import StageSpec
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.section import Section
from llmsuite.recipe.load import REMOVE, load
from llmsuite.recipe.source import MAX_INT, MIN_INT
from tests.conftest import STAGES, VALID, position, registry_with

Problems = Callable[..., list[Problem]]


@dataclasses.dataclass(kw_only=True)
class OtherSection(Section):
    size: int = 1


class OtherPlugin:
    @llmsuite.hookimpl
    def llmsuite_register_stages(self) -> list[StageSpec]:
        return [StageSpec(name="other", help="", config_cls=OtherSection, factory=lambda: object)]


def test_the_valid_recipe_is_valid(plan: Callable[..., Any]) -> None:
    assert plan().recipe.dpo.beta == 0.1


@pytest.mark.parametrize(
    "text", ["model_name_or_path: org/m\nstage: sft\nlora_rank: 8\n", "base_model: org/m\ndatasets: []\n"]
)
def test_arguments_of_other_suites_are_no_recipe(tmp_path: Path, registry: Registry, text: str) -> None:
    path = tmp_path / "arguments.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load(path, [], registry)
    (problem,) = caught.value.problems
    assert problem.where == f"{path}:1:1"
    assert "`llmsuite recipe from-llamafactory FILE -o recipe.json`" in problem.message


def test_unknown_stage(problems: Problems, tmp_path: Path) -> None:
    (problem,) = problems({"stage": "dppo"})
    assert problem.where == position(tmp_path / "recipe.json", '"stage"')
    assert problem.key == "stage"
    assert problem.message == f"no stage is called 'dppo'; did you mean 'ppo'? registered: {', '.join(STAGES)}"


def test_unknown_family(problems: Problems, tmp_path: Path) -> None:
    (problem,) = problems({"model.family": "lama"})
    assert problem.where == position(tmp_path / "recipe.json", '"family"')
    known = ", ".join(sorted(registry_with().models))
    assert problem.message == f"no model is called 'lama'; did you mean 'llama'? registered: {known}"


def test_unknown_names_hide_nothing_and_cause_nothing(problems: Problems, tmp_path: Path) -> None:
    changes = {"stage": "x", "model.family": "y", "model.config": {"q": 1}, "dpo": {"beta": 2}, "train.max_steps": "3"}
    found = problems({**changes, "launch.num_device": 1})
    path = tmp_path / "recipe.json"
    assert [(p.where, p.key) for p in found] == [
        (position(path, '"stage"'), "stage"),
        (position(path, '"family"'), "model.family"),
        (position(path, '"max_steps"'), "train.max_steps"),
        (position(path, '"num_device"'), "launch.num_device"),
    ]


def test_section_of_an_unknown_stage_may_be_right(problems: Problems) -> None:
    assert [p.key for p in problems({"stage": "spin", "spin": {"beta": 1}})] == ["stage"]
    assert [p.key for p in problems({"stage": "spin", "orpo": {"beta": 1}})] == ["stage", "orpo"]


def test_stage_that_is_no_text(problems: Problems) -> None:
    (problem,) = problems({"stage": 5, "dpo": {"beta": 1}})
    assert (problem.key, problem.message) == ("stage", "expected text, found 5")


def test_section_of_another_stage(write_recipe: Callable[..., Path]) -> None:
    two_stages = registry_with(other=OtherPlugin())
    path = write_recipe({"other": {"size": 1}})
    with pytest.raises(UserError) as caught:
        load(path, [], two_stages)
    where = position(path, '"other"')
    message = "is the section of stage 'other', which is not the stage of this recipe; remove it"
    assert str(caught.value) == f"{where}: other: {message}"
    assert load(write_recipe({"stage": "other", "other": {"size": 1}}), [], two_stages).recipe.stage == "other"


def test_all_problems_are_reported_together_in_the_order_of_the_file(problems: Problems, tmp_path: Path) -> None:
    wrong = {
        "stage": "x",
        "model.familly": "llama",
        "data.max_length": 0,
        "train.learning_rate": "fast",
        "train.warmup_ratio": 2,
        "output_dir": None,
        "engine": 3,
        "loggers": [1],
    }
    found = problems({**wrong, "data.train": REMOVE}, "--seed=-1", "--nothing=1")
    path = tmp_path / "recipe.json"
    keys = ["stage", "model.familly", "data.train", "data.max_length", "train.learning_rate", "train.warmup_ratio"]
    assert [p.key for p in found] == [*keys, "output_dir", "engine", "loggers.0", "seed", "nothing"]
    at = [tuple(map(int, p.where.rsplit(":", 2)[1:])) for p in found[:-2]]
    assert at == sorted(at)
    assert all(p.where.startswith(f"{path}:") for p in found[:-2])
    assert [p.where for p in found[-2:]] == ["--seed=-1", "--nothing=1"]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"parallel.sequence_parallel": True}, "parallel.sequence_parallel"),
        ({"parallel.sharding_parallel_degree": 2}, "parallel.sharding_parallel_degree"),
        ({"train.num_epochs": 1}, "train.max_steps"),
        ({"train.max_steps": None}, "train.max_steps"),
        ({"train.lr_schedule": "constant", "train.min_lr_ratio": 0.1}, "train.min_lr_ratio"),
        ({"train.lr_schedule": "linear", "train.decay_ratio": 0.1}, "train.decay_ratio"),
        ({"train.lr_schedule": "cosine", "train.decay_type": "sqrt"}, "train.decay_type"),
        ({"train.lr_schedule": "wsd", "train.warmup_ratio": 0.6, "train.decay_ratio": 0.5}, "train.decay_ratio"),
        ({"train.warmup_ratio": 0.1, "train.warmup_steps": 5}, "train.warmup_steps"),
        ({"train.warmup_ratio": 0.0, "train.warmup_from_zero": True}, "train.warmup_from_zero"),
        ({"dpo.loss": "ipo", "dpo.label_smoothing": 0.1}, "dpo.label_smoothing"),
    ],
)
def test_rules_of_the_shipped_sections(problems: Problems, tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    (problem,) = problems(changes)
    assert problem.key == key
    assert problem.where == position(tmp_path / "recipe.json", f'"{key.partition(".")[2]}":')


def test_rules_of_all_sections_are_reported_together(problems: Problems) -> None:
    found = problems({"train.num_epochs": 1, "parallel.sequence_parallel": True, "dpo.label_smoothing": 0.5 - 1e-9})
    assert [p.key for p in found] == ["train.max_steps", "parallel.sequence_parallel"]


@pytest.mark.parametrize("text", ["[]", "3", "null", '"x"'])
def test_document_that_is_no_object(registry: Registry, tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"r\.json:1:1: a recipe is an object"):
        load(path, [], registry)


SCALARS = st.none() | st.booleans() | st.integers(MIN_INT, MAX_INT) | st.floats(allow_nan=False) | st.text(max_size=8)
KEYS = ["stage", "model", "family", "config", "train", "dpo", "loggers", "max_steps", "x", "__class__"]
NAMES = st.sampled_from(KEYS)
VALUES = st.recursive(
    SCALARS | st.sampled_from(["dpo", "llama", "1", "sigmoid"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=4), inner, max_size=4),
    max_leaves=10,
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipes") / "recipe.json"


@settings(max_examples=400)
@given(st.data())
def test_any_document_and_override_is_loaded_or_refused(file: Path, registry: Registry, data: st.DataObject) -> None:
    tree = json.loads(json.dumps(VALID))
    for _ in range(data.draw(st.integers(0, 3))):
        node = data.draw(st.sampled_from([tree, *(v for v in tree.values() if isinstance(v, dict))]))
        node[data.draw(st.sampled_from([*node, *KEYS]))] = data.draw(VALUES)
    file.write_text(json.dumps(tree))
    keys = st.lists(NAMES, min_size=1, max_size=3).map(".".join)
    values = st.text(max_size=6) | VALUES.map(json.dumps)
    overrides = data.draw(st.lists(st.builds("--{}={}".format, keys, values) | st.text(max_size=6), max_size=3))
    try:
        loaded = load(file, overrides, registry)
    except UserError:
        return
    assert loaded.recipe.stage == "dpo"
