"""The network test of `llmsuite doctor`: connectivity of the ranks, correctness of their sums, latency and
bandwidth."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import paddle
import paddle.distributed as dist

from llmsuite.contract.schema.degrees import Degrees
from llmsuite.parallel import collective

SMALL = 1 << 10
LARGE = 1 << 22
"""Float32 elements: 4 KiB to measure latency, 16 MiB to measure bandwidth."""
_REPEATS = 5


@dataclasses.dataclass(frozen=True)
class Network:
    """Measurements of the network between ranks."""

    right: bool
    """True if every sum was correct on every rank."""
    call_seconds: float
    """Median time of an all-reduce of 4 KiB over all ranks."""
    bandwidth: float
    """Bytes/s that a rank sends in an all-reduce of 16 MiB over all ranks: 2 (n - 1) / n of the tensor, as of a
    ring."""
    pairs: dict[str, float]
    """Bandwidth between every rank and the next one, by "0-1" and so on, in bytes/s."""


def measure(num_ranks: int) -> Network:
    """Measure the network. Every rank calls it, after the device is set up."""
    mesh = collective.start(Degrees(pp=1, dp=num_ranks, sharding=1, tp=1))
    right, calls = _time(mesh.data_group, SMALL, list(range(num_ranks)))
    also_right, seconds = _time(mesh.data_group, LARGE, list(range(num_ranks)))
    right &= also_right
    pairs = {}
    for first in range(num_ranks - 1 if num_ranks > 2 else 0):  # one pair after another: they would share the network
        ranks = [first, first + 1]
        group = dist.new_group(ranks)  # by all ranks: making a group is collective
        mine = 0.0
        if mesh.rank in ranks:
            pair_right, pair_seconds = _time(group, LARGE, ranks)
            right &= pair_right
            mine = 4.0 * LARGE / pair_seconds
        # over all ranks, also those not in the pair: they wait here, so that pairs are measured one at a time
        of_ranks = collective.all_gather_floats([mine])
        pairs[f"{first}-{first + 1}"] = min(of_ranks[rank][0] for rank in ranks)
    # number of ranks with a wrong sum: a sum is used, as a rank with a broken network may see an error alone
    wrong = collective.sum_over_run([0.0 if right else 1.0])[0]
    sent = 2 * (num_ranks - 1) / num_ranks * 4.0 * LARGE
    return Network(wrong == 0, calls, sent / seconds, pairs)


def _time(group: Any, size: int, ranks: list[int]) -> tuple[bool, float]:
    """True if sums over a group are correct, and the median of their seconds."""
    durations = []
    right = True
    for turn in range(_REPEATS + 1):
        tensor = paddle.full([size], float(collective.rank() + 1), dtype="float32")
        float(tensor[0])  # waits until the tensor is on the device
        start = time.perf_counter()
        collective.sum_in_group(tensor, group)
        expected = float(sum(rank + 1 for rank in ranks))
        ends = float(tensor[0]), float(tensor[-1])
        if turn:  # the first sum opens connections
            durations.append(time.perf_counter() - start)
        right &= ends == (expected, expected) and bool((tensor == expected).all())
    return right, sorted(durations)[len(durations) // 2]
