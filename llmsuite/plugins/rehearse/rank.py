"""One rank of a rehearsal, in a process of its own: makes three steps and writes a report of them."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paddle

import llmsuite
from llmsuite.base import spans
from llmsuite.engine.model_flops import ModelFlops, StepWork
from llmsuite.engine.rehearsal import Routing, Sent, StepObserver
from llmsuite.planning.cost import Hardware
from llmsuite.plugins.rehearse import records as kinds
from llmsuite.plugins.rehearse.library import loaded_library, reserved_bytes
from llmsuite.plugins.rehearse.pipeline_times import PassMarks, stage_times
from llmsuite.plugins.rehearse.records import Places, parse_alive, parse_records, summary
from llmsuite.plugins.rehearse.timeline import figures, play, trace_events
from llmsuite.recipe.plans import ModelPlan, ParallelPlan, TrainPlan

NUM_STEPS = 3
"""The first step makes what later ones keep; the second one is counted; the third one finds out what its peak of
memory holds, for which each allocation is located, so that its time says nothing."""
_COUNTED = 2
_LOCATED = 3
_LOCATE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
_RARE = 1 << kinds.UPLOAD | 1 << kinds.READ | 1 << kinds.COPY | 1 << kinds.WAIT
"""Kinds of records that are always located."""


class _Counter(StepObserver):
    """Counts what the device is given."""

    def __init__(
        self, directory: Path, device: Hardware | None, devices_per_machine: int, model_flops: ModelFlops | None
    ):
        """
        Args:
            directory: to write files into.
            device: figures by which the step is played; None where it is only counted.
            devices_per_machine: ranks of a machine.
            model_flops: of the run; None where they are not known.
        """
        self.report: dict[str, Any] = {"steps": 0}
        self._device = device
        self._model_flops = model_flops
        self._devices_per_machine = devices_per_machine
        self._directory = directory
        self._places = Places()
        self._library = loaded_library()
        self._library.rehearse_await_peak.argtypes = [ctypes.c_int64]
        self._library.rehearse_num_records.restype = ctypes.c_int64
        self._locate = _LOCATE(lambda kind: self._places.current())  # kept: the device calls it
        self._library.rehearse_locate(self._locate, _RARE | 1 << kinds.ALLOCATION)

    def built(self) -> None:
        """Note the memory of the model."""
        self.report["built_bytes"] = int(paddle.device.memory_allocated())

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Count a step."""
        if number == _COUNTED:
            self._library.rehearse_locate(self._locate, _RARE)
        else:
            self._library.rehearse_locate(self._locate, _RARE | 1 << kinds.ALLOCATION)
        if number == _LOCATED:
            self._library.rehearse_await_peak(self.report["peak_bytes"])
        self._library.rehearse_forget_records()
        paddle.device.reset_max_memory_allocated()
        marks = PassMarks(lambda: int(self._library.rehearse_num_records()))
        if number == _COUNTED:
            spans.record(marks)
        try:
            yield
        finally:
            spans.record(None)
        self.report["steps"] = number
        peak = int(paddle.device.max_memory_allocated())
        if number < _COUNTED:
            self.report["first_peak_bytes"] = peak
        elif number == _COUNTED:
            self.report["peak_bytes"] = peak
            _, self.report["reserved_bytes"], self.report["host_bytes"] = reserved_bytes()
            self._count(marks)
        if number == _LOCATED:
            self._note_alive()

    def worked(self, number: int, work: StepWork) -> None:
        """Note the work of a step, over the ranks that share its samples."""
        if number == _COUNTED:
            self.report["tokens"] = int(sum(lengths.sum() for lengths in work.document_lengths))
            self.report["model_flops"] = 0.0 if self._model_flops is None else self._model_flops.of(work)

    def _count(self, marks: PassMarks) -> None:
        """Count the step, and play it on the device."""
        self._library.rehearse_write_records(str(self._directory / "records").encode())
        with open(self._directory / "records", encoding="utf-8") as lines:
            records = parse_records(lines, self._places, group_names())
        self.report |= summary(records)
        if self._device is not None:
            timeline = play(records, self._device, self._devices_per_machine, marks=marks.records)
            self.report["predicted"] = figures(timeline, self.report["host_seconds"])
            times = stage_times(marks.names, timeline.marks, timeline.seconds)
            self.report["times"] = dataclasses.asdict(times)
            events = trace_events(int(os.environ.get("PADDLE_TRAINER_ID", "0")), timeline)
            (self._directory / "trace.json").write_text(json.dumps(events), encoding="utf-8")

    def failed(self, error: BaseException) -> None:
        """Note an error, with the line of llmsuite that caused it, and what was alive."""
        frames = traceback.extract_tb(error.__traceback__)
        package = str(Path(llmsuite.__file__).parent)
        own = [frame for frame in frames if frame.filename.startswith(package)]
        lines = [f"{frame.filename[len(package) + 1 :]}:{frame.lineno}" for frame in own]
        self.report["error"] = {"text": _short(error), "lines": lines[::-1]}
        self.report["allocated_bytes"] = int(paddle.device.memory_allocated())
        self._library.rehearse_note_alive()
        self._note_alive()

    def _note_alive(self) -> None:
        self._library.rehearse_write_peak(str(self._directory / "alive").encode())
        with open(self._directory / "alive", encoding="utf-8") as lines:
            self.report["alive"] = parse_alive(lines, self._places)


def run_rank(
    rehearse: Callable[[StepObserver], Sent],
    model_plan: ModelPlan,
    parallel_plan: ParallelPlan,
    train_plan: TrainPlan,
    directory: Path,
    routing: Routing,
    device: Hardware | None = None,
) -> int:
    """Rehearse the rank of this process, and write a report.

    Args:
        rehearse: calls `rehearse_steps` for `NUM_STEPS` steps.
        model_plan: of the run, as the other plans.
        parallel_plan: its parallelism.
        train_plan: its training.
        directory: `report.json` is written there, and `trace.json` with the events of `timeline.trace_events`.
        routing: of tokens to experts.
        device: figures by which times are predicted; None for no times.

    Returns:
        The exit code: 1 where it did not reach the end of a step.
    """
    parallel_plan.device.factory().activate(0)  # before the first record
    model_flops = ModelFlops.from_plans(model_plan, parallel_plan, train_plan)
    counter = _Counter(directory, device, parallel_plan.devices_per_machine, model_flops)
    code = 0
    try:
        counter.report["sent"] = dataclasses.asdict(rehearse(counter))
    except Exception as error:
        counter.failed(error)
        code = 1
    if model_plan.shard_plan.gates:
        counter.report["routing"] = routing
    if train_plan.profile.updates:
        counter.report["completion_length"] = train_plan.rollout.max_completion_length
    counter.report["rank"] = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
    counter.report["resident_bytes"] = _resident_bytes()
    (directory / "report.json").write_text(json.dumps(counter.report), encoding="utf-8")
    return code


def group_names() -> dict[str, str]:
    """The ranks of Paddle's groups, by the keys under which their ranks meet."""
    from paddle.distributed.communication.group import _GroupManager

    found = {}
    for number, group in _GroupManager.group_map_by_id.items():
        found[f"XCCLCommContext/{number}"] = "ranks " + ",".join(map(str, group.ranks))
    return found


def _short(error: BaseException) -> str:
    """The text of an error, without the stack of C++ that Paddle adds."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    of_paddle = [line for line in lines if re.match(r"\(?[A-Z]\w*(Error: |\) )", line)]
    found = [*of_paddle, *lines, type(error).__name__]
    return found[0][:500]


def _resident_bytes() -> int:
    """The highest resident memory of this process."""
    with open("/proc/self/status", encoding="utf-8") as lines:
        kilobytes = next(line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(kilobytes) << 10
