"""Samples of the steps of a run: the interface of their sources, and the one of stages that train on rows, whose
micro-batches are prefetched by threads if the recipe sets them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol

from llmsuite.data.loader import Prefetcher
from llmsuite.engine.batch import Batch
from llmsuite.engine.data import TrainingData
from llmsuite.engine.passes import MicroBatchLoader


@dataclasses.dataclass(frozen=True)
class StepSamples:
    """The samples that one step trains on."""

    batches: MicroBatchLoader
    """This rank's micro-batches."""
    can_checkpoint: bool
    """True if a checkpoint may be written after the step: a resumed run can go on with the next one."""


class SampleSource(Protocol):
    """The samples of a run, step by step. Every rank has one and makes the same calls."""

    samples: int
    """Position in the stream of samples after the last finished step, where a resumed run goes on."""

    def next_step(self, step: int) -> StepSamples:
        """Return the samples of a step, counted from 1. After a roll-back the steps are counted from the one of the
        checkpoint again, and their samples are those after the ones that are used up. Raises AgreedError on all ranks
        where they cannot be made."""

    def finish_step(self, metrics: dict[str, float]) -> dict[str, float]:
        """Count the samples of the step as used up; return its metrics with those of the samples. Raises UserError when
        the run has to end. A collective call."""

    def close(self) -> None:
        """Stop threads and processes, after the last step or an error."""


class StepDataLoader:
    """The `SampleSource` of stages that train on the rows of a file."""

    def __init__(self, data: TrainingData, rank: int, first: int, last_step: int, num_workers: int):
        """
        Args:
            data: data of the run.
            rank: data rank.
            first: position in the stream of samples where the first step starts.
            last_step: last step to load.
            num_workers: number of threads that prefetch batches.
        """
        self.samples = first
        self._last_step = last_step
        self._size = data.sampler.global_batch_size
        self._positions = _Positions(self.samples, self._size)
        self._collate: Callable[[Any], Batch] | None = data.collate
        workers = num_workers
        if self._collate is None:  # numbers are not worth a thread
            workers = 0
        indices = map(functools.partial(data.sampler.micro_batches, rank=rank), self._positions)
        self._ahead = Prefetcher(data.train, indices, self._collate or list, workers)
        if workers:
            self._collate = _result

    def next_step(self, step: int) -> StepSamples:
        """Return the samples of a step; threads go on with those of later ones."""
        # more than before where the run has rolled back to an earlier step
        num_left = self._last_step - step + 1
        self._positions.end = self.samples + num_left * self._size
        return StepSamples(MicroBatchLoader(next(self._ahead), self._collate), can_checkpoint=True)

    def finish_step(self, metrics: dict[str, float]) -> dict[str, float]:
        """Count a global batch as used up. Rows add nothing to the metrics of the step."""
        self.samples += self._size
        return metrics

    def close(self) -> None:
        """Stop the threads."""
        self._ahead.close()


def _result(batch: Future[Batch]) -> Batch:
    """The batch that a thread collates, once it is done. Raises the error of the thread."""
    return batch.result()


class _Positions(Iterator[int]):
    """Positions in the stream of samples where global batches start, below `end`, which is set between them."""

    def __init__(self, first: int, step: int):
        self._next = first
        self.end = first
        self._step = step

    def __next__(self) -> int:
        if self._next >= self.end:
            raise StopIteration
        self._next += self._step
        return self._next - self._step
