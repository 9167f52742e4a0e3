"""Metrics of the model on samples it is not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle

from llmsuite.parallel.loss_ledger import LossLedger
from llmsuite.train.passes import BatchReader, Passes, run_prepasses


@paddle.no_grad()
def evaluate(
    micro_batches: Sequence[Sequence[Any]], passes: Passes, num_counted: int | None = None
) -> dict[str, float]:
    """Metrics over the micro-batches of all ranks. Leaves the model in training mode.

    Args:
        micro_batches: as many on every rank, as sharding stage 3 gathers parameters for each.
        passes: of the model, in any mode. Pre-passes run over all that is evaluated.
        num_counted: micro-batches that count, at least one; those behind only keep other ranks company. None for all.
    """
    ledger, batches = LossLedger(), BatchReader(passes.objective, micro_batches)
    run_prepasses(passes, batches, num_counted)
    passes.model.eval()
    loss = passes.objective.loss if passes.objective is not None else None
    for action in passes.actions(len(micro_batches)):
        if not action.forward:
            continue
        terms = passes.forward(action, loss, passes.batch_of(action, batches.take))
        if terms is not None and (num_counted is None or action.micro_batch < num_counted):
            ledger.add(terms)
    passes.model.train()
    return ledger.reduce()[1]
