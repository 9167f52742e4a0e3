"""A step played on a device, by times that can be added in one's head."""

from __future__ import annotations

from typing import Any

import pytest

from llmsuite.planning.cost import Hardware
from llmsuite.plugins.rehearse import records as kinds
from llmsuite.plugins.rehearse.records import Record
from llmsuite.plugins.rehearse.timeline import Rates, Timeline, figures, play, ranks_of, trace_events

DEVICE = Hardware(flops=100.0, memory=1.0, local=10.0, network=1.0, memory_bandwidth=50.0)
RATES = Rates(1.0, 1.0, 1.0, kernel_seconds=0.5, message_seconds=1.0, host_link=4.0, copy_seconds=0.25)


def record(kind: int, stream: int = 1, name: str = "k", host: float = 0.0, **numbers: Any) -> Record:
    """A record that the host makes after some seconds."""
    fields: dict[str, Any] = {"group": "", "flops": 0.0, "bytes": 0.0, "about": -1, **numbers}
    return Record(kind, stream, name, "a.py:1", host_seconds=host, **fields)


def played(*records: Record) -> Timeline:
    return play(records, DEVICE, 8, RATES)


def test_a_kernel_takes_the_longest_of_its_times() -> None:
    found = played(
        record(kinds.KERNEL, flops=200.0, bytes=50.0),
        record(kinds.KERNEL, bytes=150.0),
        record(kinds.KERNEL),
        record(kinds.COPY, bytes=100.0),
    )
    assert [span.seconds for span in found.spans] == [2.0, 3.0, 0.5, 2.0]
    assert [span.start for span in found.spans] == [0.0, 2.0, 5.0, 5.5]
    assert found.seconds == found.busy == 7.5


def test_a_kernel_begins_when_it_is_launched() -> None:
    found = played(record(kinds.KERNEL, host=10.0), record(kinds.KERNEL, host=14.0))
    assert [span.start for span in found.spans] == [0.0, 4.0]  # counted from the first launch
    assert found.seconds == 4.5


def test_messages_know_their_links() -> None:
    near = {"group": "ranks 0,7", "bytes": 40.0, "about": 2}
    far = {"group": "ranks 0,8", "bytes": 40.0, "about": 2}
    found = played(
        record(kinds.MESSAGE, name="all_gather", **near),
        record(kinds.MESSAGE, name="all_reduce", **near),
        record(kinds.MESSAGE, name="all_gather", **far),
        record(kinds.MESSAGE, name="send", **near),
    )
    assert [span.seconds for span in found.spans] == [3.0, 5.0, 21.0, 5.0]
    assert found.of_messages == 34.0


def test_streams_overlap_but_for_events() -> None:
    found = played(
        record(kinds.KERNEL, 1, flops=400.0),
        record(kinds.RECORD_EVENT, 1, about=3),
        record(kinds.KERNEL, 2, flops=100.0),
        record(kinds.WAIT_EVENT, 2, about=3),
        record(kinds.KERNEL, 2, flops=100.0),
    )
    assert [span.start for span in found.spans] == [0.0, 0.0, 4.0]
    assert found.seconds == 5.0
    assert found.busy == 4.0


@pytest.mark.parametrize(
    ("wait", "until"),
    [
        (record(kinds.WAIT, 1, "stream"), 2.0),
        (record(kinds.WAIT, 2, "stream"), 4.0),
        (record(kinds.WAIT, 1, "device"), 4.0),
        (record(kinds.WAIT, 1, "event", about=3), 2.0),
    ],
)
def test_the_host_waits(wait: Record, until: float) -> None:
    before = (record(kinds.KERNEL, 1, flops=200.0), record(kinds.RECORD_EVENT, 1, about=3))
    found = played(*before, record(kinds.KERNEL, 2, flops=400.0), wait, record(kinds.KERNEL, 3))
    assert found.spans[-1].launched == found.waited == until


def test_copies_of_the_host_pass_its_link() -> None:
    found = played(record(kinds.UPLOAD, bytes=4.0), record(kinds.READ, bytes=8.0))
    assert [span.seconds for span in found.spans] == [1.25, 2.25]


def test_a_step_that_waits_for_launches_is_said_to() -> None:
    timeline = played(record(kinds.KERNEL, flops=200.0))
    found = figures(timeline, 3.0)
    assert (found["alone_seconds"], found["busy_seconds"], found["is_launch_bound"]) == (2.0, 2.0, True)
    assert not figures(timeline, 1.0)["is_launch_bound"]
    assert figures(played(), 0.0)["alone_seconds"] == 0.0


def test_marks_are_when_all_before_them_is_done() -> None:
    steps = [record(kinds.KERNEL, 1, flops=400.0), record(kinds.KERNEL, 2, flops=100.0, host=0.5)]
    found = play([*steps, record(kinds.KERNEL, 2, flops=600.0, host=0.5)], DEVICE, 8, RATES, [0, 1, 1, 2, 3])
    assert found.marks == [0.0, 4.0, 4.0, 4.0, 7.5]


def test_groups_have_ranks() -> None:
    assert ranks_of("ranks 0,12") == [0, 12]
    assert ranks_of("XCCLCommContext/3") == []


def test_the_trace_is_of_chromes_format() -> None:
    timeline = played(record(kinds.KERNEL, flops=200.0))
    device, host = trace_events(5, timeline)
    assert (device["ph"], device["pid"], device["tid"], device["dur"]) == ("X", "rank 5", "stream 1", 2e6)
    assert (host["ph"], host["tid"], host["ts"]) == ("i", "host", 0)
