"""`llmsuite runs`: what of runs is listed, how it is sorted, and JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmsuite.cli.main import main
from llmsuite.contract.registry import ALLOW_LIST

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in this process; returns exit code, stdout and stderr."""
    monkeypatch.setenv(ALLOW_LIST, "")

    def call(*words: object) -> tuple[int, str, str]:
        return main([str(word) for word in words]), *capsys.readouterr()

    return call


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The directory of three runs: of learning rates 1e-4 and 3e-4, and one that has evaluated nothing."""
    losses = {"a": (1e-4, 2.5, 1.25), "b": (3e-4, 2.0, 1.5), "c": (1e-5, float("nan"), None)}
    for name, (rate, loss, evaluated) in losses.items():
        directory = tmp_path / "runs" / name
        directory.mkdir(parents=True)
        recipe = {"stage": "sft", "train": {"learning_rate": rate}, "seed": 0}
        (directory / "recipe.json").write_text(json.dumps(recipe))
        records: list[dict[str, Any]] = [{"step": 1, "loss": 9.0, "ips_total": 3.0}, {"step": 2, "loss": loss}]
        if evaluated is not None:
            records.append({"step": 2, "eval/loss": evaluated})
        (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path / "runs"


def names(out: str) -> list[str]:
    return [Path(line.split()[0]).name for line in out.splitlines()[1:]]


def test_a_list_has_the_usual_columns(run: Run, runs: Path) -> None:
    code, out, err = run("runs", "list", runs)
    assert (code, err) == (0, "")
    head, first, *_ = (line.split() for line in out.splitlines())
    assert head == ["run", "stage", "status", "step", "loss", "tokens/s"]
    assert first == [str(runs / "a"), "sft", "unknown", "2", "2.5", "3"]


def test_columns_are_keys_and_metrics(run: Run, runs: Path) -> None:
    code, out, _ = run("runs", "list", runs, "--columns", "train.learning_rate,eval/loss")
    assert code == 0
    assert [line.split()[1:] for line in out.splitlines()] == [
        ["train.learning_rate", "eval/loss"], ["0.0001", "1.25"], ["0.0003", "1.5"], ["1e-05"],
    ]  # fmt: skip


def test_runs_are_sorted_by_a_column(run: Run, runs: Path) -> None:
    assert names(run("runs", "list", runs)[1]) == ["a", "b", "c"]
    assert names(run("runs", "list", runs, "--sort", "train.learning_rate")[1]) == ["c", "a", "b"]
    # a run without the value comes last, in either direction
    assert names(run("runs", "list", runs, "--sort", "eval/loss")[1]) == ["a", "b", "c"]
    assert names(run("runs", "list", runs, "--sort", "eval/loss", "--descending")[1]) == ["b", "a", "c"]


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("train.learning_rate<3e-4", ["a", "c"]),
        ("train.learning_rate <= 0.0003, eval/loss>1.3", ["b"]),
        ("eval/loss!=1.5", ["a", "c"]),
        ("eval/loss=null", ["c"]),
        ("loss>0", ["a", "b"]),  # NaN has no order
        ("stage=sft,seed=0,status=unknown", ["a", "b", "c"]),
        ("stage=dpo", []),
    ],
)
def test_conditions_choose_runs(run: Run, runs: Path, where: str, found: list[str]) -> None:
    assert names(run("runs", "list", runs, "--where", where)[1]) == found


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("stage", "--where: 'stage' is no condition; write a column, one of = != < <= > >=, and a value, as in"),
        ("seed=0,", "--where: '' is no condition;"),
        ("stage<sft", "--where: 'stage<sft' compares with 'sft', which is no number; use = or !="),
        ("sed=0", "--where: no run has 'sed'; did you mean 'seed'?"),
    ],
)
def test_what_is_no_condition_is_refused(run: Run, runs: Path, where: str, message: str) -> None:
    code, out, err = run("runs", "list", runs, "--where", where)
    assert (code, out) == (2, "")
    assert err.startswith(message)


@pytest.mark.parametrize("option", ["--columns", "--sort"])
def test_a_column_that_no_run_has_is_refused(run: Run, runs: Path, option: str) -> None:
    code, out, err = run("runs", "list", runs, option, "train.learning_rat")
    assert (code, out) == (2, "")
    assert err.startswith(f"{option}: no run has 'train.learning_rat'; did you mean 'train.learning_rate'?")


def test_json_of_runs(run: Run, runs: Path) -> None:
    listed = json.loads(run("runs", "list", runs, "--columns", "status,loss", "--json")[1])
    assert listed[0] == {"run": str(runs / "a"), "status": "unknown", "loss": 2.5}
    assert listed[2]["loss"] is None, "JSON has no NaN"
    shown = json.loads(run("runs", "show", runs / "a", "--json")[1])
    assert (shown["last_step"]["loss"], shown["recipe"]["train"]["learning_rate"]) == (2.5, 1e-4)
    compared = json.loads(run("runs", "compare", runs / "a", runs / "b", "--json")[1])
    assert compared["metrics"]["eval/loss"] == [1.25, 1.5]
    assert compared["recipe"] == {"train.learning_rate": [1e-4, 3e-4]}


def test_json_of_an_empty_directory(run: Run, tmp_path: Path) -> None:
    assert json.loads(run("runs", "list", tmp_path, "--json")[1]) == []
    assert run("runs", "list", tmp_path)[1] == "no runs\n"


def test_json_of_recipes(run: Run, write_recipe: Callable[..., Path]) -> None:
    good, bad = write_recipe(name="good.json"), write_recipe({"seed": -1}, name="bad.json")
    code, out, err = run("validate", good, bad, "--json")
    assert (code, err) == (2, "")
    valid, invalid = json.loads(out)
    assert (valid["recipe"], valid["valid"], invalid["valid"]) == (str(good), True, False)
    assert valid["run"].startswith("dpo, llama, ")
    (problem,) = invalid["problems"]
    assert (problem["key"], problem["message"]) == ("seed", "expected integer >= 0, found -1")
    assert problem["where"].startswith(f"{bad}:")


def test_json_of_a_plan(run: Run, write_recipe: Callable[..., Path]) -> None:
    code, out, _ = run("plan", write_recipe(), "--json", "--memory", "1B")
    found = json.loads(out)
    assert (code, found["fits"], found["stage"]) == (3, False, "dpo")
    assert found["peak_bytes"] == max(stage["peak"] for stage in found["memory_bytes"])
    assert run("plan", write_recipe(), "--json", "--search")[0] == 2


def test_json_of_a_list(run: Run) -> None:
    stages = json.loads(run("list", "stages", "--json")[1])
    assert {"name": "dpo", "package": "llmsuite (built in)"}.items() <= next(
        s for s in stages if s["name"] == "dpo"
    ).items()
    keys = json.loads(run("list", "keys", "--json")[1])
    assert next(key for key in keys if key["key"] == "seed")["type"] == "integer >= 0"
