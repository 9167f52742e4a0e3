"""How the launchers of a run find each other, on a network where others may knock too.

Machine 0 greets whoever connects with a random text, and the other says who it is, with a proof that it knows
`LLMSUITE_LAUNCH_KEY`; machine 0 proves the same in its answer. Without that variable the key is empty, and anybody who
knows the recipe can take part. What is no such message is no error: its connection is closed, and the meeting goes on.
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

from llmsuite.errors import UserError

KEY = "LLMSUITE_LAUNCH_KEY"
MEET_SECONDS = 600.0
SILENT_SECONDS = 30.0
HELLO_SECONDS = 5.0
"""In which the other side has to say who it is."""
LINE_SECONDS = 10.0
_RETRY_SECONDS = 0.5
_LOOK_SECONDS = 0.2
_MOST_STRANGERS = 64
_MOST_BYTES = 1 << 20
_ENDPOINT = re.compile(r"[^\s,]{1,255}:\d{1,5}")


class Peer:
    """A connection that carries one JSON object a line."""

    def __init__(self, connection: socket.socket):
        self.socket, self.gone, self.last_heard = connection, False, time.monotonic()
        self._buffer = b""
        connection.settimeout(SILENT_SECONDS)

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived, without waiting. Who sends anything else counts as gone."""
        while not self.gone and select.select([self.socket], [], [], 0)[0]:
            try:
                data = self.socket.recv(65536)
            except OSError:
                data = b""
            self._buffer += data
            self.gone = not data or len(self._buffer) > _MOST_BYTES
            self.last_heard = time.monotonic()
        *lines, self._buffer = self._buffer.split(b"\n")
        found: list[dict[str, Any]] = []
        for line in lines:
            message = _message(line)
            if message is None:
                self.gone = True
                break
            found.append(message)
        return found

    def wait(self, seconds: float) -> dict[str, Any] | None:
        """The next message; None when none arrives."""
        deadline = time.monotonic() + seconds
        while not self.gone and (left := deadline - time.monotonic()) > 0:
            select.select([self.socket], [], [], min(left, 1.0))
            if messages := self.receive():
                return messages[0]
        return None

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; a lost connection is noticed when reading."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")


def _message(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _proof(nonce: str, message: Mapping[str, Any]) -> str:
    """A digest of a text that the other side has chosen and of what is said, which only who knows the key can make."""
    said = json.dumps({**message, "proof": ""}, sort_keys=True)
    return hmac.new(os.environ.get(KEY, "").encode(), f"{nonce} {said}".encode(), hashlib.sha256).hexdigest()


def _is_proven(nonce: str, message: Mapping[str, Any]) -> bool:
    given = message.get("proof")
    return isinstance(given, str) and hmac.compare_digest(given.encode(), _proof(nonce, message).encode())


@contextlib.contextmanager
def _saying(text: Callable[[], str]) -> Iterator[None]:
    """Print a line at once and every ten seconds, whatever the block waits for. No thread is left behind it."""
    ended = threading.Event()

    def say() -> None:
        while True:
            print(text(), file=sys.stderr, flush=True)
            if ended.wait(LINE_SECONDS):
                return

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@dataclasses.dataclass(frozen=True)
class Known:
    """A launcher that takes part."""

    peer: Peer
    endpoints: list[str]
    nonce: str
    restarts: int
    """How often the ranks of the run have been started again, as far as it knows."""

    def answer(self, message: Mapping[str, Any]) -> None:
        """Send it something, with a proof."""
        self.peer.send({**message, "proof": _proof(self.nonce, message)})


class Meeting:
    """Machine 0, as long as it waits for the others."""

    def __init__(
        self,
        listener: socket.socket,
        count: int,
        where: str,
        run: str,
        num_ranks: int,
        is_enough: Callable[[Mapping[int, Known], float], bool] = lambda known, seconds: False,
    ):
        """
        Args:
            listener: where the others connect.
            count: machines that may take part.
            where: the address by which users know the listener.
            run: identifies the run.
            num_ranks: of each machine.
            is_enough: whether the run goes on without those who are missing, by who is there and after how long.
        """
        self._listener, self._count, self._where = listener, count, where
        self._run, self._num_ranks, self._is_enough = run, num_ranks, is_enough
        self._known: dict[int, Known] = {}
        self._strangers: list[tuple[Peer, str, float]] = []
        self._refused: list[str] = []

    def gather(self) -> dict[int, Known]:
        """The other machines, by their numbers.

        Raises:
            UserError: they do not all connect in time, or one that knows the key cannot take part.
        """
        began = time.monotonic()
        deadline = began + MEET_SECONDS
        self._listener.setblocking(False)
        try:
            with _saying(lambda: f"waiting for {self._missing} to connect to {self._where}"):
                while len(self._known) < self._count - 1:
                    if self._is_enough(self._known, time.monotonic() - began):
                        break
                    if time.monotonic() > deadline:
                        raise UserError(
                            f"launch.master: {self._missing} did not connect to {self._where} in {MEET_SECONDS:.0f} s; "
                            f"start the same command there with --launch.node_rank{self._reasons}"
                        )
                    self._look()
        except BaseException:
            for known in self._known.values():
                known.peer.socket.close()
            raise
        finally:
            for peer, _, _ in self._strangers:
                peer.socket.close()
        return self._known

    @property
    def _missing(self) -> str:
        return f"machines {sorted({*range(1, self._count)} - self._known.keys())}"

    @property
    def _reasons(self) -> str:
        return "".join(f"; {reason}" for reason in dict.fromkeys(self._refused))

    def _look(self) -> None:
        """See who has come, and what those who have not said yet who they are say now."""
        select.select([self._listener, *(peer.socket for peer, _, _ in self._strangers)], [], [], _LOOK_SECONDS)
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            nonce = secrets.token_hex(16)
            peer = Peer(connection)
            peer.send({"llmsuite": nonce})
            self._strangers.append((peer, nonce, time.monotonic()))
        now, waiting = time.monotonic(), self._strangers
        self._strangers = []
        for peer, nonce, since in waiting[-_MOST_STRANGERS:]:
            messages = peer.receive()
            if messages and self._take(peer, nonce, messages[0]):
                continue
            if not messages and not peer.gone and now - since < HELLO_SECONDS:
                self._strangers.append((peer, nonce, since))
            else:
                peer.socket.close()
        for peer, _, _ in waiting[:-_MOST_STRANGERS]:
            peer.socket.close()
        self._drop_gone()

    def _drop_gone(self) -> None:
        """Forget machines that have come and gone: one that is started again takes their place."""
        for number, found in [*self._known.items()]:
            found.peer.receive()
            if found.peer.gone:
                self._known.pop(number).peer.socket.close()

    def _take(self, peer: Peer, nonce: str, hello: Mapping[str, Any]) -> bool:
        """Let a machine take part, if it is one; whether it does."""
        number, endpoints, restarts = hello.get("machine"), hello.get("endpoints"), hello.get("restarts", 0)
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
        refusal = self._refusal(number, str(hello["run"]), len(endpoints)) if is_proven else _OTHER_KEY
        if not refusal:
            self._known[number] = Known(peer, endpoints, hello["nonce"], restarts)
            return True
        peer.send({"refused": refusal})
        if is_proven and os.environ.get(KEY):
            raise UserError(refusal)  # it is none of strangers
        if refusal not in self._refused:
            self._refused.append(refusal)
            print(refusal, file=sys.stderr, flush=True)
        return False

    def _refusal(self, number: int, run: str, num_endpoints: int) -> str:
        """Why a machine cannot join the run; empty when it can."""
        if run != self._run or num_endpoints != self._num_ranks:
            said = f"machine {number} was given another recipe or other overrides than machine 0"
            return f"{said}; these differ: {names}" if (names := differing(self._run, run)) else said
        self._drop_gone()
        if number in self._known or not 0 < number < self._count:
            return f"two machines were started with --launch.node_rank={number}"
        return ""


def differing(ours: str, theirs: str) -> str:
    """The sections of a recipe in which two runs differ, where both are digests of sections, `NAME=DIGEST` each."""
    own, others = ({part.partition("=")[0]: part for part in run.split()} for run in (ours, theirs))
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
        UserError: nobody answers there in time, or machine 0 refuses.
    """
    where, reason = f"{address[0]}:{address[1]}", [""]
    deadline = time.monotonic() + MEET_SECONDS
    with _saying(lambda: f"waiting for machine 0 at {where}{reason[0]}"):
        while True:
            try:
                answered = _knock(address, hello, endpoints, deadline)
                if answered is not None:
                    return answered
                reason[0] = ": who answers there is not machine 0 of this run"
            except OSError as error:
                reason[0] = f": {error}"
            if time.monotonic() > deadline:
                raise UserError(f"launch.master: nobody answers at {where}{reason[0]}")
            time.sleep(_RETRY_SECONDS)


def _knock(
    address: tuple[str, int], hello: Mapping[str, Any], endpoints: Callable[[str], list[str]], deadline: float
) -> tuple[Peer, dict[str, Any]] | None:
    """One try of `join`; None where another program answers. Raises OSError without an answer."""
    peer = Peer(socket.create_connection(address, timeout=HELLO_SECONDS))
    is_kept = False
    try:
        greeting = peer.wait(HELLO_SECONDS)
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
