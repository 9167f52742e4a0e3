"""The records of a step played on a device of given figures: how long kernels and messages take, on which stream, and
where the host waits."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from llmsuite.planning.cost import Hardware
from llmsuite.plugins.rehearse.records import (
    COPY,
    KERNEL,
    MESSAGE,
    READ,
    RECORD_EVENT,
    UPLOAD,
    WAIT,
    WAIT_EVENT,
    Record,
)


@dataclasses.dataclass(frozen=True)
class Rates:
    """Fractions of the peaks of a data sheet that single kernels and messages reach, and their shortest times. Assumed,
    not measured: large products of an H100 reach about two thirds of the dense peak."""

    products: float = 0.65
    memory: float = 0.8
    links: float = 0.8
    kernel_seconds: float = 2.5e-6
    """The shortest kernel."""
    message_seconds: float = 12e-6
    """A message without bytes."""
    host_link: float = 50e9
    """Bytes/s between the device and the host, over PCIe 5."""
    copy_seconds: float = 10e-6
    """A copy to or from the host without bytes."""


_PASSES = {"all_reduce": 2.0}
"""How often the bytes of a message pass the link of a rank; once for other messages."""


@dataclasses.dataclass(frozen=True)
class Span:
    """A kernel, copy or message on its stream; times in seconds from the first launch."""

    name: str
    stream: int
    launched: float
    start: float
    seconds: float
    is_message: bool


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A step in time."""

    spans: list[Span]
    seconds: float
    """Until the host has launched everything and all streams are done."""
    waited: float
    """Seconds that the host waits for the device."""
    marks: list[float] = dataclasses.field(default_factory=list)
    """When the host and all streams are done with the records before each mark."""

    @property
    def busy(self) -> float:
        """Seconds of the busiest stream."""
        each: collections.Counter[int] = collections.Counter()
        for span in self.spans:
            each[span.stream] += span.seconds  # type: ignore[assignment]
        return max(each.values(), default=0.0)

    @property
    def of_messages(self) -> float:
        """Seconds of all messages."""
        return sum(span.seconds for span in self.spans if span.is_message)


class _Clock:
    """The host and the streams of a device."""

    def __init__(self) -> None:
        self.host = 0.0
        self.waited = 0.0
        self.streams: dict[int, float] = collections.defaultdict(float)
        self.events: dict[int, float] = collections.defaultdict(float)

    @property
    def done(self) -> float:
        """When the host and all streams are done with what they have."""
        return max([self.host, *self.streams.values()])

    def wait(self, until: float) -> None:
        """The host waits."""
        self.waited += max(0.0, until - self.host)
        self.host = max(self.host, until)

    def wait_for(self, record: Record) -> None:
        """The host waits for a stream, an event, or all streams."""
        if record.name == "event":
            self.wait(self.events[record.about])
        elif record.name == "device":
            self.wait(max(self.streams.values(), default=0.0))
        else:
            self.wait(self.streams[record.stream])


def play(
    records: Sequence[Record],
    device: Hardware,
    devices_per_machine: int,
    rates: Rates | None = None,
    marks: Sequence[int] = (),
) -> Timeline:
    """Play a step of one rank. Other ranks are taken to be there at once; `pipeline_times` has the stages of a pipeline
    wait for each other.

    Args:
        records: of the step, in their order.
        device: figures of its device.
        devices_per_machine: ranks with a link of `Hardware.local` between them.
        rates: what of these figures is reached.
        marks: numbers of records, ascending, before which the time is noted.
    """
    rates = rates or Rates()
    clock = _Clock()
    spans = []
    times: list[float] = []
    before = records[0].host_seconds if records else 0.0
    for number, record in enumerate(records):
        while len(times) < len(marks) and marks[len(times)] <= number:
            times.append(clock.done)
        clock.host += record.host_seconds - before
        before = record.host_seconds
        if record.kind == WAIT:
            clock.wait_for(record)
        elif record.kind == RECORD_EVENT:
            clock.events[record.about] = max(clock.host, clock.streams[record.stream])
        elif record.kind == WAIT_EVENT:
            clock.streams[record.stream] = max(clock.streams[record.stream], clock.events[record.about])
        else:
            seconds = _seconds(record, device, devices_per_machine, rates)
            start = max(clock.host, clock.streams[record.stream])
            clock.streams[record.stream] = start + seconds
            spans.append(Span(record.name, record.stream, clock.host, start, seconds, record.kind == MESSAGE))
    times += [clock.done] * (len(marks) - len(times))
    return Timeline(spans, clock.done, clock.waited, times)


def _seconds(record: Record, device: Hardware, devices_per_machine: int, rates: Rates) -> float:
    """Time of a kernel, copy or message."""
    if record.kind in (KERNEL, COPY):
        bandwidth = (device.memory_bandwidth or 1e12) * rates.memory
        products = record.flops / (device.flops * rates.products)
        return max(rates.kernel_seconds, products, record.bytes / bandwidth)
    if record.kind in (UPLOAD, READ):
        return rates.copy_seconds + record.bytes / rates.host_link
    ranks = ranks_of(record.group)
    is_local = len({rank // devices_per_machine for rank in ranks}) <= 1
    rate = (device.local if is_local else device.network) * rates.links
    count = max(record.about, 2)
    share = 1.0 if record.name in ("send", "recv", "broadcast") else (count - 1) / count
    return rates.message_seconds + record.bytes * _PASSES.get(record.name, 1.0) * share / rate


def ranks_of(group: str) -> list[int]:
    """The ranks in the name of a group, "ranks 0,1"; none where it has another name."""
    words = group.removeprefix("ranks ").split(",")
    return [int(word) for word in words] if all(word.isdecimal() for word in words) else []


def figures(timeline: Timeline, host_seconds: float) -> dict[str, Any]:
    """The figures of a step of one rank.

    Args:
        timeline: the step, played.
        host_seconds: processor time of the host.
    """
    return {
        "alone_seconds": timeline.seconds,
        "busy_seconds": timeline.busy,
        "message_seconds": timeline.of_messages,
        "waited_seconds": timeline.waited,
        "host_seconds": host_seconds,
        "is_launch_bound": host_seconds > timeline.busy,
    }


def trace_events(rank: int, timeline: Timeline) -> list[dict[str, Any]]:
    """The step of a rank as events of the format of chrome://tracing and Perfetto: a row for each stream of the device,
    and one for the launches of the host."""
    events: list[dict[str, Any]] = []
    process = f"rank {rank}"
    for span in timeline.spans:
        about = {"launched_us": round(span.launched * 1e6, 3)}
        row: dict[str, Any] = {"ph": "X", "pid": process, "tid": f"stream {span.stream}", "name": span.name}
        events.append({**row, "ts": round(span.start * 1e6, 3), "dur": round(span.seconds * 1e6, 3), "args": about})
        launch: dict[str, Any] = {"ph": "i", "s": "t", "pid": process, "tid": "host", "name": span.name}
        events.append({**launch, "ts": round(span.launched * 1e6, 3)})
    return events
