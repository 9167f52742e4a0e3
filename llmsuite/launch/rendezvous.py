"""The rendezvous of the launchers of a run, on a network where other programs may connect too.

Machine 0 sends a nonce on each new connection, and the other side answers with its identity and an HMAC that proves
that it knows `LLMSUITE_LAUNCH_KEY`; machine 0 proves the same in its answer. Without that variable the key is empty,
and anybody who knows the recipe can take part. Any other message is no error: its connection is closed, and the
rendezvous continues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import json
import os
import re
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from llmsuite.base.errors import UserError

KEY = "LLMSUITE_LAUNCH_KEY"
RENDEZVOUS_SECONDS = 600.0
SILENT_SECONDS = 30.0
HANDSHAKE_SECONDS = 5.0
"""Time that the other side has to identify itself."""
PROGRESS_SECONDS = 10.0
_RETRY_SECONDS = 0.5
_LOOK_SECONDS = 0.2
_MAX_UNVERIFIED = 64
_MAX_MESSAGE_BYTES = 1 << 20
_ENDPOINT = re.compile(r"[^\s,]{1,255}:\d{1,5}")


class Peer:
    """A connection that carries one JSON object per line."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self.is_closed = False
        self.last_received = time.monotonic()
        self._buffer = b""
        connection.settimeout(SILENT_SECONDS)

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived, without waiting. A peer that sends anything else counts as closed."""
        while not self.is_closed and select.select([self.socket], [], [], 0)[0]:
            try:
                data = self.socket.recv(65536)
            except OSError:
                data = b""
            self._buffer += data
            self.is_closed = not data or len(self._buffer) > _MAX_MESSAGE_BYTES
            self.last_received = time.monotonic()
        *lines, self._buffer = self._buffer.split(b"\n")
        found: list[dict[str, Any]] = []
        for line in lines:
            message = _message(line)
            if message is None:
                self.is_closed = True
                break
            found.append(message)
        return found

    def wait(self, seconds: float) -> dict[str, Any] | None:
        """The next message; None when none arrives."""
        deadline = time.monotonic() + seconds
        while not self.is_closed:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            select.select([self.socket], [], [], min(left, 1.0))
            if messages := self.receive():
                return messages[0]
        return None

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; a lost connection is noticed by `receive`."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")


def _message(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _proof(nonce: str, message: Mapping[str, Any]) -> str:
    """HMAC-SHA256 of the nonce of the other side and of the message: only a peer that knows the key can compute it."""
    content = json.dumps({**message, "proof": ""}, sort_keys=True)
    return hmac.new(os.environ.get(KEY, "").encode(), f"{nonce} {content}".encode(), hashlib.sha256).hexdigest()


def _is_proven(nonce: str, message: Mapping[str, Any]) -> bool:
    given = message.get("proof")
    return isinstance(given, str) and hmac.compare_digest(given.encode(), _proof(nonce, message).encode())


@contextlib.contextmanager
def _progress_lines(text: Callable[[], str]) -> Iterator[None]:
    """Print a line now and every ten seconds while the block runs. Its thread ends with the block."""
    ended = threading.Event()

    def report() -> None:
        while True:
            print(text(), file=sys.stderr, flush=True)
            if ended.wait(PROGRESS_SECONDS):
                return

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@dataclasses.dataclass(frozen=True)
class Member:
    """A launcher that takes part."""

    peer: Peer
    endpoints: list[str]
    nonce: str
    restarts: int
    """Restarts of the ranks of the run so far, as far as it knows."""

    def answer(self, message: Mapping[str, Any]) -> None:
        """Send it a message, with a proof."""
        self.peer.send({**message, "proof": _proof(self.nonce, message)})


class Rendezvous:
    """Machine 0's side of the rendezvous: it waits for the other machines."""

    def __init__(
        self,
        listener: socket.socket,
        count: int,
        where: str,
        run: str,
        num_ranks: int,
        is_enough: Callable[[Mapping[int, Member], float], bool] = lambda known, seconds: False,
    ):
        """
        Args:
            listener: where the others connect.
            count: machines that may take part.
            where: the address of the listener, for messages.
            run: identifies the run.
            num_ranks: of each machine.
            is_enough: decides if the run continues without the missing machines, from the members and the seconds
                since the start.
        """
        self._listener = listener
        self._count = count
        self._where = where
        self._run = run
        self._num_ranks = num_ranks
        self._is_enough = is_enough
        self._members: dict[int, Member] = {}
        self._unverified: list[tuple[Peer, str, float]] = []
        self._refused: list[str] = []

    def gather(self) -> dict[int, Member]:
        """The other machines, by their numbers.

        Raises:
            UserError: they do not all connect in time, or one that knows the key cannot take part.
        """
        began = time.monotonic()
        deadline = began + RENDEZVOUS_SECONDS
        self._listener.setblocking(False)
        try:
            with _progress_lines(lambda: f"waiting for {self._missing} to connect to {self._where}"):
                while len(self._members) < self._count - 1:
                    if self._is_enough(self._members, time.monotonic() - began):
                        break
                    if time.monotonic() > deadline:
                        raise UserError(
                            f"launch.master: {self._missing} did not connect to {self._where} in "
                            f"{RENDEZVOUS_SECONDS:.0f} s; start the same command there with "
                            f"--launch.node_rank{self._reasons}"
                        )
                    self._look()
        except BaseException:
            for known in self._members.values():
                known.peer.socket.close()
            raise
        finally:
            for peer, _, _ in self._unverified:
                peer.socket.close()
        return self._members

    @property
    def _missing(self) -> str:
        return f"machines {sorted({*range(1, self._count)} - self._members.keys())}"

    @property
    def _reasons(self) -> str:
        return "".join(f"; {reason}" for reason in dict.fromkeys(self._refused))

    def _look(self) -> None:
        """Accept a new connection, and read from those that have not identified themselves yet."""
        select.select([self._listener, *(peer.socket for peer, _, _ in self._unverified)], [], [], _LOOK_SECONDS)
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            nonce = secrets.token_hex(16)
            peer = Peer(connection)
            peer.send({"llmsuite": nonce})
            self._unverified.append((peer, nonce, time.monotonic()))
        now = time.monotonic()
        waiting = self._unverified
        self._unverified = []
        for peer, nonce, since in waiting[-_MAX_UNVERIFIED:]:
            messages = peer.receive()
            if messages and self._admit(peer, nonce, messages[0]):
                continue
            if not messages and not peer.is_closed and now - since < HANDSHAKE_SECONDS:
                self._unverified.append((peer, nonce, since))
            else:
                peer.socket.close()
        for peer, _, _ in waiting[:-_MAX_UNVERIFIED]:
            peer.socket.close()
        self._drop_closed()

    def _drop_closed(self) -> None:
        """Forget machines that have disconnected: one that is started again gets their number."""
        for number, found in [*self._members.items()]:
            found.peer.receive()
            if found.peer.is_closed:
                self._members.pop(number).peer.socket.close()

    def _admit(self, peer: Peer, nonce: str, hello: Mapping[str, Any]) -> bool:
        """Add a machine to the members, if it is one of this run. Returns True on success."""
        number = hello.get("machine")
        endpoints = hello.get("endpoints")
        restarts = hello.get("restarts", 0)
        if (
            type(number) is not int
            or type(restarts) is not int
            or not isinstance(endpoints, list)
            or not all(isinstance(e, str) and _ENDPOINT.fullmatch(e) for e in endpoints)
            or not isinstance(hello.get("run"), str)
            or not isinstance(hello.get("nonce"), str)
        ):
            return False
        is_proven = _is_proven(nonce, hello)
        refusal = _OTHER_KEY
        if is_proven:
            refusal = self._refusal(number, str(hello["run"]), len(endpoints))
        if not refusal:
            self._members[number] = Member(peer, endpoints, hello["nonce"], restarts)
            return True
        peer.send({"refused": refusal})
        if is_proven and os.environ.get(KEY):
            raise UserError(refusal)  # the key shows that it is a machine of the user's
        if refusal not in self._refused:
            self._refused.append(refusal)
            print(refusal, file=sys.stderr, flush=True)
        return False

    def _refusal(self, number: int, run: str, num_endpoints: int) -> str:
        """The reason why a machine cannot join the run; empty when it can."""
        if run != self._run or num_endpoints != self._num_ranks:
            reason = f"machine {number} was given another recipe or other overrides than machine 0"
            names = differing_sections(self._run, run)
            return f"{reason}; these differ: {names}" if names else reason
        self._drop_closed()
        if number in self._members or not 0 < number < self._count:
            return f"two machines were started with --launch.node_rank={number}"
        return ""


def differing_sections(ours: str, theirs: str) -> str:
    """The sections of a recipe in which two runs differ; a run is given as digests of sections, `NAME=DIGEST` each."""
    own = {part.partition("=")[0]: part for part in ours.split()}
    others = {part.partition("=")[0]: part for part in theirs.split()}
    if own.keys() != others.keys():  # another stage
        return ", ".join(own.keys() & others.keys() & {"stage"})
    return ", ".join(name for name, part in own.items() if others[name] != part)


_OTHER_KEY = f"a machine was given another {KEY} than machine 0"


def join(
    address: tuple[str, int], hello: Mapping[str, Any], endpoints: Callable[[str], list[str]]
) -> tuple[Peer, dict[str, Any]]:
    """Take part as a machine other than 0. Returns the connection to machine 0, and its answer.

    Args:
        address: of machine 0, which may start later.
        hello: "machine", the number of this one; "run", which identifies the run; "restarts", as far as it knows.
        endpoints: the endpoints of this machine's ranks, at the address that others can reach.

    Raises:
        UserError: there is no answer in time, or machine 0 refuses.
    """
    where = f"{address[0]}:{address[1]}"
    reason = [""]
    deadline = time.monotonic() + RENDEZVOUS_SECONDS
    with _progress_lines(lambda: f"waiting for machine 0 at {where}{reason[0]}"):
        while True:
            try:
                answered = _try_join(address, hello, endpoints, deadline)
                if answered is not None:
                    return answered
                reason[0] = ": the program that answers there is not machine 0 of this run"
            except OSError as error:
                reason[0] = f": {error}"
            if time.monotonic() > deadline:
                raise UserError(f"launch.master: there is no answer at {where}{reason[0]}")
            time.sleep(_RETRY_SECONDS)


def _try_join(
    address: tuple[str, int], hello: Mapping[str, Any], endpoints: Callable[[str], list[str]], deadline: float
) -> tuple[Peer, dict[str, Any]] | None:
    """One attempt of `join`; None where another program answers. Raises OSError without an answer."""
    peer = Peer(socket.create_connection(address, timeout=HANDSHAKE_SECONDS))
    is_kept = False
    try:
        greeting = peer.wait(HANDSHAKE_SECONDS)
        if greeting is None or not isinstance(greeting.get("llmsuite"), str):
            return None
        own = secrets.token_hex(16)
        here = endpoints(peer.socket.getsockname()[0])
        hello = {**hello, "endpoints": here, "nonce": own}
        peer.send({**hello, "proof": _proof(greeting["llmsuite"], hello)})
        answer = peer.wait(deadline - time.monotonic())
        if answer is None:
            return None
        if isinstance(answer.get("refused"), str):
            raise UserError(answer["refused"])
        if not _is_proven(own, answer):
            raise UserError(f"machine 0 at {address[0]}:{address[1]} was given another {KEY} than this machine")
        is_kept = True
        return peer, answer
    finally:
        if not is_kept:
            peer.socket.close()
