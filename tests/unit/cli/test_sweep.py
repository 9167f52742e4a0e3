"""`llmsuite sweep`: which runs it makes of a command line, and what it refuses before the first one starts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llmsuite.base.errors import UserError
from llmsuite.checkpoint.train_state import FORMAT, TrainState
from llmsuite.cli.main import main
from llmsuite.cli.sweep import is_done, name_of, split_axes, split_values
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.section import as_plain
from llmsuite.engine.output import recipe_text
from llmsuite.observe.events import add_event
from llmsuite.parallel.learning_rate import Schedule
from llmsuite.recipe.resolve import plan_run
from tests.support.paths import ROOT


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-4", ["1e-4"]),
        ("1e-4,3e-4", ["1e-4", "3e-4"]),
        ("a, b", ["a", "b"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ('{"a": 1, "b": 2}', ['{"a": 1, "b": 2}']),
        ('"a,b"', ['"a,b"']),
        ('["a]",1],2', ['["a]",1]', "2"]),
    ],
)
def test_values_are_separated_by_commas(text: str, values: list[str]) -> None:
    assert split_values(text) == values


def test_keys_with_several_values_are_swept() -> None:
    axes, fixed = split_axes(["--train.learning_rate=1e-4,3e-4", "--seed=0", '--lora.target_modules=["q","k"]'])
    assert axes == [["--train.learning_rate=1e-4", "--train.learning_rate=3e-4"]]
    assert fixed == ["--seed=0", '--lora.target_modules=["q","k"]']


def test_names_have_the_values_and_differ_where_the_values_do() -> None:
    assert name_of(["--train.learning_rate=1e-4", "--seed=0"]) == "learning_rate=1e-4_seed=0"
    assert name_of(["--train.seed=1", "--data.seed=0"]) == "train.seed=1_data.seed=0"
    first, second = (name_of([f"--data.train=data/{'long/' * 60}{end}"]) for end in ("a", "b"))
    assert len(first) == len(second) == 200
    assert first != second
    assert name_of(["--data.train=a/b"]) != name_of(["--data.train=a-b"])
    assert name_of(["--a.x=1_y=2", "--a.y=3"]) != name_of(["--a.x=1", "--a.y=2_y=3"])
    assert name_of(["--data.train=a/b"]).startswith("train=a-b-")


SMOKE = ROOT / "recipes/llama/sft.json"


def write_run(directory: Path, registry: Registry, *words: str, is_ended: bool = True) -> None:
    """Write what a run of 4 steps with these overrides leaves."""
    plan = plan_run(SMOKE, [f"--output_dir={directory}", "--train.max_steps=4", *words], registry, smoke=True)
    last = directory / "checkpoints" / "step-4"
    last.mkdir(parents=True)
    (directory / "recipe.json").write_text(recipe_text(as_plain(plan.recipe)))
    schedule = dataclasses.asdict(Schedule.of(as_plain(plan.recipe.train), 4))
    state = TrainState(step=4, samples=32, seed=42, recipe_sha256="", schedule=schedule)
    (last / "state.json").write_text(json.dumps({"format": FORMAT, **dataclasses.asdict(state)}))
    add_event(directory, "ended" if is_ended else "stopped", step=4)


def test_a_run_of_another_recipe_is_not_taken_for_the_one_that_was_asked_for(
    tmp_path: Path, registry: Registry
) -> None:
    def done(steps: int, *words: str, schedule: str = "constant") -> bool:
        given = [f"--output_dir={tmp_path / 'run'}", f"--train.max_steps={steps}", *words]
        given += [f"--train.lr_schedule={schedule}", "--train.warmup_ratio=0"]
        return is_done(plan_run(SMOKE, given, registry, smoke=True).loaded, tmp_path / "run")

    assert not done(4), "it has not begun"
    write_run(tmp_path / "run", registry, "--train.lr_schedule=constant", "--train.warmup_ratio=0")
    assert done(4)
    assert done(4, "--train.log_steps=2"), "it decides nothing that is trained"
    assert not done(8), "it is trained for longer"
    with pytest.raises(
        UserError, match=r"^sweep: .*run has a run that differs in train\.weight_decay; give this sweep"
    ):
        done(4, "--train.weight_decay=0.5")
    with pytest.raises(UserError, match=r"^sweep: .*has step 4, and the run is to have 2 steps now.* another --output"):
        done(2)
    with pytest.raises(UserError, match=r"its learning rate was computed for 4 steps with constant"):
        done(4, schedule="linear")


def test_a_run_that_was_stopped_is_not_done(tmp_path: Path, registry: Registry) -> None:
    write_run(tmp_path, registry, is_ended=False)
    words = [f"--output_dir={tmp_path}", "--train.max_steps=4"]
    assert not is_done(plan_run(SMOKE, words, registry, smoke=True).loaded, tmp_path)


MANY = ",".join(map(str, range(1001)))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--seed=1", "sweep: give a key several values, such as --train.learning_rate=1e-4,3e-4"),
        ("--seed=1,1", "sweep: --seed=1 is there twice; leave one out"),
        ("--seed=1,-1", "--seed=-1: seed: expected integer >= 0, found -1"),
        (f"--seed={MANY}", "sweep: 1,001 runs are more than 1,000; give fewer values"),
    ],
    ids=["one value", "twice", "wrong", "many"],
)
def test_what_cannot_be_swept_is_refused_before_a_run_starts(
    word: str, message: str, write_recipe: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", str(write_recipe()), word, f"--output_dir={tmp_path / 'swept'}"]) == 2
    assert capsys.readouterr() == ("", f"{message}\n")
    assert not (tmp_path / "swept").exists()
