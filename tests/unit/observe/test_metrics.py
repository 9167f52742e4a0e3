"""metrics.jsonl: what is in it after a resume, a kill or a bad number; and rates over a window."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from llmsuite.observe import metrics
from llmsuite.observe.metrics import MetricsFile, RateWindow, epoch_position, evaluation_at


def run(path: Path, resume_step: int, steps: list[int], **more: Any) -> None:
    file = MetricsFile(path, resume_step)
    for step in steps:
        file.write({"step": step, **more})
    file.close()


def steps(path: Path) -> list[Any]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_record_is_written_immediately(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    file = MetricsFile(path, 0)
    for step in (1, 2):
        file.write({"step": step, "loss": 0.5, "note": "\u4e16\n"})
        assert steps(path) == list(range(1, step + 1)), "readable while the run continues"
    file.close()
    assert path.read_text().splitlines()[0] == '{"schema": 1, "step": 1, "loss": 0.5, "note": "\\u4e16\\n"}'


def test_an_evaluation_is_found_by_its_step(tmp_path: Path) -> None:
    assert evaluation_at(tmp_path, 4) == {}
    lines = [
        {"step": 4, "loss": 1.0},
        {"step": 4, "eval/loss": 0.5, "eval/accuracy": None},
        {"step": 8, "eval/loss": 2},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "ev')
    assert evaluation_at(tmp_path, 4) == {"eval/loss": 0.5, "eval/accuracy": None}
    assert evaluation_at(tmp_path, 5) == {}


def test_a_new_run_starts_an_empty_file(tmp_path: Path) -> None:
    run(tmp_path / "m", 0, [1, 2, 3])
    run(tmp_path / "m", 0, [1])
    assert steps(tmp_path / "m") == [1]


def test_a_resume_drops_the_steps_that_are_done_again(tmp_path: Path) -> None:
    path = tmp_path / "m"
    run(path, 0, [1, 2, 2, 3, 4, 4, 5], loss=0.1)
    run(path, 2, [3, 4], loss=0.2)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["step"], r["loss"]) for r in found] == [(1, 0.1), (2, 0.1), (2, 0.1), (3, 0.2), (4, 0.2)]
    run(path, 99, [100])
    assert steps(path) == [1, 2, 2, 3, 4, 100]


def test_a_resume_without_a_file(tmp_path: Path) -> None:
    run(tmp_path / "m", 7, [8])
    assert steps(tmp_path / "m") == [8]


def test_a_last_line_cut_off_anywhere_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "m"
    run(path, 0, [1, 2], loss=0.25)
    content = path.read_bytes()
    first = content.index(b"\n") + 1
    for length in range(first, len(content)):
        path.write_bytes(content[:length])
        run(path, 2, [3])
        # only the end of the line was missing: the record is complete
        assert steps(path) == ([1, 2, 3] if length == len(content) - 1 else [1, 3]), length


@pytest.mark.parametrize("tail", [b"\0" * 30, b"\xff\xfe{}", b"7", b"[1]", b"null", b"{}", b'{"step": null}', b"\n\n"])
def test_a_garbled_last_line_is_dropped(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "m"
    run(path, 0, [1])
    path.write_bytes(path.read_bytes() + tail)
    run(path, 2, [3])
    assert steps(path) == [1, 3]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused_and_leaves_no_trace(tmp_path: Path, bad: float) -> None:
    path = tmp_path / "m"
    file = MetricsFile(path, 0)
    file.write({"step": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        file.write({"step": 2, "loss": bad})
    file.write({"step": 3})
    file.close()
    assert steps(path) == [1, 3]


def test_the_rates_of_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    window = RateWindow(num_ranks=4)
    step = {"reader_seconds": 0.5, "tokens": 600.0, "loss": 1.0}
    window.add(step)
    assert step == {"tokens": 600.0, "loss": 1.0}, "the reader's time is a rate, not a metric of the step"
    window.add({"reader_seconds": 0.3, "tokens": 200.0})
    now[0] += 4.0
    assert window.rates() == {
        "avg_reader_cost": pytest.approx(0.4),
        "avg_batch_cost": 2.0,
        "speed": 0.5,
        "ips_total": 200.0,
        "ips": 50.0,
    }
    assert window.rates(flops=8e12) == {
        **window.rates(),
        "model_flops": 4e12,  # of a step
        "model_tflops": 0.5,  # of each of 4 devices in 4 seconds
    }
    window.reset()
    window.add({"reader_seconds": 0.0, "tokens": 10.0})
    now[0] += 2.0
    assert window.rates()["ips_total"] == 5.0
    assert window.rates()["avg_reader_cost"] == 0.0


def test_flops_are_compared_with_the_peak_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    window = RateWindow(num_ranks=2, peak_flops=4e12)
    window.flops += 1e12
    window.add({"reader_seconds": 0.0, "tokens": 10.0})
    now[0] += 1.0
    assert window.rates(flops=window.flops + 3e12)["mfu"] == 0.5
    assert "mfu" not in window.rates()
    window.reset()
    assert window.flops == 0.0


def test_batches_are_counted_in_the_epoch_they_begin_in() -> None:
    found = [epoch_position(8 * step, 8, 20) for step in range(1, 8)]
    assert [at["batch"] for at in found] == [0, 1, 2, 0, 1, 0, 1]  # the third ends in the second epoch
    assert [at["epoch"] for at in found] == [0.4, 0.8, 1.2, 1.6, 2.0, 2.4, 2.8]
    assert [epoch_position(50 * step, 50, 20)["batch"] for step in (1, 2, 3)] == [0, 0, 0]
