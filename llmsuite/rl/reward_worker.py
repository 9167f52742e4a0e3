"""Rewards as a process without Paddle loads and calls them, see `llmsuite.rl.worker`."""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmsuite.errors import UserError
from llmsuite.python_files import from_file
from llmsuite.rl.checks import number_of, number_or_none, shown
from llmsuite.rl.completion import Completion
from llmsuite.rl.worker import describe, finished
from llmsuite.specs import Score

Values = list[list[float | None]]
"""For each completion its reward and the parts of it; None where there is none."""


@dataclasses.dataclass(frozen=True)
class RewardSource:
    """Where a reward comes from, such that another process can load it."""

    key: str
    """As in the recipe's `reward.functions`."""
    factory: bytes = b""
    """The pickled factory and section of a registered reward; empty for a function in a file."""
    parts: tuple[str, ...] = ()
    here: bool = False
    """Scored in the process that trains: no other loads it."""

    def serve(self) -> Callable[[Sequence[Completion]], tuple[Values, str]]:
        """What a call of it does, see `scored`. Raises UserError when it cannot be loaded."""
        return functools.partial(scored, self.load(), self.parts)

    def nothing(self, completions: Sequence[Completion]) -> Values:
        """The result of a call that has failed."""
        return [[None] * (1 + len(self.parts)) for _ in completions]

    def load(self) -> Score:
        """The function that scores.

        Raises:
            UserError: it cannot be loaded.
        """
        try:
            if self.factory:
                factory, section = pickle.loads(self.factory)
                score: Score = factory(section)
            else:
                score = from_file(self.key, "reward")
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # it is somebody else's code
            raise UserError(f"reward {self.key}: cannot be loaded: {describe(error)}") from error
        if not callable(score):
            what = f"its factory returned {score!r}, which" if self.factory else "it"
            raise UserError(f"reward {self.key}: {what} is no function that scores completions")
        return score


def scored(score: Score, parts: Sequence[str], completions: Sequence[Completion]) -> tuple[Values, str]:
    """The values that a reward gives, and why the first of them is missing that is.

    Args:
        score: the function.
        parts: names of the numbers that its mappings have beside "score".
        completions: of one call.
    """
    nothing: Values = [[None] * (1 + len(parts)) for _ in completions]
    try:
        found = finished(score(completions))
    except Exception as error:  # it is somebody else's code
        return nothing, describe(error)
    if isinstance(found, (str, bytes, Mapping)) or not hasattr(found, "__len__") or len(found) != len(completions):
        return nothing, f"it returned {shown(found)}, which is no list of {len(completions)} rewards"
    rows, why = nothing, ""
    for row, value in zip(rows, found):
        try:
            row[:] = _numbers(value, parts)
        except (TypeError, ValueError) as error:
            why = why or str(error)
            continue
        if row[0] is None:
            why = why or f"it returned {shown(value)}"
    return rows, why


def _numbers(value: Any, parts: Sequence[str]) -> list[float | None]:
    """A reward and its parts. Raises ValueError or TypeError when it is none; an error in its place says why."""
    if isinstance(value, Exception):
        raise ValueError(str(value))
    if isinstance(value, Mapping):
        if value.keys() != {"score", *parts}:
            raise ValueError(f"it returned the keys {sorted(map(str, value))}, not {sorted(['score', *parts])}")
        return [_score(value["score"]), *(_said(number_or_none, value[part]) for part in parts)]
    return [_score(value), *(None for _ in parts)]


def _score(value: Any) -> float | None:
    return None if value is None else _said(number_of, value)


def _said(read: Callable[[Any], float | None], value: Any) -> float | None:
    """A number as `read` takes it. Raises TypeError or ValueError with what was returned."""
    try:
        return read(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"it returned {error}") from error
