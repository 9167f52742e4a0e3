"""Callbacks of a training step, such as the balance of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmsuite.engine.batch import Batch


class StepCallback:
    """Base class of callbacks: every rank calls the methods in each step, in this order. Override those you need."""

    def before_passes(self, batches: Callable[[], Sequence[Batch]], scale: float) -> None:
        """Called before the forward and backward passes.

        Args:
            batches: returns the batches of this rank's micro-batches; none on middle stages of a pipeline.
            scale: loss scale, a factor of all gradients of the step.
        """

    def after_passes(self) -> None:
        """Called before the update, to reduce over the ranks what this rank has collected. Eager passes are done by
        then; a step program has the passes and the update in one, and runs after this call."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of the global batch, after `after_passes`. Called for steps that are logged only, as it waits
        for the device."""
        return {}

    def after_update(self) -> None:
        """Called after the optimizer step."""

    def after_skip(self) -> None:
        """Called instead of `after_update`, in a step that updates nothing."""
