"""An HTTP server for browsers on this machine that have its token."""

from __future__ import annotations

import hmac
import secrets
import sys
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from llmsuite.base.errors import UserError

_SECONDS = 30
"""Seconds that a client may be silent."""
_MAX_DISCARDED = 64 << 20
_CHUNK_BYTES = 1 << 16
"""Bytes of a refused request that are read in total, and at a time."""


class LocalServer(ThreadingHTTPServer):
    """A server on the loopback address, which every user of the machine can reach; call `serve_forever`."""

    daemon_threads = True

    def __init__(self, port: int, handler: type[LocalHandler], token: str | None = None):
        """
        Args:
            port: 0 for any free port.
            handler: of its requests.
            token: that requests have to send; None for a new one.

        Raises:
            UserError: the port is taken.
        """
        self.token = token or secrets.token_urlsafe(24)
        try:
            super().__init__(("127.0.0.1", port), handler)
        except (OSError, OverflowError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"--port {port}: {why}; choose another one, or 0 for any") from error

    @property
    def address(self) -> str:
        """The URL of the page, with the token."""
        return f"http://127.0.0.1:{self.server_port}/?token={self.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that disconnects in the middle of an answer; print all other errors."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class LocalHandler(BaseHTTPRequestHandler):
    """Answers only requests to a name of this machine that have the token.

    Pages of other origins do not have the token, nor do other users of the machine, who have not seen the address in
    the terminal.
    """

    server: LocalServer
    timeout = _SECONDS

    def address(self) -> tuple[str, dict[str, str]]:
        """Return the path of the request and its query parameters."""
        # not by urlsplit, which raises ValueError for some of what a client may send before its token is checked
        path, _, query = self.path.partition("?")
        return path, dict(urllib.parse.parse_qsl(query))

    def is_authorized(self, token: str) -> bool:
        """Return True for a request to a name of this machine, from no other page, with the token; refuse any other."""
        if not self.is_local():
            return False
        origin = self.headers.get("Origin")
        is_same_origin = origin is None or origin == f"http://{self.headers['Host']}"
        # compare_digest: its time does not depend on the position of the first difference
        if is_same_origin and hmac.compare_digest(token.encode(), self.server.token.encode()):
            return True
        self.refuse(403, "Open the address that the terminal shows.")
        return False

    def is_local(self) -> bool:
        """Refuse other host names, against DNS rebinding: a web page may reach this address, but not by this name."""
        if self.headers.get("Host", "").rpartition(":")[0] in ("127.0.0.1", "localhost"):
            return True
        self.refuse(403)
        return False

    def refuse(self, status: int, explain: str | None = None) -> None:
        """Answer a request with an error before its body was read. The body is read and discarded after that: otherwise
        the connection would be reset while the client is still sending, and it would not see the answer."""
        self.send_error(status, explain=explain)
        left = min(self.body_length() or 0, _MAX_DISCARDED)
        while left > 0:
            part = self.rfile.read(min(left, _CHUNK_BYTES))
            if not part:
                break
            left -= len(part)

    def body_length(self) -> int | None:
        """Return the length of the body of a request in bytes; None where the header is missing or malformed."""
        length = self.headers.get("Content-Length", "")
        if length.isdecimal() and len(length) < 20:
            return int(length)
        return None

    def answer(self, text: str, kind: str = "text/html", status: int = 200, **headers: str) -> None:
        """Send a text. An underscore in the name of a header stands for a hyphen."""
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""
