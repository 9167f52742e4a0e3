"""The four plans of a run: its model, its data, its parallelism and its training.

A component gets the plans it uses, and no recipe. Each plan has the sections of the recipe that are about it, and what
`resolve` has derived from them. Imports no Paddle.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from llmsuite.adapters.parameters import is_trained
from llmsuite.base.redaction import Url
from llmsuite.base.resources import find
from llmsuite.base.safe_files import exists, is_file
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.contract.schema.engine import EngineSection
from llmsuite.contract.schema.generation import GenerationSection
from llmsuite.contract.schema.lora import LoraSection
from llmsuite.contract.schema.parallel import ParallelSection
from llmsuite.contract.schema.prefix import PrefixSection
from llmsuite.contract.schema.recipe import (
    HELD_OUT,
    CheckpointSection,
    DataSection,
    ModelSection,
    QatSection,
    TrainSection,
    freezes_model,
)
from llmsuite.contract.schema.reft import ReftSection
from llmsuite.contract.schema.reward import RewardSection
from llmsuite.contract.schema.section import value_at
from llmsuite.contract.specs import DeviceSpec, JobSpec, ModelFamily, RolloutEngineSpec, StageProfile, StageSpec
from llmsuite.data.remote import fetch, is_remote
from llmsuite.models.head import head_of, is_tied
from llmsuite.models.shard_plan import UNSHARDED, ShardPlan
from llmsuite.models.targets import full_modules
from llmsuite.parallel.program.lengths import LENGTH_MULTIPLE
from llmsuite.recipe.teacher import TeacherPlan

DEFAULT_METRIC = "eval/loss"
"""Metric of early stopping in a recipe that names none."""

_LOWEST = re.compile(r"(.*_)?(loss|nll|perplexity)")
_HIGHEST = re.compile(r"accuracy|likely|margin|reward|bleu\d|rouge[\dl]|exact_match|pass@\d+")


def known_direction(metric: str) -> Literal["lowest", "highest"] | None:
    """Return the direction in which an evaluation metric such as "eval/tokens/accuracy" is better; None where its name
    does not tell."""
    *groups, name = metric.split("/")
    if _HIGHEST.fullmatch(name):
        return "highest"
    is_reward = groups[-1:] == ["rewards"]  # of a function with any name
    return "lowest" if _LOWEST.fullmatch(name) and not is_reward else None


@dataclasses.dataclass(frozen=True)
class ModelPlan:
    """The network of a run, the part of it that is trained, and the files it starts from."""

    section: ModelSection
    """Section `model` of the recipe."""
    family: ModelFamily
    config: Any
    """Shape of the model, of the family's `config_cls`."""
    weights: Path | None
    """Directory of the initial weights; None to initialise from the seed. It may be missing until `check_files`."""
    tokenizer: Path | None
    """Directory of the tokenizer; None for a model that reads no tokens."""
    lora: LoraSection
    reft: ReftSection
    prefix: PrefixSection
    qat: QatSection
    seed: int
    """Seed of the initial values, and of dropout."""

    @property
    def shard_plan(self) -> ShardPlan:
        """Partition of the parameters for tensor parallelism."""
        return self.family.shard_plan or UNSHARDED

    @property
    def is_scored(self) -> bool:
        """True where the model gives a score per sequence in place of logits."""
        return head_of(self.config) == "score"

    @property
    def is_frozen(self) -> bool:
        """True where adapters, interventions or a prefix are trained and the model is frozen."""
        return freezes_model(self.lora, self.reft, self.prefix)

    @property
    def full_modules(self) -> list[str]:
        """Modules that are trained in full next to adapters."""
        if self.lora.rank is None:
            return []
        return full_modules(self.lora.modules_to_save, self.shard_plan, is_tied(self.config))

    def trains(self, parameter: str) -> bool:
        """Return True for the name of a parameter that is trained."""
        if not self.is_frozen or is_trained(parameter):
            return True
        return parameter.rpartition(".")[0] in self.full_modules

    @property
    def prefix_network_size(self) -> int | None:
        """Width of the network that makes prefixes; None without such a network."""
        return self.prefix.network_size(self.config.hidden_size)

    def keeps_frozen_bf16(self, parallel_plan: ParallelPlan) -> bool:
        """Return True where the frozen matrices of decoder layers are stored in bfloat16 although parameters are
        float32: with plain LoRA, whose B starts at zero, only matrix products read them, and these round their inputs
        to bfloat16."""
        is_plain = self.lora.rank is not None and self.lora.adapter_method.is_plain
        is_wide = parallel_plan.engine.precision == "bf16" and parallel_plan.parameter_dtype == "float32"
        return is_plain and is_wide and self.lora.base_dtype is None


@dataclasses.dataclass(frozen=True)
class DataPlan:
    """The files that a run reads, and the order of their samples."""

    section: DataSection
    """Section `data` of the recipe. A stage that does not train has `prompts` there in place of `train`."""
    key: Literal["train", "prompts"]
    """Key of the section that names `train_file`."""
    train_file: Path | Url
    """Training data, or the prompts of a stage that does not train; a URL until it is `fetched`."""
    eval_files: Mapping[str, Path | Url]
    """Evaluation data by the name of its set; the name of the only set may be ""."""
    mixed: tuple[tuple[str, str], ...]
    """More training data: (key of the recipe, name)."""
    seed: int
    """Seed of the order of samples."""

    @property
    def train_path(self) -> Path:
        """`train_file` as a local path; the data has to be `fetched`."""
        assert isinstance(self.train_file, Path), f"{self.train_file} is not fetched"
        return self.train_file

    @property
    def eval_paths(self) -> dict[str, Path]:
        """`eval_files` as local paths; the data has to be `fetched`."""
        paths = dict[str, Path]()
        for name, file in self.eval_files.items():
            assert isinstance(file, Path), f"{file} is not fetched"
            paths[name] = file
        return paths

    @property
    def eval_names(self) -> tuple[str, ...]:
        """Names of the evaluation sets of a run, as far as they have samples: those of `data.eval`, and that of the
        rows of `data.holdout`. The name of the only set is ""."""
        return evaluation_names(self.section)

    def given(self, key: str) -> Any:
        """Return a key of section `data`; None where recipes of the stage have no such key."""
        return value_at(self.section, key)

    def files(self) -> Iterator[tuple[str, str, Path | Url]]:
        """Yield (key, name, file, directory or URL) of all data."""
        yield f"data.{self.key}", self.given(self.key), self.train_file
        given = self.given("eval")
        for name, file in self.eval_files.items():
            if name:
                yield f"data.eval.{name}", given[name], file
            else:
                yield "data.eval", given, file
        for key, name in self.mixed:
            yield key, name, data_file(name)

    def fetched(self, report: Callable[[str], None]) -> DataPlan:
        """Return the plan with remote data downloaded to local files. Raises UserError if a download fails."""
        train = value_at(self.section, self.key)
        if self.key == "prompts":
            if is_remote(train):
                return dataclasses.replace(self, train_file=fetch(train, report))
            return self
        for _, name in self.mixed:
            if is_remote(name):
                fetch(name, report)
        train_file = fetch(train, report) if is_remote(train) else self.train_file
        eval_files = dict(self.eval_files)
        for name, given in evaluation_data(self.section).items():
            if is_remote(given):
                eval_files[name] = fetch(given, report)
        return dataclasses.replace(self, train_file=train_file, eval_files=eval_files)


def evaluation_data(data: DataSection) -> dict[str, str]:
    """Return the data sets of `data.eval` by name; the name of a single one is ""."""
    if isinstance(data.eval, dict):
        return data.eval
    return {"": data.eval} if data.eval else {}


def evaluation_names(data: DataSection) -> tuple[str, ...]:
    """Return the names of the evaluation sets of a recipe, see `DataPlan.eval_names`."""
    names = tuple(evaluation_data(data))
    if data.holdout is None:
        return names or ("",)  # a stage may hold out a part of data.train by a key of its own
    return (HELD_OUT, *names) if names else ("",)


@dataclasses.dataclass(frozen=True)
class ParallelPlan:
    """The devices of a run, and how a step is spread over them and executed on them."""

    section: ParallelSection
    """Section `parallel` of the recipe."""
    engine: EngineSection
    device: DeviceSpec
    degrees: Degrees
    schedule: Literal["FThenB", "1F1B", "interleaved"]
    """Pipeline schedule, used with pp > 1."""
    num_chunks: int
    """Number of parts of the model on one rank."""
    accumulate_steps: int | None
    """Number of micro-batches of an optimizer step on one rank; None where it depends on their lengths."""
    devices_per_machine: int
    num_machines: int
    master_weights: bool = True
    """`train.master_weights`; true where nothing is trained."""
    fuses_projections: bool = False
    """True where the gradients of an input that several projections share are summed over tp in one call."""

    @property
    def parameter_dtype(self) -> str:
        """Dtype of parameters and activations."""
        return self.device.factory().parameter_dtype(self.engine.precision)

    @property
    def gradient_bucket_bytes(self) -> int:
        """Size of gradient buckets in bytes of float32: from the recipe, else from the device."""
        chosen = self.section.gradient_bucket_bytes
        if chosen is None:
            return self.device.factory().gradient_bucket_bytes
        return chosen

    @property
    def length_multiple(self) -> int:
        """Number of tokens whose multiples batches of a run are padded to: for programs, and for equal parts of a
        sequence under sequence parallel."""
        multiple = 1
        if self.engine.mode == "to_static":
            multiple = LENGTH_MULTIPLE
        if self.section.sequence_parallel:
            return math.lcm(multiple, self.degrees.tp)
        return multiple


@dataclasses.dataclass(frozen=True)
class TrainPlan:
    """The stage of a run, and its loop: the optimizer, the batches, the samples that the model generates, and the
    checkpoints."""

    section: TrainSection
    """Section `train` of the recipe."""
    stage: StageSpec | JobSpec
    stage_section: Any
    """Section of the stage."""
    sections: Mapping[str, Any]
    """Further sections that the stage adds to its recipes, by name."""
    rollout: Any
    """Section `rollout`; None for a stage without rollouts."""
    rollout_engine: RolloutEngineSpec | None
    """Engine that samples completions; None for a stage without rollouts."""
    reward: RewardSection | None
    """Section `reward`; None for a stage without rewards."""
    generation: GenerationSection
    checkpoint: CheckpointSection
    seed: int
    """Seed of sampled tokens."""
    teacher: TeacherPlan | None = None
    """Teacher of the stage; None for a stage without one."""

    @property
    def profile(self) -> StageProfile:
        """Metrics and pre-passes of the stage for this recipe; without any entries for a job."""
        if not isinstance(self.stage, StageSpec):
            return StageProfile()
        profile = self.stage.profile(self.stage_section)
        if self.section.mtp_loss_weight:
            return dataclasses.replace(profile, sums=(*profile.sums, "mtp_loss"))
        return profile

    @property
    def best_metric(self) -> str | None:
        """Metric that selects the best checkpoint, which is kept: that of the checkpoints, or of early stopping."""
        stopping = self.section.early_stopping
        if self.checkpoint.best_metric is not None or stopping.patience is None:
            return self.checkpoint.best_metric
        return stopping.metric or DEFAULT_METRIC

    @property
    def best_is(self) -> Literal["lowest", "highest"]:
        """Direction of `best_metric`; a rule of recipes refuses early stopping by a metric without a known one."""
        if self.checkpoint.best_metric is not None:
            return self.checkpoint.best_is
        metric = self.best_metric
        return (known_direction(metric) if metric is not None else None) or "lowest"

    @property
    def rows_per_sample(self) -> int:
        """Number of sequences per sample in a micro-batch; with rollouts, of completions per prompt."""
        profile = self.profile
        if self.rollout is None or not profile.updates:
            return profile.rows_per_sample
        if profile.completions is not None:
            return profile.completions
        return profile.rows_per_sample * int(self.rollout.num_generations)

    @property
    def samples_in_training_processes(self) -> bool:
        """True where the completions of rollouts are sampled by a model in the training processes."""
        return self.rollout_engine is not None and not self.rollout_engine.remote


def data_file(given: str) -> Path | Url:
    """Return the path or URL of data; for the prefix of an indexed corpus, the path of its index."""
    if "://" in given:
        return Url(given)
    path = find(given)
    if exists(path):
        return path
    index = find(f"{given}.idx")
    return index if is_file(index) else path
