"""Rewards in worker processes without Paddle (`llmsuite.rl.worker`): how they are loaded and called."""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.python_files import from_file
from llmsuite.contract.specs import Score
from llmsuite.rl.checks import number_of, number_or_none, shown
from llmsuite.rl.completion import Completion
from llmsuite.rl.worker import describe, finished

Values = list[list[float | None]]
"""For each completion, its reward followed by its parts; None for a missing value."""


@dataclasses.dataclass(frozen=True)
class RewardSource:
    """The source of a reward, in a form that another process can load."""

    key: str
    """The name in `reward.functions` of the recipe."""
    factory: bytes = b""
    """The pickled factory and section of a registered reward; empty for a function in a file."""
    parts: tuple[str, ...] = ()
    in_main: bool = False
    """True for a reward that is computed in the training process; workers do not load it."""

    def make_handler(self) -> Callable[[Sequence[Completion]], tuple[Values, str]]:
        """Load the reward and return `scored` with it. Raises UserError when it cannot be loaded."""
        return functools.partial(scored, self.load(), self.parts)

    def failed_result(self, completions: Sequence[Completion]) -> Values:
        """Return the result of a call that has failed: every value is missing."""
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
        except (Exception, SystemExit) as error:  # user code may raise anything
            raise UserError(f"reward {self.key}: cannot be loaded: {describe(error)}") from error
        if not callable(score):
            what = "it"
            if self.factory:
                what = f"its factory returned {score!r}, which"
            raise UserError(f"reward {self.key}: {what} is not a function that scores completions")
        return score


def scored(score: Score, parts: Sequence[str], completions: Sequence[Completion]) -> tuple[Values, str]:
    """Call a reward. Returns its values, and the reason for the first missing one, or "".

    Args:
        score: the function.
        parts: the keys of its mappings other than "score".
        completions: of one call.
    """
    missing: Values = [[None] * (1 + len(parts)) for _ in completions]
    try:
        found = finished(score(completions))
    except Exception as error:  # user code may raise anything
        return missing, describe(error)
    is_list = isinstance(found, Sized) and not isinstance(found, (str, bytes, Mapping))
    if not is_list or len(found) != len(completions):
        return missing, f"it returned {shown(found)}, which is not a list of {len(completions)} rewards"
    rows = missing
    why = ""
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
    """A reward followed by its parts. Raises ValueError or TypeError when it is none. A reward may return an error
    instead of a value: then with its message."""
    if isinstance(value, Exception):
        raise ValueError(str(value))
    if isinstance(value, Mapping):
        if value.keys() != {"score", *parts}:
            raise ValueError(f"it returned the keys {sorted(map(str, value))}, not {sorted(['score', *parts])}")
        return [_score(value["score"]), *(_converted(number_or_none, value[part]) for part in parts)]
    return [_score(value), *(None for _ in parts)]


def _score(value: Any) -> float | None:
    if value is None:
        return None
    return _converted(number_of, value)


def _converted(read: Callable[[Any], float | None], value: Any) -> float | None:
    """`read(value)`. Raises its TypeError or ValueError with "it returned" in front."""
    try:
        return read(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"it returned {error}") from error
