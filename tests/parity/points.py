"""Points of the lattice of strategies: a set that covers every legal pair of choices, found greedily."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

MAX_RANKS = 8
CHOICES: dict[str, list[Any]] = {
    "tp": [1, 2],
    "pp": [1, 2, 4],
    "schedule": ["1F1B", "FThenB"],
    "sharding": ["none", "stage1", "stage2"],
    "sharding_degree": [1, 2],
    "data_ranks": [1, 2, 4],
    "micro_batch_size": [1, 2],
    "recompute": ["none", "full"],
    "sequence_parallel": [False, True],
    "tied": [False, True],
    "optimizer": ["sgd", "adamw"],
}


@dataclasses.dataclass(frozen=True)
class Point:
    """One strategy, and the case it is tried on."""

    tp: int
    pp: int
    schedule: str
    sharding: str
    sharding_degree: int
    data_ranks: int
    micro_batch_size: int
    recompute: str
    sequence_parallel: bool
    tied: bool
    optimizer: str

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.data_ranks

    @property
    def is_legal(self) -> bool:
        """As `llmsuite validate` has it; choices that would change nothing are kept at their first value."""
        sharded = self.sharding != "none"
        return (
            1 < self.num_ranks <= MAX_RANKS
            and (self.tp > 1 or not self.sequence_parallel)
            and (self.pp > 1 or self.schedule == "1F1B")
            and (not sharded or self.data_ranks > 1)
            and (sharded or self.sharding_degree == 1)
            and self.data_ranks % self.sharding_degree == 0
        )

    def overrides(self) -> list[str]:
        """The words that make a run of it."""
        parallel = {
            "tensor_parallel_degree": self.tp,
            "pipeline_parallel_degree": self.pp,
            "pipeline_schedule": self.schedule,
            "sharding": self.sharding,
            "sharding_parallel_degree": self.sharding_degree,
            "sequence_parallel": self.sequence_parallel,
        }
        return [
            f"--parallel={json.dumps(parallel)}",
            f"--launch.num_devices={self.num_ranks}",
            f"--train.micro_batch_size={self.micro_batch_size}",
            f"--engine.recompute={self.recompute}",
        ]

    def pairs(self) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
        """Every pair of its choices."""
        return set(itertools.combinations(dataclasses.asdict(self).items(), 2))


def covering() -> list[Point]:
    """Points in which every legal pair of choices occurs; the same list every time."""
    legal = [p for values in itertools.product(*CHOICES.values()) if (p := Point(*values)).is_legal]
    pairs = {point: point.pairs() for point in legal}
    missing = set().union(*pairs.values())
    chosen: list[Point] = []
    while missing:
        best = max(legal, key=lambda point: len(pairs[point] & missing))
        chosen.append(best)
        missing -= pairs[best]
    # then the corners where most things meet, until there are sixty
    rest = sorted(set(legal) - set(chosen), key=lambda p: (-p.num_ranks, str(dataclasses.astuple(p))))
    return chosen + rest[:: max(1, len(rest) // (60 - len(chosen)))][: 60 - len(chosen)]
