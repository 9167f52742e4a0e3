"""A server for browsers on this machine only, and there for those that know its token."""

from __future__ import annotations

import hmac
import secrets
import sys
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from llmsuite.errors import UserError

_SECONDS = 30
"""For which a client may be silent."""
_MOST_DISCARDED, _AT_ONCE = 64 << 20, 1 << 16
"""Bytes of a refused request that are read in all, and at a time."""


class LocalServer(ThreadingHTTPServer):
    """Listens on the loopback address, which every user of the machine reaches; call its `serve_forever`."""

    daemon_threads = True

    def __init__(self, port: int, handler: type[LocalHandler], token: str | None = None):
        """
        Args:
            port: 0 for any that is free.
            handler: of its requests.
            token: that requests have to name; None for a new one.

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
        """Where the page is, with the token."""
        return f"http://127.0.0.1:{self.server_port}/?token={self.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser may close its page in the middle of an answer; all else is printed."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class LocalHandler(BaseHTTPRequestHandler):
    """Answers only what is asked under a name of this machine, by somebody who knows the token.

    Other pages know no token, and other users of the machine have not read the address in the terminal.
    """

    server: LocalServer
    timeout = _SECONDS

    def address(self) -> tuple[str, dict[str, str]]:
        """The path of the request, and its parameters."""
        parts = urllib.parse.urlsplit(self.path)
        return parts.path, dict(urllib.parse.parse_qsl(parts.query))

    def may(self, token: str) -> bool:
        """Whether a request comes from this machine, from no other page, and knows the token; else it is refused."""
        if not self.is_local():
            return False
        origin = self.headers.get("Origin")
        if (origin is None or origin == f"http://{self.headers['Host']}") and hmac.compare_digest(
            token.encode(), self.server.token.encode()
        ):
            return True
        self.refuse(403, "Open the address that the terminal shows.")
        return False

    def is_local(self) -> bool:
        """Refuse other names, against DNS rebinding: a web page may reach this address, but not under this name."""
        if self.headers.get("Host", "").rpartition(":")[0] in ("127.0.0.1", "localhost"):
            return True
        self.refuse(403)
        return False

    def refuse(self, status: int, explain: str | None = None) -> None:
        """Answer a request with an error before its body was read. The body is read after that and thrown away: the
        connection would break under a client that is still sending, which then sees no answer."""
        self.send_error(status, explain=explain)
        left = min(self.body_length() or 0, _MOST_DISCARDED)
        while left > 0 and (part := self.rfile.read(min(left, _AT_ONCE))):
            left -= len(part)

    def body_length(self) -> int | None:
        """Bytes of the body of a request; None where it does not say so, or nonsense."""
        told = self.headers.get("Content-Length", "")
        return int(told) if told.isdecimal() and len(told) < 20 else None

    def answer(self, text: str, kind: str = "text/html", status: int = 200, **headers: str) -> None:
        """Send a text. In names of headers, _ is -."""
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
        """Say nothing."""
