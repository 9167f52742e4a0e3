"""Words of the command line lie over the file, are checked as strictly, and are named in what they cause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import Problem
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.section import as_plain
from llmsuite.recipe.load import REMOVE, LoadedRecipe, load
from tests.conftest import position

Problems = Callable[..., list[Problem]]


@pytest.fixture
def overridden(write_recipe: Callable[..., Path], registry: Registry) -> Callable[..., LoadedRecipe]:
    def run(*overrides: str, changes: dict[str, Any] | None = None, layers: Any = ()) -> LoadedRecipe:
        return load(write_recipe(changes), overrides, registry, layers)

    return run


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("--train.max_steps=3", "train.max_steps", 3),
        ("--train.learning_rate=1", "train.learning_rate", 1.0),
        ("--train.learning_rate=2e-5", "train.learning_rate", 2e-5),
        ("--checkpoint.save_steps=5", "checkpoint.save_steps", 5),
        ("--checkpoint.save_steps=epoch", "checkpoint.save_steps", "epoch"),
        ("--train.max_grad_norm=null", "train.max_grad_norm", None),
        ("--parallel.sequence_parallel=false", "parallel.sequence_parallel", False),
        ("--seed= 7 ", "seed", 7),
        # where the key takes text, a bare word is the text whatever it looks like
        ("--output_dir=out/dir", "output_dir", "out/dir"),
        ("--output_dir=123", "output_dir", "123"),
        ("--output_dir=true", "output_dir", "true"),
        ("--output_dir=[1]", "output_dir", "[1]"),
        ("--source=", "source", ""),
        ("--output_dir=a=b c\n", "output_dir", "a=b c\n"),
        ('--output_dir="', "output_dir", '"'),
        ("--output_dir=\u00e9", "output_dir", "\u00e9"),
        ("--dpo.loss=ipo", "dpo.loss", "ipo"),
        ("--data.eval=null", "data.eval", None),
        # JSON strings are JSON
        ('--output_dir="123"', "output_dir", "123"),
        ('--output_dir="a\\u00e9\\"b"', "output_dir", 'a\u00e9"b'),
        ('--data.eval="null"', "data.eval", "null"),
        ('--dpo.loss="hinge"', "dpo.loss", "hinge"),
        # lists and objects
        ('--loggers=["visualdl"]', "loggers", ["visualdl"]),
        ('--checkpoint={"save_steps": 5}', "checkpoint.save_steps", 5),
        ("--model.config.rope_theta=5000", "model.config.rope_theta", 5000.0),
        ("--model.config.eos_token_id=[1, 2]", "model.config.eos_token_id", [1, 2]),
        ('--model.config={"hidden_size": 64}', "model.config.hidden_size", 64),
    ],
)
def test_an_override_sets_its_value(overridden: Callable[..., LoadedRecipe], word: str, key: str, value: Any) -> None:
    loaded = overridden(word, changes={"checkpoint": {"keep_last": 3}, "model.config": {"num_hidden_layers": 1}})
    found: Any = as_plain(loaded.recipe)
    for part in key.split("."):
        found = found[part]
    assert found == value
    assert type(found) is type(value)
    assert loaded.origin(tuple(key.split("."))) == word
    assert tuple(key.split(".")) in loaded.given


def test_override_lies_over_file_and_layers(overridden: Callable[..., LoadedRecipe], tmp_path: Path) -> None:
    layer = {"train.max_steps": 20, "train.warmup_ratio": 0.2, "seed": 5, "data.eval": REMOVE, "engine": {}}
    changes = {"train.warmup_ratio": 0.1, "data.eval": "x", "engine.recompute": "full"}
    loaded = overridden("--train.max_steps=30", changes=changes, layers=[("--layer", layer)])
    train = loaded.recipe.train
    recipe = loaded.recipe
    assert (train.max_steps, train.warmup_ratio, train.global_batch_size, recipe.seed) == (30, 0.2, 8, 5)
    assert recipe.data.eval is None
    assert recipe.engine.recompute == "none"
    assert loaded.origin(("train", "max_steps")) == "--train.max_steps=30"
    assert loaded.origin(("train", "warmup_ratio")) == "--layer"
    assert loaded.origin(("train", "global_batch_size")) == position(tmp_path / "recipe.json", '"global_batch_size"')
    assert ("data", "eval") not in loaded.given
    assert ("data", "eval") not in loaded.origins
    assert ("engine", "recompute") not in loaded.given


def test_a_section_given_whole_replaces_that_of_the_file(overridden: Callable[..., LoadedRecipe]) -> None:
    loaded = overridden('--dpo={"beta": 0.5}', "--dpo.loss=ipo", changes={"dpo": {"label_smoothing": 0.1}})
    dpo = as_plain(loaded.recipe)["dpo"]
    assert {key: dpo[key] for key in ("loss", "beta", "label_smoothing")} == {
        "loss": "ipo",
        "beta": 0.5,
        "label_smoothing": 0.0,
    }
    assert loaded.origin(("dpo", "beta")) == '--dpo={"beta": 0.5}'
    assert loaded.origin(("dpo", "loss")) == "--dpo.loss=ipo"


@pytest.mark.parametrize(
    ("word", "key", "message"),
    [
        ("--train.max_steps=abc", "train.max_steps", "expected integer > 0 or null, found 'abc'"),
        ("--train.max_steps=", "train.max_steps", "expected integer > 0 or null, found ''"),
        ("--train.max_steps=0", "train.max_steps", "expected integer > 0 or null, found 0"),
        ("--train.max_steps=True", "train.max_steps", "expected integer > 0 or null, found 'True'"),
        ("--train.max_steps=1e3", "train.max_steps", "expected integer > 0 or null, found 1000.0"),
        ('--train.max_steps="3"', "train.max_steps", 'expected integer > 0 or null, found "3"'),
        ("--seed=99999999999999999999", "seed", "(integer does not fit into 64 bits)"),
        ("--train.learning_rate=NaN", "train.learning_rate", "(NaN is not a JSON number; write a finite one)"),
        ("--loggers=visualdl", "loggers", 'expected list of text, such as ["a", "b"], found \'visualdl\''),
        ("--dpo.loss=ip", "dpo.loss", "did you mean 'ipo'?"),
        ('--output_dir="a\\x"', "output_dir", "(bad string: invalid \\escape"),
        ('--dpo={"beta": 1, "beta": 2}', "dpo", "(beta: is given twice"),
        ("--dpo=ipo", "dpo", "expected a section, such as {\"key\": 1}, found 'ipo'"),
        ("--dpo=5", "dpo", "expected a section: {...}, found 5"),
        ('--dpo={"betta": 1}', "dpo.betta", "unknown key; did you mean 'beta'?"),
        ("--model={}", "model.family", "is required: text"),
        ("--trian.max_steps=3", "trian", "unknown key; did you mean 'train'?"),
        ("--train.max_step=3", "train.max_step", "unknown key; did you mean 'max_steps'?"),
        ("--max_steps=3", "max_steps", "unknown key; did you mean 'train.max_steps'?"),
        ("--nothing={", "nothing", "unknown key"),
        ("--output_dir.x=1", "output_dir.x", "output_dir is a value, not a section"),
        ("--train.max_steps.a.b=1", "train.max_steps.a.b", "train.max_steps is a value, not a section"),
        ("--seed.x=1", "seed", 'expected integer >= 0, found {"x": 1}'),
        ("--stage=dppo", "stage", "no stage is called 'dppo'; did you mean 'ppo'?"),
        ("--stage=null", "stage", "expected text, found null"),
        ("--model.family=lama", "model.family", "no model is called 'lama'; did you mean 'llama'?"),
        (
            "--model.config.hidden_size=a",
            "model.config.hidden_size",
            "expected integer > 0 and <= 1073741824, found 'a'",
        ),
        ("--parallel.sequence_parallel=true", "parallel.sequence_parallel", "needs tensor_parallel_degree above 1"),
        ("--parallel.fuse_projections=true", "parallel.fuse_projections", "needs tensor_parallel_degree above 1"),
        ("train.max_steps=3", "", "is not an override; write --section.key=value"),
        ("--train.max_steps", "", "is not an override"),
        ("--train..max_steps=1", "", "is not an override"),
        ("--loggers.0=x", "", "is not an override"),
        ("--=1", "", "is not an override"),
        ("", "", "is not an override"),
    ],
)
def test_problem_names_the_override(problems: Problems, word: str, key: str, message: str) -> None:
    (problem,) = problems(None, word)
    assert (problem.where, problem.key) == (word, key)
    assert message in problem.message


def test_bytes_of_another_encoding(problems: Problems) -> None:
    assert problems(None, "--output_dir=\udcff") == [Problem("--output_dir=\\udcff", "", "is not UTF-8")]


def test_an_override_given_twice_is_refused(problems: Problems) -> None:
    found = problems(None, "--seed=1", "--seed=2")
    assert found == [Problem("--seed=2", "seed", "is given twice; it was already set by --seed=1")]


def test_every_bad_override_is_reported(problems: Problems, tmp_path: Path) -> None:
    found = problems({"data.x": 1}, "--seed=a", "oops", "--train.max_steps=b", "--data.train=a:3:4", "--q=q:1:1")
    where = position(tmp_path / "recipe.json", '"x"')
    assert found[0].where == where  # though a word ends like a position
    assert {p.where for p in found[1:]} == {"--seed=a", "oops", "--train.max_steps=b", "--q=q:1:1"}


def test_override_of_the_family_decides_types(problems: Problems, overridden: Callable[..., LoadedRecipe]) -> None:
    changes = {"model.family": "lama", "stage": "dppo"}
    loaded = overridden("--model.family=llama", "--stage=dpo", "--dpo.loss=ipo", changes=changes)
    assert loaded.recipe.stage == "dpo"
    assert loaded.origin(("stage",)) == "--stage=dpo"
    (problem,) = problems(changes, "--dpo.beta=x", "--model.family=llama", "--stage=dpo")
    assert (problem.where, problem.message) == ("--dpo.beta=x", "expected number > 0, found 'x'")


def test_override_makes_the_section_it_needs(overridden: Callable[..., LoadedRecipe]) -> None:
    loaded = overridden("--launch.num_devices=2")
    assert loaded.recipe.launch.num_devices == 2
    assert loaded.origin(("launch", "nnodes")) == "--launch.num_devices=2"
    assert ("launch", "nnodes") not in loaded.given


def test_override_below_a_value_in_the_file(problems: Problems, tmp_path: Path) -> None:
    assert problems({"model": 5}, "--model.family=llama") == [
        Problem(position(tmp_path / "recipe.json", '"model"'), "model", "expected a section: {...}, found 5"),
        Problem("--model.family=llama", "model.family", "model is a value, not a section"),
    ]


ON_GPU = {"device": "gpu", "launch": {"num_devices": 8}}


@pytest.mark.parametrize("given", ["4,5", "[4,5]", '"4,5"', "4, 5"])
def test_devices_of_the_command_line_are_counted(overridden: Callable[..., LoadedRecipe], given: str) -> None:
    launch = overridden(f"--launch.devices={given}", changes=ON_GPU).recipe.launch
    assert (launch.device_numbers, launch.num_devices) == ([4, 5], 2)


def test_devices_of_the_file_are_counted(overridden: Callable[..., LoadedRecipe]) -> None:
    assert overridden(changes={"launch": {"devices": [0, 3, 5]}}).recipe.launch.num_devices == 3
    both = {"launch": {"devices": "0,3", "num_devices": 2}}
    assert overridden(changes=both).recipe.launch.num_devices == 2, "as a resolved recipe has it"


@pytest.mark.parametrize(
    ("launch", "words", "key", "message"),
    [
        ({"devices": "1,2", "num_devices": 4}, [], "launch.devices", "names 2 devices, but num_devices is 4"),
        ({}, ["--launch.devices=1,2", "--launch.num_devices=4"], "launch.devices", "names 2 devices, but num_devices"),
        ({"devices": "1,1"}, [], "launch.devices", "is '1,1'; it has to be distinct device numbers, such as 4,5,6,7"),
        ({"devices": "a"}, [], "launch.devices", "it has to be distinct device numbers"),
        ({"devices": ""}, [], "launch.devices", "it has to be distinct device numbers"),
        ({"devices": []}, [], "launch.devices", "it has to be distinct device numbers"),
        ({"devices": 4}, [], "launch.devices", "expected text or list of integer >= 0 or null, found 4"),
    ],
)
def test_devices_that_are_none(
    problems: Problems, launch: dict[str, Any], words: list[str], key: str, message: str
) -> None:
    (problem,) = problems({"device": "gpu", "launch": launch}, *words)
    assert problem.key == key
    assert message in problem.message


def test_processes_have_no_numbers(problems: Problems) -> None:
    (problem,) = problems(None, "--launch.devices=0,1")
    assert problem.message == "cpu has no numbered devices; set launch.num_devices instead"
