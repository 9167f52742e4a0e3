"""Serves the live report of a run, to browsers on this machine only."""

from __future__ import annotations

import hashlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from llmsuite.errors import UserError
from llmsuite.observe.report import content, page
from llmsuite.observe.runs import read_run

_FILES = ("metrics.jsonl", "ranks.jsonl", "events.jsonl", "completions.jsonl", "environment.json", "recipe.json")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


def make_server(directory: Path, port: int) -> ThreadingHTTPServer:
    """A server on the loopback address; call its `serve_forever`.

    Args:
        directory: of the run.
        port: 0 for any that is free.

    Raises:
        UserError: it is not a run, or the port is taken.
    """
    read_run(directory)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # against DNS rebinding: a web page may reach this address, but not under this name
            if self.headers.get("Host", "").rpartition(":")[0] not in ("127.0.0.1", "localhost"):
                self.send_error(403)
            elif self.path == "/":
                self._answer(page([read_run(directory)], live=True), "")
            elif self.path == "/content":
                tag = _tag(directory)
                if self.headers.get("If-None-Match") == tag:
                    self.send_response(304)
                    self.end_headers()
                else:
                    self._answer(content([read_run(directory)]), tag)
            else:
                self.send_error(404)

        def _answer(self, text: str, tag: str) -> None:
            body = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", _POLICY)
            self.send_header("Cache-Control", "no-store")
            if tag:
                self.send_header("ETag", tag)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise UserError(f"--port {port}: {error.strerror}; choose another one, or 0 for any") from error


def _tag(directory: Path) -> str:
    """An ETag that changes when a file of the run changes."""
    stats = [(directory / name).stat() for name in _FILES if (directory / name).is_file()]
    return '"' + hashlib.sha256(repr([(s.st_size, s.st_mtime_ns) for s in stats]).encode()).hexdigest()[:16] + '"'
