"""The critic of a run: a second model with the same parallel layout as the policy, and with its own optimizer.

Its passes form a separate pipeline schedule that starts after the passes of the policy, so the pipelines never mix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llmsuite.contract.registry import Registry
from llmsuite.contract.specs import PrePassKind
from llmsuite.devices.base import DeviceBackend
from llmsuite.devices.tensors import array_of
from llmsuite.engine.batch import Batch
from llmsuite.engine.build import build_model
from llmsuite.engine.eager_engine import EagerEngine
from llmsuite.engine.guard import Guard
from llmsuite.engine.model_state import CRITIC, FullModelState, restore_from_stem
from llmsuite.engine.passes import MicroBatchLoader, Passes, run_prepasses
from llmsuite.engine.rules import StepCallback, StepRules
from llmsuite.engine.stage import CriticStage, Stage
from llmsuite.parallel import collective
from llmsuite.parallel.loss_ledger import LossLedger, LossTerms, Sums
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.pipeline import PipelineStage
from llmsuite.recipe.critic import CriticPlans


def build_critic(
    plans: CriticPlans | None,
    registry: Registry,
    backend: DeviceBackend,
    mesh: Mesh,
    stage: Stage[Any] | None,
    total_steps: int,
    policy: PipelineStage,
) -> Critic | NoCritic:
    """Build the critic of a run; `plans` is None for a run without one, the other arguments are those of `Critic`."""
    if plans is None:
        return NoCritic()
    return Critic(plans, registry, backend, mesh, stage, total_steps, policy)


class NoCritic(StepCallback):
    """Placeholder in runs without a critic."""

    digest = ""
    """Empty: it adds nothing to the digest of the model."""
    full_state = None
    """None: it adds nothing to a checkpoint."""

    def estimate_values(self, batches: Sequence[Any]) -> None:
        """Do nothing."""

    def restore(self, path: Path) -> None:
        """Do nothing: a checkpoint has nothing of it."""


class Critic(StepCallback):
    """Trains in each step on the batches of the step, after the passes of the policy and before any update."""

    def __init__(
        self,
        plans: CriticPlans,
        registry: Registry,
        backend: DeviceBackend,
        mesh: Mesh,
        stage: Stage[Any] | None,
        total_steps: int,
        policy: PipelineStage,
    ):
        """
        Args:
            plans: plans of the critic.
            registry: model families that its weights may belong to.
            backend: backend of the device.
            mesh: coordinates of this rank.
            stage: stage of the run; None on ranks that load no data.
            total_steps: steps of the run.
            policy: the model that is trained along with it, which knows the current step.
        """
        self._model_plan = plans.model
        self._mesh = mesh
        train = plans.train.section
        engine = plans.parallel.engine
        self.built = build_model(plans.model, plans.parallel, plans.train, registry, backend, mesh)
        self._policy = policy
        self.digest = f" {self.built.digest}"  # appended to the digest of the policy
        objective = None
        if stage is not None:
            assert isinstance(stage, CriticStage), "`make_stage` checks the class"
            objective = _CriticObjective(stage)
        part = self.built.part
        passes = Passes(objective, part, plans.parallel.schedule, ("model",))
        part.train()
        self._callbacks = [] if self.built.balance is None else [self.built.balance]
        self._guard = Guard(train.on_nonfinite, max_bad_steps=train.max_bad_steps)
        rules = StepRules(self._guard, callbacks=self._callbacks)
        self._engine = EagerEngine.from_plans(passes, rules, self.built, train, engine, backend, total_steps)
        self.optimizer = self._engine.optimizer
        self._dtype = backend.parameter_dtype(engine.precision)
        self._batches = list[Any]()
        self._scale = 1.0
        self._is_accepted = False
        self._metrics = dict[str, float]()

    def estimate_values(self, batches: Sequence[Any]) -> None:
        """Add "values" to the batches of a rollout; every rank has to call it with the same number of batches."""
        run_prepasses(self._engine.passes, MicroBatchLoader.collated(batches))

    # in a step

    def before_passes(self, batches: Callable[[], Sequence[Batch]], scale: float) -> None:
        """Keep the batches for `after_passes`, where the critic trains on them."""
        self.optimizer.reserve()
        own: list[Any] = list(batches())
        if self._mesh.has_middle_stages:  # middle stages have no batches, but run as many passes
            (count,) = collective.broadcast_from_rank0([len(own)])
            own = own or [None] * int(count)
        self._batches = own
        self._scale = scale
        for callback in self._callbacks:
            callback.before_passes(batches, scale)

    def after_passes(self) -> None:
        """Run the critic's forward and backward passes. Raises NonFiniteLoss before anything is updated."""
        ledger = LossLedger()
        reader = MicroBatchLoader.collated(self._batches)
        self._engine.forward_backward(reader, ledger, self._scale)
        weight, metrics = ledger.reduce()
        # gradients are 0 where the weight is, as in `train_step`
        norm = self.optimizer.finish_gradients((weight or 1.0) * self._scale)
        for callback in self._callbacks:
            callback.after_passes()
        self._batches = []
        if weight:  # else the step is skipped
            note = " These are the critic's."
            self._is_accepted = self._guard.decide(self._step, metrics["loss"], norm, note) == "accept"
            of_loss = {name: value for name, value in metrics.items() if name.startswith("critic/")}
            rate = self.optimizer.learning_rate(self._step)
            self._metrics = {
                "critic/loss": metrics["loss"], **of_loss, "critic/grad_norm": norm, "critic/learning_rate": rate,
            }  # fmt: skip

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the critic, each once."""
        found = self._metrics
        self._metrics = {}
        for callback in self._callbacks:
            found |= {f"critic/{name}": value for name, value in callback.metrics().items()}
        return found

    def after_update(self) -> None:
        """Update the critic, unless its own loss or gradient is not finite."""
        if not self._is_accepted:
            self.after_skip()
            return
        self.optimizer.step(self._step)
        for callback in self._callbacks:
            callback.after_update()

    def after_skip(self) -> None:
        """Drop the gradients of the critic."""
        self.optimizer.drop_gradients()
        for callback in self._callbacks:
            callback.after_skip()

    @property
    def _step(self) -> int:
        return self._policy.step

    # in a checkpoint

    def full_state(self) -> FullModelState:
        """Return the critic's parameters and optimizer state, to be saved."""
        return FullModelState(self._model_plan, self.built, self.optimizer, self._dtype, self._mesh)

    def restore(self, path: Path) -> None:
        """Load parameters and optimizer state from a checkpoint, whatever mesh it was written on."""
        restore_from_stem(path, CRITIC, self._model_plan, self.built, self.optimizer, self._mesh)


@dataclasses.dataclass(frozen=True)
class _CriticObjective:
    """Objective of the critic: values in place of statistics, and its own loss."""

    stage: CriticStage[Any]

    def prepass(self, kind: PrePassKind, model: Any, batch: Batch) -> Sums:
        batch["values"] = array_of(self.stage.values(model, batch))
        return {}

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        return self.stage.critic_loss(model, batch)
