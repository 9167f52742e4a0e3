"""Early stopping stops at the step of a count by hand, on every mesh, also resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.multi.conftest import Runner
from tests.support.interrupted_runs import SMALL

STEPS = 14
PATIENCE = 3
MIN_DELTA = 0.002
MESHES = {
    "one": ("--launch.num_devices=1", "--parallel={}"),
    "dp2": ("--launch.num_devices=2", "--parallel={}"),
    "tp2": ("--launch.num_devices=2", '--parallel={"tensor_parallel_degree":2}'),
    "pp4": ("--launch.num_devices=4", '--parallel={"pipeline_parallel_degree":4}'),
}
WORDS = (
    *SMALL, "--train.eval_steps=1", "--train.lr_schedule=constant", "--train.min_lr_ratio=0", "--train.warmup_ratio=0",
    "--train.learning_rate=0.02", "--checkpoint.save_steps=2", "--engine.recompute=none",
)  # fmt: skip
STOPPING = (f"--train.early_stopping.patience={PATIENCE}", f"--train.early_stopping.min_delta={MIN_DELTA}")


def by_hand(values: dict[int, float]) -> tuple[int, int]:
    """The step at which a run with these evaluations has to stop, and its best step."""
    best_step = 1
    waited = 0
    for step in sorted(values)[1:]:
        waited += 1
        if values[step] < values[best_step] - MIN_DELTA:
            best_step = step
            waited = 0
        if waited == PATIENCE:
            return step, min(values, key=lambda at: (values[at] if at <= step else 1e9, at))
    raise AssertionError(f"the run does not stop: {values}")


def evaluations(runner: Runner, name: str) -> dict[int, float]:
    lines = (runner.directory / name / "metrics.jsonl").read_text().splitlines()
    return {r["step"]: r["eval/loss"] for line in lines if "eval/loss" in (r := json.loads(line))}


def last_event(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "events.jsonl").read_text().splitlines()[-1])
    return found


def check_stopped(runner: Runner, name: str, expected: tuple[int, int]) -> None:
    step, best_step = expected
    run = runner.directory / name
    assert list(evaluations(runner, name)) == list(range(1, step + 1))
    event = last_event(run)
    assert (event["event"], event["step"]) == ("ended", step)
    assert event["why"].startswith(f"early stopping: eval/loss has not improved in {PATIENCE} evaluations")
    assert (run / "checkpoints/latest").read_text() == f"step-{step}\n"
    best = json.loads((run / "checkpoints/best").read_text())
    assert best["step"] == best_step
    assert (run / f"checkpoints/step-{best_step}/manifest.json").exists()


@pytest.fixture(scope="module")
def expected(runner: Runner) -> tuple[int, int]:
    """The steps of a run that does not stop early, counted by hand."""
    runner.run(*runner.smoke("whole", *WORDS, *MESHES["one"], f"--train.max_steps={STEPS}"))
    found = by_hand(evaluations(runner, "whole"))
    assert PATIENCE + 1 < found[0] < STEPS, "the first evaluation is not the best, and the run stops early"
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_it_stops_where_a_count_by_hand_stops(runner: Runner, expected: tuple[int, int], mesh: str) -> None:
    words = (*WORDS, *STOPPING, *MESHES[mesh], f"--train.max_steps={STEPS}")
    output = runner.run(*runner.smoke(mesh, *words))
    assert f"ended after step {expected[0]}: early stopping: " in output
    check_stopped(runner, mesh, expected)
    again = runner.run(*runner.smoke(mesh, *words), "--resume")
    assert f"nothing to do: step {expected[0]} of {STEPS} is done, early stopping: " in again
    check_stopped(runner, mesh, expected)


@pytest.mark.parametrize(("first", "then"), [("one", "dp2"), ("pp4", "one"), ("tp2", "tp2")])
@pytest.mark.parametrize("loses", [False, True])
def test_a_resumed_run_stops_there_too(
    runner: Runner, expected: tuple[int, int], first: str, then: str, loses: bool
) -> None:
    name = f"{first}-{then}-{loses}"
    half = expected[0] - 2
    words = (*WORDS, *STOPPING)
    runner.run(*runner.smoke(name, *words, *MESHES[first], f"--train.max_steps={half}"))
    metrics = runner.directory / name / "metrics.jsonl"
    if loses:  # it was killed between the checkpoint and the evaluation of its step
        lines = metrics.read_text().splitlines(keepends=True)
        kept = [line for line in lines if not ("eval/loss" in line and json.loads(line)["step"] == half)]
        assert len(kept) == len(lines) - 1
        metrics.write_text("".join(kept))
    runner.run(*runner.smoke(name, *words, *MESHES[then], f"--train.max_steps={STEPS}"), "--resume")
    check_stopped(runner, name, expected)


def test_more_patience_continues_a_run(runner: Runner, expected: tuple[int, int]) -> None:
    words = (*WORDS, *MESHES["one"], f"--train.max_steps={STEPS}")
    runner.run(*runner.smoke("patient", *words, *STOPPING))
    runner.run(*runner.smoke("patient", *words, "--train.early_stopping.patience=99"), "--resume")
    assert evaluations(runner, "patient") == evaluations(runner, "whole")
    assert "why" not in last_event(runner.directory / "patient")
