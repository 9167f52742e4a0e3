"""A worker process for user code, without Paddle, started by `llmsuite.rl.worker_pool`.

Over a pipe it receives the sources to load, and reports an error if one cannot be loaded. Then it receives calls, and
sends each result when it is available.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from llmsuite.base.errors import UserError


class Source(Protocol):
    """The source of a function, which is pickled so that another process can load it."""

    @property
    def key(self) -> str:
        """Its name in the recipe."""

    @property
    def in_main(self) -> bool:
        """True for a function that runs in the training process; workers do not load it."""

    def make_handler(self) -> Callable[[Any], tuple[Any, str]]:
        """Load the function that handles calls. It returns its result, and an error message if a part of it is missing;
        it never raises. Raises UserError when it cannot be loaded."""

    def failed_result(self, payload: Any) -> Any:
        """Return the result of a call that has timed out or has ended its process."""


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One event loop for the life of the process: connections that user code opens belong to it."""
    return asyncio.new_event_loop()


def finished(result: Any) -> Any:
    """The result of a user function; a coroutine is run to completion first, and its errors are raised."""
    if inspect.iscoroutine(result):
        return _loop().run_until_complete(result)
    return result


def describe(error: BaseException) -> str:
    """An error in one line, with the line of code that raised it; a UserError is its message alone."""
    if isinstance(error, UserError):
        return str(error)
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = ""
    if trace is not None:
        where = f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})"
    return f"{type(error).__name__}: {error}{where}"


def main(pipe: int) -> None:
    """Serve calls until the other end closes. `pipe` is a file descriptor."""
    os.set_inheritable(pipe, False)
    connection = Connection(pipe)
    own = os.getpid()
    try:
        sources: Sequence[Source] = connection.recv()
        try:
            functions = {i: source.make_handler() for i, source in enumerate(sources) if not source.in_main}
        except UserError as error:
            connection.send(str(error))
            return
        connection.send(None)
        while True:
            for number, which, payload in connection.recv():
                result = functions[which](payload)
                if os.getpid() != own:  # a fork made by the function has returned as well
                    os._exit(0)
                connection.send((number, *result))
    except (EOFError, ConnectionError, KeyboardInterrupt):  # the other end has closed, maybe while data was on its way
        return
