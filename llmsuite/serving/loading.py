"""The port of a server whose model is being loaded: requests get 503 with Retry-After, in place of no connection.

Uses the standard library alone, as the packages of the server are imported in the same time.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from llmsuite.base.errors import UserError

_RETRY_SECONDS = 2
_POLL_SECONDS = 0.1
_MAX_BODY_BYTES = 1 << 20
_BODY = json.dumps(
    {"error": {"message": "the model is being loaded; try again later", "type": "server_error", "code": "loading"}}
).encode()


class LoadingPort:
    """Sockets that listen at an address, and answer until a server takes them over."""

    def __init__(self, host: str, port: int) -> None:
        """Listen on all addresses of a host, and answer.

        Args:
            host: name or address.
            port: number of the port; 0 for any free one.

        Raises:
            UserError: there is no such host, or another process listens there.
        """
        self._sockets = _listen(host, port)
        self._servers = [_LoadingServer(listening) for listening in self._sockets]
        self._threads = [
            threading.Thread(target=server.serve_forever, args=(_POLL_SECONDS,), daemon=True)
            for server in self._servers
        ]
        for thread in self._threads:
            thread.start()

    @property
    def address(self) -> str:
        """The first address as host:port."""
        host, port = self._sockets[0].getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def hand_over(self) -> list[socket.socket]:
        """Stop answering, and return the sockets, which still listen: connections wait there for the server."""
        for server, thread in zip(self._servers, self._threads):
            server.shutdown()
            thread.join()
        self._servers = []
        self._threads = []
        return self._sockets

    def close(self) -> None:
        """Stop listening."""
        for listening in self.hand_over():
            listening.close()


class _LoadingServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, listening: socket.socket) -> None:
        super().__init__(listening.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()  # that of the base class, which is not bound
        self.socket = listening

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a client has gone."""


class _Handler(BaseHTTPRequestHandler):
    timeout = 5.0
    """Seconds that a client may be silent."""

    def _refuse(self) -> None:
        size = self.headers.get("Content-Length", "")
        if size.isdecimal():  # a client that is not read to the end may see a reset connection and no answer
            self.rfile.read(min(int(size), _MAX_BODY_BYTES))
        self.send_response_only(503)
        self.send_header("Retry-After", str(_RETRY_SECONDS))
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(_BODY)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(_BODY)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_OPTIONS = do_PATCH = _refuse

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: no request is logged."""


def _listen(host: str, port: int) -> list[socket.socket]:
    """Listening sockets at all addresses of a host. Raises UserError as `LoadingPort` does."""
    where = f"--host {host} --port {port}: cannot listen there"
    sockets: list[socket.socket] = []
    refused = "it has no address on this machine"
    with contextlib.ExitStack() as opened:
        try:
            for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                listening = opened.enter_context(socket.socket(family, kind, protocol))
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                if sockets:  # all addresses get the same port
                    address = (address[0], sockets[0].getsockname()[1], *address[2:])
                try:
                    listening.bind(address)
                except OSError as error:
                    if error.errno in (errno.EADDRINUSE, errno.EACCES):
                        raise
                    refused = str(error.strerror)  # an address that this machine does not have, such as ::1
                    continue
                listening.listen()
                listening.setblocking(False)
                sockets.append(listening)
        except OSError as error:  # socket.gaierror too
            raise UserError(f"{where}: {error.strerror}") from error
        if not sockets:
            raise UserError(f"{where}: {refused}")
        opened.pop_all()
    return sockets
