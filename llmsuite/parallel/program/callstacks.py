"""Programs without the Python stack that each of their operations was made in."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

_NONE = traceback.StackSummary()


@contextlib.contextmanager
def without_callstacks() -> Iterator[None]:
    """While active, operations that are made do not note where in Python. Paddle 3.3.1 asks `traceback` for each of
    them, which takes a third of the time in which a program is made, and never lets go of the answers: some 10 KB an
    operation."""
    before = traceback.extract_stack
    traceback.extract_stack = lambda *_, **__: _NONE
    try:
        yield
    finally:
        traceback.extract_stack = before
