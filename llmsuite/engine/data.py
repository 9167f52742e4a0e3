"""Data of a run: its stage, the samples, and how they make up micro-batches."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.base.files import read_json_object_if_there, write_text_atomic
from llmsuite.base.progress import report
from llmsuite.checkpoint.tokenizer_files import check_tokenizer, copy_tokenizer
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.recipe import DataSection
from llmsuite.contract.specs import StageProfile, StageSpec
from llmsuite.data.chat_template import ChatTemplate, chosen_template, load_template
from llmsuite.data.keys import ALL
from llmsuite.data.lazy_sequences import PackedSamples, Subset, lengths_of
from llmsuite.data.loader import BatchSampler, SampleOrder
from llmsuite.data.new_tokens import tokenizer_with_tokens
from llmsuite.data.tokenizer import NoTokenizer, TextTokenizer
from llmsuite.devices.base import DeviceBackend
from llmsuite.engine.batch import Batch
from llmsuite.engine.collator import Collate, collate_of
from llmsuite.engine.row_reader import RowReader
from llmsuite.engine.stage import (
    AsyncRolloutStage,
    CriticStage,
    GeneratingStage,
    RolloutStage,
    Stage,
    StageContext,
    shown_capabilities,
)
from llmsuite.engine.supervision import check_supervision
from llmsuite.engine.teacher import load_teacher
from llmsuite.models.plain import reads_tokens
from llmsuite.models.shape_spec import GroupedQuery, MoE
from llmsuite.parallel import collective
from llmsuite.parallel.mesh import Mesh
from llmsuite.recipe.plans import DataPlan, ModelPlan, ParallelPlan, TrainPlan
from llmsuite.rl.reward_services import RewardServices


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """The keys of a recipe that decide how the samples of a step become micro-batches."""

    size: int
    """Samples of a micro-batch."""
    max_tokens: int | None
    """Limit on the tokens of a micro-batch, padding included, in place of `size`; None for `size`."""
    by_length: bool
    """True where samples of one length are put together."""
    num_data_ranks: int
    length_multiple: int
    """Rows are padded to a multiple of this many tokens."""

    @classmethod
    def from_plans(cls, data_plan: DataPlan, parallel_plan: ParallelPlan, train_plan: TrainPlan) -> MicroBatches:
        train = train_plan.section
        return cls(
            size=train.micro_batch_size,
            max_tokens=train.micro_batch_tokens,
            by_length=data_plan.section.group_by_length,
            num_data_ranks=parallel_plan.degrees.num_data_ranks,
            length_multiple=parallel_plan.length_multiple,
        )

    @property
    def depend_on_lengths(self) -> bool:
        """True where the lengths of samples decide which of them are together."""
        return self.by_length or self.max_tokens is not None

    def sampler(self, order: SampleOrder, global_batch_size: int, lengths: np.ndarray | None) -> BatchSampler:
        """Build the sampler of a stream of samples; arguments are those of `BatchSampler`."""
        return BatchSampler(
            order,
            global_batch_size,
            self.size,
            self.num_data_ranks,
            lengths,
            self.max_tokens,
            self.length_multiple,
        )


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    """Samples of an evaluation. On middle stages of a pipeline a sample is just a number."""

    name: str
    """Name of the set, "" for the only one."""
    samples: Sequence[Any]
    """Samples; with `data.group_by_length` the longest first."""
    in_file_order: Sequence[Any]
    """Samples in the order of the file."""

    def metric(self, name: str) -> str:
        """Return the name of a metric of this set, such as "math/loss" for "loss"."""
        return f"{self.name}/{name}" if self.name else name

    def micro_batches(self, mesh: Mesh, size: int) -> tuple[Sequence[list[Any]], int]:
        """Return this rank's micro-batches of an evaluation, and how many of them count. Every rank has the same number
        of micro-batches, as passes are collective operations; the surplus ones do not count."""
        num_ranks = mesh.degrees.num_data_ranks
        own = range(len(self.samples))[mesh.data_rank :: num_ranks]
        batches = [own[i : i + size] for i in range(0, len(own), size)]
        if mesh.degrees.auto_parallel and len(batches) > 1 and len(batches[-1]) < size:
            # a few rows might not be enough for the ranks of an axis
            batches[-2:] = [own[(len(batches) - 2) * size :]]
        num_counted = len(batches)
        max_batches = math.ceil(math.ceil(len(self.samples) / num_ranks) / size)
        return PackedSamples(self.samples, batches + batches[-1:] * (max_batches - num_counted), list), num_counted


@dataclasses.dataclass(frozen=True)
class TrainingData:
    """Samples for training and evaluation. On middle stages of a pipeline a sample is just a number."""

    stage: Stage[Any] | None
    """Stage of the run, on ranks that load data: those of the first and the last stage of a pipeline."""
    program_stage: Stage[Any] | None
    """Stage of the run; with compiled train steps on all ranks, as each compiles the full step."""
    train: Sequence[Any]
    """Samples for training."""
    evaluations: tuple[EvaluationSet, ...]
    """Sets of samples for evaluation; none without evaluation."""
    order: SampleOrder
    """Order of the endless stream of training samples."""
    sampler: BatchSampler
    micro_batches: MicroBatches
    collate: Callable[[Sequence[Any]], Batch] | None
    """Makes a batch of samples; None on ranks that load no data."""

    def used_samples(self, num_samples: int) -> Iterator[Any]:
        """Iterate once over each of the first `num_samples` samples of the stream, and those of the evaluation."""
        for index in self.order.first(num_samples):
            yield self.train[index]
        for evaluation in self.evaluations:
            yield from evaluation.samples


def read_data(
    stage: Stage[Any] | None,
    model_plan: ModelPlan,
    data_plan: DataPlan,
    parallel_plan: ParallelPlan,
    train_plan: TrainPlan,
    mesh: Mesh,
) -> TrainingData:
    """Read the files of a run. A collective call: every rank makes it.

    Args:
        stage: stage of the run; None on ranks that neither load data nor compile the step.
        model_plan: plan of the model.
        data_plan: plan of the data.
        parallel_plan: plan of the parallelism.
        train_plan: plan of the training.
        mesh: coordinates of this rank.

    Raises:
        UserError: a file or a row is wrong, or there are too few samples.
    """
    program_stage = stage
    train: Sequence[Any] = ()
    found: Mapping[str, Sequence[Any]] = {}
    if not mesh.loads_data:
        stage = None
    has_rollouts = train_plan.profile.updates > 0
    has_answers = not has_rollouts or not train_plan.profile.evaluates_rollouts
    micro_batches = MicroBatches.from_plans(data_plan, parallel_plan, train_plan)
    collate: Collate | None = None
    if stage is not None:
        collate = collate_of(stage)
        if isinstance(stage, RolloutStage):
            stage.before_reading()
        _check_reader(stage, data_plan)
        train, found = stage.reader.read_all(data_plan.train_path, data_plan.eval_paths)
        if has_answers:  # else the samples are prompts, which have none yet
            _check_samples(stage, collate, train, found, data_plan, reads_tokens(model_plan.config), mesh)
    by_length = found
    if stage is not None and micro_batches.by_length and has_answers:
        by_length = {name: _by_length(stage, samples) for name, samples in found.items()}
    lengths: np.ndarray | None = None
    if not has_rollouts:  # else split into micro-batches after the rollout
        lengths = _row_lengths(stage, micro_batches, parallel_plan.degrees.pp, train, train_plan.stage.name)
    # ranks without data need the number of samples, to run as many passes
    names = data_plan.eval_names
    counts = collective.broadcast_from_rank0([len(train), *(len(found.get(name, ())) for name in names)])
    evaluations = list[EvaluationSet]()
    if stage is None:
        train = range(int(counts[0]))
    for name, count in zip(names, counts[1:]):
        numbers = range(int(count))
        if count:
            evaluations.append(EvaluationSet(name, by_length.get(name, numbers), found.get(name, numbers)))
    size = train_plan.section.global_batch_size
    order = _order(data_plan, size, len(train))
    of_stream = dataclasses.replace(micro_batches, max_tokens=None) if has_rollouts else micro_batches
    sampler = of_stream.sampler(order, size, lengths)
    sets = tuple(evaluations)
    return TrainingData(stage, program_stage, train, sets, order, sampler, micro_batches, collate)


def _order(data_plan: DataPlan, size: int, num_samples: int) -> SampleOrder:
    """Return the order of the stream of training samples, for global batches of this size."""
    data = data_plan.section
    if data.drop_last and num_samples < size:
        raise UserError(
            f"data.drop_last: leaves nothing of {num_samples} samples, which fill no batch of train.global_batch_size "
            f"{size}; set it to false, or lower that"
        )
    return SampleOrder(num_samples, data_plan.seed, data.shuffle, size if data.drop_last else 1)


def load_tokenizer(model_plan: ModelPlan) -> TextTokenizer:
    """Load the tokenizer of the recipe. Raises UserError when it is larger than the model's vocabulary."""
    if not reads_tokens(model_plan.config):
        return NoTokenizer()
    directory = completed_tokenizer(model_plan)
    assert directory is not None  # ensured by a rule of recipes
    tokenizer = TextTokenizer(directory)
    if tokenizer.vocab_size > model_plan.config.vocab_size:
        message = (
            f"model.tokenizer: {model_plan.tokenizer} has {tokenizer.vocab_size} tokens, more than the "
            f"{model_plan.config.vocab_size} of the model"
        )
        if directory != model_plan.tokenizer:
            message = (
                f"model.new_tokens: the tokenizer has {tokenizer.vocab_size} tokens with them, more than the "
                f"{model_plan.config.vocab_size} of the model; set model.vocab_size to that number, or to a multiple"
            )
        raise UserError(message)
    return tokenizer


def completed_tokenizer(model_plan: ModelPlan) -> Path | None:
    """Return the directory of the tokenizer with the new tokens of the recipe; None for a model without a tokenizer."""
    if model_plan.tokenizer is None:
        return None
    section = model_plan.section
    return tokenizer_with_tokens(model_plan.tokenizer, section.new_tokens, section.new_special_tokens)


def make_stage(
    model_plan: ModelPlan,
    data_plan: DataPlan,
    parallel_plan: ParallelPlan,
    train_plan: TrainPlan,
    registry: Registry,
    initial_digest: Callable[[], str],
    tokenizer: TextTokenizer,
    padding_free: bool = False,
) -> Stage[Any]:
    """Build the stage of a run, before it reads any data.

    Args:
        model_plan: plan of the model.
        data_plan: plan of the data.
        parallel_plan: plan of the parallelism.
        train_plan: plan of the training.
        registry: registered stages, data formats, rewards and environments.
        initial_digest: returns the digest of the initial model once it is built.
        tokenizer: tokenizer of the model.
        padding_free: result of `padding_free`.
    """
    data = data_plan.section
    device = parallel_plan.device.factory()
    teacher = None
    if train_plan.teacher is not None:
        teacher = functools.partial(load_teacher, train_plan.teacher, registry.models, device, tokenizer)
    context = StageContext(
        stage_name=train_plan.stage.name,
        data=data,
        train=train_plan.section,
        seed=train_plan.seed,
        tokenizer=tokenizer,
        template=lambda: _template(data, tokenizer),
        data_formats=registry.data_formats,
        initial_digest=initial_digest,
        length_multiple=parallel_plan.length_multiple,
        report=report,
        generation=train_plan.generation,
        reft=model_plan.reft,
        sections=train_plan.sections,
        readers=registry.stages_by_row_kind(),
        rewards=registry.rewards,
        environments=registry.environments,
        reward_services=RewardServices(
            families=registry.models,
            device=device,
            precision=parallel_plan.engine.precision,
        ),
        capabilities=train_plan.stage.capabilities,
        padding_free=padding_free,
        load_teacher=teacher,
        caches_tokens=True,
        caches_logps=device.has_values,
    )
    assert isinstance(train_plan.stage, StageSpec), "only stages are trained"
    return _stage_class(train_plan.stage, train_plan.profile)(train_plan.stage_section, context)


def _template(data: DataSection, tokenizer: TextTokenizer) -> ChatTemplate:
    """Load the chat template of a recipe."""
    ignores_unknown = ALL in data.ignore_columns
    return load_template(
        data.chat_template, tokenizer.directory, tokenizer.special_tokens, data.chat_template_kwargs, ignores_unknown
    )


def _stage_class(spec: StageSpec, profile: StageProfile) -> type[Stage[Any]]:
    """Return the class of a stage. Raises UserError unless it is a stage that does what its spec and profile say."""
    cls = spec.factory()
    if not (isinstance(cls, type) and issubclass(cls, Stage)):
        raise UserError(
            f"stage {spec.name}: its factory returned {cls!r}; it has to return a class derived from "
            f"{Stage.__module__}.Stage"
        )
    if spec.row_kind and spec.row_kind != cls.row_kind:
        raise UserError(
            f"stage {spec.name}: row_kind is {spec.row_kind!r} in its StageSpec and {cls.row_kind!r} in its class "
            f"{cls.__name__}; both have to be the same"
        )
    if missing := sorted(cls.__abstractmethods__):
        raise UserError(f"stage {spec.name}: its class {cls.__name__} has no method {', '.join(missing)}")
    for claim, is_claimed, base in (
        ("the capability generation", "generation" in spec.capabilities, GeneratingStage),
        ("the capability async_rollout", "async_rollout" in spec.capabilities, AsyncRolloutStage),
        ("rollouts in its profile", profile.updates > 0, RolloutStage),
        ("a critic in its profile", profile.critic is not None, CriticStage),
    ):
        if is_claimed and not issubclass(cls, base):
            raise UserError(
                f"stage {spec.name}: it has {claim}, so its class {cls.__name__} has to derive from "
                f"{base.__module__}.{base.__name__}"
            )
    if "step_programs" in spec.capabilities - shown_capabilities(cls):
        raise UserError(
            f"stage {spec.name}: it has the capability step_programs, so its class {cls.__name__} has to define "
            "`batch_layout`"
        )
    return cls


def padding_free(model_plan: ModelPlan, parallel_plan: ParallelPlan, backend: DeviceBackend) -> bool:
    """Return True if attention can separate the sequences of a row, so that batches need no padding and answers share
    their prompt.

    False in compiled programs, which are made for few lengths; where attention computes the scores of a full row; and
    with experts, whose balance depends on how often a token is processed.
    """
    shape_spec = model_plan.family.shape_spec and model_plan.family.shape_spec(model_plan.config)
    is_plain = shape_spec is not None and all(
        isinstance(layer.attention, GroupedQuery) and not isinstance(layer.mlp, MoE) for layer in shape_spec.layers
    )
    engine = parallel_plan.engine
    return is_plain and engine.mode == "dynamic" and backend.padding_free(engine.precision)


def tokenizer_to_save(tokenizer: Path | None, choice: str, output_dir: Path) -> Path | None:
    """Return the tokenizer directory for checkpoints. Its chat template is the one of the training, so that generation
    uses the same.

    Args:
        tokenizer: directory of the tokenizer; None for a model without one.
        choice: `data.chat_template`.
        output_dir: directory of the run, which gets a copy with another template.
    """
    if tokenizer is None or collective.rank() != 0:
        return tokenizer
    check_tokenizer(tokenizer)  # fail now instead of at the first checkpoint
    chosen = chosen_template(choice)
    if chosen is None:
        return tokenizer
    directory = output_dir / "tokenizer"
    directory.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(tokenizer, directory)
    write_text_atomic(directory / "chat_template.jinja", chosen)
    path = directory / "tokenizer_config.json"
    config = read_json_object_if_there(path)
    if config.pop("chat_template", None) is not None:
        # some libraries prefer the template in this file
        write_text_atomic(path, json.dumps(config, ensure_ascii=False, indent=2) + "\n")
    return directory


def _check_reader(stage: Stage[Any], data_plan: DataPlan) -> None:
    """Raise UserError where rows are chosen and the stage reads none."""
    for key in ("holdout", "sample"):
        if data_plan.given(key) is not None and not isinstance(stage.reader, RowReader):
            name = stage.context.stage_name
            raise UserError(f"data.{key}: stage {name} reads data in its own way and chooses no rows; remove it")


def _check_samples(
    stage: Stage[Any],
    collate: Collate,
    train: Sequence[Any],
    evaluations: Mapping[str, Sequence[Any]],
    data_plan: DataPlan,
    has_tokens: bool,
    mesh: Mesh,
) -> None:
    """Raise UserError where nothing is supervised, or an evaluation has too few samples."""
    if has_tokens:
        check_supervision(stage, collate, train, f"data.train: {data_plan.train_path}")
    for name, samples in evaluations.items():
        key = f"data.eval.{name}" if name in data_plan.eval_paths and name else "data.eval"
        if data_plan.section.holdout is not None and name not in data_plan.eval_paths:
            key = "data.holdout"
        what = f"{key}: {data_plan.eval_paths.get(name, data_plan.train_path)}"
        if has_tokens:
            check_supervision(stage, collate, samples, what)
        if 0 < len(samples) < mesh.degrees.num_data_ranks:
            raise UserError(f"{what} has {len(samples)} usable samples; every data rank needs one")


def _by_length(stage: Stage[Any], evaluation: Sequence[Any]) -> Sequence[Any]:
    """Sort the samples for evaluation by length."""
    if not len(evaluation):
        return evaluation
    lengths = lengths_of(evaluation, stage.row_lengths)
    if lengths is None:
        return evaluation
    return Subset(evaluation, np.argsort(-lengths.max(1), kind="stable"))  # stable: the same order on every rank


def _row_lengths(
    stage: Stage[Any] | None, micro_batches: MicroBatches, pp: int, samples: Sequence[Any], stage_name: str
) -> np.ndarray | None:
    """Return the lengths of the training samples [samples, rows per sample], where micro-batches depend on them. With
    micro-batches by tokens also on middle stages of a pipeline: the number of micro-batches depends on the lengths."""
    by_tokens = micro_batches.max_tokens is not None
    lengths = None
    if stage is not None and micro_batches.depend_on_lengths:
        lengths = lengths_of(samples, stage.row_lengths)
        if by_tokens and lengths is None:
            raise UserError(
                f"train.micro_batch_tokens: all samples of stage {stage_name} have one length, or it does not "
                "return their lengths; use train.micro_batch_size"
            )
    if by_tokens and pp > 2:
        shape = collective.broadcast_from_rank0([0, 0] if lengths is None else list(lengths.shape))
        count, rows = (int(size) for size in shape)
        mine = [0.0] * (count * rows) if lengths is None else lengths.reshape(-1).tolist()
        lengths = np.array(collective.broadcast_from_rank0(mine), "int64").reshape(count, rows)
    return lengths
