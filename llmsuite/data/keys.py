"""Keys of rows and turns: the known ones, those that carry nothing, and those that a recipe ignores.

No key is dropped unread. A column that a data format does not declare, and a key of a turn that is neither known nor
read by the chat template, make a faulty row unless `data.ignore_columns` has the name.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from llmsuite.contract.schema.columns import columns_of
from llmsuite.data.rows import REASONING

TEMPLATE_KWARGS = "chat_template_kwargs"
"""Column with variables of the chat template for one row."""
ROW_KEYS = frozenset({"system", "tools", TEMPLATE_KWARGS})
"""Columns that every format may have."""
MARGIN = "margin"
"""Column of pairs with the margin of a reward model; only stages with the capability "margins" read it."""
MEDIA = (
    "images", "videos", "audios", "image", "video", "audio", "rejected_images", "rejected_videos", "rejected_audios",
)  # fmt: skip
"""Columns, and keys of turns, with pictures, videos and sounds, by their names in other suites."""
LOSS_KEYS = ("weight", "loss")
"""Keys of a turn that select the supervised turns, and are no part of the turn for a template."""
TURN_KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", *REASONING, *LOSS_KEYS})
"""Keys of a turn that always reach the chat template, or are used here."""
_CALL_KEYS = frozenset({"id", "type", "index", "function"})
"""Keys of a call; "index" numbers calls in a stream."""
_FUNCTION_KEYS = frozenset({"name", "arguments"})
"""Keys of the function of a call."""
PART_KEYS = frozenset({"type", "text", "annotations", "logprobs", "cache_control"})
"""Keys of a part of a turn's content. All but the first two concern a server, and not what the model reads."""
_FORM_KEYS = frozenset({"role", "content", "from", "value"})
"""Keys that make an object a turn. They stay in turns where a column of the row with such a name is ignored."""
_CALL_FORM_KEYS = _CALL_KEYS | _FUNCTION_KEYS
"""Keys that make an object a call or its function, see `_FORM_KEYS`."""
_PART_FORM_KEYS = frozenset({"type", "text"})
"""Keys that make an object a part of a turn's content, see `_FORM_KEYS`."""
_TURN_COLUMNS = (
    "messages", "conversations", "prompt", "completion", "chosen", "rejected", "responses", "rejected_response",
    "rejected_messages",
)  # fmt: skip
"""Columns with turns in the formats that come with llmsuite."""
ALL = "*"
"""Entry of `data.ignore_columns` that stands for every column and key that nothing reads."""


@dataclasses.dataclass(frozen=True)
class ColumnRules:
    """The keys of the section `data` that decide which columns are read, and change rows."""

    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """`data.columns`: the source of each field, see `rename_columns`. Empty to keep the columns of the row."""
    ignored: Sequence[str] = ()
    """`data.ignore_columns`: columns, and keys of turns, that are left out; `ALL` for all that nothing reads."""
    text_template: str | None = None
    """`data.text_template`: rows have its fields, and no registered format is used; null: they have a format."""
    capabilities: Set[str] = frozenset()
    """Capabilities of the stage: it reads the column `MARGIN` with "margins", and accepts rows of plain text with
    "plain_text" and rows with ranked answers with "ranked"."""
    system: str | None = None
    """`data.system`: text of the system turn of rows without one."""
    fill: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """`data.fill`: texts in the values of rows, and what replaces them."""

    @property
    def ignores_all(self) -> bool:
        """True where every column that nothing reads is ignored."""
        return ALL in self.ignored


KEEP_ALL = ColumnRules()
"""The rules of a recipe without these keys."""


def is_nothing(value: Any) -> bool:
    """Return True for a value that carries nothing: null, and an empty text, list or object."""
    return value is None or (isinstance(value, (str, list, Mapping)) and not value)


def filled(value: Any, texts: Mapping[str, str]) -> Any:
    """Return a row, or a value in it, in whose texts each key of `texts` is replaced by its value, at all places at
    once; where several fit, the longest is. Names of columns and keys stay.

    Raises:
        ValueError: the value is nested too deeply.
    """
    if not texts:
        return value
    try:
        return _filled(value, texts, _pattern(tuple(texts)))
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def filled_columns(row: Mapping[str, Any], columns: Mapping[str, str], texts: Mapping[str, str]) -> Mapping[str, Any]:
    """Return a row whose columns that `data.columns` reads are filled, see `filled`; all others stay.

    A template of `data.columns` may have the texts itself, so this is done before it takes the values.
    """
    read = {name for source in columns.values() for name in columns_of(source)}
    return {key: filled(value, texts) if key in read else value for key, value in row.items()}


@functools.lru_cache(maxsize=16)
def _pattern(texts: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of any of the texts, the longest first."""
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)))


def _filled(value: Any, texts: Mapping[str, str], pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return pattern.sub(lambda found: texts[found[0]], value)
    if isinstance(value, Mapping):
        return {key: _filled(inner, texts, pattern) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, texts, pattern) for inner in value]
    return value


def without_ignored(row: Mapping[str, Any], ignored: Sequence[str]) -> Mapping[str, Any]:
    """Return a row without the ignored columns, and without the ignored keys of its turns, their parts and their calls.

    The keys that make an object a turn, a part or a call stay there.
    """
    names = set(ignored) - {ALL}
    if not names:
        return row
    return {key: _value_without(value, names) for key, value in row.items() if key not in names}


def _value_without(value: Any, names: set[str]) -> Any:
    if isinstance(value, list):
        return [_turn_without(item, names) for item in value]
    return _turn_without(value, names)


def _turn_without(value: Any, names: set[str]) -> Any:
    """Return a turn without keys; any other value unchanged."""
    if not isinstance(value, Mapping) or not ("role" in value or "from" in value):
        return value
    turn = _keys_without(value, names - _FORM_KEYS)
    content = turn.get("content")
    if isinstance(content, list):
        inner = names - _PART_FORM_KEYS
        turn["content"] = [_keys_without(part, inner) if isinstance(part, Mapping) else part for part in content]
    calls = turn.get("tool_calls")
    if isinstance(calls, list):
        inner = names - _CALL_FORM_KEYS
        turn["tool_calls"] = [_call_without(call, inner) if isinstance(call, Mapping) else call for call in calls]
    return turn


def _call_without(call: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    plain = _keys_without(call, names)
    if isinstance(plain.get("function"), Mapping):
        plain["function"] = _keys_without(plain["function"], names)
    return plain


def _keys_without(value: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {key: inner for key, inner in value.items() if key not in names}


def unread_columns(
    row: Mapping[str, Any], read: frozenset[str] | None, also: frozenset[str] = frozenset()
) -> list[str]:
    """Return the columns of a row that carry something and that its format does not read.

    Args:
        row: with the fields of `data.columns`.
        read: `DataFormat.columns`.
        also: other columns that the stage reads.
    """
    if read is None:
        return []
    known = read | ROW_KEYS | also
    return [key for key, value in row.items() if key not in known and not is_nothing(value)]


def unread_loss_keys(row: Mapping[str, Any]) -> list[str]:
    """Return the places of the keys of `LOSS_KEYS` in turns of a row, such as "chosen[0].weight"."""
    found: list[str] = []
    for column in _TURN_COLUMNS:
        _add_loss_keys(row.get(column), column, found)
    return found


def _add_loss_keys(value: Any, where: str, found: list[str], depth: int = 2) -> None:
    """Add the places in a turn, in a list of turns, or in a list of such lists."""
    if isinstance(value, Mapping) and ("role" in value or "from" in value):
        found += [f"{where}.{key}" for key in LOSS_KEYS if not is_nothing(value.get(key))]
    elif isinstance(value, list) and depth:
        for i, inner in enumerate(value):
            _add_loss_keys(inner, f"{where}[{i}]", found, depth - 1)


def unknown_keys(turn: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the keys of a turn and of its calls that are unknown and carry something.

    Args:
        turn: in the form of OpenAI's API, as `Message.as_turn` returns it.

    Yields:
        The place of the key in the turn, such as ".tool_calls[0]", "" for the turn itself; the key; and the turn
        without it.
    """
    for key in _unknown(turn, TURN_KEYS):
        yield "", key, _keys_without(turn, {key})
    calls = turn.get("tool_calls") or []
    for i, call in enumerate(calls):
        function = call["function"]
        fewer = [(".function", key, {**call, "function": _keys_without(function, {key})})
                 for key in _unknown(function, _FUNCTION_KEYS)]  # fmt: skip
        fewer += [("", key, _keys_without(call, {key})) for key in _unknown(call, _CALL_KEYS)]
        for place, key, without in fewer:
            yield f".tool_calls[{i}]{place}", key, {**turn, "tool_calls": [*calls[:i], without, *calls[i + 1 :]]}


def _unknown(value: Mapping[str, Any], known: Set[str]) -> list[str]:
    return [key for key, inner in value.items() if key not in known and not is_nothing(inner)]
