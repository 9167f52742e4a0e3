"""Forward passes over the micro-batches of a global batch, shared by training, evaluation and pre-passes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import paddle

from llmsuite.base.spans import span
from llmsuite.contract.specs import PrePassKind
from llmsuite.devices.tensors import in_one_copy
from llmsuite.engine.batch import Batch, BatchLayout, arrays_in
from llmsuite.engine.model_flops import StepWork
from llmsuite.parallel import collective
from llmsuite.parallel.loss_ledger import LossLedger, LossTerms, Sums
from llmsuite.parallel.pipeline import PipelineStage
from llmsuite.parallel.schedule import Action, Kind, order

T = TypeVar("T")
ObjectiveMethod = Callable[[Any, Batch], T]
"""A method of the objective that takes the model and a batch."""


class Objective(Protocol):
    """Interface of a stage for the engine: the loss of batches, without ranks, meshes or optimizers."""

    def prepass(self, kind: PrePassKind, model: Any, batch: Batch) -> Sums:
        """Return sums over one micro-batch that the loss needs of the full global batch. Called once per pre-pass."""

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        """Run the forward pass of one micro-batch. `batch["prepass_stats"]` has the sums of the pre-passes, each
        divided by its weight."""


class ProgramObjective(Objective, Protocol):
    """Interface of a stage whose steps can be compiled programs, see `engine.stage.Stage`."""

    @property
    def batch_layout(self) -> BatchLayout:
        """The entries of batches that `loss` uses."""


@dataclasses.dataclass(frozen=True)
class Passes:
    """A model with its objective, and the settings that all passes share."""

    objective: Objective | None
    """Computes losses; None on middle stages of a pipeline, which need no samples."""
    model: PipelineStage
    """Pipeline stage of this rank."""
    schedule: Kind
    """Schedule of the pipeline; without a pipeline each forward pass is followed by its backward pass."""
    prepasses: Sequence[PrePassKind] = ()
    """Pre-passes over the global batch before its loss, in this order, which is the same on every rank."""
    reference: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """Returns a context in which the model has the reference weights, for pre-passes of kind "reference"."""

    def actions(self, num_micro_batches: int) -> list[Action]:
        """Return the forward and backward passes of this rank, in order."""
        mesh = collective.mesh()
        return order(self.schedule, mesh.coordinate["pp"], mesh.degrees.pp, num_micro_batches, len(self.model.chunks))

    def forward(
        self, action: Action, method: ObjectiveMethod[T] | None, batch: Batch | None, lengths: Any = None
    ) -> T | None:
        """Run one forward pass.

        Args:
            action: the pass, with its micro-batch and chunk.
            method: method of the objective; None where there is no objective.
            batch: batch of the micro-batch; None where the chunk has neither the inputs nor the loss.
            lengths: tokens of each row without padding [B], for layers that exclude padding from their counts.

        Returns:
            The result of `method`, on ranks that have a batch.
        """
        bound = None
        if method is not None and batch is not None:
            bound = functools.partial(method, self.model, batch)
        self.model.prompt_lengths = None if batch is None else batch.get("prompt_lengths")
        with in_one_copy(arrays_in(batch or {})):
            return self.model.forward(action, bound, lengths)

    def batch_of(self, action: Action, get: Callable[[int], Batch]) -> Batch | None:
        """Return the batch of a pass on the first or the last stage; None on middle stages."""
        if self.model.owns_loss_or_inputs(action.chunk):
            return get(action.micro_batch)
        return None


class MicroBatchLoader:
    """The micro-batches of a step or an evaluation. It collates each once, and measures the time."""

    def __init__(self, samples: Sequence[Any], collate: Callable[[Any], Batch] | None):
        """
        Args:
            samples: inputs of `collate`, one entry per micro-batch.
            collate: makes the batch of a micro-batch; None on ranks that load no data, which only count the entries.
        """
        self.samples = samples
        self._collate = collate
        self._batches: dict[int, Batch] = {}
        self.has_prepasses = False
        """True once `run_prepasses` has run over the micro-batches."""
        self.prepass_stats: Mapping[str, float] | None = None
        """Ratios of sums and weights of the pre-passes; `pop` adds them to every batch."""
        self.seconds = 0.0
        """Time spent in `collate`."""
        self.work = StepWork()
        """Sizes of the micro-batches popped so far."""

    @classmethod
    def collated(cls, batches: Sequence[Any]) -> MicroBatchLoader:
        """Micro-batches that are collated already; None for each on ranks that load no data."""
        loader = cls(batches, None)
        loader._batches = {number: batch for number, batch in enumerate(batches) if batch is not None}
        return loader

    def __len__(self) -> int:
        return len(self.samples)

    def get(self, number: int) -> Batch:
        """Return the batch of a micro-batch, which is kept until `pop`."""
        if number not in self._batches:
            assert self._collate is not None
            start = time.perf_counter()
            with span("collate"):
                self._batches[number] = self._collate(self.samples[number])
            self.seconds += time.perf_counter() - start
        return self._batches[number]

    def all_batches(self) -> list[Batch]:
        """Return the batches of all micro-batches, before any is popped; none on ranks that load no data."""
        if self._collate is None and not self._batches:
            return []
        return [self.get(number) for number in range(len(self))]

    def pop(self, number: int) -> Batch:
        """Return the batch of a micro-batch, and release it."""
        batch = self.get(number)
        del self._batches[number]
        self.work.add(batch)
        if self.prepass_stats is None:
            return batch
        return {**batch, "prepass_stats": self.prepass_stats}


@paddle.no_grad()
def run_prepasses(passes: Passes, batches: MicroBatchLoader, num_counted: int | None = None) -> None:
    """Run `objective.prepass` over each micro-batch, and store the ratios of the sums over all ranks in `batches`. Does
    nothing where that was done before: pre-passes over a rollout run before the first of its steps.

    A loss that depends on the full global batch, such as one of two terms with their own weights, does not depend on
    how the batch is split if its statistics are known before the first micro-batch.

    Args:
        passes: passes of the model, which is in training mode afterwards if a pre-pass used it.
        batches: micro-batches of the global batch; the same number on every rank, as each pass may be a collective
            operation.
        num_counted: number of micro-batches that count, at least one; None for all.
    """
    if not passes.prepasses or batches.has_prepasses:
        return
    batches.has_prepasses = True
    ledger = LossLedger()
    objective = passes.objective
    counted = range(len(batches) if num_counted is None else num_counted)
    for kind in passes.prepasses:
        method = None if objective is None else functools.partial(objective.prepass, kind)
        if kind == "batch":
            if method is not None:
                for number in counted:
                    ledger.book(method(passes.model, batches.get(number)))
            continue
        passes.model.eval()
        contexts = {"adapters_off": passes.model.adapters_off, "reference": passes.reference}
        with span(f"prepass {kind}"), contexts.get(kind, contextlib.nullcontext)():
            for action in passes.actions(len(batches)):
                if not action.forward:
                    continue
                sums = passes.forward(action, method, passes.batch_of(action, batches.get))
                if sums is not None and action.micro_batch in counted:
                    ledger.book(sums)
        passes.model.train()
    if objective is not None:
        batches.prepass_stats = ledger.ratios()


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
