"""A run that loses a rank or a machine begins again by itself, with the numbers of one that lost none."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.multi.conftest import Process, Runner, learnt
from tests.support.ports import free_address

STEPS = 8
COMMON = (f"--train.max_steps={STEPS}", "--train.eval_steps=4", "--train.micro_batch_size=2")
MESHES = {
    1: ("--launch.num_devices=1", "--parallel={}"),
    2: ("--launch.num_devices=2", '--parallel={"pipeline_parallel_degree":2}'),
}
TWO_MACHINES = ("--launch.nnodes=2", "--launch.num_devices=1", '--parallel={"pipeline_parallel_degree":2}')


def _words(runner: Runner, name: str, *more: str, save_steps: int = 3, batch: int = 8) -> list[str]:
    sizes = (f"--checkpoint.save_steps={save_steps}", f"--train.global_batch_size={batch}")
    return runner.smoke(name, *COMMON, *sizes, runner.few_rows(70), *more)


def _ranks(process: Process) -> list[int]:
    return [int(c) for c in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def _master() -> str:
    """A free port of an address that only what the launchers tell each other leads to."""
    return free_address("127.0.0.2")


def _events(runner: Runner, name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (runner.directory / name / "events.jsonl").read_text().splitlines()]


def _records(runner: Runner, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (runner.directory / name / "metrics.jsonl").read_text().splitlines()]


def _assert_equal(runner: Runner, name: str, whole: str) -> None:
    """All records, those of evaluations too, and every byte of the last checkpoint."""
    ours = _records(runner, name)
    theirs = _records(runner, whole)
    assert [sorted(record) for record in ours] == [sorted(record) for record in theirs]
    assert learnt(ours) == learnt(theirs)
    files = [
        json.loads((runner.directory / n / "checkpoints" / f"step-{STEPS}" / "manifest.json").read_text())["files"]
        for n in (name, whole)
    ]
    assert files[0] == files[1]


@pytest.mark.parametrize(("ranks", "victim"), [(1, 0), (2, 0), (2, 1)])
def test_a_killed_rank_is_one_of_a_run_that_goes_on(runner: Runner, ranks: int, victim: int) -> None:
    whole = f"whole-{ranks}"
    name = f"lost-{ranks}-{victim}"
    if not (runner.directory / whole).exists():
        runner.run(*_words(runner, whole, *MESHES[ranks]))
    process = runner.start_and_hold(name, 5, *_words(runner, name, *MESHES[ranks], "--launch.max_restarts=1"), saved=3)
    os.kill(_ranks(process)[victim], signal.SIGKILL)
    runner.let_go(name)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert f"restart 1 of 1, from step 3: rank {victim} was killed by SIGKILL" in output
    assert f"resuming from {runner.directory / name / 'checkpoints' / 'step-3'}" in output
    _assert_equal(runner, name, whole)
    (restart,) = (event for event in _events(runner, name) if event["event"] == "restarting")
    assert (restart["step"], restart["restart"], restart["of"]) == (3, 1, 1)
    assert _events(runner, name)[-1]["event"] == "ended"


def test_an_evaluation_that_was_lost_is_done_again(runner: Runner) -> None:
    """A run may be lost between a checkpoint and the evaluation of the same step."""
    words = _words(runner, "evaluated", *MESHES[1], save_steps=4)
    runner.run(*words)
    place = runner.directory / "evaluated"
    metrics = (place / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in metrics if json.loads(line)["step"] <= 4]
    assert "eval/loss" in kept[-1]
    (place / "metrics.jsonl").write_text("".join(kept[:-1]))
    for path in (place / "checkpoints" / "step-8").iterdir():
        path.unlink()
    (place / "checkpoints" / "step-8").rmdir()
    runner.run(*words, "--resume")
    again = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    assert learnt(again) == learnt([json.loads(line) for line in metrics])


def test_the_best_checkpoint_is_named_though_the_run_was_lost_before(runner: Runner) -> None:
    """A run may be lost between an evaluation and the name of the best checkpoint."""
    metric = ("--checkpoint.best_metric=eval/loss", "--train.learning_rate=0.0002")
    words = _words(runner, "best", *MESHES[1], *metric, save_steps=4)
    runner.run(*words)
    best = runner.directory / "best" / "checkpoints" / "best"
    values = [record for record in _records(runner, "best") if "eval/loss" in record]
    assert [record["step"] for record in values] == [4, 8]
    assert values[1]["eval/loss"] < values[0]["eval/loss"]
    named = best.read_text()
    assert json.loads(named)["step"] == 8
    best.write_text(json.dumps({"step": 4, "metric": "eval/loss", "value": values[0]["eval/loss"]}))
    runner.run(*words, "--resume")
    assert best.read_text() == named


@pytest.mark.parametrize("what", ["rank", "launcher"])
def test_machines_meet_again(runner: Runner, what: str) -> None:
    """A rank of machine 1 is lost; or the machine, in whose place the same command is started."""
    master = _master()
    whole = "whole-2"
    name = f"machines-{what}"
    if not (runner.directory / whole).exists():
        runner.run(*_words(runner, whole, *MESHES[2]))
    where = (*TWO_MACHINES, f"--launch.master={master}", "--launch.max_restarts=2")

    def words(machine: int) -> list[str]:
        return _words(runner, name, *where, f"--launch.node_rank={machine}")

    second = runner.start_fork(*words(1))
    first = runner.start_and_hold(name, 5, *words(0), saved=3)
    victim = second.pid if what == "launcher" else _ranks(second)[0]
    os.kill(victim, signal.SIGKILL)
    if what == "launcher":
        second.communicate(timeout=60)
        second = runner.start_fork(*words(1))
    runner.let_go(name)
    outputs = [process.communicate(timeout=120)[0] for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0], "\n".join(outputs)
    lost = "machine 1 is lost" if what == "launcher" else "rank 1 on machine 1 was killed by SIGKILL"
    assert f"restart 1 of 2, from step 3: {lost}" in outputs[0]
    assert (f"restart 1 of 2, from step 3: {lost}" in outputs[1]) == (what == "rank")
    _assert_equal(runner, name, whole)


def _lose_machine_1(runner: Runner, name: str, words: Sequence[str], count: int, batch: int = 8) -> list[str]:
    """Start a run on some machines, kill machine 1 in step 5, and return what the others have printed by their end."""

    def of(machine: int) -> list[str]:
        return _words(runner, name, *words, f"--launch.node_rank={machine}", batch=batch)

    others = [runner.start_fork(*of(machine)) for machine in range(1, count)]
    first = runner.start_and_hold(name, 5, *of(0), saved=3)
    lost = others.pop(0)
    os.kill(lost.pid, signal.SIGKILL)
    lost.communicate(timeout=60)
    runner.let_go(name)
    outputs = [process.communicate(timeout=180)[0] for process in (first, *others)]
    assert [process.returncode for process in (first, *others)] == [0] * len(outputs), "\n".join(outputs)
    assert "restart 1 of 2, from step 3: machine 1 is lost" in outputs[0]
    return outputs


def test_a_spare_machine_takes_the_place_of_a_lost_one(runner: Runner) -> None:
    if not (runner.directory / "whole-2").exists():
        runner.run(*_words(runner, "whole-2", *MESHES[2]))
    where = (f"--launch.master={_master()}", "--launch.max_restarts=2", "--launch.spares=1")
    first, spare = _lose_machine_1(runner, "spare", (*TWO_MACHINES, *where), 3)
    assert "machine 2 is a spare" in spare
    assert "the run continues with machines 0, 2" in first
    assert "the run continues with machines 0, 2" in spare
    _assert_equal(runner, "spare", "whole-2")


def test_a_run_goes_on_with_fewer_machines(runner: Runner) -> None:
    """The numbers are those of one process, before and after: other ranks have other samples, and sums are the same."""
    more = ("--train.optimizer=sgd", "--train.learning_rate=0.2")
    runner.run(*_words(runner, "fewer-whole", *MESHES[1], *more, batch=12))
    where = ("--launch.nnodes=3", "--launch.num_devices=1", "--parallel={}", f"--launch.master={_master()}")
    fewer = ("--launch.max_restarts=2", "--launch.min_nnodes=2", "--launch.rejoin_seconds=1")
    for output in _lose_machine_1(runner, "fewer", (*where, *fewer, *more), 3, batch=12):
        assert "the run continues with 2 of 3 machines: 0, 2" in output
    ours = _records(runner, "fewer")
    theirs = _records(runner, "fewer-whole")
    assert [record["step"] for record in ours] == [record["step"] for record in theirs]
    for a, b in zip(ours, theirs):
        for key in {"loss", "grad_norm", "eval/loss", "learning_rate"} & b.keys():
            assert a[key] == pytest.approx(b[key], rel=1e-6), (a["step"], key)
    assert ours[-1]["step"] == STEPS
