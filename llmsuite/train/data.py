"""The data of a run: its stage, the samples, and which of them make up which micro-batch."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.checkpoint.tokenizer_files import check_tokenizer, copy_tokenizer
from llmsuite.data.chat_template import BUILTIN, load_template
from llmsuite.data.loader import BatchSampler, SampleOrder
from llmsuite.data.sequences import Packs, Picked, lengths_of
from llmsuite.data.tokenizer import NoTokenizer, TextTokenizer
from llmsuite.devices.base import DeviceBackend
from llmsuite.errors import UserError
from llmsuite.files import read_json_object, write_text_atomic
from llmsuite.models.anatomy import GroupedQuery, MoE
from llmsuite.models.plain import reads_tokens
from llmsuite.parallel import collective
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.program.lengths import length_multiple
from llmsuite.plugins.manager import Registry
from llmsuite.progress import report
from llmsuite.recipe.resolve import RunPlan
from llmsuite.regular import is_file
from llmsuite.rl.reward_services import RewardServices
from llmsuite.train.stage import Stage, StageContext
from llmsuite.train.supervision import check_supervision


@dataclasses.dataclass(frozen=True)
class TrainingData:
    """Samples for training and evaluation. In the middle of a pipeline a sample is a number, which nobody looks at."""

    stage: Stage[Any] | None
    """Where data is read: on the first and the last stage of a pipeline."""
    in_programs: Stage[Any] | None
    """The same; also in the middle of a pipeline, where steps are programs: each rank makes that of all of a step."""
    train: Sequence[Any]
    eval: Sequence[Any]
    """With `data.group_by_length` the longest first."""
    eval_as_read: Sequence[Any]
    """The same in the order of the file."""
    order: SampleOrder
    """The endless stream of training samples."""
    sampler: BatchSampler

    def used(self, num_samples: int) -> Iterator[Any]:
        """The samples that so many of the stream may be, each once, and those of the evaluation."""
        for index in self.order.first(num_samples):
            yield self.train[index]
        yield from self.eval

    def eval_micro_batches(self, mesh: Mesh, size: int) -> tuple[Sequence[list[Any]], int]:
        """This rank's micro-batches of an evaluation, as many on every rank, and how many of them count: the last ones
        only keep ranks company that have more."""
        num_ranks = mesh.degrees.num_data_ranks
        own = range(len(self.eval))[mesh.data_rank :: num_ranks]
        batches = [own[i : i + size] for i in range(0, len(own), size)]
        if mesh.degrees.own_meshes and len(batches) > 1 and len(batches[-1]) < size:
            # a few rows might not be enough for the ranks of an axis
            batches[-2:] = [own[(len(batches) - 2) * size :]]
        num_counted, most = len(batches), math.ceil(math.ceil(len(self.eval) / num_ranks) / size)
        return Packs(self.eval, batches + batches[-1:] * (most - num_counted), list), num_counted


def read_data(
    plan: RunPlan, registry: Registry, backend: DeviceBackend, mesh: Mesh, initial_digest: Callable[[], str]
) -> TrainingData:
    """Make the stage, and the samples of the recipe's files. Every rank calls it.

    Args:
        plan: of the run.
        registry: has the data formats.
        backend: the device.
        mesh: this rank's place.
        initial_digest: gives the digest of the initial model once that is built.

    Raises:
        UserError: a file or a row is wrong, or there are too few samples.
    """
    in_programs: Stage[Any] | None = None
    train: Sequence[Any] = ()
    evaluation: Sequence[Any] = ()
    _ = plan.recipe.data.collator  # read by every rank: ranks in the middle of a pipeline may make no stage
    if mesh.reads_data or plan.recipe.engine.compiles_steps:
        tokenizer = load_tokenizer(plan)
        in_programs = make_stage(plan, registry, initial_digest, tokenizer, padding_free(plan, backend))
    stage = in_programs if mesh.reads_data else None
    if stage is not None:
        train, evaluation = _read(stage, plan, mesh)
    by_length = evaluation if stage is None else _by_length(stage, plan, evaluation)
    lengths = _row_lengths(stage, plan, train)
    counts = collective.from_first_rank([len(train), len(evaluation)])
    if stage is None:
        train, evaluation = (range(int(count)) for count in counts)
        by_length = evaluation
    order = _order(plan, len(train))
    return TrainingData(stage, in_programs, train, by_length, evaluation, order, _sampler(plan, order, lengths))


def _order(plan: RunPlan, num_samples: int) -> SampleOrder:
    """The stream of training samples."""
    data, size = plan.recipe.data, plan.recipe.train.global_batch_size
    if data.drop_last and num_samples < size:
        raise UserError(
            f"data.drop_last: leaves nothing of {num_samples} samples, which fill no batch of train.global_batch_size "
            f"{size}; set it to false, or lower that"
        )
    return SampleOrder(num_samples, plan.recipe.seed, data.shuffle, size if data.drop_last else 1)


def load_tokenizer(plan: RunPlan) -> TextTokenizer:
    """The tokenizer of the recipe. Raises UserError when it is larger than the model's vocabulary."""
    if not reads_tokens(plan.model_config):
        return NoTokenizer()
    assert plan.tokenizer is not None  # a rule of recipes has seen to it
    tokenizer = TextTokenizer(plan.tokenizer)
    if tokenizer.vocab_size > plan.model_config.vocab_size:
        raise UserError(
            f"model.tokenizer: {plan.tokenizer} has {tokenizer.vocab_size} tokens, more than the "
            f"{plan.model_config.vocab_size} of the model"
        )
    return tokenizer


def make_stage(
    plan: RunPlan,
    registry: Registry,
    initial_digest: Callable[[], str],
    tokenizer: TextTokenizer,
    padding_free: bool = False,
) -> Stage[Any]:
    """The stage of the recipe; it has read nothing yet."""
    recipe = plan.recipe
    context = StageContext(
        recipe=recipe,
        tokenizer=tokenizer,
        template=lambda: load_template(recipe.data.chat_template, tokenizer.directory, tokenizer.special_tokens),
        data_formats=registry.data_formats,
        initial_digest=initial_digest,
        length_multiple=length_multiple(plan),
        report=report,
        readers=registry.readers(),
        rewards=registry.rewards,
        environments=registry.environments,
        reward_services=RewardServices(
            families=registry.models, device=plan.device.factory(), precision=recipe.engine.precision
        ),
        padding_free=padding_free,
        keeps_tokens=True,
    )
    cls = plan.stage.factory()
    if not (isinstance(cls, type) and issubclass(cls, Stage)):
        raise UserError(
            f"stage {plan.stage.name}: its factory returned {cls!r}; it has to return a class derived from "
            f"{Stage.__module__}.Stage"
        )
    if plan.stage.row_kind and plan.stage.row_kind != getattr(cls, "row_kind", None):
        raise UserError(
            f"stage {plan.stage.name}: row_kind is {plan.stage.row_kind!r} in its StageSpec and "
            f"{getattr(cls, 'row_kind', None)!r} in its class {cls.__name__}; both have to be the same"
        )
    if missing := sorted(cls.__abstractmethods__):
        raise UserError(f"stage {plan.stage.name}: its class {cls.__name__} has no method {', '.join(missing)}")
    stage: Stage[Any] = cls(plan.section, context)
    stage.check_collate(plan.stage.name)
    if (collator := recipe.data.collator) is not None:
        stage.use_collator(collator)
    return stage


def padding_free(plan: RunPlan, backend: DeviceBackend) -> bool:
    """Whether attention keeps the sequences of a row apart, so that batches need no padding, and prompts are read once.

    Not in programs, which are compiled for few lengths; not where attention makes the scores of a whole row; and not
    with experts, whose balance depends on how often a token is read.
    """
    anatomy = plan.family.anatomy and plan.family.anatomy(plan.model_config)
    is_plain = anatomy is not None and all(
        isinstance(layer.attention, GroupedQuery) and not isinstance(layer.mlp, MoE) for layer in anatomy.layers
    )
    return is_plain and plan.recipe.engine.mode == "dynamic" and backend.padding_free(plan.recipe.engine.precision)


def tokenizer_to_save(plan: RunPlan) -> Path | None:
    """The tokenizer that checkpoints get: with the chat template that is trained with, or generation would ask with
    another one."""
    choice = plan.recipe.data.chat_template
    if plan.tokenizer is None or collective.rank() != 0:
        return plan.tokenizer
    check_tokenizer(plan.tokenizer)  # now, and not at the first checkpoint
    if choice not in BUILTIN:
        return plan.tokenizer
    directory = plan.output_dir / "tokenizer"
    directory.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(plan.tokenizer, directory)
    write_text_atomic(directory / "chat_template.jinja", BUILTIN[choice])
    path = directory / "tokenizer_config.json"
    config = read_json_object(path) if is_file(path) else {}
    if config.pop("chat_template", None) is not None:
        # some libraries read this one first
        write_text_atomic(path, json.dumps(config, ensure_ascii=False, indent=2) + "\n")
    return directory


def _read(stage: Stage[Any], plan: RunPlan, mesh: Mesh) -> tuple[Sequence[Any], Sequence[Any]]:
    """Samples for training and for evaluation."""
    train, evaluation = stage.read_all(plan.train_path, plan.eval_path)
    if plan.profile.updates:  # samples are completed first
        return train, evaluation
    if reads_tokens(plan.model_config):
        check_supervision(stage, train, f"data.train: {plan.train_path}")
        check_supervision(stage, evaluation, f"data.eval: {plan.eval_path or plan.train_path}")
    if 0 < len(evaluation) < mesh.degrees.num_data_ranks:
        source = plan.eval_path or plan.train_path
        raise UserError(f"data.eval: {source} gives {len(evaluation)} usable samples; every data rank needs one")
    return train, evaluation


def _by_length(stage: Stage[Any], plan: RunPlan, evaluation: Sequence[Any]) -> Sequence[Any]:
    """Samples for evaluation in the order in which they make up micro-batches."""
    if plan.profile.updates or not plan.recipe.data.group_by_length or not len(evaluation):
        return evaluation
    lengths = lengths_of(evaluation, stage.row_lengths)
    return evaluation if lengths is None else Picked(evaluation, np.argsort(-lengths.max(1), kind="stable"))


def _row_lengths(stage: Stage[Any] | None, plan: RunPlan, samples: Sequence[Any]) -> np.ndarray | None:
    """[samples, rows of each]: tokens of the training samples, where micro-batches are made by them. With micro-batches
    by tokens also in the middle of a pipeline: their number depends on the lengths."""
    by_tokens, by_length = plan.recipe.train.micro_batch_tokens is not None, plan.recipe.data.group_by_length
    lengths = None
    if plan.profile.updates:  # they are dealt when they are completed
        return None
    if stage is not None and (by_tokens or by_length):
        lengths = lengths_of(samples, stage.row_lengths)
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


def _sampler(plan: RunPlan, order: SampleOrder, lengths: np.ndarray | None) -> BatchSampler:
    train, num_ranks = plan.recipe.train, plan.degrees.num_data_ranks
    return BatchSampler(
        order,
        train.global_batch_size,
        train.micro_batch_size,
        num_ranks,
        lengths,
        None if plan.profile.updates else train.micro_batch_tokens,
        length_multiple(plan),
    )
