"""What a stage is: it reads rows, makes batches of them and says what their loss is.

The engine knows nothing of stages, and a stage knows nothing of ranks, meshes or optimizers. A stage reads its
recipe keys when it is constructed: a key that nothing has read by the first step is reported as having no effect.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from llmsuite.cache import cache_root
from llmsuite.data.chat_template import ChatTemplate
from llmsuite.data.once import encode_once
from llmsuite.data.read import Faults, read_rows
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.errors import UserError
from llmsuite.files import sha256_of
from llmsuite.parallel.loss_ledger import LossTerms, Sums
from llmsuite.schema.recipe import Recipe
from llmsuite.specs import DataFormat, PrePassKind
from llmsuite.train.objective import Batch

__all__ = ["Batch", "LossTerms", "PrePassKind", "Stage", "StageContext", "Sums"]

S = TypeVar("S")


@dataclasses.dataclass(frozen=True)
class StageContext:
    """What a run hands to its stage."""

    recipe: Recipe
    tokenizer: TextTokenizer
    template: Callable[[], ChatTemplate]
    """Loads the chat template the recipe asks for; a stage without conversations does not call it."""
    data_formats: Mapping[str, DataFormat]
    initial_digest: Callable[[], str]
    """Gives `model_digest`; the data is read before the model is built."""
    autocast: Callable[[], AbstractContextManager[Any]]
    length_multiple: int
    """Batches are padded to a multiple of so many tokens, where sequences are cut over ranks."""
    report: Callable[[str], None]
    """Tell the user something; only rank 0 prints."""
    padding_free: bool = False
    """Whether the sequences of a batch are best laid one behind the other in one row, without padding."""
    keeps_tokens: bool = False
    """Whether `encode` goes through the cache."""

    @property
    def model_digest(self) -> str:
        """Changes with the initial weights, the shape or the precision. Known from `before_training` on."""
        return self.initial_digest()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of the texts of a file, without special tokens. Of the ranks of a run one makes them, and they are
        kept for the next one."""
        if self.keeps_tokens:
            return encode_once(texts, self.tokenizer, cache_root() / "tokens")
        return self.tokenizer.encode_batch(texts)


@dataclasses.dataclass
class DropCounts:
    """Rows that train nothing, by reason: sound ones that are dropped, and faulty ones."""

    path: Path
    read: int = 0
    """Rows that could be read."""
    unread: int = 0
    """Rows that could not."""
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)
    cut: int = 0
    """Rows of which only the beginning is used."""
    places: Sequence[str] = ()
    """File and line of each row that could be read."""
    faults: Faults = dataclasses.field(default_factory=Faults)

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def bad(self, number: int, reason: str) -> None:
        """Row `number`, counted from 0, is faulty. Raises UserError unless such rows are skipped."""
        self.faults.add(self.places[number] if self.places else f"{self.path}: row {number + 1}", reason)
        self.faults.check()

    @property
    def total(self) -> int:
        """Rows of the file, whether they could be read or not."""
        return self.read + self.unread

    @property
    def lost(self) -> int:
        """Rows that are not used."""
        return sum(self.dropped.values()) + self.faults.total

    def reasons(self) -> list[str]:
        """Why rows are not used, with the number of rows each."""
        dropped = [f"{count} {reason}" for reason, count in sorted(self.dropped.items())]
        return [*dropped, self.faults.summary()] if self.faults.total else dropped

    def check(self, report: Callable[[str], None]) -> None:
        """Report the counts. Raises UserError when no row is left."""
        reasons = "; ".join(self.reasons())
        if self.lost == self.total:
            raise UserError(f"{self.path}: none of its {self.total} rows can train anything: {reasons}")
        text = f"{self.path}: {self.total - self.lost} of {self.total} rows are used"
        report(f"{text}; dropped: {reasons}" if self.lost else text)


_RENAMED = {
    "looks": "list the pre-passes in `StageSpec.profile`, as `StageProfile.prepasses`",
    "prepasses": "list the pre-passes in `StageSpec.profile`, as `StageProfile.prepasses`",
    "look_ahead": 'call it `prepass`; its results are in `batch["prepass_stats"]`',
}
"""Methods that a stage had in former versions, and what to write instead."""


class Stage(abc.ABC, Generic[S]):
    """Base of all stages. `S` is the type of a sample."""

    row_kind: ClassVar[str]
    """What its rows are, such as "preference"; decides which data formats it reads."""

    def __init__(self, section: Any, context: StageContext):
        """`section` is the stage's own part of the recipe."""
        self.section, self.context = section, context
        self.counts: dict[Path, DropCounts] = {}
        """Of the files that were read."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Refuse methods of former versions of this contract, which nothing would call."""
        super().__init_subclass__(**arguments)
        for name, successor in _RENAMED.items():
            if hasattr(cls, name):
                raise UserError(f"{cls.__module__}.{cls.__name__}.{name} is never called: {successor}")

    def make_samples(self, rows: Sequence[Any], counts: DropCounts) -> Sequence[S]:
        """Rows to samples. Counts the rows that would train nothing and leaves them out."""
        raise AssertionError(f"{type(self).__name__} has to make samples of rows, or to read files in a way of its own")

    def before_training(self, model: Any, samples: Iterable[S]) -> None:
        """Called with the initial model and every sample the run will use, once on every rank that reads data."""

    @abc.abstractmethod
    def collate(self, samples: Sequence[S]) -> Batch:
        """Samples to arrays, with the integers "num_tokens" (without padding) and "num_supervised".

        For models with experts it may say more: "lengths" [B], what of each row is no padding, else padding counts in
        their loads; and "weight", that of the batch's loss, without which there can be no loss of their balance.
        """

    def prepass(self, kind: PrePassKind, model: Any, batch: Batch) -> Sums:
        """What the loss has to know of the whole global batch, of one micro-batch of it.

        The sums of all micro-batches of all ranks, divided by their weights, come into `loss` as
        `batch["prepass_stats"]`; what this method puts into the batch stays there too. Under "model" and
        "adapters_off" it asks the model for hidden states once, as `loss` does, and no graph is kept; under "batch" it
        does not ask the model.
        """
        raise AssertionError(f"{type(self).__name__} has a pre-pass in its profile and no method `prepass`")

    def row_lengths(self, samples: Sequence[S]) -> np.ndarray | None:
        """[samples, rows of each], int64: how many tokens the rows of each sample have in a batch, without padding.
        None where all are alike, or when a stage does not tell; then samples are not dealt out by length."""
        return None

    @abc.abstractmethod
    def loss(self, model: Any, batch: Batch) -> LossTerms:
        """Forward pass of one micro-batch: weighted sums, nothing divided."""

    def read_all(self, train: Path, evaluation: Path | None) -> tuple[Sequence[S], Sequence[S]]:
        """The samples for training and for evaluation, of the files `data.train` and `data.eval`."""
        return self.read(train), self.read(evaluation) if evaluation else []

    def digest(self, path: Path) -> str:
        """Of the content of a file of data: a run is resumed only with the same."""
        return sha256_of(path)

    def read(self, path: Path) -> Sequence[S]:
        """The samples of a file; they may be made when they are asked for.

        Raises UserError with the place of every fault, or when no row is usable.
        """
        data = self.context.recipe.data
        rows = read_rows(path, self.row_kind, data.format, self.context.data_formats, data.on_bad_row)
        counts = DropCounts(path, len(rows), places=rows.places, faults=rows.faults, unread=rows.faults.total)
        samples = self.make_samples(rows, counts)
        self.counts[path] = counts
        counts.check(self.context.report)
        return samples
