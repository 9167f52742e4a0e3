"""The process of a server: listening and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from llmsuite.serving.connections import BACKLOG, connection_class
from llmsuite.serving.service import Service

_GRACE_SECONDS = 10
"""Seconds that running answers may continue after a signal."""
_ABORT_SECONDS = 2
"""The last of these seconds, in which the remaining answers are ended with an error."""


class Server(uvicorn.Server):
    """A uvicorn server that prints its address, and shuts down cleanly on a signal."""

    def __init__(self, config: uvicorn.Config, service: Service):
        super().__init__(config)
        self._service = service

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            for server in self.servers:
                host, port = server.sockets[0].getsockname()[:2]
                print(f"{self._service.name} answers on http://{host}:{port}", flush=True)

    async def shutdown(self, sockets: Any = None) -> None:
        """Refuse queued requests immediately, and end running ones with an error before the connections are closed."""
        scheduler = self._service.scheduler
        await asyncio.to_thread(scheduler.close)
        end = asyncio.get_running_loop().call_later(_GRACE_SECONDS - _ABORT_SECONDS, scheduler.stop_soon)
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals like uvicorn, without raising the signal again at the end."""

        def end(number: int, frame: FrameType | None) -> None:
            self.handle_exit(number, frame)

        before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def make_server(service: Service, app: FastAPI, proxies: Sequence[str] = ()) -> Server:
    """A server of an application; call its `run` with sockets that listen. `proxies` are trusted addresses or networks,
    whose `X-Forwarded-For` names the client: an untrusted one could pretend to be any number of clients."""
    config = uvicorn.Config(
        app,
        http=connection_class(service.limits),
        ws="none",
        backlog=BACKLOG,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=_GRACE_SECONDS,
        lifespan="on",
        server_header=False,
        proxy_headers=bool(proxies),
        forwarded_allow_ips=list(proxies),
    )
    return Server(config, service)
