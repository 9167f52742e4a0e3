"""A thread pool for work that would block the event loop, in which clients take turns."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
from collections.abc import Callable
from typing import Any, TypeVar

from llmsuite.serving.fair_queue import Client, FairQueue

T = TypeVar("T")
_MAX_THREADS = 8


class FairThreadPool:
    """A few threads, which read bodies, tokenize prompts and format answers. A client with very many requests waits for
    its own ones, and others wait for at most one of them. For one event loop."""

    def __init__(self, num_threads: int | None = None):
        """`num_threads`: None for two more than processors, at most 8."""
        self._free = num_threads or min(_MAX_THREADS, (os.cpu_count() or 1) + 2)
        self._pool = concurrent.futures.ThreadPoolExecutor(self._free, "requests")
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    async def run(self, client: Client, work: Callable[..., T], *arguments: Any) -> T:
        """Call a function in a thread when it is the client's turn; returns its result, or raises its exception."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.add(client, turn)
        self._start()
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting.remove([turn])
            if not turn.cancelled():  # the turn has been given, and is not used
                self._end()
            raise

        def ended(_: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._end)

        running = self._pool.submit(work, *arguments)
        running.add_done_callback(ended)  # also if the client no longer waits: the thread is busy until then
        return await asyncio.wrap_future(running)

    def _start(self) -> None:
        while self._free and self._waiting:
            _, turn = self._waiting.pop()
            if not turn.done():
                self._free -= 1
                turn.set_result(None)

    def _end(self) -> None:
        self._free += 1
        self._start()
