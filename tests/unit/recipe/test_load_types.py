"""Every key of a recipe has to be known and of its type; what is not is named with its position and what would do."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Lt

import llmsuite
from llmsuite.base.errors import Problem, RecipeError
from llmsuite.contract.hookspecs import StageSpec
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.section import Section
from llmsuite.recipe.load import REMOVE, load
from tests.conftest import position, registry_with

Problems = Callable[..., list[Problem]]


@dataclasses.dataclass(kw_only=True)
class EverySection(Section):
    """A key of every type that recipes use."""

    count: Annotated[int, Gt(0)]
    """Required."""
    number: float = 1.0
    share: Annotated[float, Ge(0), Lt(1)] = 0.5
    flag: bool = False
    text: str = "x"
    choice: Literal["one", "two"] = "one"
    limit: int | None = None
    names: list[str] = dataclasses.field(default_factory=list)
    sizes: list[int] | None = None
    low: float = 0.0
    high: float = 1.0

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.low > self.high:
            yield "low", "is above high"


class EveryPlugin:
    @llmsuite.hookimpl
    def llmsuite_register_stages(self) -> list[StageSpec]:
        return [StageSpec(name="every", help="", config_cls=EverySection, factory=lambda: object)]


@pytest.fixture(scope="module")
def every() -> Registry:
    return registry_with(every=EveryPlugin())


@pytest.fixture
def section(write_recipe: Callable[..., Path], every: Registry) -> Callable[..., Any]:
    """Loads a recipe of the stage `every`; returns its section or the problems, and the file."""

    def run(values: dict[str, Any]) -> tuple[Any, Path]:
        path = write_recipe({"stage": "every", "every": {"count": 1, **values}})
        try:
            return load(path, [], every).recipe.every, path  # type: ignore[attr-defined]
        except RecipeError as error:
            return error.problems, path

    return run


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("count", True, "expected integer > 0, found true"),
        ("count", "1", 'expected integer > 0, found "1"'),
        ("count", 2.0, "expected integer > 0, found 2.0"),
        ("count", 1e3, "expected integer > 0, found 1000.0"),
        ("count", None, "expected integer > 0, found null"),
        ("count", 0, "expected integer > 0, found 0"),
        ("count", [1], "expected integer > 0, found [1]"),
        ("count", {"a": 1}, 'expected integer > 0, found {"a": 1}'),
        ("number", True, "expected number, found true"),
        ("number", "1e-5", 'expected number, found "1e-5"'),
        ("number", None, "expected number, found null"),
        ("share", -0.1, "expected number >= 0 and < 1, found -0.1"),
        ("share", 1, "expected number >= 0 and < 1, found 1"),
        ("flag", 1, "expected true or false, found 1"),
        ("flag", "true", 'expected true or false, found "true"'),
        ("flag", None, "expected true or false, found null"),
        ("text", 5, "expected text, found 5"),
        ("text", None, "expected text, found null"),
        ("text", ["a"], 'expected text, found ["a"]'),
        ("choice", "tow", "expected one of: one, two, found \"tow\"; did you mean 'two'?"),
        ("choice", "zzz", 'expected one of: one, two, found "zzz"'),
        ("choice", 1, "expected one of: one, two, found 1"),
        ("choice", None, "expected one of: one, two, found null"),
        ("limit", False, "expected integer or null, found false"),
        ("limit", "null", 'expected integer or null, found "null"'),
        ("names", "a", 'expected list of text, found "a"'),
        ("names", {"a": "b"}, 'expected list of text, found {"a": "b"}'),
        ("names", None, "expected list of text, found null"),
        ("sizes", 1, "expected list of integer or null, found 1"),
    ],
)
def test_a_wrong_value_is_refused_by_place(section: Callable[..., Any], key: str, value: Any, message: str) -> None:
    problems, path = section({key: value})
    assert problems == [Problem(position(path, f'"{key}":'), f"every.{key}", message)]


@pytest.mark.parametrize(
    ("key", "value", "items"),
    [
        ("names", ["a", 1, None], {"names.1": "expected text, found 1", "names.2": "expected text, found null"}),
        ("sizes", [1, "2"], {"sizes.1": 'expected integer, found "2"'}),
    ],
)
def test_wrong_item_of_a_list(section: Callable[..., Any], key: str, value: list[Any], items: dict[str, str]) -> None:
    problems, path = section({key: value})
    lines = path.read_text().splitlines()
    assert {p.key: p.message for p in problems} == {f"every.{k}": message for k, message in items.items()}
    for problem in problems:  # the position is that of the item: each stands on a line of its own
        _, line, column = problem.where.rsplit(":", 2)
        item = value[int(problem.key.rsplit(".", 1)[1])]
        assert lines[int(line) - 1][int(column) - 1 :].rstrip(",") == json.dumps(item)


@pytest.mark.parametrize(
    ("key", "value"),
    [("count", 2), ("number", 1), ("number", -1e300), ("share", 0), ("limit", None), ("names", ["a"]), ("sizes", [])],
)
def test_a_right_value_is_taken(section: Callable[..., Any], key: str, value: Any) -> None:
    loaded, _ = section({key: value})
    assert getattr(loaded, key) == value


def test_required_key_of_the_section_of_a_stage(write_recipe: Callable[..., Path], every: Registry) -> None:
    path = write_recipe({"stage": "every", "every": {}})
    with pytest.raises(RecipeError) as caught:
        load(path, [], every)
    assert caught.value.problems == [Problem(position(path, '"every":'), "every.count", "is required: integer > 0")]
    with pytest.raises(RecipeError) as caught:
        load(write_recipe({"stage": "every"}), [], every)
    assert caught.value.problems == [Problem(f"{path}:1:1", "every", "is required: a section")]


def test_rules_of_a_section(section: Callable[..., Any]) -> None:
    problems, path = section({"low": 2})
    assert problems == [Problem(position(path, '"low":'), "every.low", "is above high")]
    problems, path = section({"high": -1})  # low has its default: the nearest thing somebody wrote is the section
    assert problems == [Problem(position(path, '"every": {'), "every.low", "is above high")]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("train.max_step", "unknown key; did you mean 'max_steps'?"),
        ("data.max_lenght", "unknown key; did you mean 'max_length'?"),
        ("trian", "unknown key; did you mean 'train'?"),
        ("nothing_like_it", "unknown key; known keys here: checkpoint, data, device, dpo, engine,"),
        ("learning_rate", "unknown key; did you mean 'train.learning_rate'?"),
        ("engine.learning_rate", "unknown key; did you mean 'train.learning_rate'?"),
        (
            "launch.qqq",
            "unknown key; known keys here: devices, log_dir, master, max_restarts, min_nnodes, nnodes, node_rank",
        ),
        ("dpo.betta", "unknown key; did you mean 'beta'?"),
        ("model.config.hidden_sise", "unknown key; did you mean 'hidden_size'?"),
        ("model.hidden_size", "unknown key; did you mean 'model.config.hidden_size'?"),
        ("train.data_parallel_degree", "unknown key; known keys here: adam_beta1"),
        ("", "unknown key; known keys here:"),
        ("a b", "unknown key; known keys here:"),
    ],
)
def test_an_unknown_key_is_refused_by_place(problems: Problems, tmp_path: Path, key: str, message: str) -> None:
    (problem,) = problems({key: 1})
    assert problem.key == key
    assert problem.message.startswith(message)
    assert problem.where == position(tmp_path / "recipe.json", f'"{key.rpartition(".")[2]}": 1')


@pytest.mark.parametrize("section", ["model", "data", "engine", "parallel", "dpo"])
@pytest.mark.parametrize("value", [5, None, "x", [], [{}]])
def test_section_given_as_a_value(problems: Problems, tmp_path: Path, section: str, value: Any) -> None:
    (problem,) = problems({section: value})
    assert problem.where == position(tmp_path / "recipe.json", f'"{section}": ')
    assert (problem.key, problem.message) == (section, f"expected a section: {{...}}, found {json.dumps(value)}")


@pytest.mark.parametrize(
    ("changes", "key", "where", "message"),
    [
        ({"output_dir": REMOVE}, "output_dir", None, "is required: text"),
        ({"model": REMOVE}, "model", None, "is required: a section"),
        ({"stage": REMOVE}, "stage", None, "is required: text"),
        ({"train.learning_rate": REMOVE}, "train.learning_rate", '"train": {', "is required: number > 0"),
        ({"model.family": REMOVE}, "model.family", '"model"', "is required: text"),
    ],
)
def test_a_missing_required_key_is_named(
    problems: Problems, tmp_path: Path, changes: dict[str, Any], key: str, where: str | None, message: str
) -> None:
    found = problems(changes)
    path = tmp_path / "recipe.json"
    assert found == [Problem(position(path, where) if where else f"{path}:1:1", key, message)]
