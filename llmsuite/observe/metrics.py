"""The file `metrics.jsonl`: one JSON object per logged step, appended and flushed."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmsuite.base.files import NO_ROOM, os_errors, write_text_atomic
from llmsuite.base.safe_files import is_file

SCHEMA = 1


class MetricsFile:
    """Appends records; on resume, drops the records of steps after the checkpoint, which will be repeated."""

    def __init__(self, path: Path, resume_step: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._open(resume_step)

    def _open(self, last_step: int) -> None:
        kept = []
        if last_step:
            kept = [line for line in _lines(self._path) if _step(line) <= last_step]
        write_text_atomic(self._path, "".join(kept))
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115  (open for the whole run)

    def rewind(self, last_step: int) -> None:
        """Drop the records of later steps, which will be repeated."""
        self._file.close()
        self._open(last_step)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object. Raises UserError when it cannot be written."""
        with os_errors(self._path, NO_ROOM):
            self._file.write(json.dumps({"schema": SCHEMA, **record}, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closing tries again to write buffered text that could not be written
            self._file.close()


def _lines(path: Path) -> list[str]:
    """The lines with their newlines; a kill may have truncated the last one, or only removed its newline."""
    text = ""
    if is_file(path):
        text = path.read_text(encoding="utf-8", errors="replace")
    return [line + "\n" for line in text.split("\n") if line]


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # truncated by a kill
        return float("inf")


def evaluation_at(run: Path, step: int) -> dict[str, float | None]:
    """The metrics of the evaluation after a step; empty when there is none."""
    records = (json.loads(line) for line in _lines(run / "metrics.jsonl") if _step(line) == step)
    return {name: value for record in records for name, value in record.items() if name.startswith("eval/")}


def epoch_position(samples: int, batch_size: int, epoch_size: int) -> dict[str, float]:
    """The position of a step in its epoch.

    Args:
        samples: number so far, with those of the step.
        batch_size: samples of a step.
        epoch_size: samples of an epoch. Batches may span two epochs: a batch belongs to the epoch in which it begins.

    Returns:
        "epoch", the number of epochs completed (a fraction), and "batch", the number of the step's batch in its epoch,
        from 0.
    """
    before = samples - batch_size
    first = math.ceil(before // epoch_size * epoch_size / batch_size)
    return {"epoch": samples / epoch_size, "batch": before // batch_size - first}


class RateWindow:
    """Times, tokens and FLOPs since the last record, for averages."""

    def __init__(self, num_ranks: int, peak_flops: float | None = None):
        """`peak_flops` is the peak of a device in FLOP/s; None where it is unknown."""
        self._num_ranks = num_ranks
        self._peak_flops = peak_flops
        self.flops = 0.0
        """Model FLOPs of these steps for the samples of this rank."""
        self.steps = 0
        """Steps since the last record."""
        self.busy = 0.0
        """Seconds of these steps in which this rank did not wait for others."""
        self.reset()

    def reset(self) -> None:
        self._start = time.perf_counter()
        self.steps = 0
        self.busy = 0.0
        self.flops = 0.0
        self._reader = 0.0
        self._tokens = 0.0
        self._rollout: float | None = None

    def add(self, metrics: dict[str, float]) -> None:
        """Add a step; removes "reader_seconds" and "rollout_seconds" from its metrics."""
        self.steps += 1
        self._reader += metrics.pop("reader_seconds")
        if "rollout_seconds" in metrics:
            self._rollout = (self._rollout or 0.0) + metrics.pop("rollout_seconds")
        self._tokens += metrics.get("tokens", 0.0)  # unknown in the middle of a pipeline, where nothing is logged

    def exclude(self, seconds: float) -> None:
        """Exclude time that was not spent on steps."""
        self._start += seconds

    def rates(self, flops: float = 0.0) -> dict[str, float]:
        """Averages over the steps added: seconds per step, steps and tokens per second, model FLOPs of a step, and of a
        second on a device in TFLOP/s and as a fraction of its peak.

        Args:
            flops: model FLOPs of these steps, of all ranks; 0 where they are unknown.
        """
        elapsed = time.perf_counter() - self._start
        rollout = {} if self._rollout is None else {"avg_rollout_cost": self._rollout / self.steps}
        use = dict[str, float]()
        if flops:
            speed = flops / elapsed / self._num_ranks
            use = {"model_flops": flops / self.steps, "model_tflops": speed / 1e12}
            if self._peak_flops is not None:
                use["mfu"] = speed / self._peak_flops
        return {
            "avg_reader_cost": self._reader / self.steps,
            **rollout,
            "avg_batch_cost": elapsed / self.steps,
            "speed": self.steps / elapsed,
            "ips_total": self._tokens / elapsed,
            "ips": self._tokens / elapsed / self._num_ranks,
            **use,
        }
