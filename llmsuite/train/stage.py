"""The contract of a training stage: it reads rows, collates batches and computes their loss.

The engine knows nothing of stages, and a stage knows nothing of ranks, meshes or optimizers. A stage reads its
recipe keys when it is constructed: a key that nothing has read by the first step is reported as having no effect.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from llmsuite.cache import cache_root
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.data.chat_template import ChatTemplate
from llmsuite.data.encoding import encode_answers
from llmsuite.data.kinds import Readers
from llmsuite.data.mixture import Mixture, mixed_file
from llmsuite.data.once import encode_once
from llmsuite.data.placed import is_large
from llmsuite.data.read import Rows, read_rows
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.errors import UserError
from llmsuite.files import check_whole, sha256_of
from llmsuite.inference.frozen import build_frozen
from llmsuite.parallel.loss_ledger import LossTerms, Sums
from llmsuite.recipe.shape import local_weights, missing_model
from llmsuite.regular import is_file
from llmsuite.rl.reward_services import RewardServices
from llmsuite.rl.rollouts import Rollouts
from llmsuite.schema.recipe import Recipe
from llmsuite.specs import DataFormat, EnvironmentSpec, PrePassKind, RewardSpec
from llmsuite.train.collator import counting, with_collator
from llmsuite.train.drop_counts import DropCounts
from llmsuite.train.objective import Batch
from llmsuite.train.row_samples import held_samples, stored_samples
from llmsuite.typing import Tensor

__all__ = [
    "Batch", "DropCounts", "LossTerms", "PrePassKind", "RolledOut", "Rollouts", "Stage", "StageContext", "Sums",
]  # fmt: skip

S = TypeVar("S")


@dataclasses.dataclass(frozen=True)
class StageContext:
    """The services of a run for its stage."""

    recipe: Recipe
    tokenizer: TextTokenizer
    template: Callable[[], ChatTemplate]
    """Loads the chat template the recipe asks for; a stage without conversations does not call it."""
    data_formats: Mapping[str, DataFormat]
    initial_digest: Callable[[], str]
    """Gives `model_digest`; the data is read before the model is built."""
    length_multiple: int
    """Batches are padded to a multiple of this many tokens, for sequences that are sharded over ranks."""
    report: Callable[[str], None]
    """Prints a message to the user, on rank 0 only."""
    readers: Readers = dataclasses.field(default_factory=dict)
    """The registered stages by the kind of rows that each trains on."""
    rewards: Mapping[str, RewardSpec] = dataclasses.field(default_factory=dict)
    """The registered rewards of completions."""
    environments: Mapping[str, EnvironmentSpec] = dataclasses.field(default_factory=dict)
    """The registered environments of episodes."""
    reward_services: RewardServices | None = None
    """For rewards that need them."""
    padding_free: bool = False
    """Whether the sequences of a batch are best packed into one row, without padding."""
    keeps_tokens: bool = False
    """Whether `encode` goes through the cache."""

    @property
    def model_digest(self) -> str:
        """Changes with the initial weights, the shape or the precision. Known from `before_training` on."""
        return self.initial_digest()

    def frozen_model(self, key: str, given: str) -> Any:
        """A second model, such as a teacher: whole on this rank, which holds it beside its part of the first, on the
        run's device and in its precision; `llmsuite plan` does not count it. For `Stage.before_training`. Call it under
        `paddle.no_grad()`.

        Args:
            key: of the recipe that names it, for messages, such as "distil.teacher".
            given: a model directory or a run.

        Returns:
            A `llmsuite.models.blocks.CausalLM`, of any family: `hidden_states`, `logits`, `token_nll`.

        Raises:
            UserError: there is none, or the same ids are other tokens for it.
        """
        services = self.reward_services
        assert services is not None, "a context of a run has them"
        path = local_weights(given)
        if not is_file(path / "config.json"):
            raise UserError(f"{key}: {missing_model(path, '')}")
        check_whole(path)
        source, theirs = open_model(path, services.families), TextTokenizer(path)
        ids = range(self.tokenizer.vocab_size)
        if theirs.vocab_size != len(ids) or theirs.pieces(ids) != self.tokenizer.pieces(ids):
            raise UserError(
                f"{key}: {path} has other tokens than {self.tokenizer.directory}, whose ids it would be given; choose "
                "a model with the same vocabulary"
            )
        return build_frozen(source, services.device, services.precision)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of the texts of a file, without special tokens. One rank of a run encodes them, and they are
        cached for later runs."""
        if self.keeps_tokens:
            return encode_once(texts, self.tokenizer, cache_root() / "tokens")
        return self.tokenizer.encode_batch(texts)

    def encode_answers(self, texts: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Token ids of prompts and of the answers behind them, by `encode`.

        Args:
            texts: the text before each answer, and that text with the answer.
        """
        return encode_answers(texts, self.tokenizer, self.encode)


@dataclasses.dataclass(frozen=True)
class RolledOut:
    """The result of a rollout."""

    samples: Sequence[Any]
    """What `collate` takes, one for each sample of the global batch."""
    metrics: Mapping[str, float]
    """Metrics of the global batch, the same on every rank."""
    completions: Sequence[Mapping[str, Any]] = ()
    """Rows of `completions.jsonl`, see `llmsuite.rl.table`; of rank 0 they are written."""


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt and the answer that its row has, as tokens."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


_RENAMED = {
    "looks": "list the pre-passes in `StageSpec.profile`, as `StageProfile.prepasses`",
    "prepasses": "list the pre-passes in `StageSpec.profile`, as `StageProfile.prepasses`",
    "look_ahead": 'call it `prepass`; its results are in `batch["prepass_stats"]`',
}
"""Methods that a stage had in former versions, and what to write instead."""


class Stage(abc.ABC, Generic[S]):
    """Base of all stages. `S` is the type of a sample."""

    row_kind: ClassVar[str]
    """Type of its rows, such as "preference"; decides which data formats it reads."""
    row_by_row: ClassVar[bool] = False
    """Whether the sample of a row depends on that row alone, and `make_samples` tells `DropCounts` the numbers of those
    it leaves out. Then files may be larger than memory."""

    def __init__(self, section: Any, context: StageContext):
        """`section` is the stage's own part of the recipe."""
        self.section, self.context = section, context
        self.counts: dict[Path, DropCounts] = {}
        """Counts of the files that were read."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Refuse methods of former versions of this contract, which nothing would call."""
        super().__init_subclass__(**arguments)
        for name, successor in _RENAMED.items():
            if hasattr(cls, name):
                raise UserError(f"{cls.__module__}.{cls.__name__}.{name} is never called: {successor}")

    def make_samples(self, rows: Sequence[Any], counts: DropCounts) -> Sequence[S]:
        """Rows to samples. Rows that would train nothing are counted and left out."""
        raise AssertionError(f"{type(self).__name__} has to define `make_samples`, or its own `read`")

    def before_training(self, model: Any, samples: Iterable[S]) -> None:
        """Called with the initial model and every sample the run will use, once on every rank that reads data."""

    def use_collator(self, key: str) -> None:
        """Let a function of the user's make the batches, given what `collate` makes of samples. Raises UserError when
        there is no "FILE.py:FUNCTION" of this name."""
        self.collate = with_collator(key, self.collate)  # type: ignore[method-assign, assignment]

    def check_collate(self, name: str) -> None:
        """Let batches that lack what the engine reads be refused, in the name of this stage."""
        self.collate = counting(f"stage {name}: `collate`", self.collate)  # type: ignore[method-assign, assignment]

    @abc.abstractmethod
    def collate(self, samples: Sequence[S]) -> Batch:
        """Samples to arrays, with the integers "num_tokens" (without padding) and "num_supervised".

        Models with experts use two more: "lengths" [B], the length of each row without padding, else padding counts in
        the loads of experts; and "weight", that of the loss of the batch, which the balance loss needs.
        """

    def roll_out(self, step: int, samples: Sequence[S], rollouts: Rollouts) -> RolledOut:
        """Complete the samples of a global batch with the weights of the moment, before they are dealt out to ranks and
        micro-batches. Called where `StageProfile.updates` is not 0, on all ranks that read data alike: what it returns
        has to be the same on each.

        Args:
            step: the step that learns from it, or the first of them, counted from 1.
            samples: of `StageProfile.updates` global batches.
            rollouts: draws completions.

        Raises:
            UserError: the run cannot go on.
        """
        raise AssertionError(f"{type(self).__name__} has `updates` in its profile and no method `roll_out`")

    def values(self, model: Any, batch: Batch) -> Tensor:
        """What the critic `model` says of each token of a batch, [T] float32; it computes hidden states once. Called
        where `StageProfile.critic` is set, without gradients, after the pre-passes over a rollout. The batch has it as
        "values" from then on."""
        raise AssertionError(f"{type(self).__name__} has a critic in its profile and no method `values`")

    def critic_loss(self, model: Any, batch: Batch) -> LossTerms:
        """The same as `loss`, of the critic."""
        raise AssertionError(f"{type(self).__name__} has a critic in its profile and no method `critic_loss`")

    def finish_rollout(
        self, batches: Sequence[Batch], total: Callable[[Sequence[float]], list[float]]
    ) -> Mapping[str, float]:
        """Called with this rank's batches of a rollout after the pre-passes over them, for what depends on those, such
        as advantages by token. Where the last layers are not, a batch has zeros in place of what a pre-pass found, and
        its loss is not used.

        Args:
            batches: of all steps that learn from the rollout.
            total: adds up numbers over the data ranks; all of them have to call it with as many.

        Returns:
            Metrics of the rollout, the same on every rank.
        """
        return {}

    def begin_rollout(self, step: int, samples: Sequence[S], rollouts: Rollouts) -> None:
        """Begin to draw for a later step, with `Rollouts.begin`, what `roll_out` will ask for then. Called where
        `StageSpec.draws_ahead` is true and `rollout.max_staleness` above 0, on all ranks that read data alike; the
        arguments are those of `roll_out`."""
        raise AssertionError(f"{type(self).__name__} has no method `begin_rollout`")

    def evaluate_rollouts(self, samples: Sequence[S], rollouts: Rollouts) -> Mapping[str, float]:
        """Metrics of completions that are drawn for the samples of the evaluation; called as `roll_out`."""
        raise AssertionError(f"{type(self).__name__} has `updates` in its profile and no method `evaluate_rollouts`")

    def questions(self, sample: S) -> Sequence[Question]:
        """The prompts in a sample of the evaluation with their answers, which those that the model generates are
        compared with. Called where the recipe sets `generation.max_new_tokens`; prompts are shorter than
        `data.max_length`."""
        raise AssertionError(f"{type(self).__name__} has `compares_answers` in its spec and no method `questions`")

    def maxima(self) -> Mapping[str, float]:
        """The metrics `StageProfile.maxima` of this rank's micro-batches since it was called last; a rank without a
        number leaves it out. Called after each step that learns from a rollout."""
        return {}

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after each step that learns from a rollout, with its metrics. Raises UserError to end the run."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to have of the stage, as JSON data."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on with the state that a checkpoint has."""

    def prepass(self, kind: PrePassKind, model: Any, batch: Batch) -> Sums:
        """Statistics of one micro-batch that the loss needs of the whole global batch, as sums and weights.

        The sums of all micro-batches of all ranks, divided by their weights, are `batch["prepass_stats"]` in `loss`;
        whatever this method puts into the batch stays there too. For the kind "batch" it does not call the model; for
        the others it computes hidden states once, as `loss` does, without gradients.
        """
        raise AssertionError(f"{type(self).__name__} has a pre-pass in its profile and no method `prepass`")

    def row_lengths(self, samples: Sequence[S]) -> np.ndarray | None:
        """[samples, rows of each], int64: tokens of the rows of each sample in a batch, without padding. None where all
        are equal, or for a stage that does not define it; then samples are not grouped by length."""
        return None

    def remembered(self, samples: Sequence[S]) -> np.ndarray | None:
        """[samples, numbers]: what is kept of the samples of a file larger than memory beside their rows, the lengths
        for all that needs no more."""
        return self.row_lengths(samples)

    @abc.abstractmethod
    def loss(self, model: Any, batch: Batch) -> LossTerms:
        """Forward pass of one micro-batch: weighted sums, nothing divided."""

    def program_inputs(self, batch: Batch, length: int) -> Mapping[str, np.ndarray]:
        """What the program of a step takes of a batch. Called where `StageSpec.in_programs` is set, with
        `engine.program: step`; batches have "weight" then, and "input_ids" [B, L] if rows have lengths.

        Args:
            batch: of a micro-batch.
            length: that its rows get, at least their own: with few lengths, few programs have to be made. 0 without
                "input_ids".

        Returns:
            Arrays whose shapes follow from the number of rows B, which is their first dim, and the length. The loss is
            linear in the one called "weights"; the engine divides it by the weight of the global batch. Families with
            routed experts need "row_lengths" [B], int64, too: how many tokens of each row are no padding. The engine
            takes it out of what `program_loss` gets elsewhere.
        """
        raise AssertionError(f"{type(self).__name__} has `in_programs` in its spec and no method `program_inputs`")

    def program_weights(self, batch: Batch) -> Mapping[str, float]:
        """By name the weights that sums of `program_loss` have in a batch, of those that are another mean than the
        loss: the engine divides by their sums over the global batch in place of that of the loss."""
        return {}

    def program_loss(self, model: Any, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The same loss as `loss`, of the inputs of a program; it is called while the program is made.

        Returns:
            By name the sums over the micro-batch, scalars: "loss", which is trained, and those of
            `StageProfile.sums`; all are divided by the weight of the global batch already.
        """
        raise AssertionError(f"{type(self).__name__} has `in_programs` in its spec and no method `program_loss`")

    def read_all(self, train: Path, evaluation: Path | None) -> tuple[Sequence[S], Sequence[S]]:
        """The samples for training and for evaluation, of the files `data.train`, `data.mix` and `data.eval`."""
        mix = self.context.recipe.data.mix
        parts = [self.read(path) for path in (train, *self._mixed_files())]
        samples = parts[0] if len(parts) == 1 else Mixture(parts, [1.0, *mix.values()])
        return samples, self.read(evaluation) if evaluation else []

    def digest(self, path: Path) -> str:
        """Digest of the content of a data file and of those in `data.mix`: a run is resumed only with the same data."""
        files = [sha256_of(found) for found in (path, *self._mixed_files())]
        return files[0] if len(files) == 1 else hashlib.sha256("".join(files).encode()).hexdigest()

    def _mixed_files(self) -> list[Path]:
        return [mixed_file(name, "data.mix", self.context.report) for name in self.context.recipe.data.mix]

    def read(self, path: Path) -> Sequence[S]:
        """The samples of a file; they may be made lazily.

        Raises UserError with the place of every fault, or when no row is usable.
        """
        made = stored_samples if self.row_by_row and is_large(path) else held_samples
        samples, counts, said = made(self, path)
        self.counts[path] = counts
        if said is not None:
            self.context.report(said)
        if counts.cut:
            longest = self.context.recipe.data.max_length
            self.context.report(f"{path}: {counts.cut} rows are cut to data.max_length {longest}")
        counts.check(self.context.report)
        if not isinstance(samples, Sized) or not len(samples):
            found = "no sample, and counted no row as dropped"
            found = found if isinstance(samples, Sized) else f"a {type(samples).__name__}, which is no sequence"
            raise UserError(f"{path}: `make_samples` of stage {type(self).__name__} returned {found}")
        return samples

    def read_rows(self, path: Path) -> Rows:
        """The rows of a file, as the section `data` of the recipe says."""
        data, context = self.context.recipe.data, self.context
        return read_rows(
            path,
            self.row_kind,
            data.format,
            context.data_formats,
            data.on_bad_row,
            data.columns,
            limit=data.max_samples,
            readers=context.readers,
        )
