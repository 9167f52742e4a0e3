"""The stages of a pipeline played against each other: the bubbles of its schedule, and the waits for its slowest stage.

Each stage is rehearsed alone, as if what it receives were there at once. Its passes then have known times, and the
schedule says which pass waits for which.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from llmsuite.parallel.schedule import Action
from llmsuite.parallel.timeline import topological_order

PASSES = ("forward", "backward")
"""Names of the spans of the engine around the passes of a schedule."""
_PREPASS = "prepass "
"""Beginning of the names of spans around a pass over all micro-batches before their losses."""


@dataclasses.dataclass(frozen=True)
class StageTimes:
    """A step of one pipeline stage, in seconds, without waiting for other stages."""

    passes: list[float]
    """Times of the passes, in the order of the stage. A pass includes what is done until the next one begins."""
    prepasses: float
    """Time of all forward passes before the first of these, which have no backward pass."""
    around: float
    """Time of everything else: before the first pass, and after the last one."""

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return sum(self.passes) + self.prepasses + self.around


class PassMarks:
    """The numbers of the records between which passes lie, from the spans of the engine."""

    def __init__(self, num_records: Callable[[], int]):
        """
        Args:
            num_records: returns the number of records so far.
        """
        self.names: list[str] = []
        self.records: list[int] = []
        """Two for each name: the first record of its span, and the one after its last."""
        self._num_records = num_records

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """A recorder for `base.spans.record`."""
        is_pass = name in PASSES or name.startswith(_PREPASS)
        return self._span(name) if is_pass else contextlib.nullcontext()

    @contextlib.contextmanager
    def _span(self, name: str) -> Any:
        self.names.append(name)
        self.records.append(self._num_records())
        yield
        self.records.append(self._num_records())


def stage_times(names: Sequence[str], marks: Sequence[float], seconds: float) -> StageTimes:
    """The times of a step from those of its marks.

    Args:
        names: of spans, see `PassMarks`.
        marks: two times for each name.
        seconds: of the step.
    """
    prepasses = 0.0
    starts = []
    end = 0.0
    for number, name in enumerate(names):
        if name in PASSES:
            starts.append(marks[2 * number])
            end = marks[2 * number + 1]
        else:
            prepasses += marks[2 * number + 1] - marks[2 * number]
    passes = [after - before for before, after in zip(starts, [*starts[1:], end])]
    return StageTimes(passes, prepasses, seconds - prepasses - sum(passes))


@dataclasses.dataclass(frozen=True)
class PipelineTimes:
    """A step of a pipeline."""

    seconds: float
    """From the start to the end of the last stage."""
    bubble: float
    """The fraction of the time of the passes in which a stage waits, on average."""


def play_stages(stages: Sequence[StageTimes], orders: Sequence[Sequence[Action]]) -> PipelineTimes:
    """Play the stages of a pipeline against each other. A pass begins when its stage is free and the one that it
    receives from has ended: a receive is a part of the pass.

    Args:
        stages: all of them, in order.
        orders: the passes of each, see `parallel.timeline.orders`.
    """
    now = [0.0] * len(stages)
    ends: list[float] = []
    next_pass = [iter(stage.passes) for stage in stages]
    for stage, _, _, needs in topological_order(orders):
        begin = max(now[stage], ends[needs]) if needs >= 0 else now[stage]
        now[stage] = begin + next(next_pass[stage])
        ends.append(now[stage])
    length = max(ends)
    busy = sum(sum(stage.passes) for stage in stages) / len(stages)
    # pre-passes go through the pipeline one micro-batch after the other, each as fast as the slowest stage
    count = sum(action.forward and action.chunk == 0 for action in orders[0])
    each = [stage.prepasses / count for stage in stages]
    before = (count - 1) * max(each) + sum(each)
    around = max(stage.around for stage in stages)
    return PipelineTimes(before + length + around, 1 - busy / length if length else 0.0)


def with_stand_ins(
    rehearsed: Mapping[int, StageTimes], orders: Sequence[Sequence[Action]], costs: Sequence[float]
) -> list[StageTimes]:
    """The times of all stages. One that is not rehearsed is as fast as the nearest stage that is, in proportion to the
    FLOPs of its layers.

    Args:
        rehearsed: times by the number of the stage.
        orders: the passes of each stage.
        costs: FLOPs of each part of the model; part c * num_stages + s is chunk c of stage s.
    """
    num_stages = len(orders)
    found = []
    for stage in range(num_stages):
        if stage in rehearsed:
            found.append(rehearsed[stage])
            continue
        # in a pipeline of alike stages, the last one has the head too
        inner = [other for other in rehearsed if other != num_stages - 1] or list(rehearsed)
        nearest = min(inner, key=lambda other: abs(other - stage))
        means = _mean_passes(rehearsed[nearest], orders[nearest])
        passes = [
            means[action.forward, action.chunk]
            * costs[action.chunk * num_stages + stage]
            / costs[action.chunk * num_stages + nearest]
            for action in orders[stage]
        ]
        ratio = sum(costs[stage::num_stages]) / sum(costs[nearest::num_stages])
        found.append(StageTimes(passes, rehearsed[nearest].prepasses * ratio, rehearsed[nearest].around))
    return found


def _mean_passes(times: StageTimes, actions: Sequence[Action]) -> dict[tuple[bool, int], float]:
    """The mean time of a pass, by direction and chunk."""
    each: dict[tuple[bool, int], list[float]] = collections.defaultdict(list)
    for action, seconds in zip(actions, times.passes, strict=True):
        each[action.forward, action.chunk].append(seconds)
    return {key: sum(seconds) / len(seconds) for key, seconds in each.items()}
