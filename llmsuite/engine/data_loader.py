"""Data loader of a run: the micro-batches of one step after the other, prefetched by threads if the recipe sets
them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from llmsuite.data.loader import Prefetcher
from llmsuite.engine.batch import Batch
from llmsuite.engine.data import TrainingData
from llmsuite.engine.passes import MicroBatchLoader
from llmsuite.engine.sample_source import StepSamples


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
