"""The loss is a ledger: weighted terms and their weights are summed, and divided once.

A mean of means depends on how a batch was cut; a sum over a sum does not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import paddle

from llmsuite.base.errors import UserError
from llmsuite.base.spans import spanned
from llmsuite.base.typing import Tensor
from llmsuite.devices.tensors import tensor_of
from llmsuite.parallel import collective
from llmsuite.parallel.tensor import local_value


@dataclasses.dataclass(frozen=True)
class BatchSum:
    """The sum of an entry of a batch, as a weight in a step program, which does not know the number while it is
    traced."""

    entry: str


Weight = float | BatchSum
Sums = Mapping[str, tuple[Tensor | float, Weight]]
"""Sum and weight by name; the metric that is reported is sum / weight. Their graph is not kept."""


@dataclasses.dataclass
class LossTerms:
    """The loss of one micro-batch, which a stage returns."""

    total: Tensor
    """Scalar: the sum over the micro-batch of weight times loss. The engine differentiates this."""
    weight: Weight
    """Sum of the weights: pairs for DPO, supervised tokens for a language model."""
    sums: Sums = dataclasses.field(default_factory=dict)
    """Other metrics, averaged in the same way."""
    maxima: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """Metrics that are maxima over the global batch, see `StageProfile.max_metrics`: values [rows, ...], whose graph is
    not kept."""


def total_of(returned: object) -> Tensor:
    """The scalar to differentiate, from the return value of a stage's loss. Raises UserError if there is none."""
    needed = "it has to return LossTerms(total, weight), whose total is the sum over the micro-batch"
    if not isinstance(returned, LossTerms):
        raise UserError(f"the stage's `loss` returned a {type(returned).__name__}; {needed}")
    if math.prod(returned.total.shape) != 1:
        raise UserError(f"the stage's `loss` returned a total of shape {list(returned.total.shape)}; {needed}")
    return returned.total


class LossLedger:
    """Sums of the terms of one step, or of one evaluation, over micro-batches and ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor | float]] = {}
        self._weights: dict[str, float] = {}
        self._counts: dict[str, float] = {}
        self._maxima: dict[str, list[Tensor]] = {}
        self._requests: dict[str, float] = {}

    def add(self, terms: LossTerms) -> None:
        """Book one micro-batch."""
        self.book({"loss": (terms.total, terms.weight), **terms.sums})
        if collective.mesh().counts_losses:  # on earlier pipeline stages the values are no results
            for name, values in terms.maxima.items():
                self._maxima.setdefault(name, []).append(local_value(values.detach()).max())

    def book(self, sums: Sums) -> None:
        """Book sums of one micro-batch."""
        for name, (total, weight) in sums.items():
            assert not isinstance(weight, BatchSum), "a program has its own sums"
            kept = total if isinstance(total, (int, float)) else local_value(total.detach())
            self._sums.setdefault(name, []).append(kept)
            self._weights[name] = self._weights.get(name, 0.0) + weight

    def count(self, **numbers: float) -> None:
        """Book numbers that are summed and never divided, such as tokens."""
        for name, number in numbers.items():
            self._counts[name] = self._counts.get(name, 0.0) + number

    def add_requests(self, **numbers: int) -> None:
        """Book the requests of this rank, such as to stop. They are summed over every rank, also over ranks that share
        their samples with another."""
        self._requests.update(numbers)

    @spanned("loss ledger")
    def reduce(self) -> tuple[float, dict[str, float]]:
        """Sum over all data ranks. Every rank has to call it; ranks that load data with the same names.

        Returns:
            The sum of the weights of the loss, and every metric: sums divided by their weights, counts unchanged. Ranks
            in the middle of a pipeline, which book nothing, get the loss and the requests.
        """
        mesh = collective.mesh()
        if mesh.loads_data:
            weight, metrics = self._reduce_loaders()
        else:
            weight = 0.0
            metrics = {}
        if not mesh.has_middle_stages:
            return weight, metrics
        # a second sum, over all ranks: middle stages divide gradients by the weight too, and stop with the others; they
        # took no part in the first one. Rank 0 alone adds loss and weight, which the first sum has made equal
        known = [weight, metrics.get("loss", 0.0)] if mesh.rank == 0 else [0.0, 0.0]
        weight, loss, *requests = collective.sum_over_run([*known, *self._requests.values()])
        known_loss = {"loss": loss} if weight else {}  # without terms there is no mean, on these meshes as on others
        return weight, {**known_loss, **metrics, **dict(zip(self._requests, requests))}

    def maxima(self, names: Sequence[str]) -> dict[str, float]:
        """The maxima of these metrics over all ranks, without those that no rank has. Every rank has to call it, with
        the same names."""
        if not names:
            return {}
        mine = [paddle.stack(self._maxima[name]).max() if name in self._maxima else -math.inf for name in names]
        # over the run: middle stages of a pipeline have none, and get the same metrics
        largest = collective.max_over_run(mine)
        return {name: value for name, value in zip(names, largest) if value > -math.inf}

    def ratios(self) -> dict[str, float]:
        """The sums of all data ranks, each divided by its weight; 0 for a weight of 0. Every rank that loads data has
        to call it, with the same names."""
        names = list(self._sums)
        if not names:  # pre-passes that only add entries to their batches
            return {}
        # sums and weights in one call over the loader ranks: only those have batches
        totals = collective.sum_over_data([*map(self._sum, names), *(self._weights[name] for name in names)])
        return {n: total / weight if weight else 0.0 for n, total, weight in zip(names, totals, totals[len(names) :])}

    def _sum(self, name: str) -> collective.Number:
        parts = self._sums[name]
        numbers = [p for p in parts if isinstance(p, (int, float))]
        tensors = [p for p in parts if not isinstance(p, (int, float))]
        if not tensors:
            return sum(numbers)
        total = paddle.add_n(tensors)
        return total + tensor_of(sum(numbers), dtype="float64") if numbers else total

    def _reduce_loaders(self) -> tuple[float, dict[str, float]]:
        names = list(self._sums)
        counts = [*self._counts, *self._requests]
        # one call for all numbers of a step: it waits for the device, and its latency is that of the network
        totals = collective.sum_over_data(
            [self._sum(name) for name in names] + [self._weights[name] for name in names] + list(self._counts.values()),
            list(self._requests.values()),
        )
        sums = totals[: len(names)]
        weights = totals[len(names) : 2 * len(names)]
        numbers = totals[2 * len(names) :]
        metrics = {name: total / weight for name, total, weight in zip(names, sums, weights) if weight}
        return weights[names.index("loss")], {**metrics, **dict(zip(counts, numbers))}
