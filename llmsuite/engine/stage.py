"""Base classes of training stages: a stage makes samples of rows, collates batches and computes their loss.

`Stage` is what every stage has. Stages that do more derive from the classes after it: answers to compare with
(`GeneratingStage`), rollouts (`RolloutStage`, `AsyncRolloutStage`), a critic (`CriticStage`), a state in checkpoints
(`StatefulStage`).

The engine does not depend on any stage, and a stage knows nothing of ranks, meshes or optimizers.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from llmsuite.base.cache import cache_root
from llmsuite.base.errors import UserError
from llmsuite.base.files import check_intact
from llmsuite.base.safe_files import is_file
from llmsuite.base.typing import Tensor
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.contract.schema.generation import GenerationSection
from llmsuite.contract.schema.recipe import DataSection, TrainSection
from llmsuite.contract.schema.reft import ReftSection
from llmsuite.contract.specs import Capability, DataFormat, EnvironmentSpec, PrePassKind, RewardSpec
from llmsuite.data.chat_template import ChatTemplate
from llmsuite.data.encoding import encode_answers
from llmsuite.data.row_kinds import StagesByKind
from llmsuite.data.token_cache import encode_cached
from llmsuite.data.tokenizer import TextTokenizer, check_same_tokens
from llmsuite.engine.batch import Batch, BatchLayout
from llmsuite.engine.drop_counts import DropCounts
from llmsuite.engine.row_reader import RowReader, SampleReader
from llmsuite.inference.frozen import build_frozen
from llmsuite.parallel.loss_ledger import LossTerms, Sums
from llmsuite.recipe.shape import local_weights, missing_model
from llmsuite.rl.reward_services import RewardServices
from llmsuite.rl.rollouts import Rollouts

__all__ = [
    "AsyncRolloutStage", "Batch", "BatchLayout", "CriticStage", "DropCounts", "EvalPrompt", "GeneratingStage",
    "LossTerms", "PrePassKind", "RolloutResult", "RolloutStage", "Rollouts", "RowReader", "SampleReader", "Stage",
    "StageContext", "StatefulStage", "Sums",
]  # fmt: skip

S = TypeVar("S")


@dataclasses.dataclass(frozen=True)
class StageContext:
    """The services of a run for its stage."""

    stage_name: str
    """Name of the stage, such as "sft"."""
    data: DataSection
    """Section `data` of the recipe."""
    train: TrainSection
    """Section `train` of the recipe."""
    seed: int
    """Seed of the recipe."""
    tokenizer: TextTokenizer
    template: Callable[[], ChatTemplate]
    """Loads the chat template of the recipe; a stage without conversations does not call it."""
    data_formats: Mapping[str, DataFormat]
    initial_digest: Callable[[], str]
    """Returns `model_digest`. A callable, as the data is read before the model is built."""
    length_multiple: int
    """Number of tokens: batches are padded to a multiple of it, for sequences that are sharded over ranks."""
    report: Callable[[str], None]
    """Prints a message to the user, on rank 0 only."""
    generation: GenerationSection = dataclasses.field(default_factory=GenerationSection)
    """Section `generation` of the recipe."""
    reft: ReftSection = dataclasses.field(default_factory=ReftSection)
    """Section `reft` of the recipe."""
    sections: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The sections that `RunSpec.sections` adds to recipes of the stage, by name, such as "rollout"."""
    readers: StagesByKind = dataclasses.field(default_factory=dict)
    """Registered stages, by the kind of rows that each trains on."""
    rewards: Mapping[str, RewardSpec] = dataclasses.field(default_factory=dict)
    """Registered rewards of completions, by name."""
    environments: Mapping[str, EnvironmentSpec] = dataclasses.field(default_factory=dict)
    """Registered environments of episodes, by name."""
    reward_services: RewardServices | None = None
    """Services for rewards that call other models."""
    padding_free: bool = False
    """True where the sequences of a batch are best packed into one row, without padding."""
    capabilities: Set[Capability] = frozenset()
    """`RunSpec.capabilities` of the stage."""
    load_teacher: Callable[[], Any] | None = None
    """Loads the teacher of `StageProfile.teacher`; see `teacher`."""
    caches_tokens: bool = False
    """True where `encode` uses the token cache."""
    caches_logps: bool = True
    """False where log-probabilities of the model are not stored for later runs, as nobody computes them."""

    @property
    def model_digest(self) -> str:
        """Digest of the initial weights, the shape and the precision. Available from `before_training` on."""
        return self.initial_digest()

    def teacher(self) -> Any:
        """Load the teacher that the profile of the stage names, for `Comparison` of `llmsuite.models.divergence`.

        Call this method once, in `Stage.before_training`, on the ranks with the last layers (`model.is_last`), and the
        teacher under `paddle.no_grad()`. It is split over tensor parallel ranks, which therefore call it together;
        `llmsuite plan` counts it.

        Returns:
            A `llmsuite.models.blocks.CausalLM` in evaluation mode.

        Raises:
            UserError: its files cannot be read, or it has other tokens than the trained model.
        """
        assert self.load_teacher is not None, "the profile of the stage has no teacher"
        return self.load_teacher()

    def frozen_model(self, key: str, given: str) -> Any:
        """Load a second, frozen model, such as a teacher.

        This rank holds all of it next to its part of the trained model, on the device of the run and in its precision;
        `llmsuite plan` does not count that memory. Call this method in `Stage.before_training`, and the model under
        `paddle.no_grad()`.

        Args:
            key: recipe key that names the model, for messages, such as "distil.teacher".
            given: a model directory or a run.

        Returns:
            A `llmsuite.models.blocks.CausalLM` of any family, with `hidden_states`, `logits` and `token_nll`.

        Raises:
            UserError: there is no such model, or its vocabulary differs from that of the trained model.
        """
        services = self.reward_services
        assert services is not None, "the context of a run has reward services"
        path = local_weights(given)
        if not is_file(path / "config.json"):
            raise UserError(f"{key}: {missing_model(path, '')}")
        check_intact(path)
        source = open_model(path, services.families)
        check_same_tokens(key, path, self.tokenizer)
        return build_frozen(source, services.device, services.precision)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode the texts of a file to token ids, without special tokens. One rank of a run encodes them, and the
        result is cached for later runs."""
        if self.caches_tokens:
            return encode_cached(texts, self.tokenizer, cache_root() / "tokens")
        return self.tokenizer.encode_batch(texts)

    def encode_answers(self, texts: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Encode prompts and the answers that follow them, with `encode`.

        Args:
            texts: pairs of the prompt, and the prompt followed by the answer.

        Returns:
            Pairs of the token ids of the prompt and those of the answer.
        """
        return encode_answers(texts, self.tokenizer, self.encode)


@dataclasses.dataclass(frozen=True)
class RolloutResult:
    """The result of a rollout."""

    samples: Sequence[Any]
    """Inputs of `collate`, one for each sample of the global batch."""
    metrics: Mapping[str, float]
    """Metrics of the global batch, the same on every rank."""
    completions: Sequence[Mapping[str, Any]] = ()
    """Rows of `completions.jsonl`, see `llmsuite.rl.completion_rows`; those of rank 0 are written."""


@dataclasses.dataclass(frozen=True)
class EvalPrompt:
    """A prompt and the reference answer of its row, as token ids."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class Stage(abc.ABC, Generic[S]):
    """Base class of all stages. `S` is the type of a sample."""

    row_kind: ClassVar[str] = ""
    """Type of the rows that samples are made of, such as "preference"; decides which data formats are accepted. Empty
    for a stage whose `reader` reads no rows."""
    row_by_row: ClassVar[bool] = False
    """True where the sample of a row depends on that row alone, and `make_samples` passes the number of each dropped
    row to `DropCounts`. Then files may be larger than memory."""

    def __init__(self, section: Any, context: StageContext):
        """`section` is the section of the recipe that belongs to the stage."""
        self.section = section
        self.context = context
        self.reader: SampleReader[S] = RowReader(self)
        """Reads the samples of files. A stage that packs samples, or reads no rows, sets another one."""

    def make_samples(self, rows: Sequence[Any], counts: DropCounts) -> Sequence[S]:
        """Convert rows to samples. Rows without any supervised token are counted and dropped."""
        raise AssertionError(f"{type(self).__name__} has to define `make_samples`, or a reader of its own")

    def row_lengths(self, samples: Sequence[S]) -> np.ndarray | None:
        """Return the number of tokens of each row of each sample, without padding: [samples, rows per sample], int64.
        None where all are equal, and by default; then samples are not grouped by length."""
        return None

    def before_training(self, model: Any, samples: Iterable[S]) -> None:
        """Prepare with the initial model and every sample that the run will use; called once on every data-loading
        rank."""

    @abc.abstractmethod
    def collate(self, samples: Sequence[S]) -> Batch:
        """Convert samples to a batch of arrays, with the integers "num_tokens" (without padding) and "num_supervised".

        Models with experts use two more entries: "lengths" [B], the length of each row without padding (without it,
        padding counts in the load of the experts); and "weight", the loss weight of the batch, for the balance loss.
        """

    def prepass(self, kind: PrePassKind, model: Any, batch: Batch) -> Sums:
        """Compute statistics of one micro-batch that the loss needs of the full global batch, as sums and weights.

        The sums over all micro-batches of all ranks, divided by their weights, are `batch["prepass_stats"]` in `loss`;
        entries that this method adds to the batch stay there too. For the kind "batch" it does not call the model; for
        the others it computes hidden states once, as `loss` does, without gradients.
        """
        raise AssertionError(f"{type(self).__name__} has a pre-pass in its profile and no method `prepass`")

    @property
    def batch_layout(self) -> BatchLayout:
        """The entries of batches that `loss` uses, for the capability "step_programs". It is read in every step."""
        raise AssertionError(f"{type(self).__name__} has the capability step_programs and no `batch_layout`")

    @abc.abstractmethod
    def loss(self, model: Any, batch: Batch) -> LossTerms:
        """Run the forward pass of one micro-batch: return weighted sums, nothing divided.

        In a step program (`engine.program: step`) `batch` is a `llmsuite.engine.batch.ProgramBatch` with the entries
        of `batch_layout`. The functions of that module work on both kinds of batches.
        """


class GeneratingStage(Stage[S]):
    """A stage whose evaluations can compare generated answers with references, for `generation.max_new_tokens`."""

    @abc.abstractmethod
    def eval_prompts(self, sample: S) -> Sequence[EvalPrompt]:
        """Return the prompts of an evaluation sample with their reference answers, which generated answers are compared
        with. Called where the recipe sets `generation.max_new_tokens`; prompts are shorter than `data.max_length`."""


class StatefulStage(Stage[S]):
    """A stage with a state that checkpoints keep."""

    @abc.abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the state of the stage for a checkpoint, as JSON data."""

    @abc.abstractmethod
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned when the checkpoint was written."""


class RolloutStage(Stage[S]):
    """A stage that trains on completions which the model samples itself; `StageProfile.updates` of its profile is above
    0. Its methods are called on all data-loading ranks."""

    def before_reading(self) -> None:
        """Load what rollouts need, such as rewards, so that its errors are raised before the model is loaded."""

    @abc.abstractmethod
    def roll_out(self, step: int, samples: Sequence[S], rollouts: Rollouts) -> RolloutResult:
        """Generate completions for the samples of a global batch with the current weights, before they are split over
        ranks and micro-batches. The result has to be the same on each rank.

        Args:
            step: first step that trains on the result, counted from 1.
            samples: samples of `StageProfile.updates` global batches.
            rollouts: samples completions.

        Raises:
            UserError: the run cannot continue.
        """

    def finish_rollout(
        self, batches: Sequence[Batch], total: Callable[[Sequence[float]], list[float]]
    ) -> Mapping[str, float]:
        """Compute from this rank's batches of a rollout what depends on the pre-passes over them, such as token-level
        advantages. On ranks without the last layers, a batch has zeros instead of the results of a pre-pass, and its
        loss is not used.

        Args:
            batches: batches of all steps that train on the rollout.
            total: sums a list of numbers over the data ranks; a collective call, so all data ranks have to make it
                with the same number of values.

        Returns:
            Metrics of the rollout, the same on every rank.
        """
        return {}

    @abc.abstractmethod
    def evaluate_rollouts(self, samples: Sequence[S], rollouts: Rollouts) -> Mapping[str, float]:
        """Sample completions for the samples of the evaluation, and return their metrics; called as `roll_out`."""

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Inspect the metrics of a step that trained on a rollout. Raises UserError to end the run."""


class AsyncRolloutStage(RolloutStage[S]):
    """A stage whose rollouts may overlap with training, for `rollout.max_staleness`."""

    @abc.abstractmethod
    def begin_rollout(self, step: int, samples: Sequence[S], rollouts: Rollouts) -> None:
        """Start to sample, with `Rollouts.begin`, the completions that `roll_out` will request at a later step. Called
        where `rollout.max_staleness` is above 0, with the arguments of `roll_out`."""


class CriticStage(RolloutStage[S]):
    """A stage with rollouts that trains a critic along with the policy; its profile has `StageProfile.critic`."""

    @abc.abstractmethod
    def values(self, model: Any, batch: Batch) -> Tensor:
        """Estimate the value of each token of a batch with the critic `model`, [T] float32; compute hidden states once.
        Called without gradients, after the pre-passes over a rollout. The engine stores the result in the batch as
        "values"."""

    @abc.abstractmethod
    def critic_loss(self, model: Any, batch: Batch) -> LossTerms:
        """Compute the loss of the critic, as `loss` does for the policy."""


def shown_capabilities(cls: type[Stage[Any]]) -> frozenset[Capability]:
    """Return the capabilities that the bases and methods of a class show. The others are in what its methods do."""
    shown: dict[Capability, bool] = {
        "async_rollout": issubclass(cls, AsyncRolloutStage),
        "generation": issubclass(cls, GeneratingStage),
        "step_programs": cls.batch_layout is not Stage.batch_layout,
    }
    return frozenset(name for name, is_shown in shown.items() if is_shown)
