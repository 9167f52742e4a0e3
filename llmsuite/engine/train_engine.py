"""Interface of the engine that trains a model: its steps, its optimizer and its state."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

from llmsuite.checkpoint.train_state import TrainState
from llmsuite.engine.passes import MicroBatchLoader, Passes, run_prepasses
from llmsuite.engine.rules import StepRules
from llmsuite.launch import calls
from llmsuite.parallel.base_optimizer import BaseOptimizer
from llmsuite.parallel.loss_ledger import LossLedger


class TrainEngine(abc.ABC):
    """Trains one model. The loop around the steps does not know how a step runs.

    An `EagerEngine` runs the passes of a step one by one and then the update, a `ProgramEngine` runs all of it as one
    compiled program. Both give the same numbers.
    """

    def __init__(self, passes: Passes, optimizer: BaseOptimizer, rules: StepRules):
        """
        Args:
            passes: passes of the model, with the objective of the run.
            optimizer: optimizer of the parameters of the model.
            rules: guard, loss scale and callbacks of every step.
        """
        self.passes = passes
        self.optimizer = optimizer
        self.rules = rules

    def begin_step(self, step: int, batches: MicroBatchLoader, requests: Mapping[str, bool]) -> LossLedger:
        """Number the passes of a step, and run its pre-passes; return the ledger of its losses, with the requests of
        this rank. Arguments are those of `train_step`."""
        calls.step(step)
        self.passes.model.step = step
        ledger = LossLedger()
        ledger.add_requests(**requests)
        run_prepasses(self.passes, batches)
        return ledger

    @abc.abstractmethod
    def step(
        self, step: int, batches: MicroBatchLoader, requests: Mapping[str, bool], is_logged: bool = True
    ) -> dict[str, float]:
        """Run one step; return the metrics of the global batch. Arguments and errors are those of `train_step`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of the engine in a checkpoint, fields of its `TrainState`. The tensors of model and
        optimizer are not among them: each is gathered when it is written, see `model_state.FullModelState`."""
        return {**self.rules.guard.state(), **self.rules.loss_scale.state()}

    def load_state_dict(self, state: TrainState) -> None:
        """Restore the numbers of a checkpoint, to resume a run."""
        self.rules.guard.resume(state)
        self.rules.loss_scale.load(state)

    def roll_back(self, state: TrainState) -> None:
        """Restore the numbers of a checkpoint after a bad step, which stays counted."""
        self.rules.guard.roll_back(state)
        self.rules.loss_scale.load(state)
