"""A run in one process, from plan to last checkpoint. Read it top to bottom: it is what `llmsuite run` does.

device -> ranks -> tokenizer -> model -> stage and data -> optimizer -> checkpoint -> loop
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.checkpoint.model_writer import copy_tokenizer
from llmsuite.checkpoint.train_state import TrainState
from llmsuite.data.chat_template import BUILTIN, load_template
from llmsuite.data.loader import BatchSampler, SampleOrder
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.devices.base import DeviceBackend
from llmsuite.errors import RecipeError, UserError
from llmsuite.files import lock_directory, write_text_atomic
from llmsuite.launch.launch import INTERRUPTED
from llmsuite.models.anatomy import GroupedQuery, MoE
from llmsuite.parallel import collective
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.optimizer import Optimizer
from llmsuite.parallel.static import LENGTH_MULTIPLE
from llmsuite.plugins.manager import Registry
from llmsuite.progress import report
from llmsuite.recipe.resolve import RunPlan
from llmsuite.schema.section import as_plain
from llmsuite.specs import RunView
from llmsuite.train.build import build_model
from llmsuite.train.guard import Guard
from llmsuite.train.loop import Hooks, Schedule, fit
from llmsuite.train.loss_scale import LossScale
from llmsuite.train.model_state import WholeModel
from llmsuite.train.output import Output
from llmsuite.train.resume import fresh, learning_digest, load_all, resume_from, rounded
from llmsuite.train.saving import Saver
from llmsuite.train.stage import Stage, StageContext
from llmsuite.train.supervision import check_learnable


def run(plan: RunPlan, registry: Registry, resume: bool) -> int:
    """Train as the plan says, in this rank. Returns the exit code.

    Raises:
        UserError: the input is wrong; nothing that existed was changed.
    """
    recipe = plan.recipe
    backend = plan.device.factory()
    backend.activate(collective.local_rank())
    lock = lock_directory(plan.output_dir) if collective.rank() == 0 else None  # before any work is done in vain
    mesh = collective.start(plan.degrees)

    plan.check_files(mesh.reads_data)
    plan = plan.fetched(report) if mesh.reads_data else plan
    if recipe.source:
        report(f"numbers from {recipe.source}")
    tokenizer = load_tokenizer(plan) if mesh.reads_data else None
    built = build_model(plan, registry, backend, mesh)
    model = built.part

    def autocast() -> Any:
        return backend.autocast(recipe.engine.precision)

    stage: Stage[Any] | None = None
    train_samples: Sequence[Any] = ()
    eval_samples: Sequence[Any] = ()
    if tokenizer is not None:
        stage = make_stage(plan, registry, built.digest, tokenizer, autocast, padding_free(plan, backend))
        train_samples, eval_samples = _read(stage, plan, mesh)
    lengths = _row_lengths(stage, plan, train_samples)
    counts = collective.from_first_rank([len(train_samples), len(eval_samples)])
    if stage is None:  # in the middle of a pipeline a sample is a number, which nobody looks at
        train_samples, eval_samples = (range(int(count)) for count in counts)

    schedule = _schedule(plan, len(train_samples))
    host = backend if recipe.engine.offload_optimizer else None
    optimizer = Optimizer(built.shards, recipe.train, schedule.total_steps, host)
    outputs: list[Output] = []

    def whole_model() -> WholeModel:
        return WholeModel(plan, built, optimizer, backend.parameter_dtype(recipe.engine.precision), mesh)

    def saved(step: int, path: Path) -> None:
        outputs[0].saved(step, path)

    saver = Saver(
        plan.output_dir,
        recipe.checkpoint,
        plan.family,
        plan.model_config,
        _saved_tokenizer(plan),
        whole_model,
        saved,
        built.adapters,
        recipe.launch.nnodes,
    )
    loggers = _loggers(plan, registry)
    train = recipe.train
    guard = Guard(train.on_nonfinite, train.on_spike, train.spike_factor, train.max_bad_steps)
    if stage is not None and (unread := plan.loaded.unread()):
        raise RecipeError([plan.loaded.problem(key, "nothing in this run reads it; remove it") for key in unread])

    # with the initial weights still in place: what a stage computes here belongs to them
    order = SampleOrder(len(train_samples), recipe.seed)
    dealer = _dealer(plan, order, lengths)
    if stage is not None:
        # a run that goes back to a checkpoint takes more samples than its steps have
        most = len(train_samples) if recipe.train.may_roll_back else schedule.total_steps * schedule.global_batch_size
        num_used = min(most, len(train_samples))
        used = (train_samples[order.at(i)] for i in range(num_used))
        stage.before_training(model, itertools.chain(used, eval_samples))
        if model.is_first:
            model.send_stop()
    else:
        with autocast():
            model.serve_forward_only()

    # rank 0 alone compares and writes it: it takes the data to know
    digest = learning_digest(plan, built.digest, stage) if stage is not None and collective.rank() == 0 else ""
    state = fresh(digest, recipe.seed)
    if resume:
        state = resume_from(plan, state, saver.root, registry, built, optimizer)
        saver.resume(state.step)
    if state.step == schedule.total_steps:
        report(f"nothing to do: step {state.step} of {schedule.total_steps} is done")
        return 0
    scale = LossScale() if recipe.engine.precision == "fp16" else None
    if scale is not None and state.loss_scale is not None:
        scale = LossScale(state.loss_scale, state.good_steps)
    num_ranks, mesh_text = collective.num_ranks(), str(plan.degrees)
    view = RunView(plan.output_dir, as_plain(plan.recipe), num_ranks, schedule.total_steps, mesh_text)
    output = Output(view, registry, state.step, loggers) if collective.rank() == 0 else None
    outputs += [output] if output else []

    guard.norms, guard.bad_steps, guard.furthest = list(state.norms), state.bad_steps, state.furthest

    def at(step: int, samples: int) -> TrainState:
        now = dataclasses.replace(
            state,
            step=step,
            samples=samples,
            norms=tuple(guard.norms),
            bad_steps=guard.bad_steps,
            furthest=guard.furthest,
            rounded=rounded(built),
        )
        if scale is None:
            return now
        return dataclasses.replace(now, loss_scale=scale.value, good_steps=scale.good_steps)

    def logged(step: int, metrics: Mapping[str, float]) -> None:
        saver.check()
        if output is not None:
            output.logged(step, metrics)

    def of_ranks(step: int, numbers: Mapping[str, Sequence[float]]) -> None:
        if output is not None:
            output.of_ranks(step, numbers)

    def stepped(step: int) -> None:
        saver.check()
        if output is not None:
            output.stepped(step)

    def evaluated(step: int, samples: int, metrics: Mapping[str, float]) -> None:
        if output is not None:
            output.evaluated(step, metrics)
        saver.evaluated(at(step, samples), metrics)

    def skipped(step: int, metrics: Mapping[str, float]) -> None:
        if output is not None:
            output.skipped(step, metrics)

    def roll_back(step: int) -> int:
        kept = load_all(saver.last, plan, registry, built, optimizer)
        guard.norms = list(kept.norms)
        if scale is not None and kept.loss_scale is not None:
            scale.value, scale.good_steps = kept.loss_scale, kept.good_steps
        if output is not None:
            output.rolled_back(step, kept.step)
        return kept.step

    hooks = Hooks(
        logged=logged,
        stepped=stepped,
        evaluated=evaluated,
        save=lambda step, samples: saver.save(at(step, samples)),
        save_requested=saver.requested,
        finish=saver.finish,
        skipped=skipped,
        roll_back=roll_back,
        peak_memory_bytes=backend.peak_memory_bytes,
        of_ranks=of_ranks,
    )
    try:
        done = fit(
            state.step + 1,
            state.samples,
            stage,
            model,
            optimizer,
            train_samples,
            eval_samples,
            dealer,
            schedule,
            autocast,
            hooks,
            scale=scale,
            prepasses=[prepass.kind for prepass in plan.profile.prepasses],
            balance=built.balance,
            input_scales=built.input_scales,
            guard=guard,
        )
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt):  # the second one: at once
            saver.abort(error)
        if output is not None:
            output.failed(error)
        raise
    if output is not None:
        output.ended(done)
    if lock is not None:
        lock.close()
    return 0 if done == schedule.total_steps else INTERRUPTED


def load_tokenizer(plan: RunPlan) -> TextTokenizer:
    """Of the recipe. Raises UserError when it is larger than the model's vocabulary."""
    assert plan.tokenizer is not None  # plan.check_files has seen to it
    tokenizer = TextTokenizer(plan.tokenizer)
    if tokenizer.vocab_size > plan.model_config.vocab_size:
        raise UserError(
            f"model.tokenizer: {plan.tokenizer} has {tokenizer.vocab_size} tokens, more than the "
            f"{plan.model_config.vocab_size} of the model"
        )
    return tokenizer


def _saved_tokenizer(plan: RunPlan) -> Path | None:
    """The tokenizer that checkpoints get: with the chat template that is trained with, or generation would be asked
    with another one."""
    choice = plan.recipe.data.chat_template
    if plan.tokenizer is None or choice not in BUILTIN or collective.rank() != 0:
        return plan.tokenizer
    directory = plan.output_dir / "tokenizer"
    directory.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(plan.tokenizer, directory)
    write_text_atomic(directory / "chat_template.jinja", BUILTIN[choice])
    return directory


def make_stage(
    plan: RunPlan,
    registry: Registry,
    model_digest: str,
    tokenizer: TextTokenizer,
    autocast: Any,
    padding_free: bool = False,
) -> Stage[Any]:
    """The stage of the recipe; it has read nothing yet."""
    recipe = plan.recipe
    context = StageContext(
        recipe=recipe,
        tokenizer=tokenizer,
        template=lambda: load_template(recipe.data.chat_template, tokenizer.directory, tokenizer.special_tokens),
        data_formats=registry.data_formats,
        model_digest=model_digest,
        autocast=autocast,
        length_multiple=_length_multiple(plan),
        report=report,
        padding_free=padding_free,
        keeps_tokens=True,
    )
    stage: Stage[Any] = plan.stage.factory()(plan.section, context)
    return stage


def padding_free(plan: RunPlan, backend: DeviceBackend) -> bool:
    """Whether attention goes past the other sequences of a row, so that batches need no padding, and prompts are read
    once. Programs are compiled for few lengths, layers whose attention is of another kind make the scores of a whole
    row, and where experts are balanced it matters how often a token is read."""
    anatomy = plan.family.anatomy and plan.family.anatomy(plan.model_config)
    is_plain = anatomy is not None and all(
        isinstance(layer.attention, GroupedQuery) and not isinstance(layer.mlp, MoE) for layer in anatomy.layers
    )
    return is_plain and plan.recipe.engine.mode == "dynamic" and backend.padding_free(plan.recipe.engine.precision)


def _read(stage: Stage[Any], plan: RunPlan, mesh: Mesh) -> tuple[Sequence[Any], Sequence[Any]]:
    """Samples for training and for evaluation."""
    train_samples, eval_samples = stage.read_all(plan.train_file, plan.eval_file)
    check_learnable(stage, train_samples, f"data.train: {plan.train_file}")
    check_learnable(stage, eval_samples, f"data.eval: {plan.eval_file or plan.train_file}")
    if 0 < len(eval_samples) < mesh.degrees.num_data_ranks:
        source = plan.eval_file or plan.train_file
        raise UserError(f"data.eval: {source} gives {len(eval_samples)} usable samples; every data rank needs one")
    lengths = stage.row_lengths(eval_samples) if plan.recipe.data.group_by_length and eval_samples else None
    if lengths is not None:
        eval_samples = [eval_samples[i] for i in np.argsort(-lengths.max(1), kind="stable")]
    return train_samples, eval_samples


def _row_lengths(stage: Stage[Any] | None, plan: RunPlan, samples: Sequence[Any]) -> np.ndarray | None:
    """Of the samples for training, where batches are made by them. With micro-batches by tokens also in the middle of a
    pipeline: their number depends on the lengths."""
    by_tokens = plan.recipe.train.micro_batch_tokens is not None
    lengths = None
    if stage is not None and (by_tokens or plan.recipe.data.group_by_length):
        lengths = stage.row_lengths(samples)
        if by_tokens and lengths is None:
            raise UserError(
                f"train.micro_batch_tokens: the samples of stage {plan.stage.name} are all alike, or it does not tell "
                "their lengths; use train.micro_batch_size"
            )
    if by_tokens and plan.degrees.pp > 2:
        shape = collective.from_first_rank([0, 0] if lengths is None else list(lengths.shape))
        count, rows = (int(size) for size in shape)
        mine = [0.0] * (count * rows) if lengths is None else lengths.reshape(-1).tolist()
        lengths = np.array(collective.from_first_rank(mine), "int64").reshape(count, rows)
    return lengths


def _dealer(plan: RunPlan, order: SampleOrder, lengths: np.ndarray | None) -> BatchSampler:
    train, num_ranks = plan.recipe.train, plan.degrees.num_data_ranks
    return BatchSampler(
        order,
        train.global_batch_size,
        train.micro_batch_size,
        num_ranks,
        lengths,
        train.micro_batch_tokens,
        _length_multiple(plan),
    )


def _length_multiple(plan: RunPlan) -> int:
    multiple = LENGTH_MULTIPLE if plan.recipe.engine.mode == "to_static" else 1
    return math.lcm(multiple, plan.degrees.tp) if plan.recipe.parallel.sequence_parallel else multiple


def _schedule(plan: RunPlan, num_samples: int) -> Schedule:
    train = plan.recipe.train
    # the stream of samples knows no gap between epochs, so only the last step may go beyond the last one
    total = train.max_steps or math.ceil((train.num_epochs or 1) * num_samples / train.global_batch_size)
    return Schedule(
        total_steps=total,
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.micro_batch_size,
        num_workers=plan.recipe.data.num_workers,
        pipeline=plan.schedule,
        log_steps=train.log_steps,
        eval_steps=train.eval_steps,
        save_steps=plan.recipe.checkpoint.save_steps,
    )


def _loggers(plan: RunPlan, registry: Registry) -> list[Any]:
    names = plan.recipe.loggers
    return [registry.loggers[n].factory(plan.output_dir) for n in names] if collective.rank() == 0 else []
