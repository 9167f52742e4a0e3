"""`llmsuite sweep`: which runs it makes of a command line, and what it refuses before the first one starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llmsuite.cli.main import main
from llmsuite.cli.sweep import split_axes, split_values


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


MANY = ",".join(map(str, range(1001)))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--seed=1", "sweep: give a key several values, such as --train.learning_rate=1e-4,3e-4"),
        ("--seed=1,1", "sweep: two combinations have the same values; leave one out"),
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
