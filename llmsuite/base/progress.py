"""Progress for the user: a live line on a terminal, plain lines when piped; only rank 0 prints."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import TypeVar

from llmsuite.base.redaction import printable, redacted

T = TypeVar("T")
_QUIET_SECONDS = 5.0
_SHORT = {"learning_rate": "lr"}
"""Short names of metrics, with which a line of six fits into 80 columns."""


def is_first_rank() -> bool:
    """True in the process that prints for the user."""
    return os.environ.get("PADDLE_TRAINER_ID", "0") == "0"


def report(message: str) -> None:
    """Print a line for the user."""
    if is_first_rank():
        print(printable(redacted(message)), flush=True)


def track(items: Iterable[T], what: str) -> Iterator[T]:
    """Iterate with a progress bar; when piped, with a line every few seconds."""
    total = len(items) if isinstance(items, Sized) else None
    if not is_first_rank() or total == 0:
        yield from items
    elif sys.stdout.isatty():
        from rich.progress import track as rich_track

        yield from rich_track(items, what, total=total, transient=True)
    else:
        last = time.monotonic()
        for done, item in enumerate(items, 1):
            yield item
            if time.monotonic() - last > _QUIET_SECONDS:
                last = time.monotonic()
                print(f"{what}: {done}/{total or '?'}", flush=True)


@contextlib.contextmanager
def track_bytes(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with each number of bytes done; shows progress as `track` does."""
    if is_first_rank() and sys.stdout.isatty():
        from rich.progress import DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        columns = TextColumn("{task.description}"), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
        with Progress(*columns, transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda num_bytes: bar.update(task, advance=num_bytes)
        return
    done = 0
    last = time.monotonic()

    def add(num_bytes: int) -> None:
        nonlocal done, last
        done += num_bytes
        if time.monotonic() - last > _QUIET_SECONDS:
            last = time.monotonic()
            report(f"{what}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB")

    yield add


class StepProgress:
    """The progress of training: a line for each logged step, and on a terminal a bar below these lines."""

    def __init__(self, total_steps: int, first_step: int, shown: tuple[str, ...]):
        self._total = total_steps
        self._done = first_step - 1
        self._shown = shown
        self._start = time.monotonic()
        self._bar = None
        if is_first_rank() and sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("step"),
                BarColumn(bar_width=16),
                MofNCompleteColumn(),
                TextColumn("{task.fields[speed]}"),
                TimeRemainingColumn(),
                refresh_per_second=2,
            )
            self._task = self._bar.add_task("step", total=total_steps, completed=self._done, speed="")
            self._bar.start()

    def step(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """Show that a step is done; `metrics` are given for logged steps."""
        if not is_first_rank():
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=step)
            if metrics:
                self._bar.update(self._task, speed=_speed(metrics))
                text = f"step {step}  {self._text(metrics, _SHORT)}"
                # cut at the width of the terminal: metrics.jsonl has all of it
                self._bar.console.print(text, no_wrap=True, overflow="ellipsis", markup=False, highlight=False)
        elif metrics:
            rate = (time.monotonic() - self._start) / (step - self._done)
            minutes, seconds = divmod(round(rate * (self._total - step)), 60)
            left = f"{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}"  # may be more than 24 hours
            text = f"{self._text(metrics, {})}  {_speed(metrics)}"
            print(f"step {step}/{self._total}  {text}  left {left}", flush=True)

    def _text(self, metrics: Mapping[str, float], short: Mapping[str, str]) -> str:
        """The metrics to show, those in `short` by their short names."""
        shown = [name for name in self._shown if name in metrics]
        return "  ".join(f"{short.get(name, name.split('/')[-1])} {metrics[name]:.4g}" for name in shown)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _speed(metrics: Mapping[str, float]) -> str:
    return f"{metrics['speed']:.3g} step/s  {metrics['ips_total']:.0f} tokens/s"
