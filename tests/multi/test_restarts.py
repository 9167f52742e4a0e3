"""A run that loses a rank or a machine begins again by itself, with the numbers of one that lost none."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import pytest

from tests.multi.conftest import Process, Runner, learnt

STEPS = 8
COMMON = (
    f"--train.max_steps={STEPS}", "--train.eval_steps=4", "--train.global_batch_size=8", "--train.micro_batch_size=2",
)  # fmt: skip
MESHES = {
    1: ("--launch.num_devices=1", "--parallel={}"),
    2: ("--launch.num_devices=2", '--parallel={"pipeline_parallel_degree":2}'),
}
TWO_MACHINES = ("--launch.nnodes=2", "--launch.num_devices=1", '--parallel={"pipeline_parallel_degree":2}')


def _words(runner: Runner, name: str, *more: str, save_steps: int = 3) -> list[str]:
    return runner.smoke(name, *COMMON, f"--checkpoint.save_steps={save_steps}", runner.few_rows(70), *more)


def _ranks(process: Process) -> list[int]:
    return [int(c) for c in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def _events(runner: Runner, name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (runner.directory / name / "events.jsonl").read_text().splitlines()]


def _assert_equal(runner: Runner, name: str, whole: str) -> None:
    """All records, those of evaluations too, and every byte of the last checkpoint."""
    ours, theirs = (
        [json.loads(line) for line in (runner.directory / n / "metrics.jsonl").read_text().splitlines()]
        for n in (name, whole)
    )
    assert [sorted(record) for record in ours] == [sorted(record) for record in theirs]
    assert learnt(ours) == learnt(theirs)
    files = [
        json.loads((runner.directory / n / "checkpoints" / f"step-{STEPS}" / "manifest.json").read_text())["files"]
        for n in (name, whole)
    ]
    assert files[0] == files[1]


@pytest.mark.parametrize(("ranks", "victim"), [(1, 0), (2, 0), (2, 1)])
def test_a_killed_rank_is_one_of_a_run_that_goes_on(runner: Runner, ranks: int, victim: int) -> None:
    whole, name = f"whole-{ranks}", f"lost-{ranks}-{victim}"
    if not (runner.directory / whole).exists():
        runner.run(*_words(runner, whole, *MESHES[ranks]))
    process = runner.start_and_hold(name, 5, *_words(runner, name, *MESHES[ranks], "--launch.max_restarts=1"))
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


@pytest.mark.parametrize("what", ["rank", "launcher"])
def test_machines_meet_again(runner: Runner, what: str) -> None:
    """A rank of machine 1 is lost; or the machine, in whose place the same command is started."""
    with socket.socket() as s:
        s.bind(("127.0.0.2", 0))
        master = f"127.0.0.2:{s.getsockname()[1]}"
    whole, name = "whole-2", f"machines-{what}"
    if not (runner.directory / whole).exists():
        runner.run(*_words(runner, whole, *MESHES[2]))
    where = (*TWO_MACHINES, f"--launch.master={master}", "--launch.max_restarts=2")

    def words(machine: int) -> list[str]:
        return _words(runner, name, *where, f"--launch.node_rank={machine}")

    second = runner.start_fork(*words(1))
    first = runner.start_and_hold(name, 5, *words(0))
    victim = second.pid if what == "launcher" else _ranks(second)[0]
    os.kill(victim, signal.SIGKILL)
    if what == "launcher":
        second.communicate(timeout=60)
        second = runner.start_fork(*words(1))
    runner.let_go(name)
    outputs = [process.communicate(timeout=120)[0] for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0], "\n".join(outputs)
    lost = "machine 1 is gone" if what == "launcher" else "rank 1 on machine 1 was killed by SIGKILL"
    assert f"restart 1 of 2, from step 3: {lost}" in outputs[0]
    assert (f"restart 1 of 2, from step 3: {lost}" in outputs[1]) == (what == "rank")
    _assert_equal(runner, name, whole)
