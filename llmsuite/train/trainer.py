"""A training run in one rank, from plan to last checkpoint: what `llmsuite run` does.

Read top to bottom: construction (device -> mesh -> data -> model -> optimizer -> checkpointer), then the loop, then
what the loop calls. One optimizer step is in `step.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from typing import Any

from llmsuite.checkpoint.model_dir import without_carried
from llmsuite.checkpoint.train_state import TrainState
from llmsuite.errors import AgreedError, RecipeError
from llmsuite.launch import calls
from llmsuite.launch.ends import INTERRUPTED
from llmsuite.locks import lock_directory
from llmsuite.models.shard_plan import WHOLE
from llmsuite.observe.events import read_events
from llmsuite.observe.loggers import Loggers
from llmsuite.observe.metrics import Window, evaluation_at, place
from llmsuite.parallel import collective
from llmsuite.parallel.ledger_entries import VOTES
from llmsuite.parallel.optimizer import Optimizer
from llmsuite.plugins.manager import Registry
from llmsuite.progress import report
from llmsuite.recipe.resolve import RunPlan
from llmsuite.recipe.unread import unread_keys
from llmsuite.schema.section import as_plain
from llmsuite.shown import redacted_data
from llmsuite.specs import RunView
from llmsuite.train.annotated import build_annotated
from llmsuite.train.build import build_model
from llmsuite.train.cadence import Cadence
from llmsuite.train.critic import critic_of
from llmsuite.train.data import read_data, tokenizer_to_save
from llmsuite.train.evaluate import evaluate
from llmsuite.train.fetching import fetch_parts, reading
from llmsuite.train.frozen_copy import frozen_reference
from llmsuite.train.generation import AnswerEvaluation
from llmsuite.train.guard import Guard
from llmsuite.train.lora_ga import GradientStart, begin_with_gradients
from llmsuite.train.loss_scale import LossScale, NoLossScale
from llmsuite.train.model_state import WholeModel, wanted_tensors
from llmsuite.train.output import Output, Silence
from llmsuite.train.own_disks import find_own_disk, take_directory
from llmsuite.train.passes import Passes
from llmsuite.train.reader import StepReader
from llmsuite.train.resume import Beginning, check_recipe, load_all, resume_from, rounded
from llmsuite.train.rollouts import RolloutEngine, RolloutReader, rollout_engine
from llmsuite.train.saving import CheckpointContents, Saver
from llmsuite.train.step import StepRules
from llmsuite.train.stop import StopRequest
from llmsuite.train.stragglers import stragglers
from llmsuite.train.updater import Updater


def run(plan: RunPlan, registry: Registry, resume: bool) -> int:
    """Train as the plan says, in this rank. Returns the exit code.

    Raises:
        UserError: the input is wrong; nothing that existed was changed.
    """
    # taken before any work is done in vain
    with contextlib.ExitStack() as locks:
        if collective.rank() == 0:
            locks.enter_context(lock_directory(plan.output_dir))
            if resume:
                check_recipe(plan)
        trainer = Trainer(plan, registry)
        if trainer.disk is not None:
            locks.enter_context(take_directory(plan, trainer.disk, resume))
        if resume:
            trainer.resume()
        return trainer.train()


class Trainer:
    """Everything a run has in one rank, and its loop.

    Nothing that it holds refers back to it: the memory of a run is free as soon as its trainer is.
    """

    def __init__(self, plan: RunPlan, registry: Registry):
        self.registry, recipe = registry, plan.recipe
        precision, train = recipe.engine.precision, recipe.train

        # device
        self.backend = backend = plan.device.factory()
        backend.activate(collective.local_rank())

        # mesh
        self.mesh = mesh = collective.start(plan.degrees)
        self.disk = find_own_disk(plan.output_dir, recipe.launch.nnodes)

        # data
        plan.check_files(mesh.reads_data)
        self.plan = plan = plan.fetched(report) if mesh.reads_data else plan
        if recipe.source:
            report(f"numbers from {recipe.source}")
        digests: dict[str, str] = {}
        self.data = data = read_data(plan, registry, backend, mesh, lambda: digests["model"])
        self.cadence = Cadence.of(plan, data.order.epoch_length)
        self._num_workers = recipe.data.num_workers
        self._eval_batches = data.eval_micro_batches(mesh, train.micro_batch_size)

        # model
        build = build_annotated if (plan.family.shard_plan or WHOLE).is_annotated else build_model
        self.built = built = build(plan, registry, backend, mesh)
        self.critic = critic_of(plan, registry, backend, mesh, data.stage, self.cadence.total_steps, built.part)
        self._start = GradientStart.of(recipe.lora)
        self._digest = built.digest + self.critic.digest
        digests["model"] = built.digest
        prepasses = [prepass.kind for prepass in plan.profile.prepasses]
        reference = frozen_reference(plan, registry, built, mesh)
        beside = contextlib.nullcontext if reference is None else reference.active
        self.passes = Passes(data.stage, built.part, plan.schedule, prepasses, beside)
        self.rollouts = rollout_engine(plan, backend, mesh, built, data.stage) if plan.profile.updates else None
        self.answers: AnswerEvaluation | None = None
        if recipe.generation.max_new_tokens is not None:
            self.answers = AnswerEvaluation(plan, backend, mesh, built, data)

        # optimizer
        self.updater = Updater.of(plan, backend, built, data.in_programs, self.cadence.total_steps)
        self.optimizer = self.updater.optimizer
        self.rules = StepRules(
            Guard.of(train),
            LossScale() if precision == "fp16" else NoLossScale(),
            [part for part in (built.balance, built.input_scales, self.critic) if part is not None],
            may_be_empty=self.rollouts is not None,
        )

        # checkpointer
        dtype = backend.parameter_dtype(precision)
        whole_model = functools.partial(WholeModel, plan, built, self.optimizer, dtype, mesh)
        config = plan.model_config if built.carried is not None else without_carried(plan.model_config)
        contents = CheckpointContents(
            plan.family,
            config,
            tokenizer_to_save(plan),
            whole_model,
            built.adapters,
            self.critic.whole,
        )
        self.saver = Saver(plan.output_dir, recipe.checkpoint, contents, recipe.launch.nnodes, self.disk)
        self.output: Silence = Silence()

        names = recipe.loggers if collective.rank() == 0 else ()
        self._loggers = Loggers({name: registry.loggers[name].factory(plan.output_dir) for name in names})
        if data.stage is not None and (unread := unread_keys(plan.loaded)):
            raise RecipeError(unread)
        self._prepare_stage()
        # rank 0 alone compares and writes it: it takes the data to know
        compares, of_reference = collective.rank() == 0, "" if reference is None else reference.digest
        self.beginning = Beginning(plan, self._digest + of_reference, data.stage if compares else None, self.cadence)
        self.state = self.beginning.state
        self.step, self.samples = 0, 0

    def resume(self) -> None:
        """Go on from the newest whole checkpoint; from step 0 when there is none. Every rank calls it."""
        root, built = self.saver.root, self.built
        others = [self.critic.restore]  # nothing, without one
        state = resume_from(self.plan, self.beginning, root, self.registry, built, self.optimizer, self.disk, others)
        self.state, self.step, self.samples = state, state.step, state.samples
        self.saver.resume(state.step)
        self.rules.guard.resume(state)
        self.rules.loss_scale.load(state)
        if self.data.stage is not None:
            self.data.stage.load_state(state.stage)
        if self.rollouts is not None:
            self.rollouts.load_state(state.rollouts)

    # the loop

    def train(self) -> int:
        """Train to the last step, or until a signal. Returns the exit code."""
        total_steps = self.cadence.total_steps
        lacks_evaluation, lacks_end = self._unfinished()
        if self.step == total_steps and not lacks_evaluation and not lacks_end:
            report(f"nothing to do: step {self.step} of {total_steps} is done")
            return 0
        with StopRequest(lambda: self.output.interrupted()) as stop:
            if collective.rank() == 0:
                self.output = self._open_output()
                self.saver.on_saved = self.output.saved
            try:
                if lacks_evaluation:  # it ended behind its last checkpoint
                    self.evaluate()
                if self.step < total_steps:
                    self._run_steps(stop)
                self.saver.finish()
            except BaseException as error:
                if stop.is_repeated:  # where it met C++, the KeyboardInterrupt of that has become another error
                    self.output.failed(KeyboardInterrupt())
                    raise KeyboardInterrupt from None
                if not isinstance(error, KeyboardInterrupt):
                    self.saver.abort(error)
                self.output.failed(error)
                raise
        self.output.ended(self.step)
        return 0 if self.step == total_steps else INTERRUPTED

    def _unfinished(self) -> tuple[bool, bool]:
        """Whether a run that goes on lacks the evaluation behind the step of its checkpoint, and its end where that was
        the last step."""
        if self.step == 0:
            return False, False
        lacks = [False, False]
        if collective.rank() == 0:
            directory = self.plan.output_dir
            is_due = self._evaluates()
            events = read_events(directory)
            is_ended = bool(events) and events[-1]["event"] == "ended"
            recorded = evaluation_at(directory, self.step)
            lacks = [is_due and not recorded, not is_ended]
            self.saver.recall(self.step, recorded)
        lacks_evaluation, lacks_end = collective.from_first_rank([float(value) for value in lacks])
        return lacks_evaluation > 0, lacks_end > 0

    def _run_steps(self, stop: StopRequest) -> None:
        cadence, num_left = self.cadence, self.cadence.total_steps - self.step
        self.built.part.train()
        self.begin()
        self.window = Window(collective.num_ranks())
        reader: StepReader | RolloutReader
        if self.rollouts is None:
            reader = StepReader(self.data, self.mesh.data_rank, self.samples, num_left, self._num_workers)
            passes = dataclasses.replace(self.passes, objective=reader.objective)
        else:  # which runs the pre-passes too
            at, drew = (self.step, self.samples), self.output.drew
            last, critic = cadence.total_steps, self.critic
            reader = RolloutReader(self.data, self.plan, self.rollouts, self.passes, at, last, drew, critic)
            passes = dataclasses.replace(self.passes, objective=reader.objective, prepasses=())
        with reader:
            while self.step < cadence.total_steps:
                self.step += 1
                started, waited = time.perf_counter(), calls.waited()
                metrics = self.updater.take(
                    self.step,
                    self._next_of(reader),
                    passes,
                    self.rules,
                    # after `next`: the updates of a rollout are not separated
                    dict(
                        zip(VOTES, (reader.is_between and asked() for asked in (stop.requested, self.saver.requested)))
                    ),
                    cadence.logs(self.step),
                )
                metrics = reader.finished(metrics)
                self.window.busy += time.perf_counter() - started - (calls.waited() - waited)
                self.samples += cadence.global_batch_size + reader.further
                # any rank's signal stops all, at the same step
                stopping, save_asked, is_bad = (metrics.pop(name, 0.0) > 0 for name in (*VOTES, "roll_back"))
                if metrics.get("skipped"):
                    self.output.skipped(self.step, metrics)
                if is_bad:
                    reader.extend(self.roll_back())
                    if stopping:  # the checkpoint is there; resumed, the run comes to the bad step again
                        break
                    continue

                self.log(metrics, stopping or cadence.logs(self.step))
                paused = time.perf_counter()
                if stopping or save_asked or cadence.saves(self.step):
                    is_over = stopping or (self.step == cadence.total_steps and not self._evaluates())
                    self.save(overlaps=not is_over)
                if stopping:
                    break
                if self._evaluates():
                    self.evaluate()
                self.window.leave_out(time.perf_counter() - paused)
            self.saver.finish()  # while another signal still ends it at once

    # what the loop calls

    def _next_of(self, reader: StepReader | RolloutReader) -> list[Any]:
        """The batches of this step. Where a rollout fails, what was learnt before is saved."""
        try:
            return next(reader)
        except AgreedError:
            self.step -= 1
            if self.step:
                self._save_at_failure()
            raise

    def begin(self) -> None:
        """Before the first step, with the model in training mode: what takes gradients to begin with."""
        if self.step == 0 and self._start is not None:
            assert isinstance(self.optimizer, Optimizer)  # rules refuse it with programs
            begin_with_gradients(self._start, self.plan, self.built, self.data, self.passes, self.optimizer, self.rules)

    def log(self, metrics: dict[str, float], is_recorded: bool) -> None:
        """Count a step, and record its metrics with the averages since the last record."""
        self.window.add(metrics)
        if not is_recorded:
            self.saver.check()
            self.output.stepped(self.step)
            return
        memory, slow = self.backend.peak_memory_bytes(), dict[str, float]()
        if collective.num_ranks() > 1:
            of_ranks = collective.from_all_ranks([self.window.busy / self.window.steps, memory])
            seconds, bytes_ = ([numbers[i] for numbers in of_ranks] for i in (0, 1))
            slow = stragglers(self.mesh, seconds)
            self.output.rank_numbers(self.step, {"busy_seconds": seconds, "peak_memory_bytes": bytes_})
        at = place(self.samples, self.cadence.global_batch_size, self.data.order.epoch_length)
        rates = self.window.rates()
        self.saver.check()
        self.output.logged(self.step, {**at, **metrics, **rates, "peak_memory_bytes": memory, **slow})
        self.window.reset()

    def evaluate(self) -> None:
        """Evaluate on `data.eval`, if there is any; keep the model if it is the best so far."""
        micro_batches, num_counted = self._eval_batches
        if self.rollouts is None:
            metrics = evaluate(micro_batches, self.passes, num_counted)
        else:
            metrics = self._evaluated_by(self.rollouts)
        if self.answers is not None:
            compared, answers = self.answers.evaluate()
            metrics = {**metrics, **compared}
            self.output.answered(self.step, answers)
        self.output.evaluated(self.step, metrics)
        self.saver.evaluated(self.snapshot_state(), metrics)

    def _evaluated_by(self, rollouts: RolloutEngine) -> dict[str, float]:
        """Metrics of completions. Where they cannot be judged, what was learnt is saved."""
        try:
            return rollouts.evaluate(self.data, self.step)
        except AgreedError:
            self._save_at_failure()
            raise

    def _save_at_failure(self) -> None:
        """Save, on all ranks. None leaves before: where one has failed, its launcher ends the others."""
        self.save(overlaps=False)
        collective.barrier()

    def _evaluates(self) -> bool:
        """Whether this step is evaluated."""
        return self.cadence.evaluates(self.step) and len(self.data.eval) > 0

    def save(self, overlaps: bool) -> None:
        """Write a checkpoint of this step, in the background if something `overlaps` and the recipe says so."""
        self.saver.save(self.snapshot_state(), overlaps)

    def snapshot_state(self) -> TrainState:
        """The small part of a checkpoint, at this moment."""
        return dataclasses.replace(
            self.state,
            step=self.step,
            samples=self.samples,
            rounded=rounded(self.built),
            stage=self.data.stage.state() if self.data.stage is not None else {},
            rollouts=self.rollouts.state() if self.rollouts is not None else {},
            **self.rules.guard.state(),
            **self.rules.loss_scale.state(),
        )

    def roll_back(self) -> int:
        """After a bad step: go back to the last checkpoint, and on with the samples behind the bad step. Returns how
        many steps are to be done again."""
        path = self.saver.last
        if self.disk is not None:
            fetch_parts(path, self.disk, wanted_tensors(self.plan, self.built, self.optimizer))
        with reading(path, self.disk) as place:
            kept = load_all(place, self.plan, self.registry, self.built, self.optimizer)
        self.rules.guard.roll_back(kept)
        self.rules.loss_scale.load(kept)
        self.output.rolled_back(self.step, kept.step)
        num_lost = self.step - kept.step
        self.step = kept.step
        self.window.reset()
        return num_lost

    # construction

    def _open_output(self) -> Output:
        total_steps, num_ranks = self.cadence.total_steps, collective.num_ranks()
        plain = redacted_data(as_plain(self.plan.recipe))  # for loggers and plugins too
        view = RunView(self.plan.output_dir, plain, num_ranks, total_steps, str(self.plan.degrees))
        return Output(view, self.registry, self.step, self._loggers, draws=self.rollouts is not None)

    def _prepare_stage(self) -> None:
        """Let the stage compute what belongs to the initial weights, while they are in place."""
        stage, model, cadence = self.data.stage, self.built.part, self.cadence
        if stage is None:
            model.serve_forward_only()
            return
        # a run that goes back to a checkpoint takes more samples than its steps have
        may_roll_back = self.plan.recipe.train.may_roll_back
        most = len(self.data.train) if may_roll_back else cadence.total_steps * cadence.global_batch_size
        stage.before_training(model, self.data.used(most))
        if model.is_first:
            model.send_stop()
