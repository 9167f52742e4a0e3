"""Converts rows of a file to the rows that a stage trains on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.contract.registry import traceback_tail
from llmsuite.contract.specs import DataFormat
from llmsuite.data.columns import MissingColumnError, rename_columns
from llmsuite.data.faults import Faults
from llmsuite.data.keys import (
    ALL,
    KEEP_ALL,
    MARGIN,
    MEDIA,
    ColumnRules,
    filled,
    filled_columns,
    is_nothing,
    unread_columns,
    unread_loss_keys,
    without_ignored,
)
from llmsuite.data.plain_text import text_template_format
from llmsuite.data.row_kinds import StagesByKind, is_accepted, other_kinds, preference_hint
from llmsuite.data.row_limits import MAX_COLUMNS, check_conversations
from llmsuite.data.rows import TYPES, Conversation, Preference, Ranking, with_default_system
from llmsuite.data.suggest import (
    Columns,
    advice,
    columns_option,
    correct_columns,
    fields_of,
    ignore_option,
    shell_quoted,
    suggest_columns,
)
from llmsuite.data.turns import parse_margin

_MAX_UNREAD = 8
"""Largest number of unread columns that a message names."""


class RowConverter:
    """Converts rows of one kind; the first row decides the format, where none is chosen."""

    def __init__(
        self,
        kind: str,
        name: str,
        formats: Mapping[str, DataFormat],
        columns: ColumnRules = KEEP_ALL,
        readers: StagesByKind | None = None,
    ):
        """
        Args:
            kind: the type of rows that the stage needs, such as "preference".
            name: a format's name, or "auto" for the first one that matches the first row.
            formats: the registered formats.
            columns: the columns that are read and those that are ignored.
            readers: the registered stages, for messages about rows of another kind.

        Raises:
            UserError: the format makes rows of another kind.
        """
        self._kind = kind
        self._formats = formats
        self._columns = columns.sources
        self._rules = columns
        self._stages_by_kind = readers or {}
        self._name = name
        self.format: DataFormat | None = None if name == "auto" or columns.text_template else formats[name]
        """None until the first row has decided it."""
        self._has_read = False
        """True once a row was converted: then a fault of a later row is not that of its columns."""
        if columns.text_template is not None:
            self.format = text_template_format(columns.text_template)
        if self.format is not None and self.format.kind != kind:
            raise UserError(f"data.format: {name} gives {self.format.kind} rows; this stage trains on {kind} rows")
        if columns.system is not None and kind not in TYPES:
            raise UserError(f"data.system: {kind} rows are no conversations, so they have no system turn; remove it")

    def convert(self, where: str, raw: Any, fault: str | None, faults: Faults) -> Any:
        """Convert a row.

        Args:
            where: place of the row, for messages.
            raw: the row in its file.
            fault: the reason why it could not be parsed; None without one.
            faults: records the fault of the row, if it has one.

        Returns:
            The row; None for one with a fault.

        Raises:
            UserError: no format fits.
        """
        if fault is None and not isinstance(raw, Mapping):
            fault = f"is a {type(raw).__name__}, not an object"
        if fault is None and len(raw) > MAX_COLUMNS:
            fault = f"has {len(raw):,} columns; at most {MAX_COLUMNS:,} are read"
        if fault is None:
            fault = _text_fault(raw)
        if fault is None and not self._columns:
            media = [name for name in MEDIA if not is_nothing(raw.get(name)) and name not in self._rules.ignored]
            if media:
                fault = (
                    f"has {', '.join(media)}, and only text is read; name the columns of text in data.columns, or "
                    "list these in data.ignore_columns"
                )
        is_of_recipe = False
        given = raw
        if fault is None:
            try:
                raw = self._fields(given)
                self.format = self.format or self._recognise(raw, given, where)
                row = self._completed(self._converted(self.format, raw, where), raw)
                self._has_read = True
                fault = self._unread_fault(self.format, raw)
                if fault is None:
                    return row
                is_of_recipe = True
            except MissingColumnError as error:
                fault = str(error)
                is_of_recipe = True
            except (KeyError, ValueError) as error:
                fault = f"has no key {error}" if isinstance(error, KeyError) else str(error)
                if self.format is not None and not is_accepted(self.format.matches, raw):
                    fault += f"; {self.format.name} needs: {self.format.help}{self._advice_on_first(given)}"
        faults.add(where, fault, once=is_of_recipe)
        return None

    def _fields(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields of a row of the file, with the texts of `data.fill`, without those that are ignored."""
        if not self._columns:
            return filled(without_ignored(row, self._rules.ignored), self._rules.fill)
        values = filled_columns(row, self._columns, self._rules.fill)
        return without_ignored(rename_columns(values, self._columns), self._rules.ignored)

    def _unread_fault(self, data_format: DataFormat, row: Mapping[str, Any]) -> str | None:
        """The fault of a row with columns or weights that its format does not read; None without one."""
        if self._rules.ignores_all:
            return None
        # only conversations have weights; another kind's turns are converted by the same code
        places = [] if self._kind == "conversation" else unread_loss_keys(row)
        if places:
            key = places[0].rpartition(".")[2]
            option = shell_quoted(ignore_option([*self._rules.ignored, key]))
            return (
                f"has {places[0]!r}, and {self._kind} rows have no weights of turns: remove the key {key!r} from the "
                f"rows, or leave it out with {option}"
            )
        reads_margins = self._kind == "preference" and "margins" in self._rules.capabilities
        also = frozenset({MARGIN}) if reads_margins else frozenset()
        unread = unread_columns(row, data_format.columns, also)
        if not unread:
            return None
        names = [*self._rules.ignored, *unread]
        named = ", ".join(map(repr, unread))
        if len(unread) > _MAX_UNREAD:
            names = [ALL]
            named = f"{', '.join(map(repr, unread[:_MAX_UNREAD]))} and {len(unread) - _MAX_UNREAD} more"
        if self._columns:
            return f"{data_format.name} does not read {named}; leave that out of data.columns"
        option = shell_quoted(ignore_option(names))
        # the names come before the colon, as skipped rows are counted by the text up to it
        return (
            f"has the columns {named}, which {data_format.name} does not read: remove them from the rows, or leave "
            f'them out with {option} ("*" stands for all such columns)'
        )

    def _converted(self, data_format: DataFormat, raw: Mapping[str, Any], where: str) -> Any:
        """Return a row of the stage's kind. Raises UserError for a fault of the format, not of the row."""
        what = f"{where}: `convert` of the data format {data_format.name}"
        try:
            row = data_format.convert(raw)
        except (AttributeError, IndexError, TypeError) as error:
            raise UserError(
                f"{what} has to raise ValueError with what is wrong in the row: {traceback_tail(error)}"
            ) from error
        expected = TYPES.get(self._kind, object)
        is_ranking = expected is Preference and isinstance(row, Ranking)
        if row is not None and (isinstance(row, expected) or is_ranking):
            check_conversations(row)
            return row
        found = "nothing"
        if row is not None:
            found = f"a {type(row).__name__}"
        hint = ""
        if expected is not object:
            hint = f"; {self._kind} rows are {expected.__module__}.{expected.__name__}"
        raise UserError(f"{what} returned {found}{hint}")

    def _completed(self, row: Any, raw: Mapping[str, Any]) -> Any:
        """Return a row with what only some stages read of it. Raises ValueError for what this stage does not accept."""
        capabilities = self._rules.capabilities
        if isinstance(row, Ranking) and "ranked" not in capabilities:
            raise ValueError("has ranked answers, which are not read here; give pairs of answers")
        if isinstance(row, Conversation) and row.is_plain and "plain_text" not in capabilities:
            raise ValueError("is plain text, and conversations are read here; give turns")
        if self._rules.system is not None:
            if isinstance(row, Conversation) and row.is_plain:
                raise ValueError("is plain text, which has no turns; remove data.system")
            row = with_default_system(row, self._rules.system)
        if "margins" not in capabilities or is_nothing(raw.get(MARGIN)):
            return row
        if isinstance(row, Ranking):
            raise ValueError(f"{MARGIN!r} belongs to a pair of answers, and the row has ranked ones")
        if isinstance(row, Preference):
            return dataclasses.replace(row, margin=parse_margin(raw))
        return row

    def suggest_columns(self, row: Mapping[str, Any]) -> Columns | None:
        """Return a proposal of `data.columns` for a row that has other columns; None where it cannot be guessed."""
        if not self._columns:
            return suggest_columns(row, self._kind, self._formats, self._name)
        mended = correct_columns(self._columns, row)
        if mended is None:
            return None
        trial = RowConverter(self._kind, self._name, self._formats, dataclasses.replace(self._rules, sources=mended))
        try:
            if trial.convert("", row, None, Faults("skip")) is not None:
                return mended
            return None
        except UserError:
            return None

    def _advice_on_first(self, row: Mapping[str, Any]) -> str:
        """Advice about the first row where the chosen format has other fields; "" where there is none."""
        columns = None if self._has_read else self.suggest_columns(row)
        self._has_read = True  # one message with advice is enough
        if columns:
            return f"; {advice(row, columns, self._kind)}"
        return ""

    def _recognise(self, row: Mapping[str, Any], given: Mapping[str, Any], where: str) -> DataFormat:
        """Return the first format that fits.

        Args:
            row: with the fields of `data.columns`.
            given: the row in its file.
            where: its place.

        Raises:
            UserError: no format fits, or the row is one for other stages.
        """
        fitting = [f for f in self._formats.values() if f.kind == self._kind]
        # a table has null in the columns that other rows fill: such columns count only if no format fits without them
        present = {key: value for key, value in row.items() if value is not None}
        for candidate, columns in [(f, columns) for columns in (present, row) for f in fitting]:
            if is_accepted(candidate.matches, columns):
                if not self._columns:  # with data.columns the user has said what the rows are
                    fault = preference_hint(row, candidate, self._formats, self._stages_by_kind)
                    if fault:
                        raise UserError(f"{where}: {fault}")
                return candidate
        others = other_kinds(row, self._kind, self._formats, self._stages_by_kind)
        raise UserError(
            f"{where}: keys {sorted(row)} fit no format with {self._kind} rows{others}. {self._way_out(given, fitting)}"
        )

    def text_advice(self, row: Mapping[str, Any]) -> str:
        """Advice to train on a row's column "text" alone; "" where that is not possible."""
        is_chosen = bool(self._columns) or self._name != "auto"
        if is_chosen or self._kind != "conversation" or "plain_text" not in self._rules.capabilities:
            return ""
        if "text" not in self._formats or not isinstance(row.get("text"), str):
            return ""
        unread = [] if self._rules.ignores_all else unread_columns(row, self._formats["text"].columns)
        ignored = [*self._rules.ignored, *unread] if len(unread) <= _MAX_UNREAD else [*self._rules.ignored, ALL]
        rules = dataclasses.replace(self._rules, ignored=ignored)
        try:
            if RowConverter(self._kind, "text", self._formats, rules).convert("", row, None, Faults("skip")) is None:
                return ""
        except UserError:
            return ""
        option = f" {shell_quoted(ignore_option(ignored))}" if unread else ""
        return f"To train on 'text' as plain text, add --data.format=text{option}. Otherwise: "

    def _way_out(self, row: Mapping[str, Any], fitting: Sequence[DataFormat]) -> str:
        """Advice about a row that fits no format: the columns that it probably has, else the fields of the formats."""
        text = self.text_advice(row)
        columns = self.suggest_columns(row)
        if columns is not None and self._columns:
            return f"Did you mean {shell_quoted(columns_option(columns))}"
        if columns is not None:
            what = advice(row, columns, self._kind)
            return f"{text}{what}" if text else f"{what[0].upper()}{what[1:]}"
        known = "; ".join(f"{f.name} ({f.help})" for f in fitting)
        hint = ""
        if fitting and len(row) >= len(fields_of(self._kind)):
            hint = f". If the columns have other names, {advice(row, None, self._kind)}"
        return f"{text}{'known' if text else 'Known'}: {known or 'none'}{hint}"


def _text_fault(row: Mapping[str, Any]) -> str | None:
    """The reason why no tokenizer accepts a row that is valid JSON; None if there is none."""
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return "has half of a surrogate pair (\\ud800 to \\udfff), which is no text"
    except RecursionError:
        return "is nested too deeply"
    return None
