"""Steps whose gradients are recorded, and batches that are cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from llmsuite.parallel.optimizer import Optimizer


class Recording(Optimizer):
    """Keeps the gradients a step was made with."""

    def step(self, step: int) -> None:
        self.gradients = {shard.name: gradient.numpy() for shard, gradient in self.final_gradients()}
        super().step(step)


def cut(samples: Sequence[Any], sizes: Sequence[int]) -> list[Sequence[Any]]:
    ends = list(itertools.accumulate(sizes, initial=0))
    assert ends[-1] == len(samples)
    return [samples[start:end] for start, end in itertools.pairwise(ends)]
