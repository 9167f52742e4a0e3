"""What a run would say of the first rows of its data, told before it starts. Imports no Paddle.

The rows are read, converted and rendered by the functions that read them in a run, so that both say the same. Of each
file no more is read than the first row takes that can be read, of a directory each file.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from llmsuite.data.chat_template import ChatTemplate, load_template
from llmsuite.data.columns import renamed
from llmsuite.data.conversion import Conversion
from llmsuite.data.documents import check_has_columns, first_document, text_key
from llmsuite.data.faults import Faults
from llmsuite.data.kinds import answered, other_kinds
from llmsuite.data.read import data_files, first_rows
from llmsuite.data.remote import is_remote, saved_rows
from llmsuite.data.rendered import check_rendered
from llmsuite.data.rows import Message, Prompt
from llmsuite.data.special_tokens import read_token_files
from llmsuite.data.suggest import columns_word, corrected, fields_of, key_word, suggested_text
from llmsuite.errors import Problem, RecipeError, UserError
from llmsuite.inference.prompts import asked_at, prompt_columns
from llmsuite.plugins.manager import BUILTIN, Registry
from llmsuite.recipe.resolve import RunPlan, data_fault
from llmsuite.regular import is_file
from llmsuite.rl.columns import missing_columns
from llmsuite.schema.columns import columns_of
from llmsuite.schema.reward import RewardSection
from llmsuite.shown import Url, redacted

_MOST_FAULTS = 10
"""Rows without one that can be read: that is enough to tell."""
_MOST_SKIPPED = 100
"""The same, where faulty rows are left out."""
_MOST_FILES = 64
"""Files of a directory."""
_FOR_REWARDS = 10
"""Rows that are looked at for columns of rewards, which some rows may lack."""
_CORPUS = (".idx", ".bin")


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns of the first row of a file that a stage cannot read, and the fields it needs."""

    of_file: tuple[str, ...]
    fields: Mapping[str, str]
    """Each with the column that it probably is; "" where nothing is known."""


def check_rows(plan: RunPlan, registry: Registry) -> list[str]:
    """Look at the data of a recipe as far as it is here.

    Returns:
        Notes about what was not looked at.

    Raises:
        RecipeError: with everything that a run would refuse of the first rows.
    """
    problems: list[Problem] = []
    notes: list[str] = []
    look, seen = _Look(plan, registry), set[Path | Url]()
    for key, given, path in plan.data_files():
        if path in seen:  # with --smoke evaluations may be of the same rows
            continue
        seen.add(path)
        if isinstance(path, Url) or (is_remote(given) and saved_rows(given) is None):
            notes.append(f"{key}: not checked: {redacted(given)}, which `llmsuite run` fetches")
        else:
            problems += look.problems(key, given, path)
    if problems:
        raise RecipeError(list(dict.fromkeys(problems)))
    return notes


def unread_columns(plan: RunPlan, registry: Registry) -> Columns | None:
    """The columns of the training data where these are what is wrong with it; None where it can be read, or something
    else is wrong."""
    look = _Look(plan, registry)
    key, given, path = next(plan.data_files())
    if (
        isinstance(path, Url)
        or is_remote(given)
        or data_fault(path) is not None
        or not list(look.problems(key, given, path))
    ):
        return None
    row = look.first(given, path)
    if row is None or look.is_read(row):
        return None
    fields = look.proposed(row)
    if not fields and not look.fits_others(row):
        fields = dict.fromkeys(look.fields, "")
    return Columns(tuple(row), fields) if fields else None


class _Look:
    """Looks at files as the stage of a plan reads them. It reads no key of the recipe, as whoever trains has to."""

    def __init__(self, plan: RunPlan, registry: Registry):
        self._plan, self._registry, self._stage = plan, registry, plan.stage
        self._data = plan.recipe.__dict__["data"].__dict__
        self._columns: Mapping[str, str] = self._data["columns"]
        self._skips = self._data.get("on_bad_row") == "skip"
        self._section = plan.recipe.__dict__[plan.stage.section_name].__dict__
        is_ours = registry.owner("stage", plan.stage.name).distribution == BUILTIN
        self._reads_text = is_ours and plan.stage.name == "pretrain"
        self._reads_prompts = is_ours and plan.stage.name == "infer"
        self._renders = is_ours and not self._reads_text and not self._section.get("raw")

    # what is wrong

    def problems(self, key: str, given: str, path: Path) -> Iterator[Problem]:
        """What is wrong with the data of a key."""
        try:
            if not is_remote(given) and (fault := data_fault(path)) is not None:
                raise UserError(fault)
            if self._stage.row_kind:
                yield from self._of_rows(given, path)
            elif self._reads_text:
                self._check_text(path)
            elif self._reads_prompts:
                self._check_prompt(given, path)
        except UserError as error:
            message, of_columns = str(error), "data.columns: "
            key = "data.columns" if message.startswith(of_columns) else key
            problem = self._plan.loaded.problem(key, message.removeprefix(of_columns))
            yield dataclasses.replace(problem, remedy=self._remedy(given, path))

    def _of_rows(self, given: str, path: Path) -> Iterator[Problem]:
        rewards = self._plan.recipe.__dict__.get("reward")
        wants = _FOR_REWARDS if isinstance(rewards, RewardSection) else 1
        rows = self._converted(given, path, wants)
        template = self._template()
        if rows and template is not None and not self._skips:
            where, row = rows[0]
            _at(where, lambda: check_rendered(template, row))
        prompts = [(where, row) for where, row in rows if isinstance(row, Prompt)]
        if isinstance(rewards, RewardSection) and prompts:
            for key, message in missing_columns(self._plan.recipe, prompts):
                yield self._plan.loaded.problem(key, message)

    def _converted(self, given: str, path: Path, wants: int) -> list[tuple[str, Any]]:
        """The first rows of each file with their places. Raises UserError as a run does."""
        conversion, faults = self._conversion(), Faults("skip" if self._skips else "error")
        found, is_all = list[tuple[str, Any]](), True
        most = _MOST_SKIPPED if self._skips else _MOST_FAULTS
        for rows in self._files(given, path):
            good, bad = 0, 0
            for where, raw, fault in rows:
                if good == wants or bad == most:
                    is_all = False
                    break
                row = conversion.convert(where, raw, fault, faults)
                if row is None:
                    bad += 1
                    continue
                good += 1
                found.append((where, row))
        faults.check()
        if not found and is_all:
            raise UserError(f"{path}: has no rows{f': {faults.summary()}' if faults.total else ''}")
        return found

    def _files(self, given: str, path: Path) -> Iterator[Iterator[tuple[str, Any, str | None]]]:
        """The rows of each file."""
        saved = saved_rows(given)
        if saved is not None:
            yield saved
            return
        for file in data_files(path)[:_MOST_FILES]:
            rows = first_rows(file)
            yield _as_copied(rows, path, file) if self._renders and file.suffix != ".jsonl" else rows

    def _check_text(self, path: Path) -> None:
        key = text_key(self._columns, self._section["key"])
        check_has_columns(path, self._columns)
        if path.suffix in _CORPUS:
            from llmsuite.data.indexed import IndexedCorpus, index_path  # which imports NumPy

            IndexedCorpus(index_path(path))
            return
        faults = _FewFaults("skip" if self._skips else "error")
        try:
            text = first_document(path, key, faults)
        except _Enough:
            return
        if text is None:
            raise UserError(f"{path}: no text to index{f': {faults.summary()}' if faults.total else ''}")

    def _check_prompt(self, given: str, path: Path) -> None:
        rows = saved_rows(given) or first_rows(path)
        found = next(rows, None)
        if found is None:
            raise UserError(f"{path}: has no rows")
        where, question = found[0], asked_at(*found, self._columns)
        turns = question.turns
        template, system = self._template(), self._section["system"]
        if template is None:
            return
        messages = [Message("user", turns)] if isinstance(turns, str) else turns
        if system is not None and all(message.role != "system" for message in messages):
            messages = [Message("system", system), *messages]
        _at(where, lambda: template.prompt(messages, question.tools))

    def _template(self) -> ChatTemplate | None:
        """The chat template, as far as it is known here. Raises UserError where there is none."""
        directory = self._plan.tokenizer
        if not self._renders or directory is None or not is_file(directory / "tokenizer_config.json"):
            return None
        return load_template(self._data["chat_template"], directory, dict(read_token_files(directory).roles))

    # what would be right

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that rows have at least."""
        if self._reads_text:
            return (self._section["key"],)
        return ("prompt",) if self._reads_prompts else fields_of(self._stage.row_kind)

    def first(self, given: str, path: Path) -> Mapping[str, Any] | None:
        """The first row of the data, as the file has it; None where there is none."""
        try:
            rows = saved_rows(given) or first_rows(data_files(path)[0])
            raw = next((raw for _, raw, fault in itertools.islice(rows, _MOST_SKIPPED) if fault is None), None)
        except UserError:
            return None
        return raw if isinstance(raw, Mapping) else None

    def is_read(self, row: Mapping[str, Any]) -> bool:
        """Whether the stage has the fields it needs of a row, be they right or not."""
        if self._reads_text:
            return all(name in row for name in columns_of(self._columns.get(self.fields[0], self.fields[0])))
        try:
            fields = renamed(row, self._columns)
        except ValueError:
            return False
        if self._reads_prompts:
            return "prompt" in fields or "messages" in fields
        name = self._data["format"]
        formats = [f for f in self._registry.data_formats.values() if f.kind == self._stage.row_kind]
        return any(name in ("auto", f.name) and answered(f.matches, fields) for f in formats)

    def proposed(self, row: Mapping[str, Any]) -> Mapping[str, str]:
        """The column of each field, as far as it can be guessed."""
        if self._reads_text:
            text = suggested_text(row) if not self._columns else None
            return {self.fields[0]: text} if text else corrected(self._columns, row) or {}
        if self._reads_prompts:
            return prompt_columns(row, self._columns) or {}
        return self._conversion().suggested(row) or {}

    def fits_others(self, row: Mapping[str, Any]) -> bool:
        """Whether a row is one for other stages."""
        kind, formats = self._stage.row_kind, self._registry.data_formats
        return bool(kind and other_kinds(row, kind, formats, self._registry.readers()))

    def _remedy(self, given: str, path: Path) -> str:
        """The override that lets the stage read the first row; "" where that cannot be guessed."""
        if not is_remote(given) and (data_fault(path) is not None or path.suffix in _CORPUS):
            return ""
        row = self.first(given, path)
        fields = {} if row is None or self.is_read(row) else self.proposed(row)
        if self._reads_text and fields and not self._columns:
            return key_word("pretrain.key", *fields.values())
        return columns_word(fields) if fields else ""

    def _conversion(self) -> Conversion:
        formats, readers = self._registry.data_formats, self._registry.readers()
        return Conversion(self._stage.row_kind, self._data["format"], formats, self._columns, readers)


class _Enough(Exception):
    """So many rows cannot be read that no more are looked at."""


class _FewFaults(Faults):
    """Faults of the first rows."""

    def add(self, where: str, reason: str, once: bool = False) -> None:
        super().add(where, reason, once)
        if self.skips and self.total >= _MOST_SKIPPED:
            raise _Enough


def _as_copied(
    rows: Iterator[tuple[str, Any, str | None]], path: Path, file: Path
) -> Iterator[tuple[str, Any, str | None]]:
    """Rows of a file, which is copied to JSON Lines before it is read if all of `path` is large. Raises UserError as
    that does."""
    from llmsuite.data.placed import as_line, is_large, is_lines  # which imports NumPy

    is_copied = is_large(path) and not is_lines(file)
    for where, raw, fault in rows:
        if fault is None and is_copied:
            as_line(where, raw)
        yield where, raw, fault


def _at(where: str, does: Callable[[], object]) -> None:
    """Do something with a row. Raises UserError with its place."""
    try:
        does()
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
