"""What is waited for from the scheduler: the answers to a request, and what else is made for one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from fastapi import HTTPException, Request

from llmsuite.errors import UserError
from llmsuite.inference.batch import Line
from llmsuite.serving.scheduler import Busy, BusyClient, Closing, Paused, Scheduler
from llmsuite.serving.turns import Client

PATIENCE = 0.5
"""Seconds between two looks whether a client is still there."""
_CLOSING = "the server is shutting down"
_FAILED = "the model could not go on; see the server's log"


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some text of one answer to a request."""

    number: int
    text: str
    ended: bool
    num_logprobs: int
    """How many tokens of the answer have log-probabilities by now."""


class Job:
    """The answers to one request, as they come."""

    def __init__(self, lines: Sequence[Line], scheduler: Scheduler, deadline: float, client: Client):
        """Submit the lines of a client; `deadline` is a time of `time.monotonic`. Raises Busy."""
        self.lines = lines
        self._scheduler, self._deadline = scheduler, deadline
        self._pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listener(number: int) -> Any:
            def on_token(text: str, ended: bool) -> None:
                piece = Piece(number, text, ended, len(lines[number].logprobs))
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                    loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

            return on_token

        begun = [number for number, line in enumerate(lines) if line.finished is None]  # all, or none of no tokens
        self._num_open = len(begun)
        scheduler.submit([lines[number] for number in begun], [listener(number) for number in begun], client)

    async def pieces(self) -> AsyncIterator[Piece]:
        """The pieces of all answers, until each has ended. Raises HTTPException when one cannot."""
        num_open, left = self._num_open, max(0.0, self._deadline - time.monotonic())
        # not by asyncio.wait_for, which before Python 3.12 loses a cancellation that comes together with a piece
        alarm = asyncio.get_running_loop().call_later(left, self._pieces.put_nowait, None)
        try:
            while num_open:
                piece = await self._pieces.get()
                if piece is None:
                    raise HTTPException(504, "the answer took longer than the server's request_timeout")
                if piece.ended and self.lines[piece.number].finished is None:
                    raise _failure(self.lines[piece.number].error)
                num_open -= piece.ended
                yield piece
        finally:
            alarm.cancel()
            self._scheduler.cancel([line for line in self.lines if line.finished is None])


async def waited(request: Request, future: concurrent.futures.Future[Any], deadline: float) -> Any:
    """The result of what the scheduler was asked for; it is left out of the queue when the client goes.

    Args:
        request: whose client waits.
        future: the result.
        deadline: a time of `time.monotonic`.

    Raises:
        HTTPException: it took too long, or the server ends.
    """
    waiting = asyncio.wrap_future(future)
    try:
        while not waiting.done():
            await asyncio.wait([waiting], timeout=PATIENCE)
            if not waiting.done() and time.monotonic() > deadline:
                raise HTTPException(504, "the answer took longer than the server's request_timeout")
            if not waiting.done() and await request.is_disconnected():
                raise HTTPException(499, "the client has gone")
        if waiting.cancelled():
            raise Closing
        return waiting.result()
    except Closing:
        raise HTTPException(503, _CLOSING) from None
    finally:
        waiting.cancel()


def _failure(error: Exception | None) -> HTTPException:
    """The answer to a request one of whose lines has failed."""
    if isinstance(error, Closing):
        return HTTPException(503, _CLOSING)
    return HTTPException(500, str(error) if isinstance(error, UserError) else _FAILED)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turns what a scheduler raises into answers."""
    try:
        yield
    except BusyClient:
        raise HTTPException(429, "as many answers wait as one client may ask for at once; try again later") from None
    except Busy:
        raise HTTPException(429, "the server has no room for more requests; try again later") from None
    except Closing:
        raise HTTPException(503, _CLOSING) from None
    except Paused:
        raise HTTPException(503, "the server is paused; try again after /v1/resume") from None
