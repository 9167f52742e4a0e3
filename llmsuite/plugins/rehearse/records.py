"""The records of the virtual device, counted: launches, reads, waits, uploads and messages of a step, and what is alive
at its peak of memory."""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import llmsuite

KERNEL, MESSAGE, UPLOAD, READ, COPY, WAIT, RECORD_EVENT, WAIT_EVENT = range(8)
"""Kinds of records, as in `runtime/records.h`."""
ALLOCATION = 8
"""The bit of allocations in the mask of `rehearse_locate`."""
_PACKAGE = str(Path(llmsuite.__file__).parent) + "/"
_HELPERS = ("devices/tensors.py", "plugins/rehearse/", "engine/rehearsal.py")
"""Files whose callers are named instead."""
UNKNOWN = "outside of llmsuite"


class Places:
    """Lines of Python that reach the device, by a number of each."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}

    def current(self) -> int:
        """The number of the innermost line of llmsuite that is running."""
        frame = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(_PACKAGE):
                file = file[len(_PACKAGE) :]
                if not file.startswith(_HELPERS):
                    return self._number(f"{file}:{frame.f_lineno}")
            frame = frame.f_back  # type: ignore[assignment]
        return self._number(UNKNOWN)

    def name(self, number: int) -> str:
        """The place with a number; -1 where nobody looked."""
        return self.names[number] if number >= 0 else UNKNOWN

    def _number(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self.names)
            self.names.append(name)
        return self._numbers[name]


@dataclasses.dataclass(frozen=True)
class Record:
    """Something that the host puts on the device, or waits for."""

    kind: int
    stream: int
    name: str
    place: str
    """File and line of the caller."""
    group: str
    """The ranks of a message."""
    flops: float
    bytes: float
    """Device memory that is read and written; the size of a message, of all ranks."""
    host_seconds: float
    """Processor time of the host so far."""
    about: int
    """Number of an event; number of ranks of a message."""


def parse_records(lines: Iterable[str], places: Places, group_names: Mapping[str, str]) -> list[Record]:
    """Records from the lines that `rehearse_write_records` writes.

    Args:
        lines: the lines.
        places: names of the places that are numbers there.
        group_names: names of the groups of messages, by what the device calls them.
    """
    found = []
    for line in lines:
        kind, stream, name, place, group, flops, size, host, about = line.rstrip("\n").split("\t")
        found.append(
            Record(
                kind=int(kind),
                stream=int(stream),
                name=name,
                place=places.name(int(place)),
                group=group_names.get(group, group),
                flops=float(flops),
                bytes=float(size),
                host_seconds=float(host) / 1e9,
                about=int(about),
            )
        )
    return found


def parse_alive(lines: Iterable[str], places: Places) -> list[dict[str, Any]]:
    """Number and bytes of the tensors that are alive, for each kernel and place that allocated them, the largest first;
    from the lines that `rehearse_write_peak` writes."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    sizes: collections.Counter[tuple[str, str]] = collections.Counter()
    for line in lines:
        size, name, place = line.rstrip("\n").split("\t")
        key = places.name(int(place)), name
        counts[key] += 1
        sizes[key] += int(size)
    return [
        {"place": key[0], "kernel": key[1], "count": counts[key], "bytes": size} for key, size in sizes.most_common()
    ]


def count_by(records: Iterable[Record], *fields: str) -> list[dict[str, Any]]:
    """Number, bytes and FLOPs of records that are equal in these fields, the largest numbers first."""
    counts: collections.Counter[tuple[Any, ...]] = collections.Counter()
    sizes: collections.Counter[tuple[Any, ...]] = collections.Counter()
    flops: collections.Counter[tuple[Any, ...]] = collections.Counter()
    for record in records:
        key = tuple(getattr(record, field) for field in fields)
        counts[key] += 1
        sizes[key] += record.bytes  # type: ignore[assignment]
        flops[key] += record.flops  # type: ignore[assignment]
    return [
        {**dict(zip(fields, key, strict=True)), "count": count, "bytes": sizes[key], "flops": flops[key]}
        for key, count in counts.most_common()
    ]


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """The counts of one step, from its records in their order."""
    of_kind: dict[int, list[Record]] = collections.defaultdict(list)
    for record in records:
        of_kind[record.kind].append(record)
    return {
        "launches": len(of_kind[KERNEL]) + len(of_kind[MESSAGE]) + len(of_kind[COPY]),
        "flops": sum(record.flops for record in of_kind[KERNEL]),
        "host_seconds": records[-1].host_seconds - records[0].host_seconds if records else 0.0,
        "kernels": count_by(of_kind[KERNEL], "name"),
        "reads": count_by(of_kind[READ], "place"),
        "waits": count_by(of_kind[WAIT], "place", "name"),
        "uploads": count_by(of_kind[UPLOAD], "place"),
        "copies": count_by(of_kind[COPY], "place"),
        "messages": count_by(of_kind[MESSAGE], "group", "name", "about"),
    }
