"""What takes part in every step beside the loss and the optimizer, such as the balance of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmsuite.train.objective import Batch


class StepPart:
    """Called in each step by every rank, in the order of these methods. A part overrides those it needs."""

    def begin(self, batches: Callable[[], Sequence[Batch]], scale: float) -> None:
        """Before the passes.

        Args:
            batches: makes the batches of this rank's micro-batches; none in the middle of a pipeline.
            scale: factor of all gradients of the step.
        """

    def finish(self) -> None:
        """After the passes: bring together what all ranks have seen."""

    def metrics(self) -> dict[str, float]:
        """Metrics of the global batch, after `finish`. They are read from the device, so only where they are logged."""
        return {}

    def update(self) -> None:
        """After the optimizer step."""

    def forget(self) -> None:
        """In place of `update`, in a step that updates nothing."""
