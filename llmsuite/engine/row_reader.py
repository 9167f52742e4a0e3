"""Readers of the samples of data files: the interface that the engine calls, and the reader of rows."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Callable, Sequence, Sized
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.base.files import sha256_of
from llmsuite.data.disk_rows import is_large
from llmsuite.data.keys import ColumnRules
from llmsuite.data.mixture import Mixture, find_mixture_file
from llmsuite.data.packing import pack_samples
from llmsuite.data.read import Rows, read_rows
from llmsuite.engine.drop_counts import DropCounts
from llmsuite.engine.row_samples import SampleMaker, in_memory_samples, lazy_samples

S = TypeVar("S")


class SampleReader(abc.ABC, Generic[S]):
    """Reads the samples of data files for a stage."""

    def __init__(self) -> None:
        self.counts: dict[Path, DropCounts] = {}
        """Drop counts of each file that was read."""

    @abc.abstractmethod
    def read_all(self, train: Path, evaluation: Path | None) -> tuple[Sequence[S], Sequence[S]]:
        """Read the samples for training and for evaluation."""

    @abc.abstractmethod
    def read(self, path: Path) -> Sequence[S]:
        """Read the samples of a file. Raises UserError with every fault, or when there is no sample."""

    @abc.abstractmethod
    def digest(self, path: Path) -> str:
        """Compute the digest of the content of a data file, and of those that are mixed into it: a run resumes only
        with the same data."""


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

    def read_all(self, train: Path, evaluation: Path | None) -> tuple[Sequence[S], Sequence[S]]:
        """Read the samples for training and for evaluation, from `data.train`, `data.mix` and `data.eval`."""
        mix = self.stage.context.data.mix
        parts = [self.read(path) for path in (train, *self._mixed_files())]
        samples = parts[0] if len(parts) == 1 else Mixture(parts, [1.0, *mix.values()])
        evaluated = self.read(evaluation) if evaluation else []
        return samples, evaluated

    def read(self, path: Path) -> Sequence[S]:
        """Read the samples of a file; they may be made lazily.

        Raises UserError with the file and line of every fault, or when no row is usable.
        """
        stage = self.stage
        report = stage.context.report
        is_lazy = stage.row_by_row and is_large(path)
        samples, counts, warning = lazy_samples(self, path) if is_lazy else in_memory_samples(self, path)
        self.counts[path] = counts
        if warning is not None:
            report(warning)
        if counts.cut:
            longest = stage.context.data.max_length
            report(f"{path}: {counts.cut} rows are cut to data.max_length {longest}")
        counts.check(report)
        if not isinstance(samples, Sized) or not len(samples):
            found = "no sample, and counted no row as dropped"
            if not isinstance(samples, Sized):
                found = f"a {type(samples).__name__}, which is no sequence"
            raise UserError(f"{path}: `make_samples` of stage {type(stage).__name__} returned {found}")
        return self.arrange(samples, path)

    def read_rows(self, path: Path) -> Rows:
        """Read the rows of a file with the settings of the section `data` of the recipe."""
        context = self.stage.context
        data = context.data
        return read_rows(
            path,
            self.stage.row_kind,
            data.format,
            context.data_formats,
            data.on_bad_row,
            ColumnRules(data.columns, data.ignore_columns, fill=data.fill),
            limit=data.max_samples,
            readers=context.readers,
        )

    def digest(self, path: Path) -> str:
        """Compute the digest of the content of a data file and of those in `data.mix`."""
        files = [sha256_of(found) for found in (path, *self._mixed_files())]
        return files[0] if len(files) == 1 else hashlib.sha256("".join(files).encode()).hexdigest()

    def _mixed_files(self) -> list[Path]:
        context = self.stage.context
        return [find_mixture_file(name, "data.mix", context.report) for name in context.data.mix]


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
        packs, filled = pack_samples(samples, self.stage.row_lengths, self._max_length, self._join)
        self.stage.context.report(f"{path}: packed into {len(packs)} samples, which are {filled:.1%} full")
        self.max_pack_size = max(self.max_pack_size, packs.max_pack_size)
        return packs
