"""A profile of some steps: a trace of each rank, and the numbers of a run without one."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from typing import Any

import pytest

from tests.multi.conftest import Runner, learnt

PP2 = ("--launch.num_devices=2", '--parallel={"pipeline_parallel_degree":2}', "--train.micro_batch_size=2")
TP2 = ("--launch.num_devices=2", '--parallel={"tensor_parallel_degree":2}', "--train.micro_batch_size=4")
STEPS = ("--train.global_batch_size=8", "--train.lr_schedule=constant")
PROGRAM = ("--engine.mode=to_static", "--engine.program=step", "--engine.recompute=none")


def events(runner: Runner, name: str, file: str) -> list[dict[str, Any]]:
    """The events of a trace that have a duration."""
    with gzip.open(runner.directory / name / "profile" / file, "rt", encoding="utf-8") as opened:
        found = json.load(opened)["traceEvents"]
    return [event for event in found if event["ph"] == "X"]


def spans(found: list[dict[str, Any]]) -> Counter[str]:
    """How often each span of llmsuite is in a trace."""
    return Counter(event["name"] for event in found if event["cat"] == "PythonUserDefined")


def test_two_ranks_of_a_pipeline_write_their_traces(runner: Runner) -> None:
    common = (*STEPS, *PP2, "--train.max_steps=3")
    runner.run(*runner.smoke("plain", *common))
    runner.run(*runner.smoke("profiled", *common, "--train.profile.steps=[2,3]"))
    assert learnt(runner.metrics("profiled")) == learnt(runner.metrics("plain"))
    directory = runner.directory / "profiled" / "profile"
    assert sorted(path.name for path in directory.iterdir()) == [
        "steps-2-3.rank-0.json.gz",
        "steps-2-3.rank-1.json.gz",
    ]
    traces = [events(runner, "profiled", f"steps-2-3.rank-{rank}.json.gz") for rank in range(2)]
    for found in traces:
        counts = spans(found)
        # two steps of four micro-batches, and an evaluation after the last one
        assert [counts[name] for name in ("step 2", "step 3", "gradients", "optimizer")] == [1, 1, 2, 2]
        assert [counts[name] for name in ("forward", "backward", "evaluation", "loss ledger")] == [8, 8, 1, 3]
        assert min(counts[name] for name in ("data", "collate", "all_reduce", "receive", "send", "checkpoint")) > 0
        assert any(event["cat"] == "Operator" for event in found)
    # the ranks of a machine have one clock, and processes of their own
    ranges = [(min(e["ts"] for e in found), max(e["ts"] + e["dur"] for e in found)) for found in traces]
    assert max(begin for begin, _ in ranges) < min(end for _, end in ranges)
    assert {event["pid"] for event in traces[0]} & {event["pid"] for event in traces[1]} == set()


def test_a_run_is_resumed_in_its_window(runner: Runner) -> None:
    words = (*STEPS, *TP2, "--train.profile.steps=[2,4]", "--train.max_steps=4", "--checkpoint.save_steps=1")
    process = runner.start_and_hold("resumed", 2, *runner.smoke("resumed", *words))
    (runner.directory / "resumed" / "stop-now").touch()
    runner.let_go("resumed")
    output, _ = process.communicate()
    files = sorted(path.name for path in (runner.directory / "resumed" / "profile").iterdir())
    assert files == ["steps-2-3.rank-0.json.gz", "steps-2-3.rank-1.json.gz"], output
    runner.run(*runner.smoke("resumed", *words), "--resume")
    assert spans(events(runner, "resumed", "steps-2-3.rank-1.json.gz"))["step 3"] == 1
    counts = spans(events(runner, "resumed", "steps-4-4.rank-0.json.gz"))
    assert [counts["step 3"], counts["step 4"]] == [0, 1]


@pytest.mark.further
def test_programs_are_in_traces_too(runner: Runner) -> None:
    common = (*STEPS, *PP2, *PROGRAM, "--train.max_steps=2")
    runner.run(*runner.smoke("program", *common))
    runner.run(*runner.smoke("program-profiled", *common, "--train.profile.steps=[1,2]"))
    plain, profiled = (
        [{**record, "program_seconds": 0.0} for record in learnt(runner.metrics(name))]
        for name in ("program", "program-profiled")
    )
    assert profiled == plain
    for rank in range(2):
        counts = spans(events(runner, "program-profiled", f"steps-1-2.rank-{rank}.json.gz"))
        names = ("compile", "program", "update", "forward", "backward")
        assert [counts[name] for name in names] == [1, 2, 2, 8, 8]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("[3,2]", "train.profile.steps: begins at step 3 and ends at step 2, before it; write [2, 3]"),
        ("[2]", "train.profile.steps: has 1 numbers; give the first and the last step, such as [10, 12]"),
        ("[2,9]", "train.profile.steps: ends at step 9, and the run has 3 steps"),
        ("[0,1]", "train.profile.steps"),
    ],
)
def test_a_bad_window_is_refused(runner: Runner, steps: str, message: str) -> None:
    words = ("--launch.num_devices=1", "--parallel={}", "--train.max_steps=3", f"--train.profile.steps={steps}")
    assert message in runner.run(*runner.smoke("refused", *words), expect=2)
