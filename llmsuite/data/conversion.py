"""Rows as a file has them, converted to what a stage reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llmsuite.data.bounds import MOST_COLUMNS, check_conversations
from llmsuite.data.columns import NoColumn, renamed
from llmsuite.data.faults import Faults
from llmsuite.data.formats import MEDIA
from llmsuite.data.kinds import Readers, answered, other_kinds, pairs_beside
from llmsuite.data.rows import TYPES
from llmsuite.data.suggest import Columns, advice, columns_word, corrected, fields_of, suggested, typed
from llmsuite.errors import UserError
from llmsuite.plugins.manager import tail
from llmsuite.specs import DataFormat


class Conversion:
    """Converts rows of one kind; the first one decides the format, where none is chosen."""

    def __init__(
        self,
        kind: str,
        name: str,
        formats: Mapping[str, DataFormat],
        columns: Mapping[str, str] | None = None,
        readers: Readers | None = None,
    ):
        """
        Args:
            kind: the type of rows that the stage needs, such as "preference".
            name: a format's name, or "auto" to take the first one that matches the first row.
            formats: the registered formats.
            columns: what fields a row gets from its columns, see `renamed`; none to take it as it is.
            readers: the registered stages, which messages about other rows name.

        Raises:
            UserError: the format gives other rows.
        """
        self._kind, self._formats, self._columns, self._readers = kind, formats, columns or {}, readers or {}
        self._name = name
        self.format: DataFormat | None = None if name == "auto" else formats[name]
        """None until it is known."""
        self._has_read = False
        """Whether a row was converted: where one was, the next one's fault is not that of its columns."""
        if self.format is not None and self.format.kind != kind:
            raise UserError(f"data.format: {name} gives {self.format.kind} rows; this stage trains on {kind} rows")

    def convert(self, where: str, raw: Any, fault: str | None, faults: Faults) -> Any:
        """The row; None for one with a fault, which is recorded in `faults`. Raises UserError when no format fits."""
        if fault is None and not isinstance(raw, Mapping):
            fault = f"is a {type(raw).__name__}, not an object"
        if fault is None and len(raw) > MOST_COLUMNS:
            fault = f"has {len(raw):,} columns; at most {MOST_COLUMNS:,} are read"
        if fault is None:
            fault = _text_fault(raw)
        if fault is None and not self._columns and (media := [name for name in MEDIA if raw.get(name)]):
            fault = f"has {', '.join(media)}, and only text is read; name the columns of text in data.columns"
        of_recipe, given = False, raw
        if fault is None:
            try:
                raw = renamed(given, self._columns)
                self.format = self.format or self._recognise(raw, given, where)
                row = self._converted(self.format, raw, where)
                self._has_read = True
                return row
            except NoColumn as error:
                fault, of_recipe = str(error), True
            except (KeyError, ValueError) as error:
                fault = f"has no key {error}" if isinstance(error, KeyError) else str(error)
                if self.format is not None and not answered(self.format.matches, raw):
                    fault += f"; {self.format.name} needs: {self.format.help}{self._advice_on_first(given)}"
        faults.add(where, fault, once=of_recipe)
        return None

    def _converted(self, data_format: DataFormat, raw: Mapping[str, Any], where: str) -> Any:
        """A row of the stage's kind. Raises UserError where that is the format's fault, not that of the row."""
        what = f"{where}: `convert` of the data format {data_format.name}"
        try:
            row = data_format.convert(raw)
        except (AttributeError, IndexError, TypeError) as error:
            raise UserError(f"{what} has to raise ValueError with what is wrong in the row: {tail(error)}") from error
        wanted = TYPES.get(self._kind, object)
        if row is not None and isinstance(row, wanted):
            check_conversations(row)
            return row
        found = "nothing" if row is None else f"a {type(row).__name__}"
        hint = "" if wanted is object else f"; {self._kind} rows are {wanted.__module__}.{wanted.__name__}"
        raise UserError(f"{what} returned {found}{hint}")

    def suggested(self, row: Mapping[str, Any]) -> Columns | None:
        """What `data.columns` may be for a row that has other columns, see `llmsuite.data.suggest`; None where that
        cannot be guessed."""
        if not self._columns:
            return suggested(row, self._kind, self._formats, self._name)
        mended = corrected(self._columns, row)
        if mended is None:
            return None
        trial = Conversion(self._kind, self._name, self._formats, mended)
        try:
            return mended if trial.convert("", row, None, Faults("skip")) is not None else None
        except UserError:
            return None

    def _advice_on_first(self, row: Mapping[str, Any]) -> str:
        """What to do about the first row where a format is chosen that has other fields; "" where nothing is known."""
        columns = None if self._has_read else self.suggested(row)
        self._has_read = True  # once is enough
        return f"; {advice(row, columns, self._kind)}" if columns else ""

    def _recognise(self, row: Mapping[str, Any], given: Mapping[str, Any], where: str) -> DataFormat:
        """The first format that fits. Raises UserError if there is none, or the row is rather one for other stages.

        Args:
            row: with the fields of `data.columns`.
            given: as the file has it.
            where: its place.
        """
        fitting = [f for f in self._formats.values() if f.kind == self._kind]
        # a table has null in the columns that other rows fill; with it, where that is all there is of a format
        present = {key: value for key, value in row.items() if value is not None}
        for candidate, columns in [(f, columns) for columns in (present, row) for f in fitting]:
            if answered(candidate.matches, columns):
                # who names columns has said what the rows are
                if not self._columns and (fault := pairs_beside(row, candidate, self._formats, self._readers)):
                    raise UserError(f"{where}: {fault}")
                return candidate
        others = other_kinds(row, self._kind, self._formats, self._readers)
        raise UserError(
            f"{where}: keys {sorted(row)} fit no format with {self._kind} rows{others}. {self._way_out(given, fitting)}"
        )

    def _way_out(self, row: Mapping[str, Any], fitting: Sequence[DataFormat]) -> str:
        """What to do about a row that fits no format: the columns that it probably has; else what formats need."""
        columns = self.suggested(row)
        if columns is not None and self._columns:
            return f"Did you mean {typed(columns_word(columns))}"
        if columns is not None:
            what = advice(row, columns, self._kind)
            return f"{what[0].upper()}{what[1:]}"
        known = "; ".join(f"{f.name} ({f.help})" for f in fitting)
        can_be = fitting and len(row) >= len(fields_of(self._kind))
        hint = f". Where they are called otherwise, {advice(row, None, self._kind)}" if can_be else ""
        return f"Known: {known or 'none'}{hint}"


def _text_fault(row: Mapping[str, Any]) -> str | None:
    """The reason why no tokenizer would take a row, though it is JSON; None if there is none."""
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return "has half of a surrogate pair (\\ud800 to \\udfff), which is no text"
    except RecursionError:
        return "is nested too deeply"
    return None
