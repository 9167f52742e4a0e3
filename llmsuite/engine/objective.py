"""Interface between the engine and a training stage."""

from __future__ import annotations

from typing import Any, Protocol

from llmsuite.contract.specs import PrePassKind
from llmsuite.engine.batch import Batch, BatchLayout
from llmsuite.parallel.loss_ledger import LossTerms, Sums


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
