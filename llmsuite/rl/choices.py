"""The choices of a server's answer, read field by field: what is wrong in one is named with its place and its value.

All here raise ValueError where an answer is not what was asked for.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from llmsuite.rl.checks import check_length, log_probabilities, shown, token_ids
from llmsuite.rl.drawing import Drawing, Drawn


def field(data: Any, name: str, where: str) -> Any:
    """A field of an object at a place of an answer."""
    if not isinstance(data, dict):
        raise ValueError(f"{where} is {shown(data)}, not an object")
    if name not in data:
        raise ValueError(f"{where} has no {name!r}")
    return data[name]


def items(data: Any, name: str, where: str) -> list[Any]:
    """A field of an object that is a list."""
    found = field(data, name, where)
    if not isinstance(found, list):
        raise ValueError(f"{where}.{name} is {shown(found)}, not a list")
    return found


def choices_of(answer: Any, count: int) -> list[Any]:
    """The choices of an answer, in the order of their indices, which are 0 to `count` - 1."""
    rows = items(answer, "choices", "the answer")
    if len(rows) != count:
        raise ValueError(f"{len(rows)} choices in place of {count}")
    found: dict[int, Any] = {}
    for i, row in enumerate(rows):
        index = field(row, "index", f"choices[{i}]")
        if type(index) is not int or not 0 <= index < count or index in found:
            raise ValueError(f"choices[{i}].index is {shown(index)}; they have to be 0 to {count - 1}, each once")
        found[index] = row
    return [found[index] for index in range(count)]


def completion_of(
    row: Any, logprobs: Any, drawing: Drawing, stop_ids: Collection[int], vocab_size: int, where: str
) -> Drawn:
    """The completion of a choice.

    Args:
        row: the choice.
        logprobs: of its tokens.
        drawing: what was asked for.
        stop_ids: tokens that end a completion.
        vocab_size: of the model.
        where: the place of the choice.
    """
    ids = token_ids(field(row, "token_ids", where), vocab_size, f"{where}.token_ids")
    values = log_probabilities(logprobs, f"{where}.logprobs")
    check_length(ids, values, drawing.max_completion_length, where)
    reason = field(row, "finish_reason", where)
    if reason not in ("stop", "length") or (reason == "stop") != (ids[-1] in stop_ids):
        raise ValueError(f"{where} ends with token {ids[-1]} and finish_reason {shown(reason)}")
    return Drawn(np.zeros(0), ids, values, reason)
