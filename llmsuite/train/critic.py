"""The critic of a run: a second model beside the one that is trained, cut as that one, with an optimizer of its own.

Its passes are a schedule of their own, behind those of the first model, so pipelines of the two never mix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llmsuite.devices.base import DeviceBackend
from llmsuite.parallel import collective
from llmsuite.parallel.loss_ledger import LossLedger, LossTerms, Sums
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.optimizer import Optimizer
from llmsuite.parallel.pipeline import PipelineStage
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.critic import critic_plan
from llmsuite.recipe.resolve import RunPlan
from llmsuite.specs import PrePassKind
from llmsuite.train.build import build_model
from llmsuite.train.guard import Guard
from llmsuite.train.model_state import CRITIC, WholeModel, restore_whole
from llmsuite.train.objective import Batch
from llmsuite.train.parts import StepPart
from llmsuite.train.passes import BatchReader, Passes, run_prepasses
from llmsuite.train.stage import Stage
from llmsuite.train.step import forward_backward


def critic_of(
    plan: RunPlan,
    registry: Registry,
    backend: DeviceBackend,
    mesh: Mesh,
    stage: Stage[Any] | None,
    total_steps: int,
    first: PipelineStage,
) -> Critic | NoCritic:
    """The critic of a run; arguments as of `Critic`."""
    if plan.profile.critic is None:
        return NoCritic()
    return Critic(plan, registry, backend, mesh, stage, total_steps, first)


class NoCritic(StepPart):
    """In place of a critic, in runs without."""

    digest = ""
    """It adds nothing to that of the model."""
    whole = None
    """Nor to a checkpoint."""

    def judge(self, batches: Sequence[Any]) -> None:
        """Says nothing of a rollout."""

    def restore(self, path: Path) -> None:
        """A checkpoint has nothing of it."""


class Critic(StepPart):
    """Learns in each step from the batches of the step, after the passes of the first model and before any update."""

    def __init__(
        self,
        plan: RunPlan,
        registry: Registry,
        backend: DeviceBackend,
        mesh: Mesh,
        stage: Stage[Any] | None,
        total_steps: int,
        first: PipelineStage,
    ):
        """
        Args:
            plan: of the run, whose profile has a critic.
            registry: of the families its weights may be of.
            backend: of the device.
            mesh: this rank's place.
            stage: of the run; None on ranks that read no data.
            total_steps: of the run.
            first: the model that is trained beside it, which knows the step.
        """
        self._plan, self._mesh = critic_plan(plan), mesh
        recipe = self._plan.recipe
        train, precision = recipe.train, recipe.engine.precision
        self.built = build_model(self._plan, registry, backend, mesh)
        self._first, self.digest = first, f" {self.built.digest}"  # stands behind that of the model
        objective = None if stage is None else _Judgement(stage)
        part, schedule = self.built.part, plan.schedule
        self._passes = Passes(objective, part, schedule, ("model",))
        part.train()
        host = backend if recipe.engine.offload_optimizer else None
        self.optimizer = Optimizer(self.built.shards, train, total_steps, host, backend.ops(precision))
        self._dtype = backend.parameter_dtype(precision)
        self._parts = [part for part in (self.built.balance,) if part is not None]
        self._guard = Guard(train.on_nonfinite, max_bad_steps=train.max_bad_steps)
        self._batches, self._scale, self._is_accepted = list[Any](), 1.0, False
        self._metrics = dict[str, float]()

    def judge(self, batches: Sequence[Any]) -> None:
        """Put into the batches of a rollout, of which every rank has as many, what it says of their tokens."""
        run_prepasses(self._passes, BatchReader(self._passes.objective, batches))

    # in a step

    def begin(self, batches: Callable[[], Sequence[Batch]], scale: float) -> None:
        """See `StepPart`."""
        self.optimizer.reserve()
        own: list[Any] = list(batches())
        if self._mesh.has_middle:  # where there are none
            (count,) = collective.from_first_rank([len(own)])
            own = own or [None] * int(count)
        self._batches, self._scale = own, scale
        for part in self._parts:
            part.begin(batches, scale)

    def finish(self) -> None:
        """Forward and backward passes. Raises NonFiniteLoss before anything is updated."""
        ledger, reader = LossLedger(), BatchReader(self._passes.objective, self._batches)
        forward_backward(self._passes, reader, self.optimizer, ledger, self._scale)
        weight, metrics = ledger.reduce()
        norm = self.optimizer.finish_gradients((weight or 1.0) * self._scale)
        for part in self._parts:
            part.finish()
        self._batches = []
        if weight:  # else the step is skipped
            note = " These are the critic's."
            self._is_accepted = self._guard.judge(self._step, metrics["loss"], norm, note) == "accept"
            told = {name: value for name, value in metrics.items() if name.startswith("critic/")}
            rate = self.optimizer.learning_rate(self._step)
            self._metrics = {
                "critic/loss": metrics["loss"], **told, "critic/grad_norm": norm, "critic/learning_rate": rate,
            }  # fmt: skip

    def metrics(self) -> dict[str, float]:
        """See `StepPart`."""
        told, self._metrics = self._metrics, {}
        return {**told, **{f"critic/{name}": value for part in self._parts for name, value in part.metrics().items()}}

    def update(self) -> None:
        """See `StepPart`; a step whose numbers are not finite updates nothing of it."""
        if not self._is_accepted:
            self.forget()
            return
        self.optimizer.step(self._step)
        for part in self._parts:
            part.update()

    def forget(self) -> None:
        """See `StepPart`."""
        self.optimizer.drop_gradients()
        for part in self._parts:
            part.forget()

    @property
    def _step(self) -> int:
        return self._first.step

    # in a checkpoint

    def whole(self) -> WholeModel:
        """Its parameters and the state of its optimizer, to be saved."""
        return WholeModel(self._plan, self.built, self.optimizer, self._dtype, self._mesh)

    def restore(self, path: Path) -> None:
        """Load both from a checkpoint, whatever mesh it was written on."""
        restore_whole(path, CRITIC, self._plan, self.built, self.optimizer, self._mesh)


@dataclasses.dataclass(frozen=True)
class _Judgement:
    """The objective of the critic over batches that a rollout has made."""

    stage: Stage[Any]

    def collate(self, samples: Any) -> Batch:
        batch: Batch = samples
        return batch

    def prepass(self, kind: PrePassKind, model: Any, batch: Batch) -> Sums:
        batch["values"] = self.stage.values(model, batch).numpy()
        return {}

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        return self.stage.critic_loss(model, batch)
