"""A process that scores completions, without Paddle: started by `llmsuite.rl.reward_pool`.

Over a pipe it gets the rewards it is to load, says which of them it could not, then gets calls, and sends the result of
each as it has it.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from llmsuite.errors import UserError
from llmsuite.launch.ranks import die_with_parent
from llmsuite.python_files import import_file
from llmsuite.rl.completion import Completion
from llmsuite.schema.reward import python_function
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
                score = _of_file(self.key)
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # it is somebody else's code
            raise UserError(f"reward {self.key}: cannot be loaded: {describe(error)}") from error
        if not callable(score):
            raise UserError(f"reward {self.key}: is no function")
        return score


def describe(error: BaseException) -> str:
    """An error in one line, with the line of code it comes from."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})"
    return f"{type(error).__name__}: {error}{where}"


def scored(score: Score, parts: Sequence[str], completions: Sequence[Completion]) -> tuple[Values, str]:
    """The values that a reward gives, and why the first of them is missing that is.

    Args:
        score: the function.
        parts: names of the numbers that its mappings have beside "score".
        completions: of one call.
    """
    nothing: Values = [[None] * (1 + len(parts)) for _ in completions]
    try:
        found = score(completions)
    except Exception as error:  # it is somebody else's code
        return nothing, describe(error)
    if isinstance(found, (str, bytes, Mapping)) or not hasattr(found, "__len__") or len(found) != len(completions):
        return nothing, f"it returned {found!r:.200}, which is no list of {len(completions)} rewards"
    rows, why = nothing, ""
    for row, value in zip(rows, found):
        try:
            row[:] = _numbers(value, parts)
        except (TypeError, ValueError) as error:
            why = why or str(error)
            continue
        if row[0] is None:
            why = why or f"it returned {value!r:.200}"
    return rows, why


def _numbers(value: Any, parts: Sequence[str]) -> list[float | None]:
    """A reward and its parts. Raises ValueError or TypeError when it is none."""
    if isinstance(value, Mapping):
        if value.keys() != {"score", *parts}:
            raise ValueError(f"it returned the keys {sorted(map(str, value))}, not {sorted(['score', *parts])}")
        return [_number(value["score"]), *(_number(value[part]) for part in parts)]
    return [_number(value), *(None for _ in parts)]


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, (str, bytes)):
        raise TypeError(f"it returned {value!r:.200}, which is no number")
    number = float(value)
    return number if math.isfinite(number) else None


def _of_file(key: str) -> Score:
    """The function "FILE.py:FUNCTION"; its file is imported as the neighbour of a script is."""
    parsed = python_function(key)
    assert parsed is not None, key
    path, name = Path(parsed[0]).resolve(), parsed[1]
    module = sys.modules.get(path.stem)
    if module is None:
        module = import_file(path)
    elif Path(getattr(module, "__file__", None) or "").resolve() != path:
        raise UserError(f"reward {key}: a module {path.stem!r} is imported already; give the file another name")
    if not hasattr(module, name):
        raise UserError(f"reward {key}: {path} has no function {name!r}")
    function: Score = getattr(module, name)
    return function


def main(pipe: int) -> None:
    """Serve calls until the other end closes. `pipe` is a file descriptor."""
    die_with_parent()
    connection = Connection(pipe)
    try:
        sources: list[RewardSource] = connection.recv()
        try:
            functions = {i: (source.load(), source.parts) for i, source in enumerate(sources) if not source.here}
        except UserError as error:
            connection.send(str(error))
            return
        connection.send(None)
        while True:
            for number, which, completions in connection.recv():
                score, parts = functions[which]
                connection.send((number, *scored(score, parts, completions)))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
