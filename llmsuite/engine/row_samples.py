"""Samples of the rows of a file: held in memory, or made lazily from rows that stay on disk.

For a large file one pass makes all samples, a window of rows at a time, and caches which rows have a sample and how
long each is. So packing, lengths and the order of samples are the same as for rows in memory. The name of a cache entry
is a digest of everything that it depends on: the state of the files, the keys of the recipe, the template, the
tokenizer, and the code that reads rows.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import importlib.metadata
import inspect
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from llmsuite import data as data_package
from llmsuite.base.cache import cache_root, locked
from llmsuite.base.errors import UserError
from llmsuite.base.files import committed_directory, read_json_file, write_json
from llmsuite.base.progress import track_bytes
from llmsuite.base.safe_files import is_file, real_path
from llmsuite.contract.schema import columns, text_template
from llmsuite.contract.schema.section import as_plain
from llmsuite.data.control_tokens import ControlTokens, warning
from llmsuite.data.disk_rows import ROW_SPAN, DiskRows, file_state, jsonl_files, scan_rows
from llmsuite.data.faults import Faults
from llmsuite.data.keys import ColumnRules
from llmsuite.data.lazy_sequences import LazySequence, LengthFunction, Subset
from llmsuite.data.read import Rows, data_files
from llmsuite.data.row_converter import RowConverter
from llmsuite.data.rows import turns_of
from llmsuite.engine.drop_counts import DropCounts

S = TypeVar("S")
_FORMAT = "3"
"""Format version in the names of entries: raise it with any change of their files."""
_BY_LENGTH = ("longer than", "with a single token", "with no answer within")
"""How reasons of dropped rows begin that are about the length."""
_WINDOW_BYTES = 4 << 20
_WINDOW_ROWS = 4096


class SampleMaker(Protocol[S]):
    """Part of a stage that makes samples from rows."""

    context: Any
    section: Any

    @property
    def row_kind(self) -> str: ...
    @property
    def row_by_row(self) -> bool: ...

    def make_samples(self, rows: Sequence[Any], counts: DropCounts) -> Sequence[S]: ...
    def row_lengths(self, samples: Sequence[S]) -> np.ndarray | None: ...


class ReaderOfRows(Protocol):
    """Part of a `RowReader` that this module uses."""

    @property
    def stage(self) -> SampleMaker[Any]: ...

    def read_rows(self, path: Path) -> Rows: ...
    def format_of(self, path: Path) -> str: ...
    def cached_numbers(self, samples: Sequence[Any]) -> np.ndarray | None: ...


class LazySamples(LazySequence[S]):
    """Samples of a file that are made when they are accessed."""

    def __init__(self, rows: DiskRows, make: Callable[[Any, int], S], lengths: np.ndarray | None):
        """
        Args:
            rows: the row of each sample.
            make: converts a row to one of its samples, by number.
            lengths: `RowReader.cached_numbers` of all samples.
        """
        self._rows = rows
        self._make = make
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._rows)

    def make(self, number: int) -> S:
        return self._make(self._rows[number], self._rows.part(number))

    def lengths(self, measure: LengthFunction) -> np.ndarray | None:
        return self._lengths


LoadedSamples = tuple[Sequence[Any], DropCounts, "str | None"]
"""Samples of chosen rows of a file or directory, their drop counts, and a warning about control tokens in the rows."""


class OpenRows(Protocol):
    """The rows of a file or directory, of which samples can be made."""

    num_rows: int
    """Number of rows that could be read."""
    faults: Faults
    """Faults of the other rows."""

    def usable(self) -> np.ndarray:
        """Return the numbers of the rows that have a sample, in ascending order, for the choice of Axolotl. Raises
        UserError if a row has none for another reason than its length, as Axolotl keeps such rows."""

    def samples(self, numbers: np.ndarray | None, part: str, faults: Faults) -> LoadedSamples:
        """Make samples of rows.

        Args:
            numbers: numbers of the rows, in the order of the samples; None for all rows.
            part: description of these rows for messages, such as " (held out)".
            faults: the faults that count for these rows, to which those of conversations are added.

        Raises:
            UserError: a row is faulty.
        """


def _check_dropped_by_length(counts: DropCounts) -> None:
    """Raise UserError if rows are dropped for another reason than their length."""
    others = {reason: number for reason, number in counts.dropped.items() if not reason.startswith(_BY_LENGTH)}
    if others:
        raise UserError(
            f"{counts.path}: {sum(others.values())} rows are dropped {next(iter(others))}; Axolotl counts them among "
            "the rows of which it holds out some: remove them from the file, or set data.choice to datasets"
        )


def column_rules(context: Any) -> ColumnRules:
    """Return the rules for the columns of rows of the section `data` of a stage's context."""
    data = context.data
    return ColumnRules(
        sources=data.columns,
        ignored=data.ignore_columns,
        text_template=data.text_template,
        capabilities=context.capabilities,
        system=data.system,
        fill=data.fill,
    )


class RowsInMemory:
    """Rows that are all in memory."""

    def __init__(self, reader: ReaderOfRows, path: Path):
        """Raises UserError when a row is faulty, or there is none."""
        self._stage = reader.stage
        self._path = path
        self._rows = reader.read_rows(path)
        self.num_rows = len(self._rows)
        self.faults = self._rows.faults
        self._sample_of: dict[int, Any] | None = None
        """The sample of each usable row, once `usable` has made them all; None where they are to be made again."""

    def usable(self) -> np.ndarray:
        counts = DropCounts(self._path, self.num_rows, places=self._rows.places, faults=Faults("skip"))
        samples = self._stage.make_samples(self._rows, counts)
        found = kept_rows(self._stage, self.num_rows, len(samples), counts)
        _check_dropped_by_length(counts)
        # else the counts of a part are not known: how many of its rows are cut, say
        if self._stage.row_by_row and not (counts.cut or counts.forgetful or counts.num_ranked):
            self._sample_of = dict(zip(found, samples))
        return np.unique(np.array(found, "int64"))

    def samples(self, numbers: np.ndarray | None, part: str, faults: Faults) -> LoadedSamples:
        stage = self._stage
        rows: Sequence[Any] = self._rows
        places: Sequence[str] = self._rows.places
        if numbers is not None:
            rows = [rows[number] for number in numbers]
            places = [places[number] for number in numbers]
        control = ControlTokens(stage.context.tokenizer, stage.context.template)
        found = []
        for where, row in zip(places, rows):
            token = control.find_in_turns(turns_of(row))
            if token:
                found.append((where, token))
        counts = DropCounts(self._path, len(rows), places=places, faults=faults, unread=faults.total, part=part)
        if numbers is not None and self._sample_of is not None and all(n in self._sample_of for n in numbers.tolist()):
            samples: Sequence[Any] = [self._sample_of[number] for number in numbers.tolist()]
        else:
            samples = stage.make_samples(rows, counts)
        return samples, counts, warning(found, len(found))


class RowsOnDisk:
    """Rows that stay on disk, for samples that are made when they are accessed; the sample of a row depends on that row
    alone.

    Opening them makes a pass over all rows unless the cache has its result, in one process; other processes that need
    the same samples wait.
    """

    def __init__(self, reader: ReaderOfRows, path: Path):
        """Raises UserError when a row is faulty, none is usable, or the cache cannot be written to."""
        stage = reader.stage
        row_stage = copy.copy(stage)
        row_stage.context = dataclasses.replace(stage.context, caches_tokens=False, report=lambda text: None)
        data = stage.context.data
        formats = stage.context.data_formats
        readers = stage.context.readers
        columns = column_rules(stage.context)
        conversion = RowConverter(stage.row_kind, reader.format_of(path), formats, columns, readers)
        entry = cache_root() / "rows" / _name(reader, path)
        faults = Faults(data.on_bad_row)
        cache_pass = _CachePass(row_stage, path, conversion, faults, data.max_samples, reader.cached_numbers)
        with locked(entry.with_suffix(".lock")):
            note = _note(entry)
            if note is None:
                with committed_directory(entry) as directory:
                    cache_pass.run(directory)
                note = _note(entry)
                assert note is not None, entry
        places = np.memmap(entry / "places", ROW_SPAN, "r")
        lengths: np.ndarray | None = None
        if note["has_lengths"]:
            lengths = np.memmap(entry / "lengths", "<i8", "r").reshape(len(places), -1)
        found_format = RowConverter(stage.row_kind, note["format"], formats, columns)
        rows = DiskRows([Path(file) for file, _ in note["files"]], places)
        make = functools.partial(_sample, row_stage, found_format, path)
        self._path = path
        self._samples = LazySamples(rows, make, lengths)
        self._counts = DropCounts(path, **note["counts"], faults=Faults.from_json(note["faults"], path))
        self._warning: str | None = note["warning"]
        self._numbers = np.memmap(entry / "numbers", "<i8", "r")
        """Number of the row of each sample."""
        self._outcomes = np.memmap(entry / "outcomes", "<i4", "r")
        """For each row the position of the reason why it has no sample among `_reasons`, or -1."""
        self._reasons: list[tuple[bool, str]] = [(is_fault, reason) for is_fault, reason in note["reasons"]]
        self._is_reported = False
        self.num_rows = self._counts.read
        self.faults = Faults.from_json(note["unread_faults"], path)

    def usable(self) -> np.ndarray:
        _check_dropped_by_length(self._counts)
        return np.unique(self._numbers)

    def samples(self, numbers: np.ndarray | None, part: str, faults: Faults) -> LoadedSamples:
        if numbers is None:
            return self._samples, self._counts, self._warning
        # the samples of a row follow each other; a row may have none, and one with ranked answers several
        first = np.searchsorted(self._numbers, numbers, side="left")
        last = np.searchsorted(self._numbers, numbers, side="right")
        picked = np.concatenate([np.arange(0), *(np.arange(i, j) for i, j in zip(first, last))])
        counts = DropCounts(self._path, len(numbers), faults=faults, unread=faults.total, part=part)
        for number in numbers[first == last]:
            at = self._outcomes[number]
            is_fault, reason = self._reasons[at] if at >= 0 else (False, "without a reason")
            if is_fault:
                counts.faults.add(f"{self._path}: row {number + 1}", reason)
            else:
                counts.drop(reason)
        return Subset(self._samples, picked), counts, self._whole_file()

    def _whole_file(self) -> str | None:
        """Return what the cache has of the whole file only, for a message; None if there is nothing, or it was returned
        for another part."""
        if self._is_reported:
            return None
        self._is_reported = True
        counts = self._counts
        found = [] if self._warning is None else [self._warning]
        if counts.cut:
            found.append(f"{self._path}: {counts.cut} rows of the whole file are cut to data.max_length")
        if counts.forgetful:
            found.append(
                f"{self._path}: in {counts.forgetful} rows of the whole file the chat template leaves out thoughts of "
                "earlier turns, which are not trained on"
            )
        if (ranked := counts.of_ranked()) is not None:
            found.append(f"{self._path}: of the whole file, {ranked}")
        return "\n".join(found) or None


def _sample(stage: SampleMaker[Any], conversion: RowConverter, path: Path, raw: Any, part: int) -> Any:
    """Make sample `part` of a row that had it in the pass over all rows."""
    faults = Faults()
    row = conversion.convert(str(path), raw, None, faults)
    faults.check()
    return stage.make_samples([row], DropCounts(path, 1))[part]


class _CachePass:
    """Pass over all rows that fills a cache entry."""

    def __init__(
        self,
        stage: SampleMaker[Any],
        path: Path,
        conversion: RowConverter,
        faults: Faults,
        limit: int | None,
        measure: LengthFunction,
    ):
        """
        Args:
            stage: makes the samples.
            path: file or directory of the rows.
            conversion: converts rows to the kind of the stage.
            faults: counts faulty rows.
            limit: greatest number of rows to read; None for all.
            measure: `RowReader.cached_numbers`.
        """
        self._stage = stage
        self._measure = measure
        self._path = path
        self._conversion = conversion
        self._limit = limit
        self._counts = DropCounts(path, faults=faults)
        self._control = ControlTokens(stage.context.tokenizer, stage.context.template)
        self._with_control: list[tuple[str, str]] = []
        """Place and token of the first row with a control token."""
        self._num_with_control = 0
        self._has_lengths = True
        self._reasons: dict[tuple[bool, str], int] = {}
        """Reasons why rows have no sample, each with its position: True for a fault, and the text."""
        self._bad = Counter[str]()
        """Number of rows that could be read and are faulty, by reason."""

    def run(self, directory: Path) -> None:
        """Fill an entry of the cache. Raises UserError as `lazy_samples` does."""
        faults = self._counts.faults
        files = jsonl_files(self._path)
        states = [file_state(file) for file in files]
        total = 0
        bar = track_bytes(sum(size for size, *_ in states), f"reading {self._path}")
        with (
            bar as add,
            open(directory / "places", "wb") as places,
            open(directory / "numbers", "wb") as numbers_of_rows,
            open(directory / "lengths", "wb") as lengths,
            open(directory / "outcomes", "wb") as outcomes,
        ):
            for rows, names, where in self._windows(add):
                if faults.total and not faults.skips:
                    continue  # the run ends with the faults of all rows, so no more samples are made
                kept, numbers, outcomes_of_rows = self._window(rows, names)
                outcomes.write(outcomes_of_rows.tobytes())
                spans = np.array([(*place, 0) for place in where], ROW_SPAN)[kept]
                spans["part"] = _parts(kept)
                places.write(spans.tobytes())
                first = self._counts.read - len(rows)
                numbers_of_rows.write((np.array(kept, "<i8") + first).tobytes())
                total += len(kept)
                if numbers is None:
                    self._has_lengths = False
                else:
                    lengths.write(numbers.astype("<i8").tobytes())
        faults.check()
        if not self._counts.read:
            reason = f": {faults.summary()}" if faults.total else ""
            raise UserError(f"{self._path}: has no rows{reason}")
        if not total:
            self._counts.check(lambda text: None)
        format = self._conversion.format
        note = {
            "files": [[str(file), state] for file, state in zip(files, states)],
            "format": "auto" if format is None else format.name,
            "has_lengths": self._has_lengths,
            "counts": self._counts.to_json(),
            "faults": faults.to_json(self._path),
            "unread_faults": {
                kind: (count - self._bad[kind], first)
                for kind, (count, first) in faults.to_json(self._path).items()
                if count > self._bad[kind]
            },
            "reasons": list(self._reasons),
            "warning": warning(self._with_control, self._num_with_control),
        }
        write_json(directory / "note.json", note)

    def _windows(self, add: Callable[[int], None]) -> Iterator[tuple[list[Any], list[str], list[tuple[int, int, int]]]]:
        """Iterate over windows of converted rows, with their places for messages and their positions in the files."""
        rows: list[Any] = []
        names: list[str] = []
        places: list[tuple[int, int, int]] = []
        size = 0
        for where, raw, fault, place in scan_rows(self._path):
            if self._counts.read == self._limit:
                break
            row = self._conversion.convert(where, raw, fault, self._counts.faults)
            add(place[1])
            if row is None:
                self._counts.unread += 1
                continue
            rows.append(row)
            names.append(where)
            places.append(place)
            self._counts.read = self._counts.read + 1
            size = size + place[1]
            if size >= _WINDOW_BYTES or len(rows) == _WINDOW_ROWS:
                yield rows, names, places
                rows = []
                names = []
                places = []
                size = 0
        if rows:
            yield rows, names, places

    def _window(self, rows: list[Any], names: list[str]) -> tuple[list[int], np.ndarray | None, np.ndarray]:
        """Return the number of the row of each sample of a window, the numbers to cache of these samples, and for each
        row the position of the reason why it has none, or -1."""
        counts = DropCounts(self._path, len(rows), places=names, faults=self._counts.faults)
        samples = self._stage.make_samples(rows, counts)
        kept = kept_rows(self._stage, len(rows), len(samples), counts)
        self._counts.add_samples(counts)
        for name, row in zip(names, rows):
            if token := self._control.find_in_turns(turns_of(row)):
                self._with_control = self._with_control or [(name, token)]
                self._num_with_control += 1
        return kept, self._measure(samples), self._outcomes(counts)

    def _outcomes(self, counts: DropCounts) -> np.ndarray:
        outcomes = np.full(counts.read, -1, "<i4")
        for number, reason in counts.dropped_rows.items():
            is_fault = number in counts.bad_rows
            if is_fault:
                counted = Faults("skip")  # which leaves out the details of the row
                counted.add("", reason)
                (reason,) = counted.counts
                self._bad[reason] += 1
            outcomes[number] = self._reasons.setdefault((is_fault, reason), len(self._reasons))
        return outcomes


def kept_rows(stage: SampleMaker[Any], num_rows: int, num_samples: int, counts: DropCounts) -> list[int]:
    """Return the number of the row of each sample.

    Args:
        stage: made the samples.
        num_rows: number of rows that it received.
        num_samples: number of samples that it made of them.
        counts: of these rows, with those that it dropped.

    Raises:
        UserError: the stage did not name each row that it dropped.
    """
    kept = counts.sample_rows
    if kept is None:
        kept = [number for number in range(num_rows) if number not in counts.dropped_rows]
    if len(kept) != num_samples:
        name = f"{type(stage).__module__}.{type(stage).__name__}"
        raise UserError(
            f"{name}: returned {num_samples} samples of {num_rows} rows and has named {len(counts.dropped_rows)} that "
            "it drops; with `row_by_row`, `make_samples` has to call `counts.drop(reason, number)` for each"
        )
    return kept


def _parts(numbers: Sequence[int]) -> list[int]:
    """Return the number of each sample among those of its row; the samples of a row follow each other."""
    parts: list[int] = []
    for i, number in enumerate(numbers):
        parts.append(parts[-1] + 1 if i and numbers[i - 1] == number else 0)
    return parts


def _note(entry: Path) -> dict[str, Any] | None:
    """Read the note of a cache entry; None if the entry is missing, or a file that it depends on is missing or
    changed."""
    if not is_file(entry / "note.json"):
        return None
    note: dict[str, Any] = read_json_file(entry / "note.json")
    is_there = all(is_file(Path(file)) and file_state(Path(file)) == state for file, state in note["files"])
    return note if is_there else None


def _name(reader: ReaderOfRows, path: Path) -> str:
    """Return the name of an entry, a digest of everything that it depends on."""
    stage = reader.stage
    context = stage.context
    tokenizer = context.tokenizer
    packages = ["jinja2", *tokenizer.libraries]
    parts = [
        _FORMAT,
        [[str(real_path(file)), *file_state(file)] for file in data_files(path)],
        context.stage_name,
        {**as_plain(context.data), **dict.fromkeys(("train", "eval", "mix", *_USED_LATER))},
        {name: as_plain(section) for name, section in context.sections.items()},
        as_plain(stage.section),
        [tokenizer.digest(), _template_of(context)],
        [f"{package} {importlib.metadata.version(package)}" for package in packages],
        [hashlib.sha256(file.read_bytes()).hexdigest() for file in _code(reader)],
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()


_USED_LATER = (
    *("packing", "pack_length", "shuffle", "drop_last", "group_by_length", "collator", "num_workers"),
    *("sample", "holdout", "choice"),
)
"""Keys of the section `data` that do not change the sample of a row."""


def _template_of(context: Any) -> str:
    try:
        source: str = context.template().source
    except UserError:  # a stage without conversations needs no template
        source = ""
    return source


def _code(reader: ReaderOfRows) -> list[Path]:
    """Return the source files of the code that makes samples from rows, and numbers of samples."""
    stage = reader.stage
    convert = (f.convert for f in stage.context.data_formats.values() if f.kind == stage.row_kind)
    names = {getattr(defined, "__module__", "") for defined in (*type(stage).__mro__, *type(reader).__mro__, *convert)}
    files = set(Path(data_package.__path__[0]).glob("*.py"))
    files |= {Path(inspect.getfile(module)) for module in (columns, text_template)}
    for module in (sys.modules[name] for name in names if name in sys.modules):
        if getattr(module, "__file__", None):
            files.add(Path(inspect.getfile(module)))
    return sorted(files)
