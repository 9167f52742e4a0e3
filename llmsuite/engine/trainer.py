"""Training run in one rank, from the plan to the last checkpoint: the work of `llmsuite run`.

Read top to bottom: construction (device -> mesh -> data -> model -> engine -> checkpointer), then the loop, then
the methods that it calls. One optimizer step is in `step.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmsuite.base.errors import AgreedError
from llmsuite.base.locks import lock_directory
from llmsuite.base.progress import report
from llmsuite.base.redaction import redacted_data
from llmsuite.base.spans import span, spanned
from llmsuite.checkpoint.local_storage import LocalStorage
from llmsuite.checkpoint.model_dir import without_carried
from llmsuite.checkpoint.train_state import TrainState
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.section import as_plain
from llmsuite.contract.specs import RunView
from llmsuite.devices.base import DeviceBackend
from llmsuite.engine.auto_parallel import build_auto_parallel
from llmsuite.engine.build import build_model
from llmsuite.engine.cadence import Cadence
from llmsuite.engine.checkpointer import CheckpointContents, Checkpointer
from llmsuite.engine.critic import build_critic
from llmsuite.engine.data import (
    EvaluationSet,
    completed_tokenizer,
    load_tokenizer,
    make_stage,
    padding_free,
    read_data,
    tokenizer_to_save,
)
from llmsuite.engine.data_loader import SampleSource, StepDataLoader, StepSamples
from llmsuite.engine.eager_engine import EagerEngine
from llmsuite.engine.early_stopping import EarlyStopping, LossWatchdog
from llmsuite.engine.fetching import fetch_missing, fetched_checkpoint
from llmsuite.engine.generation import GenerationEvaluation
from llmsuite.engine.given_rollouts import given_rollout_engine
from llmsuite.engine.guard import Guard
from llmsuite.engine.local_storage import claim_directory, find_local_storage, leads
from llmsuite.engine.lora_ga import GradientInit, init_from_gradients
from llmsuite.engine.model_flops import ModelFlops
from llmsuite.engine.model_state import FullModelState, needed_tensors
from llmsuite.engine.output import NullOutput, Output, WatchedDirectory
from llmsuite.engine.passes import MicroBatchLoader, Passes, evaluate
from llmsuite.engine.program_engine import ProgramEngine
from llmsuite.engine.reference_weights import load_reference_weights
from llmsuite.engine.request_file import RequestFile
from llmsuite.engine.resume import (
    RunIdentity,
    file_digests,
    load_all,
    resume_from,
    rounded,
)
from llmsuite.engine.rollouts import RolloutDataLoader, RolloutEngine, rollout_engine
from llmsuite.engine.rules import LossScale, NoLossScale, StepRules
from llmsuite.engine.run_record import RunRecord
from llmsuite.engine.stage import Stage, StatefulStage
from llmsuite.engine.step_profile import StepProfile
from llmsuite.engine.stop import StopRequest
from llmsuite.engine.stragglers import stragglers
from llmsuite.engine.teacher import teacher_digest
from llmsuite.engine.train_engine import TrainEngine
from llmsuite.launch import calls
from llmsuite.launch.ends import INTERRUPTED
from llmsuite.observe.events import read_events
from llmsuite.observe.loggers import Loggers
from llmsuite.observe.metrics import RateWindow, epoch_position, evaluation_at
from llmsuite.parallel import collective
from llmsuite.parallel.ledger_entries import REQUESTS
from llmsuite.planning.cost import peak_flops
from llmsuite.recipe.critic import critic_plans
from llmsuite.recipe.plans import TrainPlan
from llmsuite.recipe.resolve import RunPlan


def run(plan: RunPlan, registry: Registry, resume: bool) -> int:
    """Train according to the plan, in this rank. Returns the exit code.

    Raises:
        UserError: the input is wrong; no existing file was changed.
    """
    # lock first, before the long work of construction
    with contextlib.ExitStack() as locks:
        if collective.rank() == 0:
            locks.enter_context(lock_directory(plan.output_dir))
            if resume:
                RunRecord.from_recipe(plan.loaded, plan.output_dir).check()
        trainer = Trainer(plan, registry)
        if trainer.local_storage is not None:
            check_new = None if resume else plan.check_output
            recipe = as_plain(plan.recipe)
            locks.enter_context(claim_directory(plan.output_dir, recipe, trainer.local_storage, check_new))
        if resume:
            trainer.resume()
        return trainer.train()


def _early_stopping(train_plan: TrainPlan) -> EarlyStopping:
    section = train_plan.section.early_stopping
    if section.patience is None:
        return EarlyStopping(None, False, None, 0.0)
    is_highest = train_plan.best_is == "highest"
    return EarlyStopping(train_plan.best_metric, is_highest, section.patience, section.min_delta)


def _find_storage(output_dir: Path, num_machines: int, backend: DeviceBackend) -> LocalStorage | None:
    """The storage of this machine that is not that of others; None without values: no other rank answers then, and
    nothing is saved."""
    return find_local_storage(output_dir, num_machines) if backend.has_values else None


class Trainer:
    """State of a run in one rank, and its training loop.

    Nothing that it holds refers back to it: the memory of a run is freed together with its trainer.
    """

    def __init__(self, plan: RunPlan, registry: Registry):
        self.registry = registry
        precision = plan.parallel.engine.precision
        train = plan.train.section

        # device
        self.backend = backend = plan.parallel.device.factory()
        backend.activate(collective.local_rank())
        backend.check_precision(precision)

        # mesh
        self.mesh = mesh = collective.start(plan.parallel.degrees)
        self.local_storage = _find_storage(plan.output_dir, plan.parallel.num_machines, backend)

        # data
        plan.check_files(mesh.loads_data, loads_model=backend.has_values)
        self.plan = plan = plan.fetched(report) if mesh.loads_data else plan
        if plan.recipe.source:
            report(f"recipe notes: {plan.recipe.source}")
        digests: dict[str, str] = {}
        stage = self._make_stage(lambda: digests["model"])
        self.data = data = read_data(stage, plan.model, plan.data, plan.parallel, plan.train, mesh)
        self.cadence = Cadence.from_plan(plan.train, data.order.epoch_length)
        self._num_workers = plan.data.section.num_workers
        self._eval_batches = [found.micro_batches(mesh, train.micro_batch_size) for found in data.evaluations]
        self.early_stopping = _early_stopping(plan.train)
        self.loss_watchdog = LossWatchdog.from_section(train.loss_watchdog)
        self._profile = StepProfile(train.profile, plan.output_dir, backend, collective.rank())
        self._profile.check(self.cadence.total_steps)
        self._model_flops = ModelFlops.from_plans(plan.model, plan.parallel, plan.train)

        # model
        if plan.model.shard_plan.is_auto_parallel:
            self.built = built = build_auto_parallel(plan.model, plan.parallel, registry, backend, mesh)
        else:
            self.built = built = build_model(plan.model, plan.parallel, plan.train, registry, backend, mesh)
        critic = critic_plans(plan.model, plan.parallel, plan.train)
        self.critic = build_critic(critic, registry, backend, mesh, data.stage, self.cadence.total_steps, built.part)
        self._gradient_init = GradientInit.from_section(plan.model.lora)
        self._digest = built.digest + self.critic.digest
        digests["model"] = built.digest
        prepasses = [prepass.kind for prepass in plan.train.profile.prepasses]
        reference = load_reference_weights(plan.model, plan.train, registry, built, mesh, backend.has_values)
        with_reference = contextlib.nullcontext if reference is None else reference.active
        passes = Passes(data.stage, built.part, plan.parallel.schedule, prepasses, with_reference)
        self.rollouts: RolloutEngine | None = None
        if plan.train.profile.updates:
            self.rollouts = self._make_rollout_engine(precision)
        self.generation: GenerationEvaluation | None = None
        if plan.train.generation.max_new_tokens is not None:
            max_length = plan.data.section.max_length
            self.generation = GenerationEvaluation(
                plan.model, plan.train, precision, max_length, backend, mesh, built, data
            )

        # engine, with the optimizer
        self.engine = self._make_engine(passes)

        # checkpointer
        self.checkpointer = self._make_checkpointer(precision)
        self.output: NullOutput = NullOutput()
        self._stop_file = RequestFile(plan.output_dir / "stop-now")

        names = plan.recipe.loggers if collective.rank() == 0 else ()
        self._loggers = Loggers({name: registry.loggers[name].factory(plan.output_dir) for name in names})
        self._prepare_stage()
        # only rank 0 compares and writes it: its digest reads all data files
        files = None
        others_digest = "" if reference is None else reference.digest
        if data.stage is not None and collective.rank() == 0 and backend.has_values:  # else nothing is resumed
            files = file_digests(plan.data, data.stage)
            others_digest += teacher_digest(plan.train.teacher, registry.models)
        record = RunRecord.from_recipe(plan.loaded, plan.output_dir)
        self.identity = RunIdentity(record, files, self._digest + others_digest, self.cadence)
        self.state = self.identity.initial_state
        self.step = 0
        self.samples = 0

    def resume(self) -> None:
        """Resume from the newest complete checkpoint; start at step 0 when there is none. A collective call."""
        root = self.checkpointer.root
        built = self.built
        optimizer = self.engine.optimizer
        others = [self.critic.restore]  # does nothing without a critic
        state = resume_from(
            self.plan.model, self.identity, root, self.registry, built, optimizer, self.local_storage, others
        )
        self.state = state
        self.step = state.step
        self.samples = state.samples
        self.checkpointer.resume(state.step)
        self.engine.load_state_dict(state)
        self.early_stopping.load_state(state.early_stopping)
        self.loss_watchdog.load_state(state.loss_watchdog)
        if isinstance(self.data.stage, StatefulStage):
            self.data.stage.load_state(state.stage)
        if self.rollouts is not None:
            self.rollouts.load_state(state.rollouts)

    # the loop

    def train(self) -> int:
        """Train to the last step, until early stopping, or until a signal. Returns the exit code."""
        total_steps = self.cadence.total_steps
        lacks_evaluation, lacks_end = self._unfinished()
        if self._is_over and not lacks_evaluation and not lacks_end:
            why = f", {self._early_reason}" if self.step < total_steps else ""
            report(f"nothing to do: step {self.step} of {total_steps} is done{why}")
            return 0
        with StopRequest(lambda: self.output.interrupted()) as stop:
            if collective.rank() == 0:
                self.output = self._open_output()
                self.checkpointer.on_saved = self.output.saved
            elif self.local_storage is not None and leads(self.local_storage):
                self.output = WatchedDirectory(self.plan.output_dir)
            try:
                if lacks_evaluation:  # the run was killed between its last checkpoint and the evaluation
                    self.evaluate()
                if not self._is_over:
                    self._run_steps(stop)
                self.checkpointer.finish()
            except BaseException as error:
                if stop.is_repeated:  # in C++ code the KeyboardInterrupt has become another error
                    self.output.failed(KeyboardInterrupt())
                    raise KeyboardInterrupt from None
                if not isinstance(error, KeyboardInterrupt):
                    self.checkpointer.abort(error)
                self.output.failed(error)
                raise
        is_early = self.step < total_steps and self._is_over
        self.output.ended(self.step, self._early_reason if is_early else "")
        return 0 if self._is_over else INTERRUPTED

    @property
    def _is_over(self) -> bool:
        """True where no step is left, or early stopping or the loss watchdog ends the run."""
        return self.step == self.cadence.total_steps or self._is_early

    @property
    def _is_early(self) -> bool:
        """True where early stopping or the loss watchdog ends the run."""
        return self.early_stopping.is_over or self.loss_watchdog.is_over

    @property
    def _early_reason(self) -> str:
        """The reason why the run ends before its last step, for a message."""
        if self.loss_watchdog.is_over:
            return self.loss_watchdog.reason
        return self.early_stopping.reason

    def _unfinished(self) -> tuple[bool, bool]:
        """Return two flags of a resumed run: it lacks the evaluation after the step of its checkpoint, and it lacks the
        "ended" event. A collective call: rank 0 reads the files, whose evaluation counts for early stopping."""
        if self.step == 0:
            return False, False
        lacks = [False, False]
        recorded: dict[str, float | None] = {}
        if collective.rank() == 0:
            directory = self.plan.output_dir
            is_due = self._evaluates()
            events = read_events(directory)
            is_ended = bool(events) and events[-1]["event"] == "ended"
            recorded = evaluation_at(directory, self.step)
            lacks = [is_due and not recorded, not is_ended]
            self.checkpointer.restore_best(self.step, recorded)
        # rank 0 alone reads the record, and an evaluation needs all ranks
        lacks_evaluation, lacks_end = collective.broadcast_from_rank0([float(value) for value in lacks])
        if self._evaluates() and not lacks_evaluation:
            self.early_stopping.evaluated(self.step, recorded, is_recorded=True)
        return lacks_evaluation > 0, lacks_end > 0

    def _run_steps(self, stop: StopRequest) -> None:
        cadence = self.cadence
        self.built.part.train()
        self.init_adapters()
        self.window = RateWindow(collective.num_ranks(), self._peak_flops)
        if self._stop_file.requested():  # it was meant for an earlier process
            report("removed a file stop-now from before the first step")
        with contextlib.closing(self._sample_source()) as source, self._profile:
            while not self._is_over:
                self.step += 1
                self.window.exclude(self._profile.begin_step(self.step))
                started = time.perf_counter()
                waited = calls.waited()
                samples = self._next_samples(source)
                # a request in between the updates of a rollout waits for the last of them
                stop_requested = samples.can_checkpoint and any([stop.requested(), self._stop_file.requested()])
                save_requested = samples.can_checkpoint and self.checkpointer.requested()
                requests = dict(zip(REQUESTS, (stop_requested, save_requested)))
                is_logged = cadence.logs(self.step)
                metrics = self.engine.step(self.step, samples.batches, requests, is_logged)
                metrics = source.finish_step(metrics)
                self.window.busy += time.perf_counter() - started - (calls.waited() - waited)
                if self._model_flops is not None and self.mesh.counts_losses:
                    self.window.flops += self._model_flops.of(samples.batches.work)
                self.samples = source.samples
                # requests are summed over the ranks: a signal to any rank stops all of them after the same step
                stopping, saving, is_bad = (metrics.pop(name, 0.0) > 0 for name in (*REQUESTS, "roll_back"))
                if metrics.get("skipped"):
                    self.output.skipped(self.step, metrics)
                if is_bad:
                    self.roll_back()
                    if stopping:  # there is a checkpoint; when resumed, the run reaches the bad step again
                        break
                    continue

                self.loss_watchdog.step_ended(metrics.get("loss", 0.0), self._evaluates())
                self.log(metrics, stopping or cadence.logs(self.step))
                paused = time.perf_counter()
                if stopping or saving or cadence.saves(self.step):
                    is_over = stopping or (self.step == cadence.total_steps and not self._evaluates())
                    self.save(overlaps=not is_over)
                if stopping:
                    break
                if self._evaluates():
                    self.evaluate()
                if self._is_early:
                    self.save(overlaps=False)
                self.window.exclude(time.perf_counter() - paused)
            self.checkpointer.finish()  # inside the context, where another signal still stops the run immediately
        self._stop_file.requested()  # one of the last step must not stop a later run

    # called by the loop

    def _sample_source(self) -> SampleSource:
        """Open the source of the samples of the steps that are left."""
        total_steps = self.cadence.total_steps
        if self.rollouts is None:
            return StepDataLoader(self.data, self.mesh.data_rank, self.samples, total_steps, self._num_workers)
        passes = self.engine.passes
        start = (self.step, self.samples)
        on_completions = self.output.sampled
        return RolloutDataLoader(
            self.data, self.plan.train, self.rollouts, passes, start, total_steps, on_completions, self.critic
        )

    def _next_samples(self, source: SampleSource) -> StepSamples:
        """Return the samples of this step. Where a rollout fails, the steps before it are saved."""
        try:
            with span("data" if self.rollouts is None else "rollout"):
                return source.next_step(self.step)
        except AgreedError:
            self.step -= 1
            if self.step:
                self._save_at_failure()
            raise

    def init_adapters(self) -> None:
        """Initialize adapters that need gradients, before the first step and with the model in training mode."""
        if self.step == 0 and self._gradient_init is not None:
            assert isinstance(self.engine, EagerEngine)  # a rule of recipes refuses compiled train steps with it
            init_from_gradients(
                self._gradient_init,
                self.plan.model.shard_plan,
                self._num_workers,
                self.built,
                self.data,
                self.engine,
            )

    def log(self, metrics: dict[str, float], is_recorded: bool) -> None:
        """Count a step; if `is_recorded`, record its metrics with the averages since the last record."""
        self.window.add(metrics)
        if not is_recorded:
            self.checkpointer.check()
            self.output.stepped(self.step)
            return
        memory = self.backend.peak_memory_bytes()
        flops = self.window.flops
        slow = dict[str, float]()
        if collective.num_ranks() > 1:
            # a collective call: all ranks record the same steps
            own = [self.window.busy / self.window.steps, memory, flops]
            seconds, bytes_, flops_of_ranks = map(list, zip(*collective.all_gather_floats(own)))
            flops = sum(flops_of_ranks)
            slow = stragglers(self.mesh, seconds)
            self.output.rank_numbers(self.step, {"busy_seconds": seconds, "peak_memory_bytes": bytes_})
        at = epoch_position(self.samples, self.cadence.global_batch_size, self.data.order.epoch_length)
        rates = self.window.rates(flops)
        self.checkpointer.check()
        self.output.logged(self.step, {**at, **metrics, **rates, "peak_memory_bytes": memory, **slow})
        self.window.reset()

    @property
    def _peak_flops(self) -> float | None:
        """Peak of a device in FLOP/s, of the recipe or of the device's data sheet; None where it is unknown."""
        given = self.plan.train.section.peak_tflops
        if given is not None:
            return given * 1e12
        return peak_flops(self.backend.device_name(), self.plan.parallel.engine.precision)

    @spanned("evaluation")
    def evaluate(self) -> None:
        """Evaluate on each set of the evaluation data, and keep the checkpoint if it is the best so far."""
        metrics = dict[str, float]()
        for found, (micro_batches, num_counted) in zip(self.data.evaluations, self._eval_batches):
            if self.rollouts is None or not self.plan.train.profile.evaluates_rollouts:
                of_set = evaluate(MicroBatchLoader(micro_batches, self.data.collate), self.engine.passes, num_counted)
            else:
                of_set = self._evaluate_rollouts(self.rollouts, found)
            metrics |= {found.metric(name): value for name, value in of_set.items()}
        if self.generation is not None:
            generation_metrics, answers = self.generation.evaluate()
            metrics = {**metrics, **generation_metrics}
            self.output.generated(self.step, answers)
        self.output.evaluated(self.step, metrics, [found.name for found in self.data.evaluations])
        self.early_stopping.evaluated(self.step, {f"eval/{name}": value for name, value in metrics.items()})
        self.checkpointer.evaluated(self.snapshot_state(), metrics)

    def _evaluate_rollouts(self, rollouts: RolloutEngine, evaluation: EvaluationSet) -> dict[str, float]:
        """Return metrics of completions. Where scoring fails, the steps so far are saved."""
        try:
            return rollouts.evaluate(self.data, evaluation, self.step)
        except AgreedError:
            self._save_at_failure()
            raise

    def _save_at_failure(self) -> None:
        """Save on all ranks. The barrier keeps every rank alive until all have saved: when one rank fails, the launcher
        ends the others."""
        self.save(overlaps=False)
        collective.barrier()

    def _evaluates(self) -> bool:
        """Return True if there is an evaluation after this step."""
        return self.cadence.evaluates(self.step) and len(self.data.evaluations) > 0

    def save(self, overlaps: bool) -> None:
        """Write a checkpoint of this step, in the background if training `overlaps` with it and the recipe allows
        it."""
        self.checkpointer.save(self.snapshot_state(), overlaps)

    def snapshot_state(self) -> TrainState:
        """Return the current `TrainState`, the small part of a checkpoint."""
        stage = self.data.stage
        stage_state = stage.state() if isinstance(stage, StatefulStage) else {}
        rollout_state = self.rollouts.state() if self.rollouts is not None else {}
        return dataclasses.replace(
            self.state,
            step=self.step,
            samples=self.samples,
            rounded=rounded(self.built),
            stage=stage_state,
            rollouts=rollout_state,
            early_stopping=self.early_stopping.state(),
            loss_watchdog=self.loss_watchdog.state(),
            **self.engine.state_dict(),
        )

    def roll_back(self) -> None:
        """Return to the last checkpoint after a bad step, and continue with the samples after it."""
        path = self.checkpointer.last
        if self.local_storage is not None:
            fetch_missing(path, self.local_storage, needed_tensors(self.plan.model, self.built, self.engine.optimizer))
        with fetched_checkpoint(path, self.local_storage) as readable:
            kept = load_all(readable, self.plan.model, self.registry, self.built, self.engine.optimizer)
        self.engine.roll_back(kept)
        self.early_stopping.rewind(kept.step)
        self.loss_watchdog.load_state(kept.loss_watchdog)
        self.output.rolled_back(self.step, kept.step)
        self.step = kept.step
        self.window.reset()

    # construction

    def _make_stage(self, initial_digest: Callable[[], str]) -> Stage[Any] | None:
        """Build the stage; None on ranks that neither load data nor compile the step."""
        plan = self.plan
        if not self.mesh.loads_data and not plan.parallel.engine.compiles_steps:
            return None
        tokenizer = load_tokenizer(plan.model)
        is_padding_free = padding_free(plan.model, plan.parallel, self.backend)
        return make_stage(
            plan.model,
            plan.data,
            plan.parallel,
            plan.train,
            self.registry,
            initial_digest,
            tokenizer,
            is_padding_free,
        )

    def _make_rollout_engine(self, precision: str) -> RolloutEngine:
        """Build the rollout engine; on a device without values one that samples nothing."""
        plan = self.plan
        stage = self.data.stage
        if self.backend.has_values:
            return rollout_engine(
                plan.model, plan.train, precision, plan.output_dir, self.backend, self.mesh, self.built, stage
            )
        stop_ids = None if stage is None else stage.context.tokenizer.stop_token_ids()
        return given_rollout_engine(plan.model, plan.train, precision, self.backend, self.mesh, stop_ids, self.built)

    def _make_engine(self, passes: Passes) -> TrainEngine:
        """Build the engine of the run: each step is one program, or passes and an update."""
        plan = self.plan
        train = plan.train.section
        built = self.built
        total_steps = self.cadence.total_steps
        rules = StepRules(
            Guard.from_section(train),
            LossScale() if plan.parallel.engine.precision == "fp16" else NoLossScale(),
            [part for part in (built.balance, built.input_scales, self.critic) if part is not None],
            max_metrics=plan.train.profile.max_metrics,
            may_be_empty=self.rollouts is not None,
            has_values=self.backend.has_values,
        )
        if not plan.parallel.engine.compiles_steps:
            return EagerEngine.from_plans(passes, rules, built, train, plan.parallel.engine, self.backend, total_steps)
        objective = self.data.program_stage
        assert objective is not None, "every rank has one where steps are programs"
        return ProgramEngine(passes, rules, built, objective, plan.parallel, plan.data, train, total_steps)

    def _make_checkpointer(self, precision: str) -> Checkpointer:
        plan = self.plan
        dtype = self.backend.parameter_dtype(precision)
        full_state = functools.partial(FullModelState, plan.model, self.built, self.engine.optimizer, dtype, self.mesh)
        config = plan.model.config
        if self.built.carried is None:
            config = without_carried(config)
        contents = CheckpointContents(
            plan.model.family,
            config,
            tokenizer_to_save(completed_tokenizer(plan.model), plan.data.section.chat_template, plan.output_dir),
            full_state,
            self.built.adapters,
            self.critic.full_state,
        )
        return Checkpointer(
            plan.output_dir,
            plan.train.checkpoint,
            contents,
            plan.parallel.num_machines,
            self.local_storage,
            plan.train.best_metric,
            plan.train.best_is,
        )

    def _open_output(self) -> Output:
        total_steps = self.cadence.total_steps
        num_ranks = collective.num_ranks()
        plain = redacted_data(as_plain(self.plan.recipe))  # without secrets: loggers and plugins get it too
        view = RunView(self.plan.output_dir, plain, num_ranks, total_steps, str(self.plan.parallel.degrees))
        return Output(view, self.registry, self.step, self._loggers, has_rollouts=self.rollouts is not None)

    def _prepare_stage(self) -> None:
        """Call `Stage.before_training` while the model has its initial weights.

        Stages in the middle of a pipeline have no stage object. They serve the forward passes that `before_training`
        of the first and last one may run, until the first one sends them a stop.
        """
        stage = self.data.stage
        model = self.built.part
        cadence = self.cadence
        if stage is None:
            model.serve_forward_only()
            return
        # a run that may roll back can use more samples than its steps need
        may_roll_back = self.plan.train.section.may_roll_back
        max_samples = cadence.total_steps * cadence.global_batch_size
        if may_roll_back:
            max_samples = len(self.data.train)
        stage.before_training(model, self.data.used_samples(max_samples))
        if model.is_first:
            model.send_stop()
