"""Numbers of other people's code and machines, checked where they come in: later they overflow, or index memory."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Sequence
from typing import Any

LARGEST = (2 - 2**-23) * 2.0**127
"""The largest number of float32."""
ROUNDING = 1e-6
"""How far above 0 a log-probability may be: that of a token that is certain is rounded. It is taken as 0."""
LEAST_LOGPROB = -1e4
"""No token is drawn whose log-probability is less: random numbers have 53 bits."""
MOST_TOKENS = 1 << 24
"""More than any vocabulary has."""
_SHOWN = 200


def number_of(value: Any) -> float:
    """A number that float32 can hold.

    Raises:
        TypeError, ValueError: it is none; the text goes on from "it returned".
    """
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{shown(value)}, which is no number, though it may look like one")
    too_large = f"which is too large: float32 ends at {LARGEST:.3g}"
    try:
        number = float(value)
    except OverflowError as error:  # of an integer
        raise ValueError(f"{shown(value)}, {too_large}") from error
    except Exception as error:  # an object may be somebody else's code
        raise TypeError(f"{shown(value)}, which is no number") from error
    if not math.isfinite(number):
        raise ValueError(f"{shown(value)}, which is not finite")
    if abs(number) > LARGEST:
        raise ValueError(f"{shown(value)}, {too_large}")
    return number


def number_or_none(value: Any) -> float | None:
    """The same, None in place of ValueError and of None. Raises TypeError."""
    if value is None:
        return None
    try:
        return number_of(value)
    except ValueError:
        return None


def shown(value: Any) -> str:
    """A value in a message, in so many characters that a line has room for it."""
    try:
        return f"{value!r:.{_SHOWN}}"
    except Exception:  # of somebody else's code; and Python writes out no integer of thousands of digits
        return f"a value of type {type(value).__name__}"


def token_ids(given: Any, vocab_size: int, where: str) -> list[int]:
    """Token ids of a completion. Raises ValueError where they are none of the vocabulary."""
    found = _all_of(given, numbers.Integral, where, "token id")
    at = next((i for i, token in enumerate(found) if not 0 <= token < vocab_size), None)
    if at is not None:
        raise ValueError(f"{where}[{at}] is {shown(found[at])}; the vocabulary has the ids 0 to {vocab_size - 1}")
    return [int(token) for token in found]


def log_probabilities(given: Any, where: str) -> list[float]:
    """Log-probabilities of tokens that were drawn. Raises ValueError where they can be none."""
    found = _all_of(given, numbers.Real, where, "number")
    at = next((i for i, value in enumerate(found) if not LEAST_LOGPROB <= value <= ROUNDING), None)
    if at is not None:
        raise ValueError(
            f"{where}[{at}] is {shown(found[at])}; the log-probability of a token that was drawn is at most 0, and not "
            f"below {LEAST_LOGPROB:g}"
        )
    return [min(float(value), 0.0) for value in found]


def check_length(ids: Sequence[int], logprobs: Sequence[float], most: int, where: str) -> None:
    """Raises ValueError where a completion has no tokens, too many, or another number of log-probabilities."""
    if len(ids) != len(logprobs):
        raise ValueError(f"{where} has {len(ids)} tokens and {len(logprobs)} log-probabilities")
    if not 1 <= len(ids) <= most:
        raise ValueError(f"{where} has {len(ids)} tokens; 1 to {most} were asked for")


def _all_of(given: Any, kind: type, where: str, what: str) -> Sequence[Any]:
    """A list whose items are all of a kind, and none true or false. Raises ValueError where it is none."""
    found = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(found, (list, tuple)):
        raise ValueError(f"{where} is {shown(given)}, not a list")
    types = set(map(type, found))
    if bool in types or not all(issubclass(each, kind) for each in types):
        wrong = (each is bool or not issubclass(each, kind) for each in map(type, found))
        at = next(itertools.compress(itertools.count(), wrong))
        raise ValueError(f"{where}[{at}] is {shown(found[at])}, which is no {what}")
    return found
