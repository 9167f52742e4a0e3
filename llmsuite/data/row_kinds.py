"""Recognises rows of another kind than a stage trains on, and names the stages for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmsuite.contract.specs import DataFormat
from llmsuite.data.rows import Conversation

StagesByKind = Mapping[str, Sequence[str]]
"""Names of the stages that train on rows, by the kind of rows."""


def other_kinds(row: Mapping[str, Any], kind: str, formats: Mapping[str, DataFormat], readers: StagesByKind) -> str:
    """Return the end of a sentence about a row that no format of a kind fits: the formats that fit, and their stages.

    Only the formats that need the most of its columns are named. "" where there is none.
    """
    needed = {f.name: _needed(f, row) for f in formats.values() if f.kind != kind}
    most = max(map(len, needed.values()), default=0)
    if not most:
        return ""
    named: dict[str, str] = {}
    for name, columns in needed.items():
        if len(columns) == most:
            named.setdefault(formats[name].kind, name)
    parts = [f"{other} rows ({name}){_clause(other, readers)}" for other, name in named.items()]
    return f", but one with {', or one with '.join(parts)}"


def preference_hint(
    row: Mapping[str, Any], fitting: DataFormat, formats: Mapping[str, DataFormat], readers: StagesByKind
) -> str | None:
    """Return the reason why a row that fits a conversation format is a preference pair; None if it is not.

    It is one if a preference format shares a column with `fitting`, needs more columns, and can convert the row. The
    columns alone are not enough: rows with `messages` to train on may also have `chosen` and `rejected`, such as those
    of HuggingFaceH4/ultrafeedback_binarized. A conversation that ends with its answer is no pair.
    """
    if fitting.kind != "conversation" or is_accepted(lambda row: _has_answer(fitting.convert(row)), row):
        return None
    read = _needed(fitting, row)
    for pairs in formats.values():
        needed = _needed(pairs, row) if pairs.kind == "preference" else set()
        if needed & read and len(needed) > len(read) and is_accepted(pairs.convert, row):
            left_out = ", ".join(map(repr, sorted(needed - read)))
            names = json.dumps(sorted(needed - read), ensure_ascii=False)
            return (
                f"is a pair of answers ({pairs.name}: {pairs.help}){_clause(pairs.kind, readers)}; to train on the "
                f"conversation without {left_out}, set data.format={fitting.name} and data.ignore_columns={names}"
            )
    return None


def _has_answer(conversation: Conversation) -> bool:
    last = conversation.messages[-1]
    return last.role == "assistant" and bool(last.content or last.tool_calls)


def _clause(kind: str, readers: StagesByKind) -> str:
    """Return a clause about the stages that train on a kind of rows; "" if none does."""
    *others, last = readers.get(kind, ("",))
    named = f"stages {', '.join(others)} and {last} train" if others else f"stage {last} trains"
    return f", which {named} on" if last else ""


def _needed(data_format: DataFormat, row: Mapping[str, Any]) -> set[str]:
    """Return the columns of a row that a format needs to fit it; none if it does not fit, or fits anything.

    Columns are dropped in groups that are halved while the format needs one of them: a row may have many columns.
    """
    if not is_accepted(data_format.matches, row):
        return set()
    found = set[str]()
    groups = [list(row)]
    while groups:
        group = groups.pop()
        without = set(group)
        if is_accepted(data_format.matches, {k: v for k, v in row.items() if k not in without}):
            continue
        if len(group) == 1:
            found.update(group)
        else:
            groups += [group[: len(group) // 2], group[len(group) // 2 :]]
    return found


def is_accepted(call: Callable[[Mapping[str, Any]], Any], row: Mapping[str, Any]) -> bool:
    """Call a function of a format with a row; False if it raises, as a plugin may not expect rows of other kinds."""
    try:
        return bool(call(row))
    except (LookupError, ValueError, TypeError, AttributeError):
        return False
