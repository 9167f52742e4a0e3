"""Queues in which clients take turns, so that no client waits for all requests of another one."""

from __future__ import annotations

import collections
import ipaddress
from collections.abc import Iterator
from typing import Generic, TypeVar

from fastapi import Request

T = TypeVar("T")
Client = str
"""An IP address, or a network of addresses that one host may have."""
NOBODY: Client = ""
"""The server itself."""
_THIS_MACHINE = "localhost"
_HOST_BITS = 64
"""Bits of an IPv6 address that a host may choose freely."""


def client_of(request: Request) -> Client:
    """The client of a request, by its address only: a client could invent another key or name for each request."""
    return client_at(request.client.host if request.client is not None else "")


def client_at(host: str) -> Client:
    """The client at an address. All addresses of this machine are one client, and so are those of an IPv6 network of 64
    bits."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a proxy's name for its client, or a socket of this machine
        return host
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    if address.is_loopback:
        return _THIS_MACHINE
    if address.version == 6 and not address.is_link_local:
        return str(ipaddress.IPv6Network((int(address), _HOST_BITS), strict=False))
    return str(address)


class FairQueue(Generic[T]):
    """A queue that serves clients in turn, one entry each, and the entries of one client in their order."""

    def __init__(self) -> None:
        self._entries: collections.OrderedDict[Client, collections.deque[T]] = collections.OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def __iter__(self) -> Iterator[T]:
        for queue in self._entries.values():
            yield from queue

    def count(self, client: Client) -> int:
        """Number of entries of a client."""
        return len(self._entries.get(client, ()))

    def add(self, client: Client, entry: T, is_first: bool = False) -> None:
        """Queue an entry after those of the same client, or before them with `is_first`."""
        queue = self._entries.setdefault(client, collections.deque())
        if is_first:
            queue.appendleft(entry)
        else:
            queue.append(entry)

    def pop(self) -> tuple[Client, T]:
        """Remove the next entry; returns its client and the entry. The client is then the last in turn. The queue must
        not be empty."""
        client, queue = self._entries.popitem(last=False)
        entry = queue.popleft()
        if queue:
            self._entries[client] = queue
        return client, entry

    def remove(self, entries: list[T]) -> None:
        """Remove entries, where they are in the queue."""
        for client, queue in list(self._entries.items()):
            kept = collections.deque(entry for entry in queue if entry not in entries)
            if kept:
                self._entries[client] = kept
            else:
                del self._entries[client]
