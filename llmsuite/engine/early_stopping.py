"""Early ends of a run: evaluations no longer improve (early stopping), or the loss stays too high (watchdog)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.contract.schema.recipe import LossWatchdogSection
from llmsuite.parallel import collective


@dataclasses.dataclass(frozen=True)
class _Progress:
    """The evaluations up to a step."""

    step: int = 0
    """Step of the last evaluation."""
    best: float | None = None
    """Value of the last improvement; None before the first."""
    best_step: int = 0
    waited: int = 0
    """Number of evaluations since the last improvement."""


class EarlyStopping:
    """Counts the evaluations without an improvement. Every rank has an instance and calls the same methods, as only
    rank 0 has all metrics.

    Each evaluation counts once. A checkpoint may have been written before the evaluation of its step. A resumed run
    then counts that evaluation first: the recorded one, or a new one.
    """

    def __init__(self, metric: str | None, is_highest: bool, patience: int | None, min_delta: float):
        """
        Args:
            metric: name of the metric, such as "eval/loss".
            is_highest: True where the highest value is best.
            patience: number of evaluations without an improvement after which the run ends; None for never.
            min_delta: an improvement is better than the last one by more than this.
        """
        self._metric = metric
        self._is_highest = is_highest
        self._patience = patience
        self._min_delta = min_delta
        self._history = [_Progress()]
        """Progress after each evaluation of this process, to return to; the first is that of the start."""

    @property
    def last_step(self) -> int:
        """Step of the last evaluation that has counted."""
        return self._history[-1].step

    @property
    def is_over(self) -> bool:
        """True where the run has to end."""
        return self._patience is not None and self._history[-1].waited >= self._patience

    @property
    def reason(self) -> str:
        """The reason why the run ends, for a message."""
        now = self._history[-1]
        best = "it was never a number" if now.best is None else f"its best is {now.best:.6g} at step {now.best_step}"
        return f"early stopping: {self._metric} has not improved in {now.waited} evaluations; {best}"

    def evaluated(self, step: int, metrics: Mapping[str, float | None], is_recorded: bool = False) -> None:
        """Count the evaluation after a step, unless it has counted. A collective call.

        Args:
            step: optimizer steps that are done.
            metrics: of the evaluation, on rank 0, with the names that they have on disk.
            is_recorded: the metrics are those of an earlier process, and count for nothing if they lack the metric.

        Raises:
            UserError: the evaluation lacks the metric.
        """
        if self._patience is None or step <= self.last_step:
            return
        value = metrics.get(self._metric or "")
        # of rank 0, as middle stages of a pipeline do not have all metrics, and all ranks stop after the same step
        is_known, number = collective.broadcast_from_rank0(
            [self._metric in metrics, math.nan if value is None else value]
        )
        if not is_known and is_recorded:
            return  # early stopping or this metric was set since
        if not is_known:
            known = ", ".join(sorted(metrics))
            raise UserError(f"train.early_stopping.metric: is {self._metric!r}; the evaluation has {known}")
        before = self._history[-1]
        if self._is_improvement(number, before.best):
            now = _Progress(step, number, step, 0)
        else:
            now = dataclasses.replace(before, step=step, waited=before.waited + 1)
        self._history.append(now)

    def _is_improvement(self, value: float, best: float | None) -> bool:
        # a first value that is not finite would stay the best one: nothing compares as better than NaN
        if not math.isfinite(value) or best is None:
            return math.isfinite(value)
        gain = value - best if self._is_highest else best - value
        return gain > self._min_delta

    def rewind(self, step: int) -> None:
        """Forget the evaluations after a step, which the run reaches again."""
        while len(self._history) > 1 and self.last_step > step:
            self._history.pop()

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON data; empty without early stopping."""
        if self._patience is None:
            return {}
        return {"metric": self._metric, **dataclasses.asdict(self._history[-1])}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; that of another metric counts for nothing."""
        if state and state["metric"] == self._metric:
            self._history = [_Progress(**{key: value for key, value in state.items() if key != "metric"})]


@dataclasses.dataclass
class LossWatchdog:
    """Ends a run whose loss stays too high: counts the steps in a row whose loss is above a threshold. Every rank has
    an instance and gives it the same losses.

    As the callback of Axolotl, it looks at the loss of a step when the next one ends, and not at all where the model
    was evaluated in between.
    """

    threshold: float | None = None
    """None for no watchdog."""
    patience: int = 3
    """Number of steps in a row after which the run ends."""
    violations: int = 0
    """Number of steps in a row whose loss was above the threshold."""
    last_loss: float | None = None
    """Loss of the last step; None before the first one, and after an evaluation."""

    @classmethod
    def from_section(cls, section: LossWatchdogSection) -> LossWatchdog:
        """Build the watchdog of a recipe."""
        return cls(section.threshold, section.patience)

    @property
    def is_over(self) -> bool:
        """True where the run has to end."""
        return self.threshold is not None and self.violations >= self.patience

    @property
    def reason(self) -> str:
        """The reason why the run ends, for a message."""
        return f"the loss of {self.violations} steps was above train.loss_watchdog.threshold {self.threshold:g}"

    def step_ended(self, loss: float, is_evaluated: bool) -> None:
        """Look at the loss of the step before.

        Args:
            loss: of this step.
            is_evaluated: True if the model is evaluated after this step.
        """
        if self.threshold is None:
            return
        if self.last_loss is not None:
            self.violations = self.violations + 1 if self.last_loss > self.threshold else 0
        self.last_loss = None if is_evaluated else loss

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON data; empty without a watchdog."""
        if self.threshold is None:
            return {}
        return {"violations": self.violations, "last_loss": self.last_loss}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.violations = state.get("violations", 0)
        self.last_loss = state.get("last_loss")
