"""Evaluation: metrics of the model on samples that it is not trained on."""

from __future__ import annotations

import paddle

from llmsuite.engine.passes import MicroBatchLoader, Passes, run_prepasses
from llmsuite.parallel.loss_ledger import LossLedger


@paddle.no_grad()
def evaluate(batches: MicroBatchLoader, passes: Passes, num_counted: int | None = None) -> dict[str, float]:
    """Compute metrics over the micro-batches of all ranks. Leaves the model in training mode.

    Args:
        batches: as many micro-batches on every rank, as each forward pass of sharding stage 3 is a collective
            operation that gathers parameters.
        passes: passes of the model, in any mode. Pre-passes run over all samples of the evaluation.
        num_counted: number of micro-batches that count, at least one; the rest only matches the number of other ranks.
            None for all.
    """
    ledger = LossLedger()
    run_prepasses(passes, batches, num_counted)
    passes.model.eval()
    loss = passes.objective.loss if passes.objective is not None else None
    for action in passes.actions(len(batches)):
        if not action.forward:
            continue
        terms = passes.forward(action, loss, passes.batch_of(action, batches.pop))
        if terms is not None and (num_counted is None or action.micro_batch < num_counted):
            ledger.add(terms)
    passes.model.train()
    return ledger.reduce()[1]
