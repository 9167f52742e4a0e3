"""Interface of the sources that a run takes the samples of its steps from: a stream of rows, or rollouts."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from llmsuite.engine.passes import MicroBatchLoader


@dataclasses.dataclass(frozen=True)
class StepSamples:
    """The samples that one step trains on."""

    batches: MicroBatchLoader
    """This rank's micro-batches."""
    can_checkpoint: bool
    """True if a checkpoint may be written after the step: a resumed run can go on with the next one."""


class SampleSource(Protocol):
    """The samples of a run, step by step. Every rank has one and makes the same calls."""

    samples: int
    """Position in the stream of samples after the last finished step, where a resumed run goes on."""

    def next_step(self, step: int) -> StepSamples:
        """Return the samples of a step, counted from 1. After a roll-back the steps are counted from the one of the
        checkpoint again, and their samples are those after the ones that are used up. Raises AgreedError on all ranks
        where they cannot be made."""

    def finish_step(self, metrics: dict[str, float]) -> dict[str, float]:
        """Count the samples of the step as used up; return its metrics with those of the samples. Raises UserError when
        the run has to end. A collective call."""

    def close(self) -> None:
        """Stop threads and processes, after the last step or an error."""
