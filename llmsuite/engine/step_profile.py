"""Profile of some steps of a run, `train.profile`: a trace of each rank by Paddle's profiler, for Perfetto."""

from __future__ import annotations

import contextlib
import gzip
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import paddle.profiler

from llmsuite.base import spans
from llmsuite.base.errors import UserError
from llmsuite.base.files import os_errors, temporary_path
from llmsuite.base.locks import scratch_directory
from llmsuite.base.progress import report
from llmsuite.contract.schema.recipe import ProfileSection
from llmsuite.devices.base import DeviceBackend

DIRECTORY = "profile"
"""Directory of the traces in that of a run."""
_PROCESSES_OF_A_RANK = 1000
"""Distance of the numbers of the processes of two ranks in their traces, which may be looked at together."""
_CLOCK = 10**12
"""Microseconds after which the clock of traces starts from 0 again: nanoseconds fit into floats of such numbers."""


class StepProfile:
    """Records the steps of a window in this rank, and writes their trace. A context manager around all steps."""

    def __init__(self, section: ProfileSection, output_dir: Path, backend: DeviceBackend, rank: int):
        """
        Args:
            section: section `train.profile` of the recipe.
            output_dir: directory of the run.
            backend: backend of the device.
            rank: of this process.
        """
        self._window = section.steps
        self._directory = output_dir / DIRECTORY
        self._backend = backend
        self._rank = rank
        self._steps: list[int] = []
        """Steps of the trace so far."""
        self._profiler: paddle.profiler.Profiler | None = None
        self._step = contextlib.ExitStack()
        """The span of the current step."""

    def check(self, total_steps: int) -> None:
        """Raise UserError if the run has not all steps of the window."""
        if self._window is not None and self._window[1] > total_steps:
            raise UserError(
                f"train.profile.steps: ends at step {self._window[1]}, and the run has {total_steps} steps; choose a "
                "window within them"
            )

    def begin_step(self, step: int) -> float:
        """Start and end recording where the step is the first of the window or the first after it. Returns the seconds
        that this took, which is no time of a step."""
        if self._window is None:
            return 0.0
        started = time.perf_counter()
        first, last = self._window
        self._step.close()
        if first <= step <= last:
            if self._profiler is None:
                self._start()
            self._steps.append(step)
            self._step.enter_context(spans.span(f"step {step}"))
        else:
            self._stop()
        return time.perf_counter() - started

    def __enter__(self) -> StepProfile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End recording, and write the trace of the steps so far: a run may end in its window."""
        self._step.close()
        self._stop()

    def _start(self) -> None:
        self._profiler = _profiler(self._backend)
        if self._profiler.profiler is None:  # Paddle has one for each process
            self._profiler = None
            raise UserError(
                "train.profile: a profiler of Paddle's is active in this process already; end it, or remove the key"
            )
        self._profiler.start()
        spans.record(paddle.profiler.RecordEvent)

    def _stop(self) -> None:
        if self._profiler is None:
            return
        spans.record(None)
        profiler = self._profiler
        steps = self._steps
        self._profiler = None
        self._steps = []
        profiler.stop()
        path = self._directory / f"steps-{steps[0]}-{steps[-1]}.rank-{self._rank}.json.gz"
        try:
            with os_errors(path, "the run goes on without this trace"):
                self._directory.mkdir(parents=True, exist_ok=True)
                _write(_exported(profiler), path, self._rank)
        except UserError as error:  # the run itself is not to end because of it
            report(f"warning: train.profile: {error}")
            return
        if self._rank == 0:
            report(f"traces of steps {steps[0]} to {steps[-1]}: {self._directory}")


def _profiler(backend: DeviceBackend) -> paddle.profiler.Profiler:
    """Make a profiler of the host, and of the device where it has one."""
    targets = [paddle.profiler.ProfilerTarget.CPU]
    if backend.profiler_target is not None:
        targets.append(paddle.profiler.ProfilerTarget[backend.profiler_target])
    # without a function of its own, Paddle writes a trace into the working directory
    return paddle.profiler.Profiler(targets=targets, on_trace_ready=lambda profiler: None)


def _exported(profiler: paddle.profiler.Profiler) -> dict[str, Any]:
    """Return the trace as Paddle writes it."""
    with scratch_directory() as directory:
        file = directory / "trace.json"
        profiler.export(str(file))
        trace: dict[str, Any] = json.loads(file.read_text(encoding="utf-8", errors="replace"))
    return trace


def _write(trace: Mapping[str, Any], path: Path, rank: int) -> None:
    text = json.dumps({"traceEvents": perfetto_events(trace["traceEvents"], rank), "displayTimeUnit": "ms"})
    temporary = temporary_path(path)
    with gzip.open(temporary, "wb", compresslevel=5) as file:
        file.write(text.encode())
    temporary.replace(path)


def perfetto_events(events: Sequence[Mapping[str, Any]], rank: int) -> list[dict[str, Any]]:
    """Convert the events of a trace of Paddle's to those that Perfetto shows best.

    Paddle 3.3.1 puts the duration into each name, so that no two events have the same one; rounds the start of an event
    down to a microsecond; lets some events of operators end after the next one has begun, which Perfetto cannot show;
    and names threads by texts, and processes by numbers that ranks have in common.

    Args:
        events: `traceEvents` of Paddle's file.
        rank: of the process.
    """
    # an empty event ends the list; the spans of llmsuite have the true numbers of steps
    events = [event for event in events if "ph" in event and event.get("cat") != "ProfileStep"]
    timed = [event for event in events if event["ph"] == "X"]
    # what Paddle rounds down is the same fraction of a microsecond for all
    began = min((int(event["ts"]) - int(_start(event)) for event in timed), default=0) % _CLOCK
    processes: dict[Any, int] = {}
    threads: dict[Any, int] = {}
    found: list[dict[str, Any]] = []
    by_thread: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        process = event.get("pid", 0)
        thread = event.get("tid", 0)
        own = {
            "pid": processes.setdefault(process, rank * _PROCESSES_OF_A_RANK + len(processes)),
            "tid": threads.setdefault((process, thread), len(threads)),
        }
        if event["ph"] == "X":
            name = str(event["name"]).rpartition("[")[0] or event["name"]
            times = {"ts": round(began + _start(event), 3), "dur": event["dur"]}
            found.append({"ph": "X", "name": name, "cat": event.get("cat", ""), **own, **times})
            by_thread.setdefault((own["pid"], own["tid"]), []).append(found[-1])
        elif event.get("name") == "process_name":
            found.append({**event, **own, "args": {"name": f"rank {rank}: {event['args']['name']}"}})
        elif event.get("name") == "process_sort_index":
            found.append({**event, **own, "args": {"sort_index": own["pid"]}})
        else:
            found.append({**event, **own})
    for of_thread in by_thread.values():
        _nest(of_thread)
    return found


def _nest(events: list[dict[str, Any]]) -> None:
    """Shorten events of one thread, so that of two that overlap one contains the other; by as little as possible."""
    ends: list[float] = []
    around: list[dict[str, Any]] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        start = event["ts"]
        end = start + event["dur"]
        while ends and ends[-1] <= start:
            ends.pop()
            around.pop()
        while ends and end > ends[-1]:
            if end - ends[-1] <= ends[-1] - start:
                end = ends[-1]
                event["dur"] = round(end - start, 3)
            else:
                ends.pop()
                outer = around.pop()
                outer["dur"] = round(start - outer["ts"], 3)
        ends.append(end)
        around.append(event)


def _start(event: Mapping[str, Any]) -> float:
    """Return the start of an event in microseconds after that of the profile."""
    number, _, unit = str(event["args"]["start_time"]).partition(" ")
    return float(number) * {"us": 1.0, "ms": 1e3, "s": 1e6, "ns": 1e-3}[unit]
