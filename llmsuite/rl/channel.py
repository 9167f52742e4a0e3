"""The pipe to a worker process, as the training process sees it: messages go both ways without waiting for the worker.

A worker runs code of users, which may stop in the middle of a message, stop to read, or write anything into the pipe.
`multiprocessing.Connection` would wait for the rest of a message without end, whatever the time limit of a call is.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import struct
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

MAX_MESSAGE_BYTES = 1 << 30
"""Bytes of a message from a worker; more than any result has."""
_CHUNK = 1 << 20
_SIZE = struct.Struct("!i")
_LARGE_SIZE = struct.Struct("!Q")
_IS_LARGE = -1
"""In place of a size that does not fit 31 bits: the large size follows. This is the format of `Connection`."""


class BadMessage(Exception):
    """The worker has written something that is no message."""


class Channel:
    """Messages to and from one worker."""

    def __init__(self) -> None:
        self._connection, other = multiprocessing.Pipe()
        self.other = other
        """The end for the worker, to be closed here once it has started."""
        os.set_blocking(self.fileno(), False)
        self._unsent = bytearray()
        self._received = bytearray()

    def fileno(self) -> int:
        """The file descriptor, to wait for."""
        return self._connection.fileno()

    @property
    def has_unsent(self) -> bool:
        """True while a part of the messages is unsent: call `flush` when the pipe can be written to."""
        return bool(self._unsent)

    def send(self, message: Any) -> None:
        """Send a message, as much of it as fits into the pipe now. Raises ConnectionError."""
        data = ForkingPickler.dumps(message)
        if len(data) < 1 << 31:
            self._unsent += _SIZE.pack(len(data))
        else:
            self._unsent += _SIZE.pack(_IS_LARGE) + _LARGE_SIZE.pack(len(data))
        self._unsent += data
        self.flush()

    def flush(self) -> None:
        """Send more of what is unsent. Raises ConnectionError."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self.fileno(), memoryview(self._unsent)[:_CHUNK].tobytes())]
        except BlockingIOError:
            return

    def has_input(self) -> bool:
        """True where the worker has sent something that has not been received, or has closed its end."""
        return bool(self._received) or self._connection.poll()

    def receive(self) -> Iterator[Any]:
        """Yield the messages that have arrived in full, without waiting.

        Raises:
            EOFError: after these messages the worker has closed its end.
            ConnectionError: likewise.
            BadMessage: after these messages there is something else.
        """
        has_ended = False
        while len(self._received) < MAX_MESSAGE_BYTES + _CHUNK:
            try:
                data = os.read(self.fileno(), _CHUNK)
            except BlockingIOError:
                break
            if not data:
                has_ended = True
                break
            self._received += data
        while (message := self._next_message()) is not None:
            yield _unpickled(message)
        if has_ended:
            raise EOFError

    def close(self) -> None:
        """Close this end."""
        self._connection.close()

    def _next_message(self) -> bytes | None:
        """Remove a message from what was received; None where none is complete. Raises BadMessage."""
        begin = _SIZE.size
        if len(self._received) < begin:
            return None
        (size,) = _SIZE.unpack_from(self._received)
        if size == _IS_LARGE:
            begin += _LARGE_SIZE.size
            if len(self._received) < begin:
                return None
            (size,) = _LARGE_SIZE.unpack_from(self._received, _SIZE.size)
        if not 0 <= size <= MAX_MESSAGE_BYTES:
            raise BadMessage(f"a message of {size:,} bytes")
        if len(self._received) < begin + size:
            return None
        message = bytes(self._received[begin : begin + size])
        del self._received[: begin + size]
        return message


def _unpickled(message: bytes) -> Any:
    try:
        return pickle.loads(message)  # of a process that runs the user's code, as this one may
    except Exception as error:  # code of the user has written into the pipe, so that this may fail in any way
        raise BadMessage(type(error).__name__) from error
