"""The process of a server: where it listens, and how it ends."""

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

_GRACE = 10
"""Seconds that answers which have begun may go on after a signal."""
_FAREWELL = 2
"""The last seconds of those, in which the others are told that they end."""


class Server(uvicorn.Server):
    """Prints where it listens, and shuts down cleanly on a signal."""

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
        """Refuse what waits at once, and what has not ended in time before the connections are closed."""
        scheduler = self._service.scheduler
        await asyncio.to_thread(scheduler.close)
        end = asyncio.get_running_loop().call_later(_GRACE - _FAREWELL, scheduler.give_up)
        try:
            await super().shutdown(sockets)
        finally:
            end.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn has it, without raising the signal again at the end."""

        def end(number: int, frame: FrameType | None) -> None:
            self.handle_exit(number, frame)

        before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def make_server(service: Service, app: FastAPI, host: str, port: int, proxies: Sequence[str] = ()) -> Server:
    """A server of an application; call its `run`. `proxies` are addresses, or networks, that are believed whose
    requests they pass on (`X-Forwarded-For`): who may say that of itself is as many clients as it likes."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=connection_class(service.limits),
        ws="none",
        backlog=BACKLOG,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=_GRACE,
        lifespan="on",
        server_header=False,
        proxy_headers=bool(proxies),
        forwarded_allow_ips=list(proxies),
    )
    return Server(config, service)
