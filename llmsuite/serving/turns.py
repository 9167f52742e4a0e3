"""Queues in which clients take turns, so that nobody waits for all that another one has asked for."""

from __future__ import annotations

import collections
import ipaddress
from collections.abc import Iterator
from typing import Generic, TypeVar

from fastapi import Request

T = TypeVar("T")
Client = str
"""An address, or several that one host may have."""
NOBODY: Client = ""
"""The server itself."""
_THIS_MACHINE = "localhost"
_HOST_BITS = 64
"""Bits of an IPv6 address that any host may choose as it likes."""


def client_of(request: Request) -> Client:
    """Who asks: an address, and nothing that is sent along, as somebody could make up another key or name for each
    request."""
    return client_at(request.client.host if request.client is not None else "")


def client_at(host: str) -> Client:
    """The client at an address. All addresses of this machine are one client, and so are those of an IPv6 network of 64
    bits."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # what a proxy calls its client, or a socket of this machine
        return host
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    if address.is_loopback:
        return _THIS_MACHINE
    if address.version == 6 and not address.is_link_local:
        return str(ipaddress.IPv6Network((int(address), _HOST_BITS), strict=False))
    return str(address)


class Turns(Generic[T]):
    """What clients wait for: one entry of each in turn, and those of one client in their order."""

    def __init__(self) -> None:
        self._entries: collections.OrderedDict[Client, collections.deque[T]] = collections.OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def __iter__(self) -> Iterator[T]:
        for own in self._entries.values():
            yield from own

    def count(self, client: Client) -> int:
        """Entries of a client."""
        return len(self._entries.get(client, ()))

    def add(self, client: Client, entry: T, is_first: bool = False) -> None:
        """Queue an entry behind those of the same client, or in front of them."""
        own = self._entries.setdefault(client, collections.deque())
        if is_first:
            own.appendleft(entry)
        else:
            own.append(entry)

    def pop(self) -> tuple[Client, T]:
        """The next entry, which leaves the queue, and whose it is; the client is the last in turn then. There has to be
        one."""
        client, own = self._entries.popitem(last=False)
        entry = own.popleft()
        if own:
            self._entries[client] = own
        return client, entry

    def remove(self, entries: list[T]) -> None:
        """Leave out entries, where they are there."""
        for client, own in list(self._entries.items()):
            kept = collections.deque(entry for entry in own if entry not in entries)
            if kept:
                self._entries[client] = kept
            else:
                del self._entries[client]
