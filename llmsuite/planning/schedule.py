"""The passes of a pipeline in time: the engine's own orders, played with the time that each pass takes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from llmsuite.engine.schedule import Action, Kind, order


@dataclasses.dataclass(frozen=True)
class Timed:
    """A pass and when it runs, in seconds or units."""

    action: Action
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """What each rank of a pipeline does when, in its order."""

    ranks: list[list[Timed]]

    @property
    def length(self) -> float:
        """From the first pass to the end of the last one."""
        return max(timed[-1].end for timed in self.ranks)

    def busy(self, stage: int) -> float:
        """How long a rank computes."""
        return sum(timed.end - timed.start for timed in self.ranks[stage])

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which they wait."""
        return 1 - sum(map(self.busy, range(len(self.ranks)))) / (len(self.ranks) * self.length)


def orders(kind: Kind, num_stages: int, num_micro_batches: int, num_chunks: int) -> list[list[Action]]:
    """The passes of every rank, as the engine runs them; without a pipeline each micro-batch goes forward and back."""
    return [order(kind, stage, num_stages, num_micro_batches, num_chunks) for stage in range(num_stages)]


def simulate(
    passes: Sequence[Sequence[Action]], forward: Sequence[float], backward: Sequence[float], transfer: float = 0.0
) -> Timeline:
    """Play the passes: each starts when its rank is done with the one before and what it needs has come.

    Args:
        passes: of each rank, see `orders`.
        forward: time of a forward pass of each part of the model.
        backward: of a backward pass.
        transfer: what a message to a neighbour takes; senders do not wait for it.
    """
    num_stages, last = len(passes), len(forward) - 1
    done: dict[tuple[bool, int, int], float] = {}
    ranks: list[list[Timed]] = [[] for _ in passes]
    at, now = [0] * num_stages, [0.0] * num_stages
    left = sum(map(len, passes))
    while left:
        before = left
        for stage, actions in enumerate(passes):
            while at[stage] < len(actions):
                action = actions[at[stage]]
                part = action.chunk * num_stages + stage
                start = now[stage]
                if action.forward and part:
                    needed = done.get((True, part - 1, action.micro_batch))
                elif not action.forward and part != last:
                    needed = done.get((False, part + 1, action.micro_batch))
                else:
                    needed = 0.0
                if needed is None:
                    break
                waits = needed + transfer if needed else 0.0
                start = max(start, waits)
                end = start + (forward if action.forward else backward)[part]
                done[action.forward, part, action.micro_batch] = now[stage] = end
                ranks[stage].append(Timed(action, start, end))
                at[stage] += 1
                left -= 1
        assert left < before, "the ranks wait for each other for ever"
    return Timeline(ranks)


def peak_held(actions: Sequence[Action], kept: Callable[[Action], float], gradients: Sequence[float] = ()) -> float:
    """The most that a rank holds at once between two passes.

    Args:
        actions: its passes.
        kept: what a forward pass keeps until its backward pass.
        gradients: of each chunk, which are there from its first backward pass on; none to leave them out.
    """
    held = peak = 0.0
    there: set[int] = set()
    for action in actions:
        held += kept(action) if action.forward else -kept(action)
        if not action.forward:
            there.add(action.chunk)
        peak = max(peak, held + sum(gradients[chunk] for chunk in there if gradients))
    return peak


def most_held(timed: Sequence[Timed]) -> int:
    """The most passes a rank holds at once for their backward pass."""
    return round(peak_held([t.action for t in timed], lambda action: 1.0))


def draw_text(timeline: Timeline, width: int = 100) -> list[str]:
    """A line a rank: digits and letters are forward passes of a micro-batch, by chunk, `-` backward ones, `.` waits.

    The shortest pass is a column; of what is longer than `width` the beginning is drawn.
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
