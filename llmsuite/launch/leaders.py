"""Connections between rank 0 and the first rank of every other machine, for decisions outside of training.

They belong to no process group, so a thread may use them while training continues. A lost connection raises an error
where it is read. Messages are JSON; a process without the key of the run cannot connect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from llmsuite.base.errors import UserError


class Leaders:
    """The other ends by machine: on rank 0 those of all others, on a first rank only that of machine 0."""

    def __init__(self, connections: Mapping[int, Connection]):
        self._connections = dict(connections)

    @property
    def machines(self) -> list[int]:
        """Machines at the other ends, in order."""
        return sorted(self._connections)

    def send(self, machine: int, message: Any) -> None:
        """Send JSON data. Raises UserError when the connection is lost."""
        try:
            self._connections[machine].send_bytes(json.dumps(message).encode())
        except OSError as error:
            raise _lost_connection(machine, error) from error

    def receive(self, machine: int) -> Any:
        """Wait for the next message. Raises UserError when the connection is lost."""
        try:
            return json.loads(self._connections[machine].recv_bytes())
        except (OSError, EOFError) as error:
            raise _lost_connection(machine, error) from error

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections.values():
            connection.close()


def listen(host: str, key: bytes, num_others: int) -> Listener:
    """Wait, at a free port, for the first ranks of other machines. Raises UserError when that cannot be done."""
    try:
        return Listener((host, 0), backlog=num_others, authkey=key)
    except OSError as error:
        raise UserError(f"rank 0 cannot listen at {host}: {error}") from error


def accept(listener: Listener, num_others: int) -> Leaders:
    """The connections of all other machines, on rank 0."""
    connections: dict[int, Connection] = {}
    with listener:
        while len(connections) < num_others:
            try:
                connection = listener.accept()
                connections[int(connection.recv_bytes())] = connection
            except (AuthenticationError, OSError, EOFError):  # not a rank of this run: a rank that is lost ends the run
                continue
    return Leaders(connections)


def connect(host: str, port: int, key: bytes, machine: int) -> Leaders:
    """The connection of the first rank of a machine to rank 0. Raises UserError when there is none."""
    try:
        connection = Client((host, port), authkey=key)
        connection.send_bytes(str(machine).encode())
    except (AuthenticationError, OSError, EOFError) as error:
        raise UserError(
            f"machine {machine} cannot connect to rank 0 at {host}:{port}, over which machines without a shared "
            f"output_dir agree on checkpoints: {error}"
        ) from error
    return Leaders({0: connection})


def _lost_connection(machine: int, error: BaseException) -> UserError:
    why = f": {error}" if str(error) else ""
    return UserError(f"the first rank of machine {machine} is lost{why}")
