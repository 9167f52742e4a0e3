"""Steps that learn from completions which the model draws itself: one rollout, then one or several updates.

A rollout is a function of the weights, the seed, the number of its first step and the prompts: nothing of it has to be
in a checkpoint. So checkpoints are written between rollouts, never between the updates of one.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from llmsuite.data.loader import BatchSampler, SampleOrder
from llmsuite.devices.base import DeviceBackend
from llmsuite.errors import AgreedError, UserError
from llmsuite.parallel import collective
from llmsuite.parallel.loss_ledger import LossTerms, Sums
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.program.lengths import length_multiple
from llmsuite.progress import report
from llmsuite.recipe.resolve import RunPlan
from llmsuite.rl.ahead import begun_from, state_of
from llmsuite.rl.engine import Engine, EngineContext, Releasing
from llmsuite.rl.rollouts import DrawnApart, Rollouts
from llmsuite.specs import PrePassKind
from llmsuite.train.build import BuiltModel
from llmsuite.train.critic import Critic, NoCritic
from llmsuite.train.data import TrainingData
from llmsuite.train.forms_apart import forms_apart
from llmsuite.train.objective import Batch
from llmsuite.train.passes import BatchReader, Passes, run_prepasses
from llmsuite.train.stage import RolledOut, Stage
from llmsuite.train.whole_weights import whole_weights
from llmsuite.typing import Tensor

Weights = Callable[[], Iterable[tuple[str, Tensor]]]
"""Gathers the weights of the whole model, one after the other; every rank of the run goes through them."""


class RolloutEngine:
    """Draws completions for the stage, with the weights of the moment."""

    def __init__(
        self,
        engine: Engine | None,
        rollouts: Rollouts | None,
        weights: Weights,
        is_remote: bool,
        draws: bool = False,
    ):
        """
        Args:
            engine: None on ranks that read no data: they only help to gather weights.
            rollouts: likewise.
            weights: gathers them.
            is_remote: whether the engine has its weights elsewhere, and may draw while the model is trained.
            draws: whether this rank asks the engine for completions.
        """
        self._engine, self._rollouts, self._weights, self._draws = engine, rollouts, weights, draws
        self._is_remote = is_remote
        self._version: int | None = None

    def current(self, version: int) -> Rollouts | None:
        """Draws with the weights of this moment; None on ranks that read no data. Every rank of the run calls it.

        Args:
            version: steps that are done; while it is the same, so are the weights.
        """
        if version != self._version:
            if self._engine is not None:
                self._engine.refresh(version, self._weights())
            else:
                for _ in self._weights():
                    pass
            self._version = version
            if self._rollouts is not None:
                self._rollouts.version = version
        return self._rollouts

    def release(self) -> None:
        """The model is trained next: free what only rollouts need. Every rank of the run calls it."""
        if self._is_remote:
            return
        if isinstance(self._engine, Releasing):
            self._engine.release()
        self._version = None  # on all ranks, as all help to gather

    def evaluate(self, data: TrainingData, step: int) -> dict[str, float]:
        """Metrics of completions of the samples for evaluation, after so many steps. Every rank of the run calls it;
        those that read no data get none. Raises AgreedError where it fails on all ranks."""
        rollouts, found, failure = self.current(step), dict[str, float](), None
        if data.stage is not None and rollouts is not None:
            try:
                found = dict(data.stage.evaluate_rollouts(data.eval, rollouts))
            except AgreedError as error:
                failure = error
        if collective.mesh().has_middle:  # ranks there wait to hear how it went
            (has_failed,) = collective.from_first_rank([failure is not None])
            if has_failed and failure is None:
                failure = AgreedError("the evaluation has failed on the ranks that read data")
        if failure is not None:
            raise failure
        return found

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to have: completions for later steps that this rank has drawn ahead, as JSON data. It
        waits until they are drawn."""
        return {} if self._rollouts is None else state_of(self._rollouts.begun)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on with the completions that a checkpoint has."""
        if self._rollouts is not None:
            self._rollouts.restore(begun_from(state, self._draws))

    def close(self) -> None:
        """The run has ended, well or not."""
        if self._engine is not None:
            self._engine.close()


def rollout_engine(
    plan: RunPlan, backend: DeviceBackend, mesh: Mesh, built: BuiltModel, stage: Stage[Any] | None
) -> RolloutEngine:
    """The engine of a run, on each rank that reads data."""
    weights = functools.partial(whole_weights, plan, built, backend.parameter_dtype(plan.recipe.engine.precision), mesh)
    assert plan.rollout_engine is not None, "a stage with rollouts has the section"
    on_one = plan.rollout_engine.remote
    if stage is None:
        return RolloutEngine(None, None, weights, on_one)
    tokenizer = stage.context.tokenizer
    draws = not on_one or collective.rank() == mesh.readers[0]
    engine: Engine = plan.rollout_engine.factory(EngineContext(plan, backend, draws, report))
    missing = [name for name in ("refresh", "begin", "close") if not callable(getattr(engine, name, None))]
    if missing:
        name = plan.rollout_engine.name
        raise UserError(f"rollout engine {name}: its factory returned {engine!r}, without {', '.join(missing)}")
    stop_ids = tokenizer.ends(plan.weights or tokenizer.directory)
    vocab_size = plan.model_config.vocab_size
    rollouts = Rollouts(engine, stop_ids, tokenizer.decode, plan.recipe.seed, vocab_size, on_one)
    return RolloutEngine(engine, rollouts, weights, on_one, draws)


class RolloutReader:
    """This rank's micro-batches of each step, as `StepReader`, of samples that are completed first."""

    def __init__(
        self,
        data: TrainingData,
        plan: RunPlan,
        engine: RolloutEngine,
        passes: Passes,
        at: tuple[int, int],
        last_step: int,
        drew: Callable[[int, Sequence[Mapping[str, Any]]], None],
        critic: Critic | NoCritic,
    ):
        """
        Args:
            data: of the run.
            plan: of the run.
            engine: draws completions.
            passes: of the model, for pre-passes over a rollout.
            at: steps done, and the position in the stream of samples where the first step begins.
            last_step: of the run.
            drew: is told of the completions of a rollout, and the first step that learns from them.
            critic: of the run; it judges a rollout after the pre-passes.
        """
        self._data, self._plan, self._mesh, self._engine = data, plan, collective.mesh(), engine
        (self._step, self._position), self._last_step, self._drew = at, last_step, drew
        self._critic = critic
        recipe: Any = plan.recipe  # whose section `rollout` only such stages have
        self._lag: int = recipe.rollout.max_staleness
        self.objective = None if data.stage is None else _CollatedBatches(data.stage)
        """Makes a batch of what `next` gives."""
        self._passes = dataclasses.replace(passes, objective=self.objective)
        self._waiting: list[list[Any]] = []
        self._metrics: dict[str, float] = {}
        self._further = 0

    @property
    def further(self) -> int:
        """Samples that the rollout has taken besides its global batches, once its last step was read."""
        return self._further if self.is_between else 0

    @property
    def is_between(self) -> bool:
        """Whether a checkpoint may be written after the step that was read last: it is the last one of its rollout."""
        return not self._waiting

    def __enter__(self) -> RolloutReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._engine.close()

    def __next__(self) -> list[Any]:
        if not self._waiting:
            self._roll_out()
        self._engine.release()  # an evaluation may have drawn since
        self._step += 1
        return self._waiting.pop(0)

    def extend(self, num_steps: int) -> None:
        """Recipes refuse to roll steps back where there are rollouts."""
        raise AssertionError("a step was rolled back")

    def finished(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics of the step with those of its rollout, and those that are the largest number of all ranks. Every
        rank of the run calls it. Raises UserError when the stage ends the run."""
        names, stage = self._plan.profile.maxima, self._data.stage
        mine = {} if stage is None else stage.maxima()
        largest = collective.max_over_run([mine.get(name, -np.inf) for name in names]) if names else []
        known = dict(zip(names, largest))
        metrics = {**metrics, **self._metrics, **{name: value for name, value in known.items() if np.isfinite(value)}}
        if stage is not None:
            self._after_step(stage, metrics)
        return metrics

    def _after_step(self, stage: Stage[Any], metrics: Mapping[str, float]) -> None:
        try:
            stage.after_step(self._step, metrics)
        except DrawnApart as error:
            engine, recipe = self._plan.rollout_engine, self._plan.recipe
            if engine is None or engine.remote:  # a server's model is not made here
                raise
            backend = self._plan.device.factory()
            where = forms_apart(self._plan.family, self._plan.model_config, backend, recipe.engine.precision)
            raise UserError(f"{error}; {where}") from error

    def _roll_out(self) -> None:
        """Complete the samples of the next steps, and make this rank's batches of them."""
        began = time.perf_counter()
        train, stage = self._plan.recipe.train, self._data.stage
        num_updates, size = self._plan.profile.updates, train.global_batch_size
        rollouts, samples, begin = self._engine.current(self._step), list[Any](), self._position
        staleness = self._begin_later(rollouts)
        prompts = self._take(size * num_updates)
        if stage is not None:
            assert rollouts is not None
            rollouts.further = self._take
            rolled = self._rolled(stage, prompts, rollouts)
            samples, self._metrics = list(rolled.samples), {**rolled.metrics, **staleness}
            self._drew(self._step + 1, rolled.completions)
            assert len(samples) == size * num_updates, "a rollout gives a sample for each that it gets"
        self._engine.release()
        self._further = self._position - begin - size * num_updates
        if self._mesh.has_middle:
            self._further = int(*collective.from_first_rank([self._further]))
            if self._further < 0:
                raise AgreedError(f"step {self._step + 1}: its rollout has failed on the ranks that read data")
        self._position = begin + size * num_updates + self._further
        self._waiting = [self._dealt(samples[i : i + size]) for i in range(0, size * num_updates, size)]
        self._run_prepasses()
        self._metrics["rollout_seconds"] = time.perf_counter() - began

    def _rolled(self, stage: Stage[Any], prompts: list[Any], rollouts: Rollouts) -> RolledOut:
        try:
            return stage.roll_out(self._step + 1, prompts, rollouts)
        except AgreedError:
            if self._mesh.has_middle:  # where a pipeline's ranks wait to hear what was taken
                collective.from_first_rank([-1])
            raise

    def _take(self, count: int) -> list[Any]:
        """The next samples of the stream."""
        self._position += count
        return [self._data.train[self._data.order.at(self._position - count + i)] for i in range(count)]

    def _begin_later(self, rollouts: Rollouts | None) -> dict[str, float]:
        """With `rollout.max_staleness`, begin to draw for the steps that may learn from the weights of this moment.
        Returns the metrics of how old the weights are that have drawn for the next step."""
        stage, size = self._data.stage, self._plan.recipe.train.global_batch_size
        if not self._lag or stage is None or rollouts is None:
            return {}
        for ahead in range(min(self._lag, self._last_step - self._step - 1) + 1):
            step, first = self._step + 1 + ahead, self._position + ahead * size
            if step not in rollouts.begun:
                samples = [self._data.train[self._data.order.at(first + i)] for i in range(size)]
                stage.begin_rollout(step, samples, rollouts)
        age = float(self._step - rollouts.begun[self._step + 1].version)
        assert 0 <= age <= self._lag, f"completions of {age} steps ago"
        return {"staleness": age, "staleness/max": age}

    def _dealt(self, samples: Sequence[Any]) -> list[Any]:
        """This rank's batches of a step; in the middle of a pipeline as many that nobody looks at."""
        train, stage, own = self._plan.recipe.train, self._data.stage, list[Any]()
        if stage is not None:
            by_length = self._plan.recipe.data.group_by_length or train.micro_batch_tokens is not None
            sampler = BatchSampler(
                SampleOrder(len(samples), 0, shuffle=False),
                len(samples),
                train.micro_batch_size,
                self._mesh.degrees.num_data_ranks,
                stage.row_lengths(samples) if by_length else None,
                train.micro_batch_tokens,
                length_multiple(self._plan),
            )
            own = [stage.collate([samples[i] for i in part]) for part in sampler.micro_batches(0, self._mesh.data_rank)]
        if self._mesh.has_middle:
            (count,) = collective.from_first_rank([len(own)])
            own = own or [None] * int(count)
        return own

    def _run_prepasses(self) -> None:
        """Over all steps of the rollout, before the first of them changes the weights; statistics are of a step."""
        stage = self._data.stage
        for step in self._waiting:
            reader = BatchReader(self.objective, step)
            run_prepasses(self._passes, reader)
            for batch in step if reader.prepass_stats is not None else ():
                batch["prepass_stats"] = reader.prepass_stats
        batches = [batch for step in self._waiting for batch in step]
        self._critic.judge(batches)
        if stage is not None:
            self._metrics |= stage.finish_rollout(batches, collective.sum_over_data)


@dataclasses.dataclass(frozen=True)
class _CollatedBatches:
    """The objective of micro-batches that are batches already. What pre-passes put into a batch stays there."""

    stage: Stage[Any]

    def collate(self, samples: Any) -> Batch:
        batch: Batch = samples
        return batch

    def prepass(self, kind: PrePassKind, model: Any, batch: Batch) -> Sums:
        return self.stage.prepass(kind, model, batch)

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        return self.stage.loss(model, batch)
