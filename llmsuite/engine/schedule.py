"""In which order a pipeline stage computes the micro-batches of a step. Plain data: nothing here needs a device."""

from __future__ import annotations

import collections
import dataclasses
from typing import Literal

Kind = Literal["FThenB", "1F1B"]


@dataclasses.dataclass(frozen=True)
class Action:
    """One pass over one micro-batch."""

    forward: bool
    micro_batch: int


def order(kind: Kind, stage: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """The passes of a pipeline stage.

    FThenB runs all forward passes, then all backward passes, and holds every micro-batch at once. 1F1B starts the
    backward passes as soon as it can and holds at most `num_stages - stage` (Narayanan et al. 2021, arXiv 2104.04473).
    """
    forward = [Action(True, i) for i in range(num_micro_batches)]
    backward = [Action(False, i) for i in range(num_micro_batches)]
    if kind == "FThenB":
        return forward + backward
    warmup = min(num_stages - 1 - stage, num_micro_batches)
    steady = [action for pair in zip(forward[warmup:], backward) for action in pair]
    return forward[:warmup] + steady + backward[num_micro_batches - warmup :]


def peak_live(kind: Kind, num_stages: int, num_micro_batches: int) -> list[int]:
    """Play a schedule through with blocking receives: the most micro-batches each stage holds at once.

    Raises:
        AssertionError: the stages wait for each other for ever.
    """
    queues = [collections.deque(order(kind, s, num_stages, num_micro_batches)) for s in range(num_stages)]
    done: set[tuple[bool, int, int]] = set()
    live, peak = [0] * num_stages, [0] * num_stages
    while any(queues):
        moved = False
        for stage, queue in enumerate(queues):
            while queue and _ready(queue[0], stage, num_stages, done):
                action = queue.popleft()
                done.add((action.forward, stage, action.micro_batch))
                live[stage] += 1 if action.forward else -1
                peak[stage] = max(peak[stage], live[stage])
                moved = True
        assert moved, f"{kind} with {num_stages} stages and {num_micro_batches} micro-batches does not end"
    return peak


def _ready(action: Action, stage: int, num_stages: int, done: set[tuple[bool, int, int]]) -> bool:
    if action.forward:
        return stage == 0 or (True, stage - 1, action.micro_batch) in done
    if stage == num_stages - 1:
        return (True, stage, action.micro_batch) in done
    return (False, stage + 1, action.micro_batch) in done
