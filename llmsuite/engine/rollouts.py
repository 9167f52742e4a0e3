"""Online training on completions that the model samples itself: one rollout, then one or several updates.

A rollout depends only on the weights, the seed, the number of its first step and the prompts: a checkpoint does not
need it. So checkpoints are written between rollouts, never between the updates of one.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmsuite.base.errors import AgreedError, UserError
from llmsuite.base.progress import report
from llmsuite.base.typing import Tensor
from llmsuite.data.loader import SampleOrder
from llmsuite.devices.base import DeviceBackend
from llmsuite.engine.build import BuiltModel
from llmsuite.engine.critic import Critic, NoCritic
from llmsuite.engine.data import EvaluationSet, TrainingData
from llmsuite.engine.data_loader import StepSamples
from llmsuite.engine.full_weights import full_weights
from llmsuite.engine.passes import MicroBatchLoader, Passes, run_prepasses
from llmsuite.engine.rollout_mismatch import find_rollout_mismatch
from llmsuite.engine.stage import AsyncRolloutStage, RolloutResult, RolloutStage, Stage
from llmsuite.parallel import collective
from llmsuite.parallel.mesh import Mesh
from llmsuite.recipe.plans import ModelPlan, TrainPlan
from llmsuite.rl.engine import Engine, EngineContext, ReleasableEngine
from llmsuite.rl.in_flight import in_flight_state, restore_in_flight
from llmsuite.rl.rollouts import RolloutMismatch, Rollouts

Weights = Callable[[], Iterable[tuple[str, Tensor]]]
"""Iterates over the full weights of the model by name. Gathering is collective: every rank has to exhaust it."""


class RolloutEngine:
    """Samples completions for the stage, with the current weights."""

    def __init__(
        self,
        engine: Engine | None,
        rollouts: Rollouts | None,
        weights: Weights,
        is_remote: bool,
        is_sampler: bool = False,
        find_mismatch: Callable[[], str] | None = None,
    ):
        """
        Args:
            engine: rollout engine; None on ranks that load no data: they only take part in gathering the weights.
            rollouts: interface of the engine for stages; None on the same ranks.
            weights: gathers the weights.
            is_remote: True for an engine on a server, which may sample while the model is trained.
            is_sampler: True if this rank requests completions from the engine.
            find_mismatch: returns where the engine's model differs from the trained one, for a message; None for an
                engine whose model cannot be compared here.
        """
        self.find_mismatch = find_mismatch
        self._engine = engine
        self._rollouts = rollouts
        self._weights = weights
        self._is_sampler = is_sampler
        self._is_remote = is_remote
        self._version: int | None = None

    def current(self, version: int) -> Rollouts | None:
        """Return the rollouts with the current weights; None on ranks that load no data. A collective call, as it
        gathers the weights.

        Args:
            version: number of finished steps; the weights are gathered only when it changes.
        """
        if version != self._version:
            if self._engine is not None:
                self._engine.refresh(version, self._weights())
            else:  # take part in the collective gathering
                for _ in self._weights():
                    pass
            self._version = version
            if self._rollouts is not None:
                self._rollouts.version = version
        return self._rollouts

    def release(self) -> None:
        """Free the memory that only rollouts need, before the model is trained. Every rank of the run calls it."""
        if self._is_remote:
            return
        if isinstance(self._engine, ReleasableEngine):
            self._engine.release()
        self._version = None  # on all ranks, so that all of them gather the weights next time

    def evaluate(self, data: TrainingData, evaluation: EvaluationSet, step: int) -> dict[str, float]:
        """Return metrics of completions of the samples of an evaluation, after `step` steps. A collective call; ranks
        that load no data get no metrics. Raises AgreedError on all ranks where it fails."""
        rollouts = self.current(step)
        metrics = dict[str, float]()
        failure = None
        if isinstance(data.stage, RolloutStage) and rollouts is not None:
            try:
                metrics = dict(data.stage.evaluate_rollouts(evaluation.samples, rollouts))
            except AgreedError as error:
                failure = error
        if collective.mesh().has_middle_stages:  # middle stages only get the outcome
            (has_failed,) = collective.broadcast_from_rank0([failure is not None])
            if has_failed and failure is None:
                failure = AgreedError("the evaluation has failed on the data-loading ranks")
        if failure is not None:
            raise failure
        return metrics

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint as JSON data: completions for later steps that this rank has sampled in
        advance. Waits until they are complete."""
        return {} if self._rollouts is None else in_flight_state(self._rollouts.in_flight)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the completions of a checkpoint."""
        if self._rollouts is not None:
            self._rollouts.restore(restore_in_flight(state, self._is_sampler))

    def close(self) -> None:
        """Close the engine at the end of the run, successful or not."""
        if self._engine is not None:
            self._engine.close()


def rollout_engine(
    model_plan: ModelPlan,
    train_plan: TrainPlan,
    precision: str,
    output_dir: Path,
    backend: DeviceBackend,
    mesh: Mesh,
    built: BuiltModel,
    stage: Stage[Any] | None,
) -> RolloutEngine:
    """Build the rollout engine of a run. Every rank calls it; ranks that load no data get one without an engine."""
    weights = functools.partial(full_weights, model_plan, built, backend.parameter_dtype(precision), mesh)
    spec = train_plan.rollout_engine
    assert spec is not None, "recipes of such a stage have the section"
    on_first_rank = spec.remote
    if stage is None:
        return RolloutEngine(None, None, weights, on_first_rank)
    tokenizer = stage.context.tokenizer
    is_sampler = not on_first_rank or collective.rank() == mesh.loader_ranks[0]
    section = getattr(train_plan.rollout, train_plan.rollout.engine, None)
    context = EngineContext(model_plan, backend, precision, section, output_dir, is_sampler, report)
    engine: Engine = spec.factory(context)
    missing = [name for name in ("refresh", "begin", "close") if not callable(getattr(engine, name, None))]
    if missing:
        raise UserError(f"rollout engine {spec.name}: its factory returned {engine!r}, without {', '.join(missing)}")
    stop_ids = tokenizer.stop_token_ids(model_plan.weights or tokenizer.directory)
    stop_ids |= {tokenizer.token_id(text) for text in train_plan.rollout.stop}
    vocab_size = model_plan.config.vocab_size
    rollouts = Rollouts(engine, stop_ids, tokenizer.decode, train_plan.seed, vocab_size, on_first_rank)
    find_mismatch = None
    if not on_first_rank:  # the model of a server cannot be compared here
        find_mismatch = functools.partial(
            find_rollout_mismatch, model_plan.family, model_plan.config, backend, precision
        )
    return RolloutEngine(engine, rollouts, weights, on_first_rank, is_sampler, find_mismatch)


def needs_rollout(seed: int, num_finished: int, share: float) -> bool:
    """Return True if the next steps train on a rollout, in a run that has a share of the rollouts. The same on every
    rank, and in a resumed run; it is the draw of GKD in ms-swift.

    Args:
        seed: of the recipe.
        num_finished: number of finished steps.
        share: `StageProfile.on_policy`.
    """
    return random.Random(seed + num_finished).random() <= share


class RolloutDataLoader:
    """The `SampleSource` of stages that train on completions which the model samples itself."""

    def __init__(
        self,
        data: TrainingData,
        train_plan: TrainPlan,
        engine: RolloutEngine,
        passes: Passes,
        start: tuple[int, int],
        last_step: int,
        on_completions: Callable[[int, Sequence[Mapping[str, Any]]], None],
        critic: Critic | NoCritic,
    ):
        """
        Args:
            data: data of the run.
            train_plan: plan of the training.
            engine: samples completions.
            passes: passes of the model, for pre-passes over a rollout.
            start: number of finished steps, and the position in the stream of samples where the first step starts.
            last_step: last step of the run.
            on_completions: called with the first step that trains on a rollout, and its completions.
            critic: critic of the run; it estimates the values of a rollout after the pre-passes.
        """
        self._step, self.samples = start
        self._data = data
        self._stage: RolloutStage[Any] | None = None
        if data.stage is not None:
            assert isinstance(data.stage, RolloutStage), "`make_stage` checks the class"
            self._stage = data.stage
        self._global_batch_size = train_plan.section.global_batch_size
        self._num_updates = train_plan.profile.updates
        self._on_policy = train_plan.profile.on_policy
        self._seed = train_plan.seed
        self._mesh = collective.mesh()
        self._engine = engine
        self._position = self.samples
        """In the stream of samples, after the last one that a rollout has used."""
        self._last_step = last_step
        self._on_completions = on_completions
        self._critic = critic
        self._max_staleness: int = train_plan.rollout.max_staleness
        self._passes = passes
        self._steps: list[MicroBatchLoader] = []
        """Batches of the remaining steps of the rollout."""
        self._metrics: dict[str, float] = {}
        self._extra_samples = 0
        """Samples that the rollout has used besides its global batches."""

    def next_step(self, step: int) -> StepSamples:
        """Return the samples of a step, after a rollout if it is the first one that trains on it. Between the updates
        of one rollout no checkpoint is written."""
        assert step == self._step + 1, "a rule of recipes refuses roll-backs with rollouts"
        if not self._steps:
            self._roll_out()
        self._engine.release()  # an evaluation may have refreshed it since
        self._step = step
        batches = self._steps.pop(0)
        return StepSamples(batches, can_checkpoint=not self._steps)

    def finish_step(self, metrics: dict[str, float]) -> dict[str, float]:
        """Count the samples of a step as used up, and add to its metrics those of its rollout. Raises UserError when
        the stage ends the run."""
        self.samples += self._global_batch_size
        if not self._steps:
            self.samples += self._extra_samples
        stage = self._stage
        metrics = {**metrics, **self._metrics}
        if stage is not None:
            self._after_step(stage, metrics)
        return metrics

    def close(self) -> None:
        """Close the rollout engine."""
        self._engine.close()

    def _after_step(self, stage: RolloutStage[Any], metrics: Mapping[str, float]) -> None:
        try:
            stage.after_step(self._step, metrics)
        except RolloutMismatch as error:
            find_mismatch = self._engine.find_mismatch
            if find_mismatch is None:
                raise
            raise UserError(f"{error}; {find_mismatch()}") from error

    def _roll_out(self) -> None:
        """Run the rollout of the next steps, and collate this rank's batches of it; or of the samples as they are,
        where they need no rollout."""
        started = time.perf_counter()
        stage = self._stage
        num_updates = self._num_updates
        size = self._global_batch_size
        is_sampled = needs_rollout(self._seed, self._step, self._on_policy)
        rollouts = self._engine.current(self._step) if is_sampled else None
        samples = list[Any]()
        position = self._position
        staleness = self._start_later_steps(rollouts)
        prompts = self._take_samples(size * num_updates)
        self._metrics = {}
        if stage is not None and not is_sampled:
            samples = prompts
        elif stage is not None:
            assert rollouts is not None
            rollouts.next_samples = self._take_samples
            result = self._call_stage(stage, prompts, rollouts)
            samples = list(result.samples)
            self._metrics = {**result.metrics, **staleness}
            self._on_completions(self._step + 1, result.completions)
            assert len(samples) == size * num_updates, "a rollout has to return one sample per prompt"
        self._engine.release()
        self._extra_samples = self._position - position - size * num_updates
        if self._mesh.has_middle_stages:
            self._extra_samples = int(*collective.broadcast_from_rank0([self._extra_samples]))
            if self._extra_samples < 0:
                raise AgreedError(f"step {self._step + 1}: its rollout has failed on the data-loading ranks")
        self._position = position + size * num_updates + self._extra_samples
        self._steps = [self._local_batches(samples[i : i + size]) for i in range(0, size * num_updates, size)]
        self._run_prepasses()
        if self._on_policy < 1:
            self._metrics["on_policy"] = float(is_sampled)
        self._metrics["rollout_seconds"] = time.perf_counter() - started

    def _call_stage(self, stage: RolloutStage[Any], prompts: list[Any], rollouts: Rollouts) -> RolloutResult:
        try:
            return stage.roll_out(self._step + 1, prompts, rollouts)
        except AgreedError:
            if self._mesh.has_middle_stages:  # middle stages wait for the number of extra samples
                collective.broadcast_from_rank0([-1])
            raise

    def _take_samples(self, count: int) -> list[Any]:
        """Return the next samples of the stream."""
        self._position += count
        return [self._data.train[self._data.order.at(self._position - count + i)] for i in range(count)]

    def _start_later_steps(self, rollouts: Rollouts | None) -> dict[str, float]:
        """With `rollout.max_staleness`, start sampling for the later steps that may use the current weights. Returns
        metrics of the age, in steps, of the weights that sampled for the next step."""
        stage = self._stage
        size = self._global_batch_size
        if not self._max_staleness or stage is None or rollouts is None:
            return {}
        assert isinstance(stage, AsyncRolloutStage), "a rule of recipes refuses other stages"
        for ahead in range(min(self._max_staleness, self._last_step - self._step - 1) + 1):
            step = self._step + 1 + ahead
            first = self._position + ahead * size
            if step not in rollouts.in_flight:
                samples = [self._data.train[self._data.order.at(first + i)] for i in range(size)]
                stage.begin_rollout(step, samples, rollouts)
        age = float(self._step - rollouts.in_flight[self._step + 1].version)
        assert 0 <= age <= self._max_staleness, f"completions of {age} steps ago"
        return {"staleness": age, "staleness/max": age}

    def _local_batches(self, samples: Sequence[Any]) -> MicroBatchLoader:
        """Collate this rank's batches of a step; on middle stages of a pipeline return as many placeholders."""
        stage = self._stage
        micro_batches = self._data.micro_batches
        own = list[Any]()
        if stage is not None:
            row_lengths = None
            if micro_batches.depend_on_lengths:
                row_lengths = stage.row_lengths(samples)
            order = SampleOrder(len(samples), 0, shuffle=False)
            sampler = micro_batches.sampler(order, len(samples), row_lengths)
            assert self._data.collate is not None
            for part in sampler.micro_batches(0, self._mesh.data_rank):
                own.append(self._data.collate([samples[i] for i in part]))
        if self._mesh.has_middle_stages:  # they have no batches, but run as many passes
            (count,) = collective.broadcast_from_rank0([len(own)])
            own = own or [None] * int(count)
        return MicroBatchLoader.collated(own)

    def _run_prepasses(self) -> None:
        """Run the pre-passes of all steps of the rollout, before the first of them changes the weights. Statistics are
        those of one step each."""
        stage = self._stage
        for step in self._steps:
            run_prepasses(self._passes, step)
            if step.prepass_stats is not None:
                for batch in step.all_batches():
                    batch["prepass_stats"] = step.prepass_stats
        # placeholders too: the critic makes as many passes on middle stages of a pipeline
        batches = [batch for step in self._steps for batch in step.samples]
        self._critic.estimate_values(batches)
        if stage is not None:
            self._metrics |= stage.finish_rollout(batches, collective.sum_over_data)
