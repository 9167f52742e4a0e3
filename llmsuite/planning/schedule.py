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
class Timed:
    """A pass and when it runs, in seconds or units."""

    action: Action
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The passes of each rank of a pipeline, in its order, with their times."""

    ranks: list[list[Timed]]

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


class Turn(NamedTuple):
    """A pass in a topological order of the passes of all ranks."""

    stage: int
    action: Action
    part: int
    """The part of the model it runs."""
    needs: int
    """The index of the turn whose message it receives; -1 for none."""


def in_turn(passes: Sequence[Sequence[Action]]) -> list[Turn]:
    """The passes of all ranks in a topological order: each after the previous one of its rank and the one it needs.

    Args:
        passes: of each rank, see `orders`.
    """
    num_stages = len(passes)
    last = max(action.chunk for actions in passes for action in actions) * num_stages + num_stages - 1
    made: dict[tuple[bool, int, int], int] = {}
    turns: list[Turn] = []
    at, total = [0] * num_stages, sum(map(len, passes))
    while len(turns) < total:
        before = len(turns)
        for stage, actions in enumerate(passes):
            for action in itertools.islice(actions, at[stage], None):
                part, needs = action.chunk * num_stages + stage, -1
                if part != (0 if action.forward else last):
                    origin = part - 1 if action.forward else part + 1
                    needs = made.get((action.forward, origin, action.micro_batch), -1)
                    if needs < 0:
                        break
                made[action.forward, part, action.micro_batch] = len(turns)
                turns.append(Turn(stage, action, part, needs))
                at[stage] += 1
        assert len(turns) > before, "the ranks wait for each other for ever"
    return turns


@functools.lru_cache(maxsize=8)
def turns_of(kind: Kind, num_stages: int, num_micro_batches: int, num_chunks: int) -> list[Turn]:
    """The turns of `orders`, cached."""
    return in_turn(orders(kind, num_stages, num_micro_batches, num_chunks))


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
    turns = in_turn(passes)
    ranks: list[list[Timed]] = [[] for _ in passes]
    for turn, start, end in zip(turns, *_times(turns, forward, backward, transfer)):
        ranks[turn.stage].append(Timed(turn.action, start, end))
    return Timeline(ranks)


def length(turns: Sequence[Turn], forward: Sequence[float], backward: Sequence[float], transfer: float = 0.0) -> float:
    """`simulate(...).length`, from a known topological order."""
    return max(_times(turns, forward, backward, transfer)[1])


def _times(
    turns: Sequence[Turn], forward: Sequence[float], backward: Sequence[float], transfer: float
) -> tuple[list[float], list[float]]:
    """Start and end of each turn."""
    now = [0.0] * len(forward)
    starts: list[float] = []
    ends: list[float] = []
    for stage, action, part, needs in turns:
        start = now[stage]
        if needs >= 0 and (came := ends[needs] + transfer) > start:
            start = came
        now[stage] = end = start + (forward if action.forward else backward)[part]
        starts.append(start)
        ends.append(end)
    return starts, ends


def peak_held(actions: Sequence[Action], kept: Callable[[Action], float], gradients: Sequence[float] = ()) -> float:
    """The most memory that a rank holds between two passes.

    Args:
        actions: its passes.
        kept: what a forward pass keeps until its backward pass.
        gradients: the gradients of each chunk, which exist from its first backward pass on; empty to leave them out.
    """
    held = peak = 0.0
    there: set[int] = set()
    for action in actions:
        held += kept(action) if action.forward else -kept(action)
        if not action.forward:
            there.add(action.chunk)
        peak = max(peak, held + sum(gradients[chunk] for chunk in there if gradients))
    return peak


def peak_passes(timed: Sequence[Timed]) -> int:
    """The most forward passes of a rank that wait for their backward pass at once."""
    return round(peak_held([t.action for t in timed], lambda action: 1.0))


def draw_text(timeline: Timeline, width: int = 100) -> list[str]:
    """One line a rank: digits and letters are forward passes of micro-batches, by chunk, `-` backward ones, `.` waits.

    The shortest pass takes one column; a longer timeline is cut off at `width` columns.
    """
    unit = min(t.end - t.start for rank in timeline.ranks for t in rank)
    columns = math.ceil(round(timeline.length / unit, 6))
    lines = []
    for stage, timed in enumerate(timeline.ranks):
        cells = ["."] * columns
        for t in timed:
            first, end = round(t.start / unit), round(t.end / unit)
            names = "0123456789" if t.action.chunk == 0 else "abcdefghij"
            cells[first:end] = [names[t.action.micro_batch % 10] if t.action.forward else "-"] * (end - first)
        drawn = "".join(cells)
        lines.append(f"stage {stage:>3} |{drawn[:width]}{' …' if columns > width else '|'}")
    return lines
