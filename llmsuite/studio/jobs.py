"""What the page has started: runs, which outlive it, and servers of their models, which do not."""

from __future__ import annotations

import dataclasses
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

from llmsuite.errors import UserError
from llmsuite.launch.keeper import Kept
from llmsuite.observe.runs import find_runs, has_records, is_run, read_run
from llmsuite.observe.summary import cards
from llmsuite.regular import is_dir, is_file
from llmsuite.shown import SECRETS
from llmsuite.studio.recipes import Filled
from llmsuite.web.client import API_KEY

_TAIL = 4000
_GRACE_SECONDS = 15.0
"""For a server to end what it is at."""
_LLMSUITE = (sys.executable, "-m", "llmsuite")
_ADDRESS = re.compile(r"answers on (http://127\.0\.0\.1:\d+)")


@dataclasses.dataclass
class Job:
    """A run, and what it prints."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def tail(self) -> str:
        """The end of what it has printed."""
        return _tail(self.log)


@dataclasses.dataclass
class _Server:
    """A server, and what it prints: it ends with the studio, whatever ends that."""

    process: Kept
    log: Path

    @property
    def tail(self) -> str:
        """The end of what it has printed."""
        return _tail(self.log)


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-_TAIL:]


class Jobs:
    """The processes of one studio."""

    def __init__(self, root: Path):
        """`root`: where runs are looked for besides those that are started here."""
        self._root = root
        self._runs: dict[str, Job] = {}
        self._chats: dict[str, _Server] = {}
        self._key = os.environ.get(API_KEY) or secrets.token_urlsafe(24)
        """Key of the servers, which other users of the machine reach too."""
        SECRETS.add(self._key)
        self._lock = threading.Lock()
        self._logs = tempfile.TemporaryDirectory(prefix="llmsuite-studio-")

    def start(self, filled: Filled, output_dir: Path) -> str:
        """Start a run; returns its name.

        Raises:
            UserError: its directory is taken.
        """
        name = str(output_dir)
        with self._lock:
            job = self._runs.get(name)
            if job is not None and job.process.poll() is None:
                raise UserError(f"{name}: this run goes on; stop it, or choose another output_dir")
            is_replaced = filled.smoke and "output_dir" not in filled.changes  # by `run`: not worth keeping
            if has_records(output_dir) and not is_replaced:
                raise UserError(f"{name}: there is a run already; choose another output_dir")
            self._runs[name] = self._spawn("run", *filled.words)
            if server := self._chats.pop(name, None):
                server.process.end()  # it has other weights
        return name

    def stop(self, name: str) -> None:
        """Ask a run to save a checkpoint and end. Raises UserError if it was not started here."""
        job = self._runs.get(name)
        if job is None:
            raise UserError(f"{name}: was not started here")
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGTERM)

    def talk(self, name: str) -> dict[str, Any]:
        """Serve the model of a run; its address, or what became of the server so far. Raises UserError if there is no
        such run."""
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
        # behind the mark that a browser sends to no server
        return {"address": f"{found[1]}/#key={self._key}" if found else None}

    def known(self) -> list[dict[str, Any]]:
        """Every run, those that were started here first."""
        names = list(self._runs)
        others = [str(path) for path in find_runs(self._root)] if is_dir(self._root) else []
        return [self._told(name) for name in dict.fromkeys([*reversed(names), *others])]

    def directory(self, name: str) -> Path:
        """The directory of a run that the page may look at. Raises UserError if it is none."""
        path = Path(name)
        known = name in self._runs or (is_dir(self._root) and path in find_runs(self._root))
        if not known or not is_run(path):
            raise UserError(f"{name}: has recorded nothing yet, or is no run below {self._root}")
        return path

    def close(self) -> list[str]:
        """End the servers; returns the runs that go on without the page."""
        for server in self._chats.values():
            server.process.end()
        going = [name for name, job in self._runs.items() if job.process.poll() is None]
        if not going:
            self._logs.cleanup()
        return going

    def _told(self, name: str) -> dict[str, Any]:
        job, path = self._runs.get(name), Path(name)
        told: dict[str, Any] = {"run": name, "is_here": job is not None, "can_watch": is_run(path)}
        alive = job is not None and job.process.poll() is None
        if is_run(path):
            told["cards"] = {card.label: [card.value, card.note] for card in cards(read_run(path))}
        told["status"] = "starting" if alive and not is_run(path) else "" if not is_run(path) else read_run(path).status
        if job is not None and not alive and job.process.returncode:
            told |= {"status": "failed", "log": job.tail}
        told["is_running"] = alive
        told["can_talk"] = is_file(path / "checkpoints" / "latest") and not alive
        return told

    def _spawn(self, *words: str) -> Job:
        log = self._log(words[0])
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [*_LLMSUITE, *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C at the page does not end a run
            )
        return Job(process, log)

    def _serve(self, name: str) -> _Server:
        log = self._log("serve")
        command = [*_LLMSUITE, "serve", name, "--port", "0", "--name", Path(name).name]
        with open(log, "wb") as file:
            environment = {**os.environ, API_KEY: self._key}
            return _Server(Kept(command, output=file, grace=_GRACE_SECONDS, environment=environment), log)

    def _log(self, of: str) -> Path:
        number = len(self._runs) + len(self._chats)
        return Path(self._logs.name) / f"{number}-{of}-{threading.get_ident()}.log"
