"""The edges of a pipeline: every send has its receiver, in a channel that both ends know."""

from __future__ import annotations

import pytest

from llmsuite.parallel.edges import (
    Channel,
    Message,
    channels,
    has_header,
    incoming,
    messages,
    outgoing,
    source,
    target,
)


@pytest.mark.parametrize(("line", "ring"), [([0, 2], False), ([0, 2], True), ([1, 3, 5, 7], False), ([1, 3, 5], True)])
def test_both_ends_of_a_channel_name_it_alike(line: list[int], ring: bool) -> None:
    known = channels(line, ring)
    assert len(set(known)) == len(known) == 2 * (len(line) - (not ring))
    for channel in known:
        assert outgoing(line, channel.sender, channel.forward) == channel
        assert incoming(line, channel.receiver, channel.forward) == channel


def test_two_ranks_with_several_chunks_have_four_channels() -> None:
    """Each is the other's next: activations and gradients go the same way, and may not be taken for each other."""
    assert set(channels([0, 1], ring=True)) == {Channel(a, 1 - a, forward) for a in (0, 1) for forward in (True, False)}


@pytest.mark.parametrize("forward", [True, False])
def test_what_one_part_sends_another_receives(forward: bool) -> None:
    targets = {part: target(part, 4, forward) for part in range(4)}
    assert {to: part for part, to in targets.items() if to is not None} == {
        part: origin for part in range(4) if (origin := source(part, 4, forward)) is not None
    }
    assert [part for part, to in targets.items() if to is None] == [3 if forward else 0]


def test_shapes_come_first_and_gradients_need_none() -> None:
    assert messages(True, [2, 5, 8], 0) == [Message("header", (5,)), Message("activations", (2, 5, 8))]
    with_documents = messages(True, [2, 5, 8], 10)  # under sequence parallel over two ranks
    assert with_documents[1] == Message("document_starts", (2, 10))
    assert [message.is_int64 for message in with_documents] == [True, True, False]
    assert messages(False, [2, 5, 8], 10) == [Message("gradients", (2, 5, 8))]
    assert messages(True, [2, 5, 8], 10, with_header=False) == with_documents[1:]


def test_the_last_part_gets_one_header_in_the_passes_over_a_batch() -> None:
    assert [has_header(to, 4, micro_batch) for to in (2, 3) for micro_batch in (None, 0, 1)] == [True] * 5 + [False]
