"""Samples of the rows of a file: held in memory, or made when they are needed, of rows that are read where they are.

Of a large file one pass makes all samples, a window of rows at a time, and keeps in the cache which rows give one, and
how long each is. So packing, lengths and the order of samples are those of rows that are all in memory. An entry is
named by all that it depends on: the state of the files, the keys of the recipe, template and tokenizer, and the code
that reads rows.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from llmsuite import data as data_room
from llmsuite.cache import cache_root, locked
from llmsuite.data.control import ControlTokens, warning
from llmsuite.data.conversion import Conversion
from llmsuite.data.faults import Faults
from llmsuite.data.placed import PLACE, PlacedRows, lines_of, placed_rows, state_of
from llmsuite.data.read import Rows, data_files
from llmsuite.data.rows import turns_of
from llmsuite.data.sequences import Lazy, Measure
from llmsuite.errors import UserError
from llmsuite.files import committed_directory, read_json_file, write_json
from llmsuite.progress import track_bytes
from llmsuite.regular import is_file
from llmsuite.schema.section import as_plain
from llmsuite.train.drop_counts import DropCounts

S = TypeVar("S")
_FORMAT = "1"
"""Part of the name of entries: change it with anything that changes their files."""
_WINDOW_BYTES, _WINDOW_ROWS = 4 << 20, 4096
_WITHOUT = (
    "checkpoint", "device", "engine", "generation", "launch", "loggers", "lora", "model", "output_dir", "parallel",
    "prefix", "qat", "reft", "seed", "source", "train",
)  # fmt: skip
"""Sections of a recipe that change no sample of a row."""


class Source(Protocol):
    """The part of a stage that makes samples of rows."""

    context: Any
    section: Any

    @property
    def row_kind(self) -> str: ...

    def read_rows(self, path: Path) -> Rows: ...
    def make_samples(self, rows: Sequence[Any], counts: DropCounts) -> Sequence[Any]: ...
    def remembered(self, samples: Sequence[Any]) -> np.ndarray | None: ...


class StoredSamples(Lazy[S]):
    """The samples of a file."""

    def __init__(self, rows: PlacedRows, make: Callable[[Any], S], lengths: np.ndarray | None):
        """
        Args:
            rows: those that give a sample.
            make: a row to its sample.
            lengths: `Stage.remembered` of all.
        """
        self._rows, self._make, self._lengths = rows, make, lengths

    def __len__(self) -> int:
        return len(self._rows)

    def make(self, number: int) -> S:
        return self._make(self._rows[number])

    def lengths(self, measure: Measure) -> np.ndarray | None:
        return self._lengths


Read = tuple[Sequence[Any], DropCounts, "str | None"]
"""The samples of a file or directory, their counts, and a warning of what the rows say."""


def held_samples(stage: Source, path: Path) -> Read:
    """Those of rows that are all in memory. Raises UserError: a row is faulty, or there is none."""
    rows = stage.read_rows(path)
    control = ControlTokens(stage.context.tokenizer, stage.context.template)
    found = [(where, token) for where, row in zip(rows.places, rows) if (token := control.find_said(turns_of(row)))]
    counts = DropCounts(path, len(rows), places=rows.places, faults=rows.faults, unread=rows.faults.total)
    return stage.make_samples(rows, counts), counts, warning(found, len(found))


def stored_samples(stage: Source, path: Path) -> Read:
    """Those of rows that are read where they are, each of which makes its sample by itself.

    The first time it takes a pass over all rows, in one process; others that need the same samples wait.

    Raises:
        UserError: a row is faulty, none is usable, or the cache cannot be written to.
    """
    alone = copy.copy(stage)
    alone.context = dataclasses.replace(stage.context, keeps_tokens=False, report=lambda text: None)
    data = stage.context.recipe.data
    formats, readers = stage.context.data_formats, stage.context.readers
    conversion = Conversion(stage.row_kind, data.format, formats, data.columns, readers)
    entry = cache_root() / "rows" / _name(stage, path)
    reader = _Pass(alone, path, conversion, Faults(data.on_bad_row), data.max_samples)
    with locked(entry.with_suffix(".lock")):
        note = _note(entry)
        if note is None:
            with committed_directory(entry) as directory:
                reader.run(directory)
            note = _note(entry)
            assert note is not None, entry
    places = np.memmap(entry / "places", PLACE, "r")
    lengths = np.memmap(entry / "lengths", "<i8", "r").reshape(len(places), -1) if note["has_lengths"] else None
    known = Conversion(stage.row_kind, note["format"], stage.context.data_formats, data.columns)
    rows = PlacedRows([Path(file) for file, _ in note["files"]], places)
    make = functools.partial(_sample, alone, known, path)
    counts = DropCounts(path, **note["counts"], faults=Faults.of_note(note["faults"], path))
    return StoredSamples(rows, make, lengths), counts, note["warning"]


def _sample(stage: Source, conversion: Conversion, path: Path, raw: Any) -> Any:
    """The sample of a row that has given one before."""
    faults = Faults()
    row = conversion.convert(str(path), raw, None, faults)
    faults.check()
    (sample,) = stage.make_samples([row], DropCounts(path, 1))
    return sample


class _Pass:
    """The pass over all rows."""

    def __init__(self, stage: Source, path: Path, conversion: Conversion, faults: Faults, limit: int | None):
        self._stage, self._path, self._conversion, self._limit = stage, path, conversion, limit
        self._counts = DropCounts(path, faults=faults)
        self._control = ControlTokens(stage.context.tokenizer, stage.context.template)
        self._marked: list[tuple[str, str]] = []
        """Place and token of the first row that says a control token."""
        self._num_marked, self._has_lengths = 0, True

    def run(self, directory: Path) -> None:
        """Fill an entry of the cache. Raises UserError as `stored_samples`."""
        faults, files = self._counts.faults, lines_of(self._path)
        states, total = [state_of(file) for file in files], 0
        bar = track_bytes(sum(size for size, *_ in states), f"reading {self._path}")
        with bar as add, open(directory / "places", "wb") as places, open(directory / "lengths", "wb") as lengths:
            for rows, names, where in self._windows(add):
                if faults.total and not faults.skips:
                    continue  # the run ends, with the faults of all rows
                kept, of_kept = self._window(rows, names)
                places.write(np.array(where, PLACE)[kept].tobytes())
                total += len(kept)
                if of_kept is None:
                    self._has_lengths = False
                else:
                    lengths.write(of_kept.astype("<i8").tobytes())
        faults.check()
        if not self._counts.read:
            raise UserError(f"{self._path}: has no rows{f': {faults.summary()}' if faults.total else ''}")
        if not total:
            self._counts.check(lambda text: None)
        format = self._conversion.format
        note = {
            "files": [[str(file), state] for file, state in zip(files, states)],
            "format": "auto" if format is None else format.name,
            "has_lengths": self._has_lengths,
            "counts": {name: getattr(self._counts, name) for name in ("read", "unread", "dropped", "cut")},
            "faults": faults.noted(self._path),
            "warning": warning(self._marked, self._num_marked),
        }
        write_json(directory / "note.json", note)

    def _windows(self, add: Callable[[int], None]) -> Iterator[tuple[list[Any], list[str], list[tuple[int, int, int]]]]:
        """Converted rows with the places that users are told, and where they are."""
        rows: list[Any] = []
        names: list[str] = []
        places: list[tuple[int, int, int]] = []
        size = 0
        for where, raw, fault, place in placed_rows(self._path):
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
            self._counts.read, size = self._counts.read + 1, size + place[1]
            if size >= _WINDOW_BYTES or len(rows) == _WINDOW_ROWS:
                yield rows, names, places
                rows, names, places, size = [], [], [], 0
        if rows:
            yield rows, names, places

    def _window(self, rows: list[Any], names: list[str]) -> tuple[list[int], np.ndarray | None]:
        """Which rows give a sample, and the lengths of these."""
        counts = DropCounts(self._path, len(rows), places=names, faults=self._counts.faults)
        samples = self._stage.make_samples(rows, counts)
        kept = [number for number in range(len(rows)) if number not in counts.left_out]
        if len(kept) != len(samples):
            name = f"{type(self._stage).__module__}.{type(self._stage).__name__}"
            raise UserError(
                f"{name}: gives {len(samples)} samples of {len(rows)} rows and has named {len(counts.left_out)} that "
                "it leaves out; with `row_by_row`, `make_samples` has to call `counts.drop(reason, number)` for each"
            )
        for reason, count in counts.dropped.items():
            self._counts.dropped[reason] = self._counts.dropped.get(reason, 0) + count
        self._counts.cut += counts.cut
        for name, row in zip(names, rows):
            if token := self._control.find_said(turns_of(row)):
                self._marked = self._marked or [(name, token)]
                self._num_marked += 1
        return kept, self._stage.remembered(samples)


def _note(entry: Path) -> dict[str, Any] | None:
    """What an entry says of itself; None if it is not there, or a copy of rows that it is about is not."""
    if not is_file(entry / "note.json"):
        return None
    note: dict[str, Any] = read_json_file(entry / "note.json")
    is_there = all(is_file(Path(file)) and state_of(Path(file)) == state for file, state in note["files"])
    return note if is_there else None


def _name(stage: Source, path: Path) -> str:
    """Name of an entry, by all that it depends on."""
    context = stage.context
    recipe = {key: value for key, value in as_plain(context.recipe).items() if key not in _WITHOUT}
    tokenizer = context.tokenizer
    packages = ["jinja2", *tokenizer.libraries]
    parts = [
        _FORMAT,
        [[str(file.resolve()), *state_of(file)] for file in data_files(path)],
        {**recipe, "data": {**recipe["data"], **dict.fromkeys(("train", "eval", "mix", *_READ_LATER))}},
        as_plain(stage.section),
        [tokenizer.digest(), _template_of(context)],
        [f"{package} {importlib.metadata.version(package)}" for package in packages],
        [hashlib.sha256(file.read_bytes()).hexdigest() for file in _code(stage)],
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()


_READ_LATER = ("packing", "shuffle", "drop_last", "group_by_length", "collator", "num_workers")
"""Keys of the section `data` that change no sample of a row."""


def _template_of(context: Any) -> str:
    try:
        source: str = context.template().source
    except UserError:  # a stage without conversations needs none
        source = ""
    return source


def _code(stage: Source) -> list[Path]:
    """The files with the code that makes samples of rows, as far as they are files."""
    convert = (f.convert for f in stage.context.data_formats.values() if f.kind == stage.row_kind)
    names = {getattr(of, "__module__", "") for of in (*type(stage).__mro__, *convert)}
    files = set(Path(data_room.__path__[0]).glob("*.py"))
    for module in (sys.modules[name] for name in names if name in sys.modules):
        if getattr(module, "__file__", None):
            files.add(Path(inspect.getfile(module)))
    return sorted(files)
