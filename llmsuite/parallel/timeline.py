"""The passes of a pipeline in time: the engine's own schedule, simulated with the time that each pass takes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from llmsuite.parallel.schedule import Action, Kind, order


@dataclasses.dataclass(frozen=True)
class TimedPass:
    """A pass with its start and end, in seconds or units."""

    action: Action
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The passes of each rank of a pipeline, in its order, with their times."""

    ranks: list[list[TimedPass]]

    @property
    def length(self) -> float:
        """Time from the start of the first pass to the end of the last one."""
        return max(timed[-1].end for timed in self.ranks)

    def busy(self, stage: int) -> float:
        """Time in which a rank computes."""
        return sum(timed.end - timed.start for timed in self.ranks[stage])

    @property
    def bubble(self) -> float:
        """The fraction of the ranks' time in which they wait."""
        return 1 - sum(map(self.busy, range(len(self.ranks)))) / (len(self.ranks) * self.length)


@functools.lru_cache(maxsize=8)  # a search comes back to a pipeline for every other degree
def orders(kind: Kind, num_stages: int, num_micro_batches: int, num_chunks: int) -> tuple[tuple[Action, ...], ...]:
    """The passes of every rank, as the engine runs them; without a pipeline, forward and backward in turn."""
    every = (order(kind, stage, num_stages, num_micro_batches, num_chunks) for stage in range(num_stages))
    return tuple(map(tuple, every))


class OrderedPass(NamedTuple):
    """A pass in a topological order of the passes of all ranks."""

    stage: int
    action: Action
    part: int
    """Part of the model that it runs."""
    needs: int
    """Index of the pass whose message it receives; -1 for none."""


def topological_order(passes: Sequence[Sequence[Action]]) -> list[OrderedPass]:
    """The passes of all ranks in a topological order: each after the previous one of its rank and the one it needs.

    Args:
        passes: of each rank, see `orders`.
    """
    num_stages = len(passes)
    last = max(action.chunk for actions in passes for action in actions) * num_stages + num_stages - 1
    made: dict[tuple[bool, int, int], int] = {}
    ordered_passes: list[OrderedPass] = []
    at = [0] * num_stages
    total = sum(map(len, passes))
    while len(ordered_passes) < total:
        before = len(ordered_passes)
        for stage, actions in enumerate(passes):
            for action in itertools.islice(actions, at[stage], None):
                part = action.chunk * num_stages + stage
                needs = -1
                if part != (0 if action.forward else last):
                    origin = part - 1 if action.forward else part + 1
                    needs = made.get((action.forward, origin, action.micro_batch), -1)
                    if needs < 0:
                        break
                made[action.forward, part, action.micro_batch] = len(ordered_passes)
                ordered_passes.append(OrderedPass(stage, action, part, needs))
                at[stage] += 1
        assert len(ordered_passes) > before, "the ranks deadlock"
    return ordered_passes


@functools.lru_cache(maxsize=8)
def topological_order_of(kind: Kind, num_stages: int, num_micro_batches: int, num_chunks: int) -> list[OrderedPass]:
    """Topological order of the passes of `orders`, cached."""
    return topological_order(orders(kind, num_stages, num_micro_batches, num_chunks))


def simulate(
    passes: Sequence[Sequence[Action]], forward: Sequence[float], backward: Sequence[float], transfer: float = 0.0
) -> Timeline:
    """Simulate the passes: each starts when its rank is free and the message it needs has arrived.

    Args:
        passes: of each rank, see `orders`.
        forward: time of a forward pass, for each part of the model.
        backward: time of a backward pass, for each part of the model.
        transfer: time of a message to a neighbour; senders do not wait for it.
    """
    ordered_passes = topological_order(passes)
    ranks: list[list[TimedPass]] = [[] for _ in passes]
    for ordered_pass, start, end in zip(ordered_passes, *_times(ordered_passes, forward, backward, transfer)):
        ranks[ordered_pass.stage].append(TimedPass(ordered_pass.action, start, end))
    return Timeline(ranks)


def length(
    ordered_passes: Sequence[OrderedPass], forward: Sequence[float], backward: Sequence[float], transfer: float = 0.0
) -> float:
    """`simulate(...).length`, from a known topological order."""
    return max(_times(ordered_passes, forward, backward, transfer)[1])


def _times(
    ordered_passes: Sequence[OrderedPass], forward: Sequence[float], backward: Sequence[float], transfer: float
) -> tuple[list[float], list[float]]:
    """Start and end of each turn."""
    now = [0.0] * len(forward)
    starts: list[float] = []
    ends: list[float] = []
    for stage, action, part, needs in ordered_passes:
        start = now[stage]
        if needs >= 0:
            arrival = ends[needs] + transfer
            if arrival > start:
                start = arrival
        now[stage] = end = start + (forward if action.forward else backward)[part]
        starts.append(start)
        ends.append(end)
    return starts, ends


def peak_held(actions: Sequence[Action], kept: Callable[[Action], float], gradients: Sequence[float] = ()) -> float:
    """The most memory that a rank holds between two passes.

    Args:
        actions: its passes.
        kept: memory that a forward pass keeps until its backward pass.
        gradients: of each chunk, which exist after its first backward pass; empty to leave them out.
    """
    held = peak = 0.0
    there: set[int] = set()
    for action in actions:
        held += kept(action) if action.forward else -kept(action)
        if not action.forward:
            there.add(action.chunk)
        peak = max(peak, held + sum(gradients[chunk] for chunk in there if gradients))
    return peak


def peak_in_flight(timed: Sequence[TimedPass]) -> int:
    """Largest number of forward passes of a rank that wait for their backward passes at the same time."""
    return round(peak_held([t.action for t in timed], lambda action: 1.0))


def timeline_text(timeline: Timeline, width: int = 100) -> list[str]:
    """One line for each rank: digits and letters are forward passes of micro-batches, by chunk, `-` backward passes,
    `.` waiting.

    The shortest pass takes one column; a longer timeline is cut off at `width` columns.
    """
    unit = min(t.end - t.start for rank in timeline.ranks for t in rank)
    columns = math.ceil(round(timeline.length / unit, 6))
    lines = []
    for stage, timed in enumerate(timeline.ranks):
        cells = ["."] * columns
        for t in timed:
            first = round(t.start / unit)
            end = round(t.end / unit)
            names = "0123456789" if t.action.chunk == 0 else "abcdefghij"
            cells[first:end] = [names[t.action.micro_batch % 10] if t.action.forward else "-"] * (end - first)
        row = "".join(cells)
        lines.append(f"stage {stage:>3} |{row[:width]}{' …' if columns > width else '|'}")
    return lines
