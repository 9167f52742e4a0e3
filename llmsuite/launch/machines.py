"""The machines of a run: their launchers connect to the first one, and each learns within seconds if another one fails.

Every launcher keeps a connection to the launcher of machine 0. Over it they exchange the addresses of the ranks and
how the ranks ended; machine 0 forwards messages to the others. A launcher that is silent for a while counts as gone.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from llmsuite.errors import UserError
from llmsuite.launch import meeting
from llmsuite.launch.meeting import Meeting, Peer, join

_BEAT_SECONDS = 1.0


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
        self._peers: dict[int, Peer] = {}
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
                if "end" in message and (end := _end(message["end"])) is not None:
                    self._ends.setdefault(int(message["of"]), end)
                    self._send([n for n in self._peers if n != number], message)
            silent = time.monotonic() - peer.last_heard > meeting.SILENT_SECONDS
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
        try:
            listener = socket.create_server((_listening_address(host), port), backlog=self.count)
        except OSError as error:
            raise UserError(f"launch.master: machine 0 cannot listen at {self._master}: {error}") from error
        with listener:
            known = Meeting(listener, self.count, self._master, self._run, num_ranks).gather()
        self._peers = {number: found.peer for number, found in known.items()}
        addresses = [peer.socket.getsockname()[0] for peer in self._peers.values()]
        # where the others have reached this machine; not by what name it calls itself
        address = next((found for found in addresses if not _is_loopback(found)), addresses[0])
        own = [f"{address}:{p}" for p in free_ports(address, num_ranks + 1)]
        whole = [*own, *(endpoint for number in sorted(known) for endpoint in known[number].endpoints)]
        for found in known.values():
            found.answer({"endpoints": whole})
        return whole

    def _join(self, free_ports: Callable[[str, int], list[int]], num_ranks: int) -> list[str]:
        def endpoints(address: str) -> list[str]:
            return [f"{address}:{port}" for port in free_ports(address, num_ranks)]

        self._peers[0], found = join(_address(self._master), self.index, self._run, endpoints)
        return found

    def _send(self, numbers: Sequence[int], message: Any) -> None:
        for number in numbers:
            self._peers[number].send(message)


def _end(said: Any) -> End | None:
    """The end that another launcher tells of; None for anything else."""
    try:
        return End(int(said["code"]), str(said["why"]), bool(said["killed"]))
    except (TypeError, KeyError, ValueError):
        return None


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
