"""A process that runs somebody else's code, without Paddle: started by `llmsuite.rl.worker_pool`.

Over a pipe it gets the sources it is to load, says which of them it could not, then gets calls, and sends the result of
each as it has it.
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

from llmsuite.errors import UserError


class Source(Protocol):
    """Where a function comes from, such that another process can load it: it is pickled."""

    @property
    def key(self) -> str:
        """As the recipe has it."""

    @property
    def here(self) -> bool:
        """Called in the process that trains: no other loads it."""

    def serve(self) -> Callable[[Any], tuple[Any, str]]:
        """The function: it returns its result and why something of it is missing, and raises nothing. Raises UserError
        when it cannot be loaded."""

    def nothing(self, payload: Any) -> Any:
        """The result of a call that has taken too long or has ended its process."""


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One for the life of the process: what somebody's code has opened belongs to it."""
    return asyncio.new_event_loop()


def finished(result: Any) -> Any:
    """What a function of somebody's returns; an async one is run to its end first. Raises what it raises."""
    return _loop().run_until_complete(result) if inspect.iscoroutine(result) else result


def describe(error: BaseException) -> str:
    """An error in one line, with the line of code it comes from; one for the user says all by itself."""
    if isinstance(error, UserError):
        return str(error)
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})"
    return f"{type(error).__name__}: {error}{where}"


def main(pipe: int) -> None:
    """Serve calls until the other end closes. `pipe` is a file descriptor."""
    os.set_inheritable(pipe, False)
    connection, own = Connection(pipe), os.getpid()
    try:
        sources: Sequence[Source] = connection.recv()
        try:
            functions = {i: source.serve() for i, source in enumerate(sources) if not source.here}
        except UserError as error:
            connection.send(str(error))
            return
        connection.send(None)
        while True:
            for number, which, payload in connection.recv():
                result = functions[which](payload)
                if os.getpid() != own:  # a fork that the function made has come back too
                    os._exit(0)
                connection.send((number, *result))
    except (EOFError, ConnectionError, KeyboardInterrupt):  # ended, or killed with bytes on their way
        return
