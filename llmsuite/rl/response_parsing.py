"""Parsing of a rollout server's response, field by field. An error names the location and the value.

All functions raise ValueError when a response is not what was requested.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from llmsuite.inference.group_sampling import SampledCompletion, SamplingParams
from llmsuite.rl.checks import check_length, log_probabilities, shown, token_ids


def field(data: Any, name: str, where: str) -> Any:
    """A field of the object at a location of a response."""
    if not isinstance(data, dict):
        raise ValueError(f"{where} is {shown(data)}, not an object")
    if name not in data:
        raise ValueError(f"{where} has no {name!r}")
    return data[name]


def items(data: Any, name: str, where: str) -> list[Any]:
    """A field whose value is a list."""
    found = field(data, name, where)
    if not isinstance(found, list):
        raise ValueError(f"{where}.{name} is {shown(found)}, not a list")
    return found


def choices_of(answer: Any, count: int) -> list[Any]:
    """The choices of a response, in the order of their indices, which are 0 to `count` - 1."""
    rows = items(answer, "choices", "the answer")
    if len(rows) != count:
        raise ValueError(f"{len(rows)} choices instead of {count}")
    by_index: dict[int, Any] = {}
    for i, row in enumerate(rows):
        index = field(row, "index", f"choices[{i}]")
        if type(index) is not int or not 0 <= index < count or index in by_index:
            raise ValueError(
                f"choices[{i}].index is {shown(index)}; the indices have to be 0 to {count - 1}, each once"
            )
        by_index[index] = row
    return [by_index[index] for index in range(count)]


def completion_of(
    row: Any, logprobs: Any, sampling_params: SamplingParams, stop_ids: Collection[int], vocab_size: int, where: str
) -> SampledCompletion:
    """The completion of a choice.

    Args:
        row: the choice.
        logprobs: of its tokens.
        sampling_params: of the request.
        stop_ids: tokens that end a completion.
        vocab_size: of the model.
        where: the location of the choice in the response.
    """
    ids = token_ids(field(row, "token_ids", where), vocab_size, f"{where}.token_ids")
    values = log_probabilities(logprobs, f"{where}.logprobs")
    check_length(ids, values, sampling_params.max_completion_length, where)
    reason = field(row, "finish_reason", where)
    if reason not in ("stop", "length") or (reason == "stop") != (ids[-1] in stop_ids):
        raise ValueError(f"{where} ends with token {ids[-1]} and finish_reason {shown(reason)}")
    return SampledCompletion(np.zeros(0), ids, values, reason)
