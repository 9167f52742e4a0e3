"""Checks of the first rows of the data before a run starts. Imports no Paddle.

The rows are read, converted and rendered by the same functions as in a run, so errors and messages are the same. Each
file of a directory is read up to its first valid row.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from llmsuite.base.errors import Problem, RecipeError, UserError
from llmsuite.base.files import read_json_object
from llmsuite.base.redaction import Url, redacted
from llmsuite.base.safe_files import is_file
from llmsuite.checkpoint.tokenizer_files import vocabulary_ids
from llmsuite.contract.registry import BUILTIN, Registry
from llmsuite.contract.schema.columns import columns_of
from llmsuite.contract.schema.recipe import environment_of
from llmsuite.contract.specs import StageSpec
from llmsuite.data.chat_template import ChatTemplate, load_template
from llmsuite.data.columns import rename_columns
from llmsuite.data.documents import check_has_columns, first_document, text_key
from llmsuite.data.faults import Faults
from llmsuite.data.keys import ALL, ColumnRules
from llmsuite.data.read import data_files, first_rows
from llmsuite.data.remote import is_remote, saved_rows
from llmsuite.data.render_checks import check_rendered, is_plain
from llmsuite.data.row_converter import RowConverter
from llmsuite.data.row_kinds import is_accepted, other_kinds
from llmsuite.data.rows import Message, Prompt
from llmsuite.data.special_tokens import read_token_files
from llmsuite.data.suggest import columns_option, correct_columns, fields_of, key_option, suggest_text_column
from llmsuite.inference.prompts import guess_prompt_columns, parse_prompt_at
from llmsuite.recipe.load import LoadedRecipe
from llmsuite.recipe.plans import DataPlan, TrainPlan
from llmsuite.recipe.resolve import data_fault
from llmsuite.rl.columns import missing_columns

_MAX_FAULTS = 10
"""Invalid rows after which a file without a valid row is given up."""
_MAX_SKIPPED = 100
"""The limit where invalid rows are skipped."""
_MAX_FILES = 64
"""Files of a directory that are checked."""
_ROWS_FOR_REWARDS = 10
"""Rows that are checked for the columns of rewards, which single rows may lack."""
_CORPUS = (".idx", ".bin")


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns of the first row of a file that a stage cannot read, and the fields that the stage needs."""

    of_file: tuple[str, ...]
    fields: Mapping[str, str]
    """Each needed field with the column that probably holds it; "" where no column was found."""


def check_rows(
    loaded: LoadedRecipe, data_plan: DataPlan, train_plan: TrainPlan, tokenizer: Path | None, registry: Registry
) -> list[str]:
    """Check the data files of a recipe that are available locally.

    Args:
        loaded: the recipe, for the positions of keys.
        data_plan: of the run.
        train_plan: of the run.
        tokenizer: directory of the tokenizer; None for a model that reads no tokens.
        registry: has the data formats.

    Returns:
        Notes about files that were not checked.

    Raises:
        RecipeError: with all problems of the first rows for which a run would stop, and of `rollout.stop`.
    """
    problems: list[Problem] = []
    notes: list[str] = []
    checker = _RowChecker(loaded, data_plan, train_plan, tokenizer, registry)
    checked = set[Path | Url]()
    for key, given, path in data_plan.files():
        if path in checked:  # with --smoke, training and evaluation may use the same rows
            continue
        checked.add(path)
        if isinstance(path, Url) or (is_remote(given) and saved_rows(given) is None):
            notes.append(f"{key}: not checked: {redacted(given)}, which `llmsuite run` fetches")
        else:
            problems += checker.problems(key, given, path)
    problems += _stop_problems(loaded, train_plan, tokenizer)
    if problems:
        raise RecipeError(list(dict.fromkeys(problems)))
    return notes


def _stop_problems(loaded: LoadedRecipe, train_plan: TrainPlan, tokenizer: Path | None) -> Iterator[Problem]:
    """The texts of `rollout.stop` that are no tokens of a tokenizer whose tokenizer.json is available locally; others
    are found when rollouts start."""
    if train_plan.rollout is None or not train_plan.rollout.stop or tokenizer is None:
        return
    file = tokenizer / "tokenizer.json"
    if not is_file(file):
        return
    known = vocabulary_ids(read_json_object(file))
    known |= {entry.text: entry.id for entry in read_token_files(tokenizer).added}
    for text in train_plan.rollout.stop:
        if text not in known:
            yield loaded.problem("rollout.stop", f"{text!r} is no token of the vocabulary of {tokenizer}")


def unread_columns(
    loaded: LoadedRecipe, data_plan: DataPlan, train_plan: TrainPlan, tokenizer: Path | None, registry: Registry
) -> Columns | None:
    """The columns of the training data if the stage cannot read it because of them; None where it can be read, or has
    another problem. Parameters as of `check_rows`."""
    checker = _RowChecker(loaded, data_plan, train_plan, tokenizer, registry)
    key, given, path = next(data_plan.files())
    if (
        isinstance(path, Url)
        or is_remote(given)
        or data_fault(path) is not None
        or not list(checker.problems(key, given, path))
    ):
        return None
    row = checker.first(given, path)
    if row is None or checker.is_read(given, row):
        return None
    fields = checker.proposed(given, row)
    if not fields and not checker.fits_others(row):
        fields = dict.fromkeys(checker.fields, "")
    if fields:
        return Columns(tuple(row), fields)
    return None


class _RowChecker:
    """Checks files as the stage of a plan reads them."""

    def __init__(
        self,
        loaded: LoadedRecipe,
        data_plan: DataPlan,
        train_plan: TrainPlan,
        tokenizer: Path | None,
        registry: Registry,
    ):
        self._loaded = loaded
        self._tokenizer = tokenizer
        self._registry = registry
        stage = train_plan.stage
        self._row_kind = stage.row_kind if isinstance(stage, StageSpec) else ""
        self._capabilities = stage.capabilities
        self._data = data_plan.section
        self._columns: Mapping[str, str] = self._data.columns
        self._skips = data_plan.given("on_bad_row") == "skip"
        self._section = train_plan.stage_section
        self._rewards = train_plan.reward
        is_ours = registry.owner("stage", stage.name).distribution == BUILTIN
        self._reads_text = is_ours and stage.name == "pretrain"
        self._reads_prompts = is_ours and stage.name == "infer"
        self._renders = is_ours and not self._reads_text and not (self._reads_prompts and self._section.raw)

    # problems

    def problems(self, key: str, given: str, path: Path) -> Iterator[Problem]:
        """The problems of the data of a key."""
        try:
            fault = None if is_remote(given) else data_fault(path)
            if fault is not None:
                raise UserError(fault)
            if self._row_kind:
                yield from self._row_problems(given, path)
            elif self._reads_text:
                self._check_text(path)
            elif self._reads_prompts:
                self._check_prompt(given, path)
        except UserError as error:
            message = str(error)
            of_columns = "data.columns: "
            key = "data.columns" if message.startswith(of_columns) else key
            problem = self._loaded.problem(key, message.removeprefix(of_columns))
            yield dataclasses.replace(problem, remedy=self._remedy(given, path))

    def _row_problems(self, given: str, path: Path) -> Iterator[Problem]:
        num_rows = 1
        if self._rewards is not None:
            num_rows = _ROWS_FOR_REWARDS
        rows = self._converted(given, path, num_rows)
        template = None if rows and is_plain(rows[0][1]) else self._template()
        if rows and template is not None and not self._skips:
            where, row = rows[0]
            _at(where, lambda: check_rendered(template, row))
        prompts = [(where, row) for where, row in rows if isinstance(row, Prompt)]
        if self._rewards is not None and prompts:
            environment = environment_of(self._loaded.recipe)
            for key, message in missing_columns(self._rewards, environment, prompts):
                yield self._loaded.problem(key, message)

    def _converted(self, given: str, path: Path, num_rows: int) -> list[tuple[str, Any]]:
        """The first rows of each file with their locations. Raises the UserError that a run would raise."""
        conversion = self._conversion(given)
        faults = Faults("skip" if self._skips else "error")
        found = list[tuple[str, Any]]()
        is_all = True
        max_bad = _MAX_SKIPPED if self._skips else _MAX_FAULTS
        for rows in self._files(given, path):
            good = 0
            bad = 0
            for where, raw, fault in rows:
                if good == num_rows or bad == max_bad:
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
            raise UserError(f"{path}: has no rows{_summary(faults)}")
        return found

    def _files(self, given: str, path: Path) -> Iterator[Iterator[tuple[str, Any, str | None]]]:
        """The rows of each file, with location and error message."""
        saved = saved_rows(given)
        if saved is not None:
            yield saved
            return
        for file in data_files(path)[:_MAX_FILES]:
            rows = first_rows(file)
            if self._renders and file.suffix != ".jsonl":
                rows = _as_copied(rows, path, file)
            yield rows

    def _check_text(self, path: Path) -> None:
        key = text_key(self._columns, self._section.key)
        check_has_columns(path, self._columns)
        if path.suffix in _CORPUS:
            from llmsuite.data.indexed_corpus import IndexedCorpus, index_path  # which imports NumPy

            IndexedCorpus(index_path(path))
            return
        faults = _FewFaults("skip" if self._skips else "error")
        try:
            text = first_document(path, key, faults)
        except _TooManyFaults:
            return
        if text is None:
            raise UserError(f"{path}: no text to index{_summary(faults)}")

    def _check_prompt(self, given: str, path: Path) -> None:
        rows = saved_rows(given) or first_rows(path)
        found = next(rows, None)
        if found is None:
            raise UserError(f"{path}: has no rows")
        where = found[0]
        question = parse_prompt_at(*found, ColumnRules(self._columns, self._data.ignore_columns))
        turns = question.turns
        template = self._template()
        system = self._section.system
        if template is None:
            return
        messages = [Message("user", turns)] if isinstance(turns, str) else turns
        if system is not None and all(message.role != "system" for message in messages):
            messages = [Message("system", system), *messages]
        _at(where, lambda: template.prompt(messages, question.tools, question.template_kwargs))

    def _template(self) -> ChatTemplate | None:
        """The chat template; None if the tokenizer is not available locally. Raises UserError where there is no
        template."""
        directory = self._tokenizer
        if not self._renders or directory is None or not is_file(directory / "tokenizer_config.json"):
            return None
        return load_template(
            self._data.chat_template,
            directory,
            dict(read_token_files(directory).roles),
            self._data.chat_template_kwargs,
            ALL in self._data.ignore_columns,
        )

    # suggestions

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that every row needs."""
        if self._reads_text:
            return (self._section.key,)
        if self._reads_prompts:
            return ("prompt",)
        return fields_of(self._row_kind)

    def first(self, given: str, path: Path) -> Mapping[str, Any] | None:
        """The first readable row of the data, as it is in the file; None where there is none."""
        try:
            rows = saved_rows(given) or first_rows(data_files(path)[0])
            raw = next((raw for _, raw, fault in itertools.islice(rows, _MAX_SKIPPED) if fault is None), None)
        except UserError:
            return None
        return raw if isinstance(raw, Mapping) else None

    def is_read(self, given: str, row: Mapping[str, Any]) -> bool:
        """Return True if a row of a file has the fields that the stage needs, even with invalid values."""
        if self._reads_text:
            return all(name in row for name in columns_of(self._columns.get(self.fields[0], self.fields[0])))
        try:
            fields = rename_columns(row, self._columns)
        except ValueError:
            return False
        if self._reads_prompts:
            return "prompt" in fields or "messages" in fields
        name = self._format_of(given)
        formats = [f for f in self._registry.data_formats.values() if f.kind == self._row_kind]
        return any(name in ("auto", f.name) and is_accepted(f.matches, fields) for f in formats)

    def proposed(self, given: str, row: Mapping[str, Any]) -> Mapping[str, str]:
        """The column of each field in a row of a file, for the fields whose column can be guessed."""
        if self._reads_text:
            text = suggest_text_column(row) if not self._columns else None
            if text:
                return {self.fields[0]: text}
            return correct_columns(self._columns, row) or {}
        if self._reads_prompts:
            return guess_prompt_columns(row, self._columns) or {}
        return self._conversion(given).suggest_columns(row) or {}

    def fits_others(self, row: Mapping[str, Any]) -> bool:
        """Return True if other stages can read a row."""
        kind = self._row_kind
        formats = self._registry.data_formats
        return bool(kind and other_kinds(row, kind, formats, self._registry.stages_by_row_kind()))

    def _remedy(self, given: str, path: Path) -> str:
        """The command-line override with which the stage can read the first row; "" where none can be guessed."""
        if not is_remote(given) and (data_fault(path) is not None or path.suffix in _CORPUS):
            return ""
        row = self.first(given, path)
        if (
            row is not None
            and not self._reads_text
            and not self._reads_prompts
            and self._conversion(given).text_advice(row)
        ):
            return ""  # the message has two remedies, of which the user has to choose one
        fields = {} if row is None or self.is_read(given, row) else self.proposed(given, row)
        if self._reads_text and fields and not self._columns:
            return key_option("pretrain.key", *fields.values())
        return columns_option(fields) if fields else ""

    def _format_of(self, given: str) -> str:
        """The name of the data format of a file, or "auto"."""
        found: str | Mapping[str, str] = self._data.format
        return found if isinstance(found, str) else found.get(given, "auto")

    def _conversion(self, given: str) -> RowConverter:
        formats = self._registry.data_formats
        readers = self._registry.stages_by_row_kind()
        columns = ColumnRules(
            self._columns,
            self._data.ignore_columns,
            self._data.text_template,
            self._capabilities,
            self._data.system,
            self._data.fill,
        )
        return RowConverter(self._row_kind, self._format_of(given), formats, columns, readers)


class _TooManyFaults(Exception):
    """Too many rows are invalid to check more of them."""


class _FewFaults(Faults):
    """Faults of the first rows, which raises `_TooManyFaults` at a limit."""

    def add(self, where: str, reason: str, once: bool = False) -> None:
        super().add(where, reason, once)
        if self.skips and self.total >= _MAX_SKIPPED:
            raise _TooManyFaults


def _summary(faults: Faults) -> str:
    """The summary of faults for the end of a message; "" without faults."""
    if faults.total:
        return f": {faults.summary()}"
    return ""


def _as_copied(
    rows: Iterator[tuple[str, Any, str | None]], path: Path, file: Path
) -> Iterator[tuple[str, Any, str | None]]:
    """The rows of a file. If all of `path` is large, a run first copies it to JSON Lines: then raises the UserError of
    that copy."""
    from llmsuite.data.disk_rows import is_jsonl, is_large, to_jsonl_line  # which imports NumPy

    is_copied = is_large(path) and not is_jsonl(file)
    for where, raw, fault in rows:
        if fault is None and is_copied:
            to_jsonl_line(where, raw)
        yield where, raw, fault


def _at(where: str, function: Callable[[], object]) -> None:
    """Call a function for a row. Raises its UserError with the location of the row in front."""
    try:
        function()
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
