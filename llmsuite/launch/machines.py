"""The machines of a run: their launchers connect to the first one, and each is notified when another one fails.

Every launcher keeps a connection to the launcher of machine 0. Over it they exchange the addresses of the ranks and
how the ranks ended; machine 0 forwards messages to the others. A launcher that is silent for a while counts as lost.
Spare machines take part without ranks until one of the others is lost.
"""

from __future__ import annotations

import dataclasses
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.launch import rendezvous
from llmsuite.launch.ends import End, parse_end
from llmsuite.launch.membership import Membership
from llmsuite.launch.rendezvous import Member, Peer, Rendezvous, join
from llmsuite.launch.restarts import Decision

_BEAT_SECONDS = 1.0
_LOOK_SECONDS = 0.05


class Machines:
    """The launchers of a run, seen from one of them. With a single machine there is nothing to exchange."""

    def __init__(
        self, number: int = 0, count: int = 1, master: str = "", run: str = "", membership: Membership | None = None
    ):
        """
        Args:
            number: of this machine, from 0.
            count: machines of the run.
            master: host:port at which the launcher of machine 0 can be reached.
            run: identifies the run: equal on machines that were given the same recipe.
            membership: the rule by which lost machines are replaced; None where all are needed.
        """
        self.number = number
        self.membership = membership or Membership(count)
        self._master = master
        self._run = run
        self.numbers = [*range(count)]
        """The machines that make up the run, by node rank."""
        self._peers: dict[int, Peer] = {}
        self._ends: dict[int, End] = {}
        self._decision: Decision | None = None
        self._last_beat = 0.0
        self._has_met = False
        self.restarts = 0
        """Restarts of the ranks of the run so far, as far as any launcher knows."""

    @property
    def count(self) -> int:
        """Machines that make up the run."""
        return len(self.numbers)

    @property
    def index(self) -> int:
        """The node rank of this machine in the run, from 0; -1 for a spare."""
        if self.number in self.numbers:
            return self.numbers.index(self.number)
        return -1

    def connect(self, num_ranks: int) -> list[str]:
        """Wait for the other launchers. May be called again, after `close`.

        Args:
            num_ranks: ranks that this machine will start.

        Returns:
            host:port of the store that all ranks share, then of each rank, in their order.

        Raises:
            UserError: the others do not connect, or were given another run.
        """
        if self.membership.max_nodes == 1:
            return [f"127.0.0.1:{port}" for port in free_ports("127.0.0.1", num_ranks + 1)]
        back = {n for n, peer in self._peers.items() if not peer.is_closed and not self._is_lost(n)}
        expected = back if self._has_met else {*range(1, self.membership.max_nodes)}
        self._has_met = True
        self._peers = {}
        self._ends = {}
        self._decision = None
        if self.number == 0:
            return self._gather(num_ranks, expected)
        return self._join(num_ranks)

    def announce(self, end: End) -> None:
        """Report to the other machines how this machine's ranks ended."""
        self._send(list(self._peers), {"end": dataclasses.asdict(end), "of": self.number})

    def poll(self) -> End | None:
        """The end of the run on the other machine that failed first, as far as is known; None while there is none. To
        be called often: it also sends heartbeats and forwards messages."""
        if time.monotonic() - self._last_beat > _BEAT_SECONDS:
            self._last_beat = time.monotonic()
            self._send(list(self._peers), {})
        for number, peer in [*self._peers.items()]:
            for message in peer.receive():
                if number == 0 and "decision" in message:
                    self._decision = Decision.from_message(message["decision"])
                elif "end" in message:
                    end = parse_end(message["end"])
                    if end is not None:
                        self._ends.setdefault(int(message["of"]), end)
                        self._send([n for n in self._peers if n != number], message)
            silent = time.monotonic() - peer.last_received > rendezvous.SILENT_SECONDS
            if (peer.is_closed or silent) and number not in self._ends:
                why = f"machine {number} {'is lost' if peer.is_closed else 'does not answer'}"
                if number not in self.numbers:
                    print(f"{why}; it was a spare", file=sys.stderr, flush=True)
                    self._peers.pop(number).socket.close()
                    continue
                self._ends[number] = End(1, why, killed=True, of_machine=True)
                self._send([n for n in self._peers if n != number], {"end": vars(self._ends[number]), "of": number})
        bad = sorted((end for end in self._ends.values() if end.code), key=lambda end: not end.killed)
        return bad[0] if bad else None

    @property
    def all_ended(self) -> bool:
        """True once every other machine has announced its end; elsewhere than on machine 0, its end stands for all."""
        if self.number == 0:
            return all(n in self._ends for n in self.numbers if n)
        return 0 in self._ends

    def _is_lost(self, number: int) -> bool:
        return number in self._ends and self._ends[number].of_machine

    def agree(self, decision: Decision) -> Decision:
        """Machine 0's decision after the end of all ranks; this machine's own where machine 0 is lost."""
        if self.number == 0:
            self._send(list(self._peers), {"decision": decision.as_message()})
            return decision
        deadline = time.monotonic() + rendezvous.SILENT_SECONDS
        while self._decision is None and not self._peers[0].is_closed and time.monotonic() < deadline:
            self.poll()
            time.sleep(_LOOK_SECONDS)
        return self._decision or decision

    def close(self) -> None:
        """Close the connections to the other machines."""
        for peer in self._peers.values():
            peer.socket.close()

    def _gather(self, num_ranks: int, expected: set[int]) -> list[str]:
        """Wait for the others, on machine 0; `expected` are those that were not lost."""

        def is_enough(known: Mapping[int, Member], seconds: float) -> bool:
            restarts = max([self.restarts, *(found.restarts for found in known.values())])
            is_one_due = not expected <= known.keys()
            return restarts > 0 and self.membership.is_enough(len(known) + 1, is_one_due, seconds)

        host, port = _address(self._master)
        try:
            listener = socket.create_server((_listening_address(host), port), backlog=self.membership.max_nodes)
        except OSError as error:
            raise UserError(
                f"launch.master: machine 0 cannot listen at {self._master}: {error.strerror or error}; it has to be a "
                "free port at an address of machine 0"
            ) from error
        with listener:
            waiting = Rendezvous(listener, self.membership.max_nodes, self._master, self._run, num_ranks, is_enough)
            known = waiting.gather()
        self.restarts = max([self.restarts, *(found.restarts for found in known.values())])
        self._peers = {number: found.peer for number, found in known.items()}
        self.numbers = self.membership.assign({0, *known})
        addresses = [peer.socket.getsockname()[0] for peer in self._peers.values()] or ["127.0.0.1"]
        # the address at which the others have reached this machine, not that of its own name
        address = next((found for found in addresses if not _is_loopback(found)), addresses[0])
        own = [f"{address}:{p}" for p in free_ports(address, num_ranks + 1)]
        endpoints = [*own, *(endpoint for number in self.numbers[1:] for endpoint in known[number].endpoints)]
        for found in known.values():
            found.answer({"endpoints": endpoints, "restarts": self.restarts, "machines": self.numbers})
        return endpoints

    def _join(self, num_ranks: int) -> list[str]:
        def endpoints(address: str) -> list[str]:
            return [f"{address}:{port}" for port in free_ports(address, num_ranks)]

        hello = {"machine": self.number, "run": self._run, "restarts": self.restarts}
        self._peers[0], answer = join(_address(self._master), hello, endpoints)
        self.restarts = int(answer["restarts"])
        self.numbers = [int(number) for number in answer["machines"]]
        return [str(endpoint) for endpoint in answer["endpoints"]]

    def _send(self, numbers: Sequence[int], message: Any) -> None:
        for number in numbers:
            self._peers[number].send(message)


def _listening_address(host: str) -> str:
    """The address at which machine 0 listens: that of its name; all addresses, "", where its name is a loopback.

    Debian and Ubuntu map a machine's own name to 127.0.1.1 in its /etc/hosts, where no other machine can connect.
    """
    if host == "localhost" or _is_loopback(host):
        return host  # all launchers are on this machine
    if _is_loopback(socket.gethostbyname(host)):
        return ""
    return host


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")


def _address(master: str) -> tuple[str, int]:
    host, _, port = master.rpartition(":")
    return host, int(port)


def free_ports(address: str, count: int) -> list[int]:
    """Ports that are free at an address of this machine. Raises UserError when there are too few."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind((address, 0))
        return [s.getsockname()[1] for s in sockets]
    except OSError as error:
        raise UserError(f"no {count} free ports on {address}: {error}") from error
    finally:
        for s in sockets:
            s.close()
