"""The micro-batches of one step after the other, read ahead by threads where the recipe asks for them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from llmsuite.data.loader import ReadAhead
from llmsuite.parallel.loss_ledger import LossTerms, Sums
from llmsuite.specs import PrePassKind
from llmsuite.train.data import TrainingData
from llmsuite.train.objective import Batch, Objective


class StepReader:
    """This rank's micro-batches of each step. A context: its threads end with it."""

    def __init__(self, data: TrainingData, rank: int, first: int, num_steps: int, num_workers: int):
        """
        Args:
            data: of the run.
            rank: data rank.
            first: position in the stream of samples where the first step begins.
            num_steps: steps to read.
            num_workers: threads that make batches ahead of their use.
        """
        self._size = data.sampler.global_batch_size
        self._positions = _Positions(first, first + num_steps * self._size, self._size)
        is_read = data.stage is not None
        workers = num_workers if is_read else 0
        self.objective: Objective | None = data.stage
        """Makes a batch of what `next` gives."""
        if data.stage is not None and workers:
            self.objective = _ReadyBatches(data.stage)
        indices = map(functools.partial(data.sampler.micro_batches, rank=rank), self._positions)
        collate = data.stage.collate if data.stage is not None else list
        self._ahead = ReadAhead(data.train, indices, collate, workers)

    def __enter__(self) -> StepReader:
        self._ahead.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ahead.__exit__(kind, error, trace)

    def __next__(self) -> list[Any]:
        return next(self._ahead)

    @property
    def further(self) -> int:
        """Samples that the step has taken besides its global batch: none."""
        return 0

    @property
    def is_between(self) -> bool:
        """Whether a checkpoint may be written after the step that was read last: after any."""
        return True

    def finished(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics of a step as they are."""
        return metrics

    def extend(self, num_steps: int) -> None:
        """Read so many more steps, after those that were asked for: a run that rolls back sees new samples."""
        self._positions.end += num_steps * self._size


class _Positions(Iterator[int]):
    """Positions in the stream of samples where global batches begin; its end may be moved."""

    def __init__(self, first: int, end: int, step: int):
        self._next, self.end, self._step = first, end, step

    def __next__(self) -> int:
        if self._next >= self.end:
            raise StopIteration
        self._next += self._step
        return self._next - self._step


@dataclasses.dataclass(frozen=True)
class _ReadyBatches:
    """The objective of micro-batches whose batches threads have made, or are making."""

    objective: Objective

    def collate(self, samples: Any) -> Batch:
        batch: Batch = samples.result()
        return batch

    def prepass(self, kind: PrePassKind, model: Any, batch: Batch) -> Sums:
        return self.objective.prepass(kind, model, batch)

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        return self.objective.loss(model, batch)
