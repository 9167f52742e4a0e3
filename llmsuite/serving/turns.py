"""Queues in which clients take turns, so that nobody waits for all that another one has asked for."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Generic, TypeVar

from fastapi import Request

T = TypeVar("T")
Client = tuple[str, str]
"""An address, and the API key that is used from there. Addresses take turns first, so that keys that somebody makes up
gain nothing; then the keys of one address do, as those of one proxy."""
NOBODY: Client = ("", "")
"""The server itself."""


def client_of(request: Request) -> Client:
    """Who asks."""
    address = request.client.host if request.client is not None else ""
    return address, request.headers.get("authorization", "")[:200]


class Turns(Generic[T]):
    """What clients wait for: one entry of each in turn, and those of one client in their order."""

    def __init__(self) -> None:
        self._addresses: collections.OrderedDict[str, collections.OrderedDict[str, collections.deque[T]]] = (
            collections.OrderedDict()
        )

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[T]:
        for keys in self._addresses.values():
            for own in keys.values():
                yield from own

    def count(self, client: Client) -> int:
        """Entries of a client."""
        address, key = client
        keys = self._addresses.get(address)
        return len(keys[key]) if keys is not None and key in keys else 0

    def add(self, client: Client, entry: T, is_first: bool = False) -> None:
        """Queue an entry behind those of the same client, or in front of them."""
        address, key = client
        keys = self._addresses.setdefault(address, collections.OrderedDict())
        own = keys.setdefault(key, collections.deque())
        if is_first:
            own.appendleft(entry)
        else:
            own.append(entry)

    def pop(self) -> tuple[Client, T]:
        """The next entry, which leaves the queue, and whose it is; the client is the last in turn then. There has to be
        one."""
        address, keys = self._addresses.popitem(last=False)
        key, own = keys.popitem(last=False)
        entry = own.popleft()
        if own:
            keys[key] = own
        if keys:
            self._addresses[address] = keys
        return (address, key), entry

    def remove(self, entries: list[T]) -> None:
        """Leave out entries, where they are there."""
        for address, keys in list(self._addresses.items()):
            for key, own in list(keys.items()):
                kept = collections.deque(entry for entry in own if entry not in entries)
                if kept:
                    keys[key] = kept
                else:
                    del keys[key]
            if not keys:
                del self._addresses[address]
