"""The samples of steps: whichever threads read them, and where a run goes back to an earlier step."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest

from llmsuite.data.loader import BatchSampler, SampleOrder
from llmsuite.engine.batch import Batch
from llmsuite.engine.data import MicroBatches, TrainingData
from llmsuite.engine.data_loader import StepDataLoader

SIZE = 4


class Stage:
    """Numbers for samples, of which a batch is a list."""

    def __init__(self) -> None:
        self.collated: list[list[int]] = []

    def collate(self, samples: Sequence[int]) -> Batch:
        self.collated.append(list(samples))
        return {"rows": list(samples)}


def data(stage: Any) -> TrainingData:
    """Two micro-batches of two samples a step."""
    order = SampleOrder(1000, seed=0, shuffle=False)
    sampler = BatchSampler(order, SIZE, micro_batch_size=2, num_ranks=1)
    collate = None if stage is None else stage.collate
    micro_batches = MicroBatches(size=2, max_tokens=None, by_length=False, num_data_ranks=1, length_multiple=1)
    return TrainingData(stage, stage, range(1000), (), order, sampler, micro_batches, collate)


def steps_of(loader: StepDataLoader, numbers: Sequence[int]) -> list[list[list[int]]]:
    found = []
    for number in numbers:
        samples = loader.next_step(number)
        assert samples.can_checkpoint
        batches = samples.batches
        found.append([batches.pop(i)["rows"] for i in range(len(batches))])
        metrics = {"loss": float(number)}
        assert loader.finish_step(metrics) == {"loss": float(number)}
    return found


@pytest.mark.parametrize("num_workers", [0, 2])
def test_steps_take_the_samples_of_the_stream(num_workers: int) -> None:
    stage = Stage()
    loader = StepDataLoader(data(stage), 0, 8, 3, num_workers)
    with contextlib.closing(loader):
        assert loader.samples == 8
        assert steps_of(loader, [1, 2, 3]) == [
            [[8, 9], [10, 11]],
            [[12, 13], [14, 15]],
            [[16, 17], [18, 19]],
        ]
        assert loader.samples == 20
    assert len(stage.collated) == 6, "nothing is read after the last step"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_that_rolls_back_goes_on_with_new_samples(num_workers: int) -> None:
    stage = Stage()
    loader = StepDataLoader(data(stage), 0, 0, 3, num_workers)
    with contextlib.closing(loader):
        found = steps_of(loader, [1, 2, 3, 2, 3])  # the third step is bad, and the checkpoint is that of the first
        flat = [row for step in found for batch in step for row in batch]
        assert flat == list(range(5 * SIZE))
        assert loader.samples == 5 * SIZE
    assert len(stage.collated) == 10, "as many as the steps of the run with those that it repeats"


def test_ranks_without_data_count_micro_batches() -> None:
    loader = StepDataLoader(data(None), 0, 0, 1, num_workers=2)
    with contextlib.closing(loader):
        batches = loader.next_step(1).batches
        assert len(batches) == 2
        assert batches.all_batches() == []


def test_the_error_of_a_thread_is_raised_where_its_batch_is_used() -> None:
    class Faulty(Stage):
        def collate(self, samples: Sequence[int]) -> Batch:
            if 6 in samples:
                raise ValueError("row 6")
            return super().collate(samples)

    loader = StepDataLoader(data(Faulty()), 0, 0, 2, num_workers=1)
    with contextlib.closing(loader):
        assert steps_of(loader, [1]) == [[[0, 1], [2, 3]]]
        batches = loader.next_step(2).batches
        assert batches.get(0) == {"rows": [4, 5]}
        with pytest.raises(ValueError, match="row 6"):
            batches.get(1)
