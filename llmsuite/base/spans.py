"""Named spans of time in which this rank does one thing, such as a forward pass, for a trace of its steps.

Where no trace is recorded, a span is an object that does nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Recorder = Callable[[str], AbstractContextManager[Any]]
"""Returns a context manager that records the time of its block under a name."""

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()
_recorder: Recorder | None = None


def record(recorder: Recorder | None) -> None:
    """Record the spans that begin from now on, in every thread of this process; None to record none."""
    global _recorder
    _recorder = recorder


def is_recording() -> bool:
    """Return True where spans are recorded."""
    return _recorder is not None


def span(name: str) -> AbstractContextManager[Any]:
    """Return a context manager for the block that the name describes."""
    return _NOTHING if _recorder is None else _recorder(name)


def spanned(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator: each call of the function is a span of this name."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
            with span(name):
                return function(*args, **kwargs)

        return wrapper

    return decorate
