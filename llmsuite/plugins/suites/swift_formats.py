"""Data formats for data sets that ms-swift reads by rules of its own, for recipes made of its files.

Each makes the same turns of a row as ms-swift's preprocessor of that data set, and raises ValueError for a row that
ms-swift leaves out. They are chosen by name only: the rows look like those of other data sets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmsuite.contract.specs import DataFormat
from llmsuite.data.conversation_formats import query_response
from llmsuite.data.keys import ROW_KEYS
from llmsuite.data.preference_formats import alpaca_preference
from llmsuite.data.rows import Conversation, Preference
from llmsuite.data.turns import Row, get_text

_INPUT = "输入\uff1a"
"""Text in front of some inputs of alpaca-gpt4-data-zh."""
_ANSWER = "Answer: "
"""Text in front of some answers of LongAlpaca-12k."""
_SELECTOR = "\ufe0f"
"""Variation selector after an emoji, which ms-swift removes."""
_QUESTIONS = ("query", "prompt", "input", "instruction", "question", "problem")
"""Columns that ms-swift takes for the question."""
_EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
_NO_THINK = " /no_think"


def alpaca_zh(row: Row) -> Conversation:
    """`{"instruction", "input", "output"}`, without the word for an input at its begin."""
    extra = _text(row, "input")
    if extra is not None:
        extra = extra.removeprefix(_INPUT)
    return _alpaca(row, extra, get_text(row, "output"))


def long_alpaca(row: Row) -> Conversation:
    """`{"instruction", "input", "output"}`, without "Answer: " at the begin of the output."""
    output = get_text(row, "output")
    if output.startswith(_ANSWER):
        output = output.removeprefix(_ANSWER).strip()
    return _alpaca(row, _text(row, "input"), output)


def self_cognition_qwen3(row: Row) -> Conversation:
    """`{"query", "response"}`: the question asks for no thought, and the answer begins with an empty one."""
    query = get_text(row, "query") + _NO_THINK
    return query_response({**_shared(row), "query": query, "response": _EMPTY_THOUGHT + get_text(row, "response")})


def self_cognition_empty_think(row: Row) -> Conversation:
    """`{"query", "response"}`: the answer begins with an empty thought."""
    response = _EMPTY_THOUGHT + get_text(row, "response")
    return query_response({**_shared(row), "query": get_text(row, "query"), "response": response})


def emoji_pairs(row: Row) -> Preference:
    """`{"question", "answer_zh", "answer_en"}`: the answer in Chinese is preferred. Variation selectors are removed."""
    names = [name for name in _QUESTIONS if name in row]
    if "query" not in names and len(names) != 1:
        raise ValueError(f"has the questions {names}; one of {', '.join(_QUESTIONS)} is needed")
    question, chosen, rejected = (
        get_text(row, name).replace(_SELECTOR, "") for name in (names[0], "answer_zh", "answer_en")
    )
    if chosen == rejected:
        raise ValueError("has two equal answers")
    return alpaca_preference({**_shared(row), "instruction": question, "chosen": chosen, "rejected": rejected})


def _alpaca(row: Row, extra: str | None, answer: str) -> Conversation:
    """Return the turns of an instruction and its input, of which one may be empty or null."""
    instruction = _text(row, "instruction")
    query = f"{instruction}\n{extra}" if instruction and extra else instruction or extra
    if query is None:
        raise ValueError("has neither an instruction nor an input")
    return query_response({**_shared(row), "query": query, "response": answer})


def _text(row: Row, key: str) -> str | None:
    """Return the text of a column; None if it is null or missing."""
    return None if row.get(key) is None else get_text(row, key)


def _shared(row: Row) -> dict[str, Any]:
    """Return the columns that every conversation may have."""
    return {key: row[key] for key in (*ROW_KEYS, "history") if key in row}


def _never(row: Mapping[str, Any]) -> bool:
    """Return False: no row is recognised, as its columns do not tell the data set."""
    return False


def _format(
    name: str, convert: Callable[[Row], Any], data_set: str, columns: Sequence[str], *more_columns: str
) -> DataFormat:
    """Return the format for the rows of a data set.

    Args:
        name: value of `data.format`.
        convert: converts a row.
        data_set: name in ms-swift.
        columns: shown in lists of formats.
        more_columns: columns that a row may have besides these, and besides earlier turns.
    """
    return DataFormat(
        name=name,
        help=f"{', '.join(columns)}; as {data_set} in ms-swift, only by name",
        kind="preference" if convert is emoji_pairs else "conversation",
        matches=_never,
        convert=convert,
        columns=frozenset({*columns, *more_columns, "history"}),
    )


_ALPACA = ("instruction", "input", "output")
_QUERY = ("query", "response")
_PAIR = ("question", "answer_zh", "answer_en")
FORMATS = [
    _format("swift_alpaca_zh", alpaca_zh, "alpaca-gpt4-data-zh", _ALPACA),
    _format("swift_long_alpaca", long_alpaca, "LongAlpaca-12k", _ALPACA),
    _format("swift_self_cognition_qwen3", self_cognition_qwen3, "self-cognition:qwen3", _QUERY),
    _format("swift_self_cognition_empty_think", self_cognition_empty_think, "self-cognition:empty_think", _QUERY),
    _format("swift_emoji_pairs", emoji_pairs, "shareAI-Llama3-DPO-zh-en-emoji", _PAIR, *_QUESTIONS),
]
