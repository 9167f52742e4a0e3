"""The machines of a run: their launchers connect to the first one, and each learns within seconds if another one fails.

Every launcher keeps a connection to the launcher of machine 0. Over it they exchange the addresses of the ranks and
how the ranks ended; machine 0 forwards messages to the others. A launcher that is silent for a while counts as gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from llmsuite.errors import UserError

_MEET_SECONDS = 600.0
_BEAT_SECONDS = 1.0
_SILENT_SECONDS = 30.0
_RETRY_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class End:
    """How the ranks of a machine ended."""

    code: int
    """Exit code of the run."""
    why: str
    """The reason in words; empty when all is well."""
    killed: bool = False
    """Whether a rank was killed or the machine is gone: then that is why the others fail."""


class Machines:
    """The launchers of a run, seen from one of them. With a single machine there is nothing to exchange."""

    def __init__(self, index: int = 0, count: int = 1, master: str = "", run: str = ""):
        """
        Args:
            index: number of this machine, from 0.
            count: number of machines.
            master: host:port at which the launcher of machine 0 can be reached.
            run: identifies the run: equal on machines that were given the same recipe.
        """
        self.index, self.count, self._master, self._run = index, count, master, run
        self._peers: dict[int, _Peer] = {}
        self._ends: dict[int, End] = {}
        self._last_beat = 0.0

    def meet(self, free_ports: Callable[[str, int], list[int]], num_ranks: int) -> list[str]:
        """Wait for the other launchers.

        Args:
            free_ports: finds free ports at an address of this machine.
            num_ranks: ranks that this machine will start.

        Returns:
            host:port of the store that all ranks share, then of each rank, in their order.

        Raises:
            UserError: the others do not connect, or were given another run.
        """
        if self.count == 1:
            return [f"127.0.0.1:{port}" for port in free_ports("127.0.0.1", num_ranks + 1)]
        return self._gather(free_ports, num_ranks) if self.index == 0 else self._join(free_ports, num_ranks)

    def announce(self, end: End) -> None:
        """Tell the other machines how this machine's ranks ended."""
        self._send(list(self._peers), {"end": dataclasses.asdict(end), "of": self.index})

    def poll(self) -> End | None:
        """How the run ended on the other machine that failed first, as far as is known. To be called often."""
        if time.monotonic() - self._last_beat > _BEAT_SECONDS:
            self._last_beat = time.monotonic()
            self._send(list(self._peers), {})
        for number, peer in self._peers.items():
            for message in peer.receive():
                if "end" in message:
                    self._ends.setdefault(message["of"], End(**message["end"]))
                    self._send([n for n in self._peers if n != number], message)
            silent = time.monotonic() - peer.last_heard > _SILENT_SECONDS
            if (peer.gone or silent) and number not in self._ends:
                why = f"machine {number} {'is gone' if peer.gone else 'does not answer'}"
                self._ends[number] = End(1, why, killed=True)
                self._send([n for n in self._peers if n != number], {"end": vars(self._ends[number]), "of": number})
        bad = sorted((end for end in self._ends.values() if end.code), key=lambda end: not end.killed)
        return bad[0] if bad else None

    @property
    def all_ended(self) -> bool:
        """Whether every other machine has announced its end. Only machine 0 has to wait for the others."""
        return self.index != 0 or len(self._ends) == self.count - 1

    def close(self) -> None:
        """Close the connections to the other machines."""
        for peer in self._peers.values():
            peer.socket.close()

    def _gather(self, free_ports: Callable[[str, int], list[int]], num_ranks: int) -> list[str]:
        host, port = _address(self._master)
        deadline = time.monotonic() + _MEET_SECONDS
        endpoints: dict[int, list[str]] = {}
        try:
            listener = socket.create_server((_listening_address(host), port), backlog=self.count)
        except OSError as error:
            raise UserError(f"launch.master: machine 0 cannot listen at {self._master}: {error}") from error
        addresses: list[str] = []
        with listener:
            while len(self._peers) < self.count - 1:
                missing = sorted({*range(1, self.count)} - self._peers.keys())
                listener.settimeout(max(0.1, deadline - time.monotonic()))
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    text = (
                        f"launch.master: machines {missing} did not connect to {self._master} in {_MEET_SECONDS:.0f} s"
                    )
                    raise UserError(f"{text}; start the same command there with --launch.node_rank") from None
                peer = _Peer(connection)
                try:
                    hello = peer.wait(deadline)
                except UserError:
                    continue  # not the connection of a launcher
                refusal = self._refusal(hello, num_ranks)
                if refusal:
                    self._send_to(peer, {"refused": refusal})
                    raise UserError(refusal)
                self._peers[hello["machine"]], endpoints[hello["machine"]] = peer, hello["endpoints"]
                addresses.append(connection.getsockname()[0])
        # where the others have reached this machine; not by what name it calls itself
        address = next((found for found in addresses if not _is_loopback(found)), addresses[0])
        own = [f"{address}:{p}" for p in free_ports(address, num_ranks + 1)]
        whole = [*own, *(e for machine in sorted(endpoints) for e in endpoints[machine])]
        self._send(list(self._peers), {"endpoints": whole})
        return whole

    def _refusal(self, hello: Any, num_ranks: int) -> str:
        """Why a machine cannot join the run; empty when it can."""
        if hello["run"] != self._run:
            return f"machine {hello['machine']} was given another recipe or other overrides than machine 0"
        if hello["machine"] in self._peers or not 0 < hello["machine"] < self.count:
            return f"two machines were started with --launch.node_rank={hello['machine']}"
        return ""

    def _join(self, free_ports: Callable[[str, int], list[int]], num_ranks: int) -> list[str]:
        deadline = time.monotonic() + _MEET_SECONDS
        while True:
            try:
                connection = socket.create_connection(_address(self._master), timeout=_SILENT_SECONDS)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise UserError(f"launch.master: nobody answers at {self._master}: {error}") from error
                time.sleep(_RETRY_SECONDS)  # machine 0 may start later
        peer = _Peer(connection)
        address = connection.getsockname()[0]  # the address that the others can reach
        own = [f"{address}:{port}" for port in free_ports(address, num_ranks)]
        self._send_to(peer, {"machine": self.index, "run": self._run, "endpoints": own})
        answer = peer.wait(deadline)
        if "refused" in answer:
            raise UserError(answer["refused"])
        self._peers[0] = peer
        return [str(endpoint) for endpoint in answer["endpoints"]]

    def _send(self, numbers: Sequence[int], message: Any) -> None:
        for number in numbers:
            self._send_to(self._peers[number], message)

    @staticmethod
    def _send_to(peer: _Peer, message: Any) -> None:
        with contextlib.suppress(OSError):  # a lost connection is noticed when reading
            peer.socket.sendall(json.dumps(message).encode() + b"\n")


class _Peer:
    """A connection that carries one JSON object a line."""

    def __init__(self, connection: socket.socket):
        self.socket, self.gone, self.last_heard = connection, False, time.monotonic()
        self._buffer = b""
        connection.settimeout(_SILENT_SECONDS)

    def receive(self) -> list[Any]:
        """The messages that have arrived, without waiting."""
        while not self.gone and select.select([self.socket], [], [], 0)[0]:
            try:
                data = self.socket.recv(65536)
            except OSError:
                data = b""
            self.gone = not data
            self._buffer += data
            self.last_heard = time.monotonic()
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]

    def wait(self, deadline: float) -> Any:
        """The first message. Raises UserError when none arrives."""
        while time.monotonic() < deadline and not self.gone:
            select.select([self.socket], [], [], 1.0)
            if messages := self.receive():
                return messages[0]
        raise UserError("another machine of the run went away before it began")


def _listening_address(host: str) -> str:
    """Where machine 0 listens: at the address of its name; at all of them, "", where its name is one for itself.

    Debian and Ubuntu map a machine's own name to 127.0.1.1 in its /etc/hosts, where no other machine gets through.
    """
    if host == "localhost" or _is_loopback(host):
        return host  # all launchers are on this machine
    return "" if _is_loopback(socket.gethostbyname(host)) else host


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")


def _address(master: str) -> tuple[str, int]:
    host, _, port = master.rpartition(":")
    return host, int(port)
