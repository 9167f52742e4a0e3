"""Forward passes over the micro-batches of a global batch, as training, evaluation and pre-passes share them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import paddle

from llmsuite.parallel import collective
from llmsuite.parallel.loss_ledger import LossLedger
from llmsuite.parallel.pipeline import PipelineStage
from llmsuite.parallel.schedule import Action, Kind, order
from llmsuite.specs import PrePassKind
from llmsuite.train.objective import Batch, Objective

T = TypeVar("T")
Ask = Callable[[Any, Batch], T]
"""A method of the objective: model and batch to what is asked."""


@dataclasses.dataclass(frozen=True)
class Passes:
    """One model and its objective, with everything that is the same in every pass."""

    objective: Objective | None
    """Makes batches and losses; None in the middle of a pipeline, where nobody looks at samples."""
    model: PipelineStage
    """This rank's part."""
    schedule: Kind
    """Order of the passes of a pipeline; without one each micro-batch goes forward and back."""
    prepasses: Sequence[PrePassKind] = ()
    """Run over the global batch before its loss, in this order; the same on every rank."""
    reference: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """Makes a context in which the model has the weights of the reference, for pre-passes of kind "reference"."""

    def actions(self, num_micro_batches: int) -> list[Action]:
        """The passes of this rank, in order."""
        mesh = collective.mesh()
        return order(self.schedule, mesh.coordinate["pp"], mesh.degrees.pp, num_micro_batches, len(self.model.chunks))

    def forward(self, action: Action, ask: Ask[T] | None, batch: Batch | None, lengths: Any = None) -> T | None:
        """One forward pass.

        Args:
            action: which one.
            ask: method of the objective; None where there is no objective.
            batch: of the micro-batch; None where the chunk has neither the inputs nor the loss.
            lengths: [B], tokens of each row without padding, for layers that leave padding out of their counts.

        Returns:
            What `ask` gives, on ranks that have a batch.
        """
        bound = functools.partial(ask, self.model, batch) if ask is not None and batch is not None else None
        self.model.prompt_lengths = None if batch is None else batch.get("prompt_lengths")
        return self.model.forward(action, bound, lengths)

    def batch_of(self, action: Action, take: Callable[[int], Batch]) -> Batch | None:
        """The batch that a pass begins with or ends in; None in the middle of the model."""
        return take(action.micro_batch) if self.model.owns_loss_or_inputs(action.chunk) else None


class BatchReader:
    """Makes the batch of each micro-batch, once, and measures the time."""

    def __init__(self, objective: Objective | None, micro_batches: Sequence[Any]):
        """
        Args:
            objective: makes the batches; None on ranks that read no data.
            micro_batches: what `objective.collate` takes, one entry a micro-batch.
        """
        self.objective, self._samples = objective, micro_batches
        self._batches: dict[int, Batch] = {}
        self.prepass_stats: Mapping[str, float] | None = None
        """Sums over weights from the pre-passes; every batch that is taken has them."""
        self.seconds = 0.0

    def __len__(self) -> int:
        return len(self._samples)

    def at(self, number: int) -> Batch:
        """The batch of a micro-batch, which is kept until it is taken."""
        if number not in self._batches:
            assert self.objective is not None
            start = time.perf_counter()
            self._batches[number] = self.objective.collate(self._samples[number])
            self.seconds += time.perf_counter() - start
        return self._batches[number]

    def all(self) -> list[Batch]:
        """The batches of all micro-batches; none on ranks that read no data."""
        return [] if self.objective is None else [self.at(number) for number in range(len(self))]

    def take(self, number: int) -> Batch:
        """The batch of a micro-batch, which is not kept any longer."""
        batch = self.at(number)
        del self._batches[number]
        return batch if self.prepass_stats is None else {**batch, "prepass_stats": self.prepass_stats}


@paddle.no_grad()
def run_prepasses(passes: Passes, batches: BatchReader, num_counted: int | None = None) -> None:
    """Ask the objective about each micro-batch, add up over micro-batches and ranks, divide, and hand it to `batches`.

    A loss that depends on the whole global batch, such as one of two terms with weights of their own, is the same
    however the batch is cut, when what it depends on is known before its first micro-batch.

    Args:
        passes: of the model, which is left in training mode if it was asked.
        batches: of the global batch, as many on every rank.
        num_counted: micro-batches that count, at least one; None for all.
    """
    if not passes.prepasses:
        return
    ledger, objective = LossLedger(), passes.objective
    counted = range(len(batches) if num_counted is None else num_counted)
    for kind in passes.prepasses:
        ask = None if objective is None else functools.partial(objective.prepass, kind)
        if kind == "batch":
            for number in counted if ask is not None else ():
                assert ask is not None
                ledger.book(ask(passes.model, batches.at(number)))
            continue
        passes.model.eval()
        other = {"adapters_off": passes.model.adapters_off, "reference": passes.reference}
        with other.get(kind, contextlib.nullcontext)():
            for action in passes.actions(len(batches)):
                if not action.forward:
                    continue
                sums = passes.forward(action, ask, passes.batch_of(action, batches.at))
                if sums is not None and action.micro_batch in counted:
                    ledger.book(sums)
        passes.model.train()
    if objective is not None:
        batches.prepass_stats = ledger.ratios()
