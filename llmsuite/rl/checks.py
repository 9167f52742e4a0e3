"""Checks of numbers from user code, plugins and servers, made on receipt: a wrong value could later overflow, or index
memory out of bounds."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Sequence
from typing import Any

LARGEST = (2 - 2**-23) * 2.0**127
"""The largest number of float32."""
ROUNDING = 1e-6
"""The amount by which a log-probability may exceed 0, by rounding, for a token of probability 1. It is clamped to 0."""
MIN_LOGPROB = -1e4
"""Less than any token with positive probability in float32 has; random numbers of 53 bits never sample such a token."""
MAX_VOCAB_SIZE = 1 << 24
"""More tokens than any vocabulary has."""
_MAX_SHOWN = 200
"""Characters of a value in a message."""


def number_of(value: Any) -> float:
    """A number that float32 can hold.

    Raises:
        TypeError, ValueError: it is not such a number; the message continues "it returned".
    """
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{shown(value)}, which is a text, not a number")
    too_large = f"which is too large: float32 ends at {LARGEST:.3g}"
    try:
        number = float(value)
    except OverflowError as error:  # of an integer
        raise ValueError(f"{shown(value)}, {too_large}") from error
    except Exception as error:  # conversion may run user code
        raise TypeError(f"{shown(value)}, which is not a number") from error
    if not math.isfinite(number):
        raise ValueError(f"{shown(value)}, which is not finite")
    if abs(number) > LARGEST:
        raise ValueError(f"{shown(value)}, {too_large}")
    return number


def number_or_none(value: Any) -> float | None:
    """`number_of`, with None for None and for a number that float32 cannot hold. Raises TypeError for anything else."""
    if value is None:
        return None
    try:
        return number_of(value)
    except ValueError:
        return None


def shown(value: Any) -> str:
    """A value for a message, truncated to a readable length."""
    try:
        return f"{value!r:.{_MAX_SHOWN}}"
    except Exception:  # user code; Python also refuses to print an integer of thousands of digits
        return f"a value of type {type(value).__name__}"


def token_ids(given: Any, vocab_size: int, where: str) -> list[int]:
    """Token ids of a completion. Raises ValueError for any that is not in the vocabulary."""
    found = _all_of(given, numbers.Integral, where, "token id")
    wrong = next((i for i, token in enumerate(found) if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ValueError(f"{where}[{wrong}] is {shown(found[wrong])}; the vocabulary has the ids 0 to {vocab_size - 1}")
    return [int(token) for token in found]


def log_probabilities(given: Any, where: str) -> list[float]:
    """Log-probabilities of sampled tokens, clamped to 0. Raises ValueError for a value that is none."""
    found = _all_of(given, numbers.Real, where, "number")
    wrong = next((i for i, value in enumerate(found) if not MIN_LOGPROB <= value <= ROUNDING), None)
    if wrong is not None:
        raise ValueError(
            f"{where}[{wrong}] is {shown(found[wrong])}; the log-probability of a sampled token is at most 0, and not "
            f"below {MIN_LOGPROB:g}"
        )
    return [min(float(value), 0.0) for value in found]


def check_length(ids: Sequence[int], logprobs: Sequence[float], max_length: int, where: str) -> None:
    """Raise ValueError unless a completion has 1 to `max_length` tokens and a log-probability for each."""
    if len(ids) != len(logprobs):
        raise ValueError(f"{where} has {len(ids)} tokens and {len(logprobs)} log-probabilities")
    if not 1 <= len(ids) <= max_length:
        raise ValueError(f"{where} has {len(ids)} tokens; 1 to {max_length} were requested")


def _all_of(given: Any, kind: type, where: str, what: str) -> Sequence[Any]:
    """A list whose items are all of a type, but not bool. Raises ValueError for anything else.

    It compares the set of types first, as checking item by item is slow for long completions.
    """
    found = given
    if hasattr(given, "tolist"):
        found = given.tolist()
    if not isinstance(found, (list, tuple)):
        raise ValueError(f"{where} is {shown(given)}, not a list")
    types = set(map(type, found))
    if bool in types or not all(issubclass(each, kind) for each in types):
        is_wrong = (each is bool or not issubclass(each, kind) for each in map(type, found))
        wrong = next(itertools.compress(itertools.count(), is_wrong))
        raise ValueError(f"{where}[{wrong}] is {shown(found[wrong])}, which is not a {what}")
    return found
