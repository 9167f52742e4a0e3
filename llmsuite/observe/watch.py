"""Serves the live report of runs, to browsers on this machine that know its token."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from llmsuite.base.locks import is_locked
from llmsuite.base.safe_files import exists
from llmsuite.base.web.local import LocalHandler, LocalServer
from llmsuite.observe.generations import GENERATIONS
from llmsuite.observe.report import content, page
from llmsuite.observe.runs import read_run

_FILES = (
    *("metrics.jsonl", "ranks.jsonl", "events.jsonl", "completions.jsonl", GENERATIONS),
    *("environment.json", "recipe.json"),
)


def make_server(directories: Sequence[Path], port: int) -> LocalServer:
    """A server on the loopback address; call its `serve_forever`.

    Args:
        directories: of the runs, which are shown side by side.
        port: 0 for any free port.

    Raises:
        UserError: one is not a run, or the port is taken.
    """
    first = page([read_run(directory) for directory in directories], live=True)

    class Handler(LocalHandler):
        def do_GET(self) -> None:
            path, query = self.address()
            if not self.is_authorized(query.get("token", "")):  # prompts, completions and the recipe are shown
                return
            if path == "/":
                self.answer(first.html, Content_Security_Policy=first.policy)
            elif path == "/content":
                answer_content(self, directories)
            else:
                self.send_error(404)

    return LocalServer(port, Handler)


def answer_content(handler: LocalHandler, directories: Sequence[Path]) -> None:
    """Answer with the records of runs, or 304 if the browser has the newest ones."""
    tag = _tag(directories)
    if handler.headers.get("If-None-Match") == tag:
        handler.send_response(304)
        handler.end_headers()
        return
    found = content([read_run(directory) for directory in directories])
    handler.answer(json.dumps(found), "application/json", ETag=tag)


def _tag(directories: Sequence[Path]) -> str:
    """An ETag that changes when a file of a run changes, or one of a directory is added or removed; when a run's
    process ends; and until then with every minute without a record, as the page shows that time."""
    files = [directory / name for directory in directories for name in _FILES]
    stats = [path.stat() for path in files if exists(path)]
    is_running = [is_locked(directory) is not False for directory in directories]
    silent = None
    if any(is_running):
        silent = (time.time() - max((s.st_mtime for s in stats), default=0.0)) // 60
    state = [(s.st_size, s.st_mtime_ns) for s in stats], is_running, silent
    return '"' + hashlib.sha256(repr(state).encode()).hexdigest()[:16] + '"'
