"""Readers of the samples of data files: the interface that the engine calls, and the reader of rows."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.base.files import sha256_of
from llmsuite.contract.schema.recipe import HELD_OUT
from llmsuite.data.control_tokens import doubled_bos
from llmsuite.data.disk_rows import is_large
from llmsuite.data.faults import Faults
from llmsuite.data.mixture import Mixture, find_mixture_file
from llmsuite.data.packing import pack_samples
from llmsuite.data.read import Rows, read_rows
from llmsuite.data.row_choice import axolotl_rows, held_out_rows, ms_swift_rows, rows_of_files, sampled_rows
from llmsuite.engine.drop_counts import DropCounts
from llmsuite.engine.row_samples import OpenRows, RowsInMemory, RowsOnDisk, SampleMaker, column_rules

S = TypeVar("S")
_HELD_OUT_ROWS = " (held out)"
"""Description of held-out rows, after the name of their file."""


def held_out_name(names: Collection[str]) -> str:
    """Return the name of the evaluation set of held-out rows, next to sets of these names."""
    return HELD_OUT if names else ""


@dataclasses.dataclass(frozen=True)
class FilePart(Generic[S]):
    """Samples of chosen rows of a file."""

    path: Path
    samples: Sequence[S]
    counts: DropCounts


class SampleReader(abc.ABC, Generic[S]):
    """Reads the samples of data files for a stage."""

    def __init__(self) -> None:
        self.counts: dict[Path, DropCounts] = {}
        """Drop counts of each file that was read."""

    @abc.abstractmethod
    def read_all(self, train: Path, evaluations: Mapping[str, Path]) -> tuple[Sequence[S], Mapping[str, Sequence[S]]]:
        """Read the samples for training, and those of each evaluation set by name. The only set of a recipe that names
        none, and rows that the reader holds out, have the name "", or `HELD_OUT` next to others."""

    @abc.abstractmethod
    def read(self, path: Path) -> Sequence[S]:
        """Read the samples of a file. Raises UserError with every fault, or when there is no sample."""

    @abc.abstractmethod
    def digest(self, path: Path) -> str:
        """Compute the digest of the content of a data file: a run resumes only with the same data."""

    def mixed_files(self) -> Mapping[str, Path]:
        """Return the files that are mixed into the training data, by key and name for messages."""
        return {}


class RowReader(SampleReader[S]):
    """Reads rows and has the stage make samples of them, as its `row_kind` and `row_by_row` describe."""

    def __init__(self, stage: SampleMaker[S]):
        super().__init__()
        self.stage = stage

    def arrange(self, samples: Sequence[S], path: Path) -> Sequence[S]:
        """Return the samples of a file as the run uses them, such as packed."""
        return samples

    def cached_numbers(self, samples: Sequence[S]) -> np.ndarray | None:
        """Return the numbers that the cache keeps for each sample of a file larger than memory, next to the position of
        its row: [samples, numbers]. By default the row lengths."""
        return self.stage.row_lengths(samples)

    def read_all(self, train: Path, evaluations: Mapping[str, Path]) -> tuple[Sequence[S], Mapping[str, Sequence[S]]]:
        """Read the samples for training and for evaluation, from `data.train`, `data.mix`, `data.holdout` and
        `data.eval`."""
        self._report_doubled_bos()
        parts, held_out = self.read_parts(train)
        files = [part.samples for part in parts]
        samples = files[0]
        if len(files) > 1:
            samples = Mixture(files, [1.0, *self.stage.context.data.mix.values()])
        found = {name: self.read(path) for name, path in evaluations.items()}
        if held_out:
            found = {held_out_name(evaluations): _joined([part.samples for part in held_out]), **found}
        return samples, found

    def read_parts(self, train: Path) -> tuple[list[FilePart[S]], list[FilePart[S]]]:
        """Read the samples for training of each file, and those that are held out of each file with such rows."""
        files = [train, *self.mixed_files().values()]
        data = self.stage.context.data
        if data.sample is None and data.holdout is None:
            return [FilePart(path, self.read(path), self.counts[path]) for path in files], []
        opened = [self.open_rows(path) for path in files]
        of_training, of_evaluation = self.choose_rows(opened)
        parts = list[FilePart[S]]()
        held_out = list[FilePart[S]]()
        for path, rows, for_training, for_evaluation in zip(files, opened, of_training, of_evaluation):
            if not len(for_training):
                raise UserError(
                    f"data.holdout: holds out all {rows.num_rows} rows of {path}; lower it, or remove the file"
                )
            parts.append(self._part(path, rows, for_training, " (for training)", rows.faults))
            self.counts.setdefault(path, parts[-1].counts)
            if len(for_evaluation):
                faults = Faults(data.on_bad_row)  # those of the file count with the rows for training
                held_out.append(self._part(path, rows, for_evaluation, _HELD_OUT_ROWS, faults))
        if data.holdout is not None and not any(len(part.samples) for part in held_out):
            raise UserError(
                f"data.holdout: none of the {sum(map(len, of_evaluation))} held-out rows is usable; raise it"
            )
        return parts, [part for part in held_out if len(part.samples)]

    def choose_rows(self, opened: Sequence[OpenRows]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Choose rows as `data.sample`, `data.holdout` and `data.choice` say.

        Args:
            opened: rows of `data.train`, and of each file of `data.mix`.

        Returns:
            For each file, the numbers of its rows for training, and of those that are held out.
        """
        context = self.stage.context
        data = context.data
        names = ["data.train", *data.mix]
        counts = data.sample_sizes()
        sizes = [rows.num_rows for rows in opened]
        if data.choice == "ms-swift":
            return ms_swift_rows(sizes, counts, data.holdout, context.seed, names)
        if data.choice == "axolotl" and data.holdout is not None:
            return axolotl_rows([rows.usable() for rows in opened], sizes, data.holdout, context.seed)
        # rows of all files, numbered one file after the other, as datasets.concatenate_datasets does
        files = []
        first = 0
        for size, count, name in zip(sizes, counts, names):
            chosen = np.arange(size) if count is None else sampled_rows(size, count, context.seed, name)
            files.append(first + chosen)
            first += size
        rows = np.concatenate(files)
        if data.holdout is None:
            return rows_of_files(rows, sizes), [rows[:0] for _ in sizes]
        train, held_out = held_out_rows(len(rows), data.holdout, context.seed)
        return rows_of_files(rows[train], sizes), rows_of_files(rows[held_out], sizes)

    def _report_doubled_bos(self) -> None:
        """Report a chat template that writes two BOS tokens, for a stage that has a template."""
        context = self.stage.context
        if not self.stage.row_kind:
            return
        try:
            warning = doubled_bos(context.tokenizer, context.template())
        except UserError:  # without a template, or with a broken one: an error where it is used
            return
        if warning is not None:
            context.report(warning)

    def read(self, path: Path) -> Sequence[S]:
        """Read the samples of a file; they may be made lazily.

        Raises UserError with the file and line of every fault, or when no row is usable.
        """
        rows = self.open_rows(path)
        part = self._part(path, rows, None, "", rows.faults)
        self.counts[path] = part.counts
        return part.samples

    def open_rows(self, path: Path) -> OpenRows:
        """Open a file of rows, of which samples are made later. Raises UserError for faulty rows."""
        if self.stage.row_by_row and is_large(path):
            return RowsOnDisk(self, path)
        return RowsInMemory(self, path)

    def _part(self, path: Path, rows: OpenRows, numbers: np.ndarray | None, name: str, faults: Faults) -> FilePart[S]:
        """Make the samples of chosen rows of a file; parameters as of `OpenRows.samples`. Held-out rows may all be
        unusable, others not."""
        stage = self.stage
        report = stage.context.report
        samples, counts, warning = rows.samples(numbers, name, faults)
        if warning is not None:
            report(warning)
        if counts.cut:
            longest = stage.context.data.max_length
            report(f"{path}{name}: {counts.cut} rows are cut to data.max_length {longest}")
        if counts.forgetful:
            report(
                f"{path}{name}: in {counts.forgetful} rows the chat template leaves out thoughts of earlier turns, "
                "which are not trained on; `llmsuite data explain` lists the turns"
            )
        if name == _HELD_OUT_ROWS and counts.lost == counts.total:
            return FilePart(path, [], counts)
        counts.check(report)
        if not isinstance(samples, Sized) or not len(samples):
            found = "no sample, and counted no row as dropped"
            if not isinstance(samples, Sized):
                found = f"a {type(samples).__name__}, which is no sequence"
            raise UserError(f"{path}: `make_samples` of stage {type(stage).__name__} returned {found}")
        return FilePart(path, self.arrange(samples, path), counts)

    def read_rows(self, path: Path) -> Rows:
        """Read the rows of a file with the settings of the section `data` of the recipe."""
        context = self.stage.context
        data = context.data
        return read_rows(
            path,
            self.stage.row_kind,
            self.format_of(path),
            context.data_formats,
            data.on_bad_row,
            column_rules(context),
            limit=data.max_samples,
            readers=context.readers,
        )

    def format_of(self, path: Path) -> str:
        """Return the name of the data format of a file, or "auto"."""
        context = self.stage.context
        given = context.data.format
        if isinstance(given, str):
            return given
        files = {find_mixture_file(name, "data.format", context.report): found for name, found in given.items()}
        return files.get(path, "auto")

    def digest(self, path: Path) -> str:
        """Compute the digest of the content of a data file."""
        return sha256_of(path)

    def mixed_files(self) -> Mapping[str, Path]:
        """Return the files of `data.mix`."""
        context = self.stage.context
        return {f"data.mix {name}": find_mixture_file(name, "data.mix", context.report) for name in context.data.mix}


def _joined(parts: Sequence[Sequence[S]]) -> Sequence[S]:
    """Return the samples of all parts, each once."""
    if len(parts) == 1:
        return parts[0]
    return Mixture(parts, [1.0, *[None] * (len(parts) - 1)])


class PackingReader(RowReader[S]):
    """Reads rows and packs their samples, for `data.packing`."""

    def __init__(self, stage: SampleMaker[S], max_length: int, join: Callable[[Sequence[S]], S]):
        """
        Args:
            stage: makes the samples, and knows their lengths.
            max_length: greatest length of a packed row.
            join: makes one sample of several.
        """
        super().__init__(stage)
        self._max_length = max_length
        self._join = join
        self.max_pack_size = 1
        """Largest number of samples in a pack, of all files that were read."""

    def arrange(self, samples: Sequence[S], path: Path) -> Sequence[S]:
        """Return packs of the samples of a file."""
        context = self.stage.context
        order = None
        if context.data.packing == "first_fit":
            order = np.random.default_rng(context.seed)
        packs, filled = pack_samples(samples, self.stage.row_lengths, self._max_length, self._join, order)
        context.report(f"{path}: packed into {len(packs)} samples, which are {filled:.1%} full")
        self.max_pack_size = max(self.max_pack_size, packs.max_pack_size)
        return packs
