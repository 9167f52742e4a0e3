"""Pipeline schedules: the order in which each rank computes the micro-batches of a step. Plain data, without Paddle.

The layers are cut into parts, one for each rank, or several with the interleaved schedule: then chunk c of rank r is
part c * num_stages + r, and a micro-batch visits the ranks once for each chunk. `edges` has the messages between them.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal

Kind = Literal["FThenB", "1F1B", "interleaved"]


@dataclasses.dataclass(frozen=True)
class Action:
    """One pass of one micro-batch through a chunk."""

    forward: bool
    micro_batch: int
    chunk: int = 0
    """Number of the chunk on its rank, from 0."""


def order(kind: Kind, stage: int, num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> list[Action]:
    """The passes of a rank of the pipeline.

    FThenB runs all forward passes, then all backward passes, and holds the activations of every micro-batch. 1F1B
    starts the backward passes as soon as possible and holds at most `num_stages - stage` micro-batches (Narayanan et
    al. 2021, arXiv 2104.04473). Interleaved (the same paper, section 2.2) does so over several chunks a rank. It takes
    micro-batches in rounds: a round passes all chunks before the next one starts. The paper needs a number of
    micro-batches that the stages divide; here it can be any number, cut into rounds that are as equal as possible.

    Args:
        kind: the schedule.
        stage: position of the rank in the pipeline, from 0.
        num_stages: ranks of the pipeline.
        num_micro_batches: micro-batches of a step.
        num_chunks: chunks of a rank; above 1 with the interleaved schedule only.
    """
    assert num_chunks == 1 or kind == "interleaved", (kind, num_chunks)
    forward = []
    backward = []
    for micro_batches in _rounds(num_stages, num_micro_batches):
        for chunk in range(num_chunks):
            forward += [Action(True, i, chunk) for i in micro_batches]
            backward += [Action(False, i, num_chunks - 1 - chunk) for i in micro_batches]
    if kind == "FThenB":
        return forward + backward
    if num_chunks == 1:
        warmup = num_stages - 1 - stage
    else:
        # the last rank starts once the first round is in its last chunk, every earlier rank two passes before the next:
        # one for the forward pass to arrive there, one for its gradient to return
        warmup = (num_chunks - 1) * len(_rounds(num_stages, num_micro_batches)[0]) + 2 * (num_stages - 1 - stage)
    warmup = min(warmup, len(forward))
    steady = [action for pair in zip(forward[warmup:], backward) for action in pair]
    return forward[:warmup] + steady + backward[len(forward) - warmup :]


def _rounds(num_stages: int, num_micro_batches: int) -> list[range]:
    """Rounds of consecutive micro-batches: each of `num_stages` micro-batches or a few more, the longer rounds first.

    With a short last round, or with longer rounds after shorter ones, the ranks would deadlock.
    """
    count = max(1, num_micro_batches // num_stages)
    size, longer = divmod(num_micro_batches, count)
    starts = [i * size + min(i, longer) for i in range(count + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]
