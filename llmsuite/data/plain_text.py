"""Rows that are trained on as plain text, without a chat template: whole texts, and texts made by a template of text.

A template of text is literal: only the names of fields stand in braces, and braces in the values of a row are kept. The
text from the last field on is the answer, which is supervised; what precedes it is the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmsuite.base.redaction import json_type_name
from llmsuite.contract.schema.columns import PARTS, columns_of
from llmsuite.contract.schema.text_template import variants_of
from llmsuite.contract.specs import DataFormat
from llmsuite.data.columns import MissingColumnError
from llmsuite.data.keys import ROW_KEYS, is_nothing
from llmsuite.data.rows import Conversation, Message
from llmsuite.data.suggest import column_names, did_you_mean
from llmsuite.data.turns import Row, get_text

_FORMAT = "data.text_template"
"""Name of the format of rows that `data.text_template` makes, for messages."""


def text(row: Row) -> Conversation:
    """`{"text": "..."}`: all of the text is supervised, but for its first token, which nothing predicts."""
    _check_row_keys(row, frozenset(), "a row of text")
    return plain_conversation("", get_text(row, "text"))


def is_text_row(row: Mapping[str, Any]) -> bool:
    """Return True for a row whose only text is "text": with other texts or turns, it may be one of another format."""
    others = [value for key, value in row.items() if key != "text" and not is_nothing(value)]
    return "text" in row and not any(isinstance(value, (str, list, Mapping)) for value in others)


def plain_conversation(prompt: str, answer: str) -> Conversation:
    """Return a text as a conversation without a chat template. An empty prompt has no message."""
    if not prompt:
        return Conversation((Message("assistant", answer),), (True,), is_plain=True)
    return Conversation((Message("user", prompt), Message("assistant", answer)), (False, True), is_plain=True)


def plain_texts(conversation: Conversation) -> tuple[str, str]:
    """Return the prompt of a plain conversation, and the prompt with the answer."""
    *before, answer = [message.content for message in conversation.messages]
    prompt = "".join(before)
    return prompt, prompt + answer


def text_template_format(given: str) -> DataFormat:
    """Return the format of rows that a value of `data.text_template` reads."""
    variants = variants_of(given)
    fields_of = {source: columns_of(source) for source in variants}
    fields = list(dict.fromkeys(name for names in fields_of.values() for name in names))
    in_all = set(fields).intersection(*fields_of.values())
    needed = [name for name in fields if name in in_all]

    def convert(row: Row) -> Conversation:
        for name in needed:
            if name not in row:
                hint = did_you_mean(name, row)
                raise MissingColumnError(
                    f"has no field {name!r}, which {_FORMAT} takes: it has {column_names(row)}{hint}"
                )
        _check_row_keys(row, frozenset(fields), _FORMAT)
        source = variants[-1]
        for variant in variants[:-1]:
            if all(not is_nothing(row.get(name)) for name in fields_of[variant] if name not in needed):
                source = variant
                break
        last = [found for found in PARTS.finditer(source) if found[1] is not None][-1]
        prompt = _filled(source[: last.start()], row)
        answer = _filled(source[last.start() :], row)
        # without a last field there is nothing to learn, whatever the template writes after it
        if source[last.end() :] and not _value(row[last[1]], last[1]).strip():
            answer = ""
        return plain_conversation(prompt, answer)

    return DataFormat(
        name=_FORMAT,
        help=f"fields {', '.join(needed)}",
        kind="conversation",
        matches=lambda row: all(name in row for name in needed),
        convert=convert,
        columns=frozenset(fields),
    )


def _filled(source: str, row: Row) -> str:
    """Return a part of a template with the values of a row."""
    return PARTS.sub(lambda found: found[0][0] if found[1] is None else _value(row[found[1]], found[1]), source)


def _value(value: Any, name: str) -> str:
    if value is None:  # as in data.columns: a table has null in cells without text
        return ""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"field {name!r} is {json_type_name(value)}; {_FORMAT} takes texts and numbers")
    return str(value)


def _check_row_keys(row: Row, fields: frozenset[str], what: str) -> None:
    """Raise ValueError for a column that every other format reads, and that plain text has no place for."""
    for key in sorted(ROW_KEYS - fields):
        if not is_nothing(row.get(key)):
            raise ValueError(f"{key!r} is there, and {what} has no place for it; leave it out with data.ignore_columns")
