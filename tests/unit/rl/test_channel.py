"""The pipe to a worker: messages come whole, and nothing that a worker does with it is waited for."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import struct
from multiprocessing.connection import Connection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.rl import channel as channels
from llmsuite.rl.channel import BadMessage, Channel

MESSAGES = st.lists(st.one_of(st.integers(), st.text(max_size=20), st.binary(max_size=300), st.none()), max_size=6)


@contextlib.contextmanager
def opened() -> Any:
    channel = Channel()
    try:
        yield channel
    finally:
        channel.close()
        with contextlib.suppress(OSError):
            channel.other.close()


def framed(message: Any) -> bytes:
    data = pickle.dumps(message)
    return struct.pack("!i", len(data)) + data


@given(messages=MESSAGES, cuts=st.lists(st.integers(0, 2000), max_size=8))
def test_messages_come_whole_however_they_are_cut(messages: list[Any], cuts: list[int]) -> None:
    data = b"".join(map(framed, messages))
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    with opened() as channel:
        found = []
        for begin, end in itertools.pairwise(places):
            os.write(channel.other.fileno(), data[begin:end])
            found += channel.receive()
        assert found == messages
        assert list(channel.receive()) == []
        os.write(channel.other.fileno(), framed("last"))
        channel.other.close()
        rest = channel.receive()
        assert next(rest) == "last"
        with pytest.raises(EOFError):
            next(rest)


@given(lie=st.binary(min_size=1, max_size=200))
def test_what_is_no_message_is_refused_or_not_waited_for(lie: bytes) -> None:
    with opened() as channel:
        os.write(channel.other.fileno(), lie)
        with contextlib.suppress(BadMessage):
            list(channel.receive())


def test_what_comes_before_a_bad_message_counts() -> None:
    with opened() as channel:
        os.write(channel.other.fileno(), framed(1) + framed(2) + b"\0\0\0\4ouch")
        messages = channel.receive()
        assert [next(messages), next(messages)] == [1, 2]
        with pytest.raises(BadMessage, match="UnpicklingError"):
            next(messages)


def test_a_message_that_is_too_large_is_not_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MAX_MESSAGE_BYTES", 1000)
    for head in (struct.pack("!i", 1001), struct.pack("!i", -1) + struct.pack("!Q", 1 << 40), struct.pack("!i", -2)):
        with opened() as channel:
            os.write(channel.other.fileno(), head)
            with pytest.raises(BadMessage, match="a message of "):
                list(channel.receive())


@pytest.mark.parametrize("size", [10, 3_000_000])
def test_a_worker_that_does_not_read_is_not_waited_for(size: int) -> None:
    message = b"x" * size
    with opened() as channel:
        worker = Connection(os.dup(channel.other.fileno()))
        channel.send(message)
        channel.send("next")
        assert channel.has_unsent == (size > 1_000_000)
        received = b""
        while channel.has_unsent:
            received += os.read(worker.fileno(), 1 << 20)
            channel.flush()
        if received:
            os.set_blocking(worker.fileno(), False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    received += os.read(worker.fileno(), 1 << 20)
            assert received == framed_by(message) + framed_by("next")
        else:
            assert [worker.recv(), worker.recv()] == [message, "next"]
        worker.close()


def framed_by(message: Any) -> bytes:
    """As `Connection` does."""
    data = bytes(channels.ForkingPickler.dumps(message))
    return struct.pack("!i", len(data)) + data
