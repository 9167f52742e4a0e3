"""Serves the live report of runs, to browsers on this machine that know its token."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from llmsuite.locks import is_locked
from llmsuite.observe.generations import GENERATIONS
from llmsuite.observe.report import content, page
from llmsuite.observe.runs import read_run
from llmsuite.regular import exists
from llmsuite.web.local import LocalHandler, LocalServer

_FILES = (
    *("metrics.jsonl", "ranks.jsonl", "events.jsonl", "completions.jsonl", GENERATIONS),
    *("environment.json", "recipe.json"),
)


def make_server(directories: Sequence[Path], port: int) -> LocalServer:
    """A server on the loopback address; call its `serve_forever`.

    Args:
        directories: of the runs, which are drawn beside each other.
        port: 0 for any that is free.

    Raises:
        UserError: one is not a run, or the port is taken.
    """
    first = page([read_run(directory) for directory in directories], live=True)

    class Handler(LocalHandler):
        def do_GET(self) -> None:
            place, query = self.address()
            if not self.may(query.get("token", "")):  # prompts, completions and the recipe are shown
                return
            if place == "/":
                self.answer(first.html, Content_Security_Policy=first.policy)
            elif place == "/content":
                answer_content(self, directories)
            else:
                self.send_error(404)

    return LocalServer(port, Handler)


def answer_content(handler: LocalHandler, directories: Sequence[Path]) -> None:
    """Answer with what runs have recorded, or 304 if that is what the browser has."""
    tag = _tag(directories)
    if handler.headers.get("If-None-Match") == tag:
        handler.send_response(304)
        handler.end_headers()
        return
    found = content([read_run(directory) for directory in directories])
    handler.answer(json.dumps(found), "application/json", ETag=tag)


def _tag(directories: Sequence[Path]) -> str:
    """An ETag that changes when a file of a run changes, or one of a directory comes or goes; when a run's process is
    gone; and until then with every minute without a record, which the page tells."""
    files = [directory / name for directory in directories for name in _FILES]
    stats = [path.stat() for path in files if exists(path)]
    goes_on = [is_locked(directory) is not False for directory in directories]
    silent = (time.time() - max((s.st_mtime for s in stats), default=0.0)) // 60 if any(goes_on) else None
    state = [(s.st_size, s.st_mtime_ns) for s in stats], goes_on, silent
    return '"' + hashlib.sha256(repr(state).encode()).hexdigest()[:16] + '"'
