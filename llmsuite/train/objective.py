"""What the engine asks of a training stage, and the batches it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from llmsuite.parallel.loss_ledger import LossTerms, Sums
from llmsuite.specs import PrePassKind
from llmsuite.typing import Tensor

Batch = dict[str, Any]
"""The arrays of one micro-batch, by name."""


class Objective(Protocol):
    """The face of a stage towards the engine: batches and their loss, nothing of ranks, meshes or optimizers."""

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Samples to arrays. Has the integers "num_tokens" (without padding) and "num_supervised"; may have "lengths",
        the tokens of each row that are no padding, [B], and "weight", that of the loss."""

    def prepass(self, kind: PrePassKind, model: Any, batch: Batch) -> Sums:
        """Sums over one micro-batch that the loss needs of the whole global batch. Called once for each pre-pass."""

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        """Forward pass of one micro-batch. `batch["prepass_stats"]` has the sums of the pre-passes, each divided by its
        weight."""


class ProgramObjective(Objective, Protocol):
    """The face of a stage whose steps can be programs, see `train.stage.Stage`."""

    def program_inputs(self, batch: Batch, length: int) -> Mapping[str, np.ndarray]:
        """The arrays of a batch that a program takes."""

    def program_weights(self, batch: Batch) -> Mapping[str, float]:
        """The weights of sums of `program_loss` that are not those of the loss."""

    def program_loss(self, model: Any, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """`loss` of the inputs of a program."""
