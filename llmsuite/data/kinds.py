"""Rows of another kind than a stage reads: which kind that is, and who reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmsuite.data.rows import Conversation
from llmsuite.specs import DataFormat

Readers = Mapping[str, Sequence[str]]
"""The stages that train on rows, by the kind of rows."""


def other_kinds(row: Mapping[str, Any], kind: str, formats: Mapping[str, DataFormat], readers: Readers) -> str:
    """The end of a sentence about a row that no format of a kind fits: which others do, and who reads them.

    Of the others, only those that need the most of its columns. "" where there is none.
    """
    needed = {f.name: _needed(f, row) for f in formats.values() if f.kind != kind}
    most = max(map(len, needed.values()), default=0)
    if not most:
        return ""
    named: dict[str, str] = {}
    for name, columns in needed.items():
        if len(columns) == most:
            named.setdefault(formats[name].kind, name)
    return ", but one with " + ", or one with ".join(
        f"{other} rows ({name}){_clause(other, readers)}" for other, name in named.items()
    )


def pairs_beside(
    row: Mapping[str, Any], fitting: DataFormat, formats: Mapping[str, DataFormat], readers: Readers
) -> str | None:
    """Why a row that a format of conversations fits is a pair of answers all the same; None if it is none.

    A format of pairs says so if it shares a column with the other, needs more of them, and can convert the row. Columns
    alone are not enough: rows with `messages` to train on may have `chosen` and `rejected` beside them, as those of
    HuggingFaceH4/ultrafeedback_binarized. Nor is a conversation a pair that has its answer.
    """
    if fitting.kind != "conversation" or answered(lambda row: _has_answer(fitting.convert(row)), row):
        return None
    read = _needed(fitting, row)
    for pairs in formats.values():
        needed = _needed(pairs, row) if pairs.kind == "preference" else set()
        if needed & read and len(needed) > len(read) and answered(pairs.convert, row):
            left_out = ", ".join(map(repr, sorted(needed - read)))
            return (
                f"is a pair of answers ({pairs.name}: {pairs.help}){_clause(pairs.kind, readers)}; to train on the "
                f"conversation without {left_out}, say data.format={fitting.name}"
            )
    return None


def _has_answer(conversation: Conversation) -> bool:
    last = conversation.messages[-1]
    return last.role == "assistant" and bool(last.content or last.tool_calls)


def _clause(kind: str, readers: Readers) -> str:
    """A clause about the stages that train on a kind of rows; "" if none does."""
    *others, last = readers.get(kind, ("",))
    named = f"stages {', '.join(others)} and {last} train" if others else f"stage {last} trains"
    return f", which {named} on" if last else ""


def _needed(data_format: DataFormat, row: Mapping[str, Any]) -> set[str]:
    """The columns of a row without which a format would not fit it; none if it does not, or fits anything.

    Of columns that can be left out together each can be left out: a row of many is not asked about one by one.
    """
    if not answered(data_format.matches, row):
        return set()
    found, groups = set[str](), [list(row)]
    while groups:
        group = groups.pop()
        without = set(group)
        if answered(data_format.matches, {k: v for k, v in row.items() if k not in without}):
            continue
        if len(group) == 1:
            found.update(group)
        else:
            groups += [group[: len(group) // 2], group[len(group) // 2 :]]
    return found


def answered(ask: Callable[[Mapping[str, Any]], Any], row: Mapping[str, Any]) -> bool:
    """What a format answers about a row that is perhaps not of its kind, which a plugin's may not expect."""
    try:
        return bool(ask(row))
    except (LookupError, ValueError, TypeError, AttributeError):
        return False
