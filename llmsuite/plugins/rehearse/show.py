"""The output of `llmsuite rehearse`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_GIB = 1 << 30
_NUM_SHOWN = 8


def show_rank(report: Mapping[str, Any], strategy: str, memory: int | None) -> Iterator[str]:
    """Lines about one rank.

    Args:
        report: counts of the rank, see `rank.run_rank`.
        strategy: the degrees of the run.
        memory: bytes that the rank may take; None for any number.
    """
    yield f"rank {report['rank']} of {strategy}"
    if "error" in report:
        yield from _show_error(report, memory)
    if report["steps"] < 2:
        return
    experts = f", with {report['routing']} experts" if "routing" in report else ""
    yield f"  a step runs to its end{experts}"
    if "completion_length" in report:
        length = report["completion_length"]
        yield f"  it trains on given completions of {length} tokens: sampling and rewards are not rehearsed"
    peak = f"{report['peak_bytes'] / _GIB:.2f}{_limit(memory)} GiB"
    yield (
        f"  memory: peak {peak}, {report['reserved_bytes'] / _GIB:.2f} GiB with what the allocator keeps; "
        f"{report['built_bytes'] / _GIB:.2f} GiB before the first step"
    )
    if report.get("host_bytes"):
        yield f"  {report['host_bytes'] / _GIB:.2f} GiB of pinned memory of the host"
    yield from _show_alive(report)
    host_seconds = report["host_seconds"]
    each = host_seconds / max(report["launches"], 1) * 1e6
    yield (
        f"  {report['launches']:,} launches, {report['flops'] / 1e12:.2f} TFLOP, {host_seconds:.2f} s of this host's "
        f"processor ({each:.0f} us a launch)"
    )
    if "predicted" in report:
        yield from _show_times(report["predicted"])
    for kind in ("reads", "waits", "uploads"):
        yield from _show_places(kind, report[kind])
    if report["messages"]:
        yield "  messages:"
    for row in report["messages"]:
        yield f"    {row['count']:6} x {row['name']:15} {row['bytes'] / 1e9:10.3f} GB  {_short(row['group'])}"


def _short(group: str) -> str:
    """The name of a group, without most of its ranks where it has many."""
    ranks = group.split(",")
    return group if len(ranks) <= _NUM_SHOWN else f"{','.join(ranks[:_NUM_SHOWN])} and {len(ranks) - _NUM_SHOWN} more"


def _show_times(found: Mapping[str, Any]) -> Iterator[str]:
    if "step_seconds" in found:  # no other rank has failed
        waits = ""
        if found["bubble"]:
            waits = f"; stages of the pipeline wait for {found['bubble']:.1%} of its passes"
        yield (
            f"  predicted: {found['step_seconds']:.3f} s a step, MFU {found['mfu']:.1%}, "
            f"{found['tokens_per_second']:,.0f} tokens/s a device{waits}"
        )
    yield (
        f"    this rank alone {found['alone_seconds']:.3f} s; the device is busy for {found['busy_seconds']:.3f} s, "
        f"messages take {found['message_seconds']:.3f} s, the host waits for {found['waited_seconds']:.3f} s"
    )
    if found["is_launch_bound"]:
        times = found["host_seconds"] / max(found["busy_seconds"], 1e-9)
        yield f"  launch-bound: a host as fast as this one needs {times:.1f} times as long as the device"


def _limit(memory: int | None) -> str:
    """The memory that a rank may take, for a message."""
    return "" if memory is None else f" of {memory / _GIB:.1f}"


def _show_error(report: Mapping[str, Any], memory: int | None) -> Iterator[str]:
    error = report["error"]
    lines = error["lines"] or ["a line that is not llmsuite's"]
    when = f"in step {report['steps'] + 1}" if "built_bytes" in report else "before the first step"
    yield f"  fails {when} at {lines[0]}: {error['text']}"
    for line in lines[1:4]:
        yield f"    called from {line}"
    yield f"  {report['allocated_bytes'] / _GIB:.2f}{_limit(memory)} GiB are allocated"
    yield from _show_alive(report)


def _show_alive(report: Mapping[str, Any]) -> Iterator[str]:
    alive: Sequence[Mapping[str, Any]] = report.get("alive", ())
    if not alive:
        return
    yield "  the peak holds:"
    for row in alive[:_NUM_SHOWN]:
        yield f"    {row['bytes'] / _GIB:8.2f} GiB  {row['count']:5} of {row['kernel']}, {row['place']}"
    if rest := sum(row["bytes"] for row in alive[_NUM_SHOWN:]):
        yield f"    {rest / _GIB:8.2f} GiB  others"


def _show_places(kind: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    total = sum(row["count"] for row in rows)
    yield f"  {total:,} {kind}{':' if rows else ''}"
    for row in rows[:_NUM_SHOWN]:
        what = f" ({row['name']})" if "name" in row else ""
        yield f"    {row['count']:6} x {row['place']}{what}"
    if len(rows) > _NUM_SHOWN:
        yield f"    {sum(row['count'] for row in rows[_NUM_SHOWN:]):6} x elsewhere"
