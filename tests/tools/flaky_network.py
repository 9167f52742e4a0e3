"""Launchers that meet, and a hub that is fetched from, over a network that delays, cuts, silences and half closes.

python -m tests.tools.flaky_network [--seconds S] [--seed SEED]

Between two machines, which are processes here, and between a process and a hub, is a proxy with faults by chance. The
launchers' times (beats, silence, patience) are 60 times shorter than in earnest: ten minutes stand for ten hours. The
machines' work counts to a number, with a checkpoint at each; however often the network parts them, both have to come to
its end and nobody may hang. Of the hub every file has to arrive as it is, with no error but a user's on the way.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from llmsuite.base.cache import isolated_cache
from llmsuite.base.errors import UserError
from llmsuite.launch import machines, rendezvous
from llmsuite.launch.launch import launch
from llmsuite.launch.machines import Machines, free_ports
from llmsuite.launch.restarts import Restarts
from tests.support.paths import ROOT
from tests.tools.hub_server import HubServer

FASTER = 60.0
STEPS = 100
STEP_SECONDS = 0.05
STALL_TIMEOUT_SECONDS = 90.0
"""For one run of two machines; it takes 6 s when nothing goes wrong."""
FAULTS = ("none", "delay", "cut", "half close", "silence")
FILE_BYTES = 300_000
_CHUNK = 16384


class Wrong(Exception):
    """What should not be."""


class FlakyProxy:
    """Forwards connections to a port; each of them has a fault, by chance, after some bytes."""

    def __init__(self, target: int, seed: int, most_bytes: int, longest: float):
        """
        Args:
            target: port on this machine.
            seed: decides about the faults.
            most_bytes: after so many at most a connection has its fault.
            longest: seconds of a silence; a delay is a tenth of it at most.
        """
        self._target = target
        self._chance = random.Random(seed)
        self._most_bytes = most_bytes
        self._longest = longest
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.faults: dict[str, int] = {}
        self._is_open = True
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept nobody any more."""
        self._is_open = False
        self._listener.close()

    def _accept(self) -> None:
        while self._is_open:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed
                return
            fault = self._chance.choice(FAULTS)
            after = self._chance.randrange(self._most_bytes)
            seconds = self._chance.uniform(0, self._longest)
            self.faults[fault] = self.faults.get(fault, 0) + 1
            threading.Thread(target=self._forward, args=(near, fault, after, seconds), daemon=True).start()

    def _forward(self, near: socket.socket, fault: str, after: int, seconds: float) -> None:
        with near, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._target)) as far:
            forwarded = 0
            other = {near: far, far: near}
            open_ends = {near, far}
            while open_ends:
                for end in select.select(list(open_ends), [], [])[0]:
                    data = end.recv(_CHUNK)
                    if fault == "delay":
                        time.sleep(seconds / 10 / (1 + forwarded // _CHUNK))
                    forwarded += len(data)
                    if fault not in ("none", "delay") and forwarded > after:
                        if self._fails(near, far, fault, seconds, data, other[end]):
                            return
                        fault = "none"
                        open_ends.discard(end)
                        continue
                    if data:
                        other[end].sendall(data)
                    else:
                        open_ends.discard(end)
                        other[end].shutdown(socket.SHUT_WR)

    def _fails(
        self, near: socket.socket, far: socket.socket, fault: str, seconds: float, data: bytes, to: socket.socket
    ) -> bool:
        """Let something go wrong with some data; whether the connection is over."""
        to.sendall(data[: len(data) // 2])
        if fault == "half close":  # one direction ends, the other goes on
            to.shutdown(socket.SHUT_WR)
            return False
        if fault == "silence":
            time.sleep(seconds)
        for end in (near, far):  # a reset, not an end
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        return True


# a machine, in a process of its own


def machine(index: int, master: str, directory: Path) -> int:
    """The launcher of a machine whose one rank counts; ends as a run does."""
    rendezvous.SILENT_SECONDS /= FASTER
    rendezvous.HANDSHAKE_SECONDS = max(0.3, rendezvous.HANDSHAKE_SECONDS / FASTER)
    rendezvous.PROGRESS_SECONDS /= FASTER
    rendezvous.RENDEZVOUS_SECONDS = STALL_TIMEOUT_SECONDS / 3
    rendezvous._RETRY_SECONDS /= 10
    machines._BEAT_SECONDS /= FASTER
    counts = [directory / f"count-{k}" for k in (0, 1)]

    def counted(path: Path) -> int:
        return int(path.read_text() or 0) if path.exists() else 0

    def work() -> int:
        """Count, as ranks do, in step with the other machine."""
        own = counts[index]
        other = counts[1 - index]
        while counted(own) < STEPS:
            if counted(own) <= counted(other):
                partial = own.with_suffix(".tmp")
                partial.write_text(str(counted(own) + 1))
                partial.rename(own)
            time.sleep(STEP_SECONDS)
        return 0

    launchers = Machines(index, 2, master, "run")
    restarts = Restarts(10**6, lambda: counted(counts[0]))
    return launch(work, 1, directory / f"logs-{index}", lambda local: {}, print, launchers, None, restarts)


def meet_round(directory: Path, seed: int) -> dict[str, int]:
    """Two machines come to an end over a flaky network. Returns how often which fault was.

    Raises:
        Wrong: they do not.
    """
    port = free_ports("127.0.0.1", 1)[0]
    proxy = FlakyProxy(port, seed, most_bytes=1200, longest=1.0)
    ports = (port, proxy.port)
    processes = []
    for index in (0, 1):
        words = ["--machine", str(index), "--master", f"127.0.0.1:{ports[index]}", "--directory", str(directory)]
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.tools.flaky_network", *words],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    deadline = time.monotonic() + STALL_TIMEOUT_SECONDS
    outputs = []
    for process in processes:
        try:
            outputs.append(process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0])
        except subprocess.TimeoutExpired:
            process.kill()
            outputs.append(process.communicate()[0] + "\nand hangs")
    proxy.close()
    codes = [process.returncode for process in processes]
    said = "\n---\n".join(outputs)
    counts = [int((directory / f"count-{k}").read_text()) for k in (0, 1)]
    # machine 1 may never receive that machine 0 has ended; then it reports in time that machine 0 is gone
    unheard = codes == [0, 1] and any(f"machine 0 {text}" in outputs[1] for text in ("is lost", "does not answer"))
    if (codes != [0, 0] and not unheard) or "Traceback" in said or counts != [STEPS, STEPS]:
        raise Wrong(f"exit codes {codes}, counted to {counts}\n{said}")
    return {**proxy.faults, "restarts": outputs[0].count("\nrestart ")}


# a hub


def fetch_round(directory: Path, seed: int, hub: HubServer) -> dict[str, int]:
    """All files of a model arrive as they are. Returns how often which fault was, and how many errors it took.

    Raises:
        Wrong: they do not.
    """
    from llmsuite.base.hub import download
    from llmsuite.base.hub.fetch import fetch
    from llmsuite.base.hub.listing import Want
    from llmsuite.base.hub.local_copies import PINS
    from llmsuite.base.hub.names import HubName

    proxy = FlakyProxy(int(hub.url.rpartition(":")[2]), seed, most_bytes=FILE_BYTES, longest=0.5)
    os.environ.update(HF_HOME=str(directory / "hf"), LLMSUITE_CACHE=str(isolated_cache(directory / "cache")))
    os.environ.update({"HF_ENDPOINT": f"http://127.0.0.1:{proxy.port}", PINS: ""})
    download._WAIT_SECONDS = 0.01
    chance = random.Random(seed)
    files = {"config.json": b"{}", "tokenizer.json": b'{"t": 1}', "tokenizer_config.json": b"{}"}
    files["model.safetensors"] = chance.randbytes(FILE_BYTES)
    hub.add("org/model", files)
    deadline = time.monotonic() + STALL_TIMEOUT_SECONDS
    errors = list[UserError]()
    found = None
    while found is None:
        try:
            found = fetch(HubName("hf", "org/model"), Want.MODEL, lambda text: None)
        except UserError as error:
            errors.append(error)
            if time.monotonic() > deadline:
                raise Wrong(f"after {len(errors)} tries: {error}") from error
    proxy.close()
    arrived = {path.name: path.read_bytes() for path in found.directory.iterdir()}
    if arrived != files:
        raise Wrong(f"other bytes: {[name for name in files if arrived.get(name) != files[name]]}")
    return {**proxy.faults, "errors": len(errors)}


def main(seconds: float, seed: int) -> int:
    """Report each round; returns how many went wrong."""
    began = time.monotonic()
    number = 0
    bad = 0
    with tempfile.TemporaryDirectory() as place:
        hub = HubServer()
        while time.monotonic() - began < seconds:
            number += 1
            directory = Path(place) / str(number)
            directory.mkdir()
            is_meeting = number % 3 != 0
            try:
                if is_meeting:
                    found = meet_round(directory, seed + number)
                else:
                    found = fetch_round(directory, seed + number, hub)
                print(f"round {number}: {'machines' if is_meeting else 'hub'}: well; {found}", flush=True)
            except Wrong as error:
                bad += 1
                print(f"round {number} (seed {seed + number}): {error}", flush=True)
        hub.stop()
    print(f"{number - bad} of {number} rounds ended well (seed {seed}, {time.monotonic() - began:.0f} s)")
    return bad


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--machine", type=int)
    parser.add_argument("--master", default="")
    parser.add_argument("--directory", type=Path)
    given = parser.parse_args()
    if given.machine is not None:
        sys.exit(machine(given.machine, given.master, given.directory))
    os.environ.update(HF_HUB_DISABLE_XET="1")
    sys.exit(1 if main(given.seconds, given.seed) else 0)
