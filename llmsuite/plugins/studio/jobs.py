"""Processes that the page has started: runs, which outlive it, and servers of their models, which do not."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.redaction import SECRETS
from llmsuite.base.safe_files import is_dir, is_file
from llmsuite.base.supervisor import SupervisedProcess
from llmsuite.base.web.client import API_KEY
from llmsuite.observe.runs import find_runs, has_records, is_run, read_run
from llmsuite.observe.summary import cards
from llmsuite.plugins.studio.recipes import FilledRecipe

_TAIL = 4000
"""Bytes of the end of a log that are shown."""
_MAX_LOG_BYTES = 64 << 20
"""Bytes of the log of a server."""
_GRACE_SECONDS = 15.0
"""Time for a server to finish its requests."""
_LLMSUITE = (sys.executable, "-m", "llmsuite")
_ADDRESS = re.compile(r"answers on (http://127\.0\.0\.1:\d+)")


@dataclasses.dataclass
class Job:
    """A run and its output."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def tail(self) -> str:
        """The end of its output."""
        return _tail(self.log)


@dataclasses.dataclass
class _Server:
    """A server and its output. It ends with the studio, also when the studio is killed."""

    process: SupervisedProcess
    log: Path

    @property
    def tail(self) -> str:
        """The end of its output."""
        return _tail(self.log)


def _tail(log: Path) -> str:
    with open(log, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL))
        return file.read(_TAIL).decode("utf-8", "replace")


class Jobs:
    """The processes of one studio."""

    def __init__(self, root: Path):
        """
        Args:
            root: directory to search for other runs than those started here.
        """
        self._root = root
        self._runs: dict[str, Job] = {}
        self._chats: dict[str, _Server] = {}
        self._key = os.environ.get(API_KEY) or secrets.token_urlsafe(24)
        """API key of the servers, as other users of the machine can connect to them too."""
        SECRETS.add(self._key)
        self._lock = threading.Lock()
        self._log_numbers = itertools.count()
        self._logs = tempfile.TemporaryDirectory(prefix="llmsuite-studio-")

    def start(self, form: FilledRecipe, output_dir: Path) -> str:
        """Start a run; returns its name.

        Raises:
            UserError: its directory is taken.
        """
        name = str(output_dir)
        with self._lock:
            job = self._runs.get(name)
            if job is not None and job.process.poll() is None:
                raise UserError(f"{name}: this run is still running; stop it, or choose another output_dir")
            is_replaced = (
                form.smoke and "output_dir" not in form.changes
            )  # `run` deletes it: a smoke run is not worth keeping
            if has_records(output_dir) and not is_replaced:
                raise UserError(f"{name}: there is a run already; choose another output_dir")
            self._runs[name] = self._spawn("run", *form.words)
            if server := self._chats.pop(name, None):
                server.process.end()  # it serves old weights
        return name

    def stop(self, name: str) -> None:
        """Ask a run to save a checkpoint and end. Raises UserError if it was not started here."""
        job = self._runs.get(name)
        if job is None:
            raise UserError(f"{name}: was not started here")
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGTERM)

    def chat(self, name: str) -> dict[str, Any]:
        """Serve the model of a run. Returns the address of its chat page, None while the server starts. Raises
        UserError if there is no such run, or the server has ended."""
        self.directory(name)
        with self._lock:
            job = self._chats.get(name)
            if job is None:
                job = self._chats[name] = self._serve(name)
        found = _ADDRESS.search(job.log.read_text(encoding="utf-8", errors="replace"))
        if job.process.poll() is not None:
            with self._lock:
                self._chats.pop(name, None)
            job.process.end()
            raise UserError(f"the server of {name} has ended: {_tail(job.log).strip()}")
        # in the fragment of the URL, which a browser sends to no server
        return {"address": f"{found[1]}/#key={self._key}" if found else None}

    def known(self) -> list[dict[str, Any]]:
        """Every run; those that were started here come first."""
        names = list(self._runs)
        others = []
        if is_dir(self._root):
            others = [str(path) for path in find_runs(self._root)]
        return [self._describe(name) for name in dict.fromkeys([*reversed(names), *others])]

    def directory(self, name: str) -> Path:
        """The directory of a run that the page may show. Raises UserError for any other."""
        path = Path(name)
        known = name in self._runs or (is_dir(self._root) and path in find_runs(self._root))
        if not known or not is_run(path):
            raise UserError(f"{name}: has recorded nothing yet, or is no run below {self._root}")
        return path

    def close(self) -> list[str]:
        """End the servers; returns the runs that continue without the page."""
        with self._lock:
            for server in self._chats.values():
                server.process.end()
        running = [name for name, job in self._runs.items() if job.process.poll() is None]
        if not running:
            self._logs.cleanup()
        return running

    def _describe(self, name: str) -> dict[str, Any]:
        job = self._runs.get(name)
        path = Path(name)
        described: dict[str, Any] = {"run": name, "is_here": job is not None, "can_watch": is_run(path)}
        alive = job is not None and job.process.poll() is None
        if is_run(path):
            described["cards"] = {card.label: [card.value, card.note] for card in cards(read_run(path))}
        if is_run(path):
            described["status"] = read_run(path).status
        else:
            described["status"] = "starting" if alive else ""
        if job is not None and not alive and job.process.returncode:
            described |= {"status": "failed", "log": job.tail}
        described["is_running"] = alive
        described["can_talk"] = is_file(path / "checkpoints" / "latest") and not alive
        return described

    def _spawn(self, *words: str) -> Job:
        log = self._log(words[0])
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [*_LLMSUITE, *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal of the studio does not end a run
            )
        return Job(process, log)

    def _serve(self, name: str) -> _Server:
        log = self._log("serve")
        command = [*_LLMSUITE, "serve", name, "--port", "0", "--name", Path(name).name]
        with open(log, "wb") as file:
            environment = {**os.environ, API_KEY: self._key}
            process = SupervisedProcess(
                command,
                output=file,
                max_output_bytes=_MAX_LOG_BYTES,
                grace_seconds=_GRACE_SECONDS,
                environment=environment,
            )
            return _Server(process, log)

    def _log(self, of: str) -> Path:
        return Path(self._logs.name) / f"{next(self._log_numbers)}-{of}.log"
