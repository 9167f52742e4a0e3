"""Threads beside the loop that answers everybody, in which clients take turns."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
from collections.abc import Callable
from typing import Any, TypeVar

from llmsuite.serving.turns import Client, Turns

T = TypeVar("T")
_MOST = 8


class Threads:
    """A few threads, which read bodies, tokenize prompts and write answers. Whoever sends very many of them waits for
    his own, and others for one of his at most. For one loop."""

    def __init__(self, num_threads: int | None = None):
        """`num_threads`: None for two more than processors, and 8 at most."""
        self._free = num_threads or min(_MOST, (os.cpu_count() or 1) + 2)
        self._pool = concurrent.futures.ThreadPoolExecutor(self._free, "beside")
        self._waiting: Turns[asyncio.Future[None]] = Turns()

    async def run(self, client: Client, work: Callable[..., T], *given: Any) -> T:
        """The result of a function, called in a thread when it is the client's turn; or what it raises."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.add(client, turn)
        self._start()
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting.remove([turn])
            if not turn.cancelled():  # it had begun, and nothing uses it
                self._end()
            raise

        def ended(_: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._end)

        running = self._pool.submit(work, *given)
        running.add_done_callback(ended)  # also where nobody waits any more: the thread is busy until then
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
