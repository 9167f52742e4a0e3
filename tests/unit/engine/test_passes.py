"""Batches are made once, and pre-passes run over them once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle

from llmsuite.engine.batch import Batch
from llmsuite.engine.passes import MicroBatchLoader, Passes, run_prepasses
from llmsuite.parallel.loss_ledger import Sums
from tests.support import alone


class Counting:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def collate(self, samples: Sequence[float]) -> Batch:
        self.calls.append("collate")
        return {"rows": list(samples)}

    def prepass(self, kind: Any, model: Any, batch: Batch) -> Sums:
        self.calls.append(kind)
        return {"mean": (sum(batch["rows"]), len(batch["rows"]))}

    def loss(self, model: Any, batch: Batch) -> Any:
        raise AssertionError("there is no step")


def passes_of(objective: Counting) -> Passes:
    part: Any = alone.AnyModel(paddle.nn.Linear(2, 2))
    return Passes(objective, part, "1F1B", ["batch"])


def test_a_batch_is_made_once_and_kept_until_it_is_popped() -> None:
    objective = Counting()
    batches = MicroBatchLoader([[1.0], [2.0]], objective.collate)
    run_prepasses(passes_of(objective), batches)
    assert batches.all_batches() == [{"rows": [1.0]}, {"rows": [2.0]}]
    assert batches.pop(1) == {"rows": [2.0], "prepass_stats": {"mean": 1.5}}
    assert objective.calls.count("collate") == 2


def test_pre_passes_over_a_rollout_do_not_run_again_in_its_steps() -> None:
    objective = Counting()
    rows: list[Batch] = [{"rows": [1.0, 3.0]}, {"rows": [5.0]}]
    batches = MicroBatchLoader.collated(rows)
    for _ in range(2):
        run_prepasses(passes_of(objective), batches)
    assert objective.calls == ["batch", "batch"]
    assert batches.get(0) is rows[0]
    assert batches.pop(0) == {"rows": [1.0, 3.0], "prepass_stats": {"mean": 3.0}}


def test_placeholders_are_counted_and_are_no_batches() -> None:
    batches = MicroBatchLoader.collated([None, None])
    assert len(batches) == 2
    assert batches.all_batches() == []
