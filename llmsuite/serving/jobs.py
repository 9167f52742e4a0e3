"""Waiting for the scheduler: the answers to a request, and the results of other work."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from fastapi import HTTPException, Request
from fastapi.responses import StreamingResponse

from llmsuite.base.errors import UserError
from llmsuite.inference.batch import DecodingSequence
from llmsuite.serving.fair_queue import Client
from llmsuite.serving.limits import Message, Receive, Send
from llmsuite.serving.scheduler import Busy, BusyClient, Closing, Paused, Scheduler

POLL_SECONDS = 0.5
"""Seconds between two checks that a client is still connected."""
_CLOSING = "the server is shutting down"
_FAILED = "the model could not continue; see the server's log"


@dataclasses.dataclass(frozen=True)
class TextDelta:
    """New text of one answer to a request."""

    number: int
    text: str
    has_ended: bool
    num_logprobs: int
    """Tokens of the answer that have log-probabilities by now."""


class Job:
    """The answers to one request, as they are decoded."""

    def __init__(self, sequences: Sequence[DecodingSequence], scheduler: Scheduler, deadline: float, client: Client):
        """Submit the sequences of a client; `deadline` is a time of `time.monotonic`. Raises Busy."""
        self.sequences = sequences
        self._scheduler = scheduler
        self._deadline = deadline
        self._deltas: asyncio.Queue[TextDelta | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listener(number: int) -> Any:
            def on_token(text: str, has_ended: bool) -> None:
                delta = TextDelta(number, text, has_ended, len(sequences[number].logprobs))
                with contextlib.suppress(RuntimeError):  # the loop is closed: the client no longer waits
                    loop.call_soon_threadsafe(self._deltas.put_nowait, delta)

            return on_token

        # all of them, or none where an answer may have no tokens
        unfinished = [number for number, sequence in enumerate(sequences) if sequence.finish_reason is None]
        self._num_open = len(unfinished)
        listeners = [listener(number) for number in unfinished]
        scheduler.submit([sequences[number] for number in unfinished], listeners, client)

    async def deltas(self) -> AsyncIterator[TextDelta]:
        """Yield the deltas of all answers, until each has ended. Raises HTTPException when one fails."""
        num_open = self._num_open
        left = max(0.0, self._deadline - time.monotonic())
        # not by asyncio.wait_for, which before Python 3.12 loses a cancellation that comes together with a delta
        alarm = asyncio.get_running_loop().call_later(left, self._deltas.put_nowait, None)
        try:
            while num_open:
                delta = await self._deltas.get()
                if delta is None:
                    raise HTTPException(504, "the answer took longer than the server's request_timeout")
                if delta.has_ended and self.sequences[delta.number].finish_reason is None:
                    raise _failure(self.sequences[delta.number].error)
                num_open -= delta.has_ended
                yield delta
                # neither a delta that is there already nor an event that fits the buffer lets others have a turn
                await asyncio.sleep(0)
        finally:
            alarm.cancel()
            self.cancel()

    def cancel(self) -> None:
        """End the answers that have not ended: nobody waits for them."""
        self._scheduler.cancel([sequence for sequence in self.sequences if sequence.finish_reason is None])


class StreamedAnswer(StreamingResponse):
    """The answers of a job as server-sent events. The job ends with the response, also where the client has left before
    the first event: then nobody runs the generator of the events, and it cannot end the job."""

    def __init__(self, events: AsyncIterator[str], job: Job):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._job = job

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


async def wait_for_result(request: Request, future: concurrent.futures.Future[Any], deadline: float) -> Any:
    """Wait for a result of the scheduler; the work is cancelled when the client disconnects.

    Args:
        request: whose client waits.
        future: the result.
        deadline: a time of `time.monotonic`.

    Returns:
        The result.

    Raises:
        HTTPException: it took too long, or the server shuts down.
    """
    waiting = asyncio.wrap_future(future)
    try:
        while not waiting.done():
            await asyncio.wait([waiting], timeout=POLL_SECONDS)
            if not waiting.done() and time.monotonic() > deadline:
                raise HTTPException(504, "the answer took longer than the server's request_timeout")
            if not waiting.done() and await request.is_disconnected():
                raise HTTPException(499, "the client has disconnected")
        if waiting.cancelled():
            raise Closing
        return waiting.result()
    except Closing:
        raise HTTPException(503, _CLOSING) from None
    finally:
        waiting.cancel()


def _failure(error: Exception | None) -> HTTPException:
    """The response to a request one of whose sequences has failed."""
    if isinstance(error, Closing):
        return HTTPException(503, _CLOSING)
    return HTTPException(500, str(error) if isinstance(error, UserError) else _FAILED)


@contextlib.contextmanager
def as_http_errors() -> Iterator[None]:
    """Turn the exceptions of a scheduler into HTTP errors."""
    try:
        yield
    except BusyClient:
        message = "one client may not have more answers waiting at the same time; try again later"
        raise HTTPException(429, message) from None
    except Busy:
        raise HTTPException(429, "the server has no room for more requests; try again later") from None
    except Closing:
        raise HTTPException(503, _CLOSING) from None
    except Paused:
        raise HTTPException(503, "the server is paused; try again after /v1/resume") from None
