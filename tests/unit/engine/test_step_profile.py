"""Profiles of steps: which are recorded, and what Perfetto reads of them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import paddle
import paddle.profiler
import pytest

from llmsuite.base import spans
from llmsuite.base.errors import UserError
from llmsuite.contract.schema.recipe import ProfileSection
from llmsuite.devices.cpu import CpuBackend
from llmsuite.engine.step_profile import StepProfile, perfetto_events


def profile_of(steps: list[int] | None, directory: Path, rank: int = 0) -> StepProfile:
    return StepProfile(ProfileSection(steps=steps), directory, CpuBackend(), rank)


def run_steps(profile: StepProfile, steps: range) -> None:
    with profile:
        for step in steps:
            profile.begin_step(step)
            with spans.span("forward"):
                paddle.ones([4, 4]).matmul(paddle.ones([4, 4]))


def names(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [event["name"] for event in json.load(file)["traceEvents"] if event["ph"] == "X"]


def test_the_steps_of_the_window_are_in_the_trace(tmp_path: Path) -> None:
    run_steps(profile_of([2, 3], tmp_path, rank=1), range(1, 6))
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "steps-2-3.rank-1.json.gz"
    found = names(path)
    assert [name for name in found if name.startswith("step ")] == ["step 2", "step 3"]
    assert found.count("forward") == 2
    assert found.count("matmul dygraph") == 2
    assert not spans.is_recording()


def test_a_run_may_end_in_its_window_and_another_begin_in_it(tmp_path: Path) -> None:
    run_steps(profile_of([2, 5], tmp_path), range(1, 4))
    run_steps(profile_of([2, 5], tmp_path), range(4, 8))
    files = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert files == ["steps-2-3.rank-0.json.gz", "steps-4-5.rank-0.json.gz"]


def test_without_a_window_nothing_is_written(tmp_path: Path) -> None:
    profile = profile_of(None, tmp_path)
    profile.check(1)
    run_steps(profile, range(1, 4))
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_a_step_leaves_a_trace_of_it(tmp_path: Path) -> None:
    def fail() -> None:
        with profile_of([1, 4], tmp_path) as profile:
            profile.begin_step(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["steps-1-1.rank-0.json.gz"]


def test_a_trace_that_cannot_be_written_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "profile").write_text("in its way")
    run_steps(profile_of([1, 1], tmp_path), range(1, 3))
    printed = capsys.readouterr().out
    assert printed.startswith("warning: train.profile: ")
    assert printed.endswith("the run goes on without this trace\n")


def test_a_window_after_the_last_step_is_refused(tmp_path: Path) -> None:
    profile_of([7, 8], tmp_path).check(8)
    with pytest.raises(UserError, match=r"train.profile.steps: ends at step 9, and the run has 8 steps"):
        profile_of([8, 9], tmp_path).check(8)


def test_another_profiler_in_the_process_is_named(tmp_path: Path) -> None:
    other = paddle.profiler.Profiler(on_trace_ready=lambda profiler: None)
    with pytest.raises(UserError, match="a profiler of Paddle's is active in this process already"):
        run_steps(profile_of([1, 1], tmp_path), range(1, 3))
    del other
    run_steps(profile_of([1, 1], tmp_path), range(1, 3))


def event(name: str, start: float, duration: float, **more: Any) -> dict[str, Any]:
    """An event as Paddle writes it."""
    return {
        "ph": "X", "name": f"{name}[{duration} us]", "pid": 77, "tid": "77(C++)", "cat": "Operator",
        "ts": int(5_000_000 + start), "dur": duration, "args": {"start_time": f"{start} us"}, **more,
    }  # fmt: skip


def test_names_times_and_processes_are_those_that_perfetto_shows() -> None:
    meta = {"ph": "M", "name": "process_name", "pid": 77, "tid": "77(C++)", "args": {"name": "Process 77 (CPU)"}}
    step = {**event("ProfileStep#0", 0.0, 50.0), "cat": "ProfileStep"}
    device = event("kernel", 12.5, 2.0, pid=0, tid=7)
    found = perfetto_events([step, event("matmul", 10.25, 4.5), device, meta, {}], rank=2)
    assert found == [
        {"ph": "X", "name": "matmul", "cat": "Operator", "pid": 2000, "tid": 0, "ts": 5_000_010.25, "dur": 4.5},
        {"ph": "X", "name": "kernel", "cat": "Operator", "pid": 2001, "tid": 1, "ts": 5_000_012.5, "dur": 2.0},
        {**meta, "pid": 2000, "tid": 0, "args": {"name": "rank 2: Process 77 (CPU)"}},
    ]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([("a", 0.0, 9.0), ("b", 2.0, 3.0), ("c", 6.0, 3.0)], [9.0, 3.0, 3.0]),
        ([("a", 0.0, 9.0), ("b", 5.0, 4.5)], [9.0, 4.0]),  # it ends later by less than it overlaps
        ([("a", 0.0, 3.0), ("b", 2.5, 8.0)], [2.5, 8.0]),
        ([("a", 0.0, 20.0), ("b", 1.0, 3.0), ("c", 3.75, 9.0)], [20.0, 2.75, 9.0]),
    ],
)
def test_of_two_events_that_overlap_one_contains_the_other(
    events: list[tuple[str, float, float]], expected: list[float]
) -> None:
    found = perfetto_events([event(*of_event) for of_event in events], rank=0)
    assert [of_event["dur"] for of_event in found] == expected
