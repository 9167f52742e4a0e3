"""The loss is a ledger: weighted terms and their weights are summed, and divided once.

A mean of means depends on how a batch was cut; a sum over a sum does not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import paddle

from llmsuite.errors import UserError
from llmsuite.parallel import collective
from llmsuite.parallel.tensor import local_value
from llmsuite.typing import Tensor

Sums = Mapping[str, tuple[Tensor | float, float]]
"""By name a sum and its weight; the metric that is reported is sum / weight. No graph is kept of them."""


@dataclasses.dataclass
class LossTerms:
    """The loss of one micro-batch, as a stage returns it."""

    total: Tensor
    """Scalar: the sum over the micro-batch of weight times loss. The engine differentiates this."""
    weight: float
    """Sum of the weights: pairs for DPO, supervised tokens for a language model."""
    sums: Sums = dataclasses.field(default_factory=dict)
    """Further metrics, averaged in the same way."""


def total_of(returned: object) -> Tensor:
    """The number that is differentiated, of what the loss of a stage has returned. Raises UserError if it has none."""
    needed = "it has to return LossTerms(total, weight), whose total is the sum over the micro-batch"
    if not isinstance(returned, LossTerms):
        raise UserError(f"the stage's `loss` returned a {type(returned).__name__}; {needed}")
    if math.prod(returned.total.shape) != 1:
        raise UserError(f"the stage's `loss` returned a total of shape {list(returned.total.shape)}; {needed}")
    return returned.total


class LossLedger:
    """Adds up the terms of one step, or of one evaluation, over micro-batches and ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor | float]] = {}
        self._weights: dict[str, float] = {}
        self._counts: dict[str, float] = {}
        self._votes: dict[str, float] = {}

    def add(self, terms: LossTerms) -> None:
        """Book one micro-batch."""
        self.book({"loss": (terms.total, terms.weight), **terms.sums})

    def book(self, sums: Sums) -> None:
        """Book sums of one micro-batch."""
        for name, (total, weight) in sums.items():
            kept = total if isinstance(total, (int, float)) else local_value(total.detach())
            self._sums.setdefault(name, []).append(kept)
            self._weights[name] = self._weights.get(name, 0.0) + weight

    def count(self, **numbers: float) -> None:
        """Book numbers that are summed and never divided, such as tokens."""
        for name, number in numbers.items():
            self._counts[name] = self._counts.get(name, 0.0) + number

    def vote(self, **numbers: int) -> None:
        """Book numbers that count from every rank, also from those that share their samples with another."""
        self._votes.update(numbers)

    def reduce(self) -> tuple[float, dict[str, float]]:
        """Sum over all data ranks. Every rank has to call it; those that read data with the same names.

        Returns:
            The sum of the weights of the loss, and every metric: sums divided by their weights, counts as they are.
            Ranks in the middle of a pipeline, which book nothing, get the loss and the votes.
        """
        mesh = collective.mesh()
        weight, metrics = self._reduce_read() if mesh.reads_data else (0.0, {})
        if not mesh.has_middle:
            return weight, metrics
        known = [weight, metrics.get("loss", 0.0)] if mesh.rank == 0 else [0.0, 0.0]
        weight, loss, *votes = collective.sum_over_run([*known, *self._votes.values()])
        known_loss = {"loss": loss} if weight else {}  # of nothing there is no mean, on these meshes as on others
        return weight, {**known_loss, **metrics, **dict(zip(self._votes, votes))}

    def ratios(self) -> dict[str, float]:
        """The sums of all data ranks, each divided by its weight; 0 for a weight of 0. Every rank that reads data has
        to call it, with the same names."""
        names = list(self._sums)
        if not names:  # pre-passes that only leave something in their batches
            return {}
        totals = collective.sum_over_data([*map(self._sum, names), *(self._weights[name] for name in names)])
        return {n: total / weight if weight else 0.0 for n, total, weight in zip(names, totals, totals[len(names) :])}

    def _sum(self, name: str) -> collective.Number:
        parts = self._sums[name]
        numbers, tensors = ([p for p in parts if isinstance(p, (int, float)) is plain] for plain in (True, False))
        if not tensors:
            return sum(numbers)
        total = paddle.add_n(tensors)
        return total + paddle.to_tensor(sum(numbers), dtype="float64") if numbers else total

    def _reduce_read(self) -> tuple[float, dict[str, float]]:
        names, counts = list(self._sums), [*self._counts, *self._votes]
        totals = collective.sum_over_data(
            [self._sum(name) for name in names] + [self._weights[name] for name in names] + list(self._counts.values()),
            list(self._votes.values()),
        )
        sums, weights, numbers = totals[: len(names)], totals[len(names) : 2 * len(names)], totals[2 * len(names) :]
        metrics = {name: total / weight for name, total, weight in zip(names, sums, weights) if weight}
        return weights[names.index("loss")], {**metrics, **dict(zip(counts, numbers))}
