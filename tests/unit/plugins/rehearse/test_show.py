"""The output of `llmsuite rehearse`."""

from __future__ import annotations

from typing import Any

from llmsuite.plugins.rehearse.show import show_rank

GIB = 1 << 30
REPORT: dict[str, Any] = {
    "rank": 5,
    "steps": 3,
    "peak_bytes": 40 * GIB,
    "reserved_bytes": 41 * GIB,
    "built_bytes": 20 * GIB,
    "alive": [{"place": "models/blocks.py:1", "kernel": "matmul", "count": 32, "bytes": 10 * GIB}] * 9,
    "launches": 1000,
    "flops": 2e12,
    "host_seconds": 0.05,
    "reads": [{"place": "parallel/collective.py:100", "count": 2}],
    "waits": [{"place": "parallel/sharding.py:1", "name": "stream", "count": 291}],
    "uploads": [],
    "messages": [{"group": "ranks 4,5", "name": "all_gather", "count": 3, "bytes": 2e9}],
}


def test_a_rank_is_shown() -> None:
    text = "\n".join(show_rank(REPORT, "pp2 dp1 sharding2 tp2", 80 * GIB))
    assert "rank 5 of pp2 dp1 sharding2 tp2\n  a step runs to its end\n" in text
    assert "peak 40.00 of 80.0 GiB, 41.00 GiB with what the allocator keeps; 20.00 GiB before" in text
    assert "10.00 GiB     32 of matmul, models/blocks.py:1" in text
    assert "10.00 GiB  others" in text
    assert "1,000 launches, 2.00 TFLOP, 0.05 s of this host's processor (50 us a launch)" in text
    assert "2 reads:\n         2 x parallel/collective.py:100" in text
    assert "291 x parallel/sharding.py:1 (stream)" in text
    assert "0 uploads\n" in text
    assert "3 x all_gather           2.000 GB  ranks 4,5" in text


def test_many_places_are_cut() -> None:
    waits = [{"place": f"a.py:{line}", "name": "stream", "count": 2} for line in range(10)]
    text = "\n".join(show_rank({**REPORT, "waits": waits}, "tp2", None))
    assert "20 waits:" in text
    assert "a.py:8" not in text
    assert "4 x elsewhere" in text


def test_the_line_of_an_error_is_shown() -> None:
    error = {"text": "Out of memory error", "lines": ["parallel/optimizer.py:59", "parallel/optimizer.py:155"]}
    failed = {"rank": 0, "steps": 0, "error": error, "allocated_bytes": 79 * GIB, "alive": REPORT["alive"]}
    assert "fails before the first step at parallel" in "\n".join(show_rank(failed, "tp1", None))
    failed["built_bytes"] = 60 * GIB
    text = "\n".join(show_rank(failed, "tp1", 80 * GIB))
    assert "fails in step 1 at parallel/optimizer.py:59: Out of memory error\n" in text
    assert "called from parallel/optimizer.py:155" in text
    assert "79.00 of 80.0 GiB are allocated" in text
    assert "the peak holds" in text
    assert "runs to its end" not in text


PREDICTED = {
    "alone_seconds": 1.5,
    "busy_seconds": 1.25,
    "message_seconds": 0.25,
    "waited_seconds": 0.5,
    "host_seconds": 2.5,
    "is_launch_bound": True,
}


def test_predicted_times_are_those_of_the_run_and_of_the_rank() -> None:
    of_run = {"step_seconds": 2.0, "bubble": 0.25, "mfu": 0.456, "tokens_per_second": 5762.0}
    text = "\n".join(show_rank({**REPORT, "predicted": {**PREDICTED, **of_run}}, "pp2", None))
    assert (
        "predicted: 2.000 s a step, MFU 45.6%, 5,762 tokens/s a device; stages of the pipeline wait for 25.0%" in text
    )
    assert "this rank alone 1.500 s; the device is busy for 1.250 s, messages take 0.250 s, the host waits for" in text
    assert "launch-bound: a host as fast as this one needs 2.0 times as long as the device" in text
    without = "\n".join(show_rank({**REPORT, "predicted": {**PREDICTED, **of_run, "bubble": 0.0}}, "tp2", None))
    assert "tokens/s a device\n" in without


def test_a_rank_beside_a_failed_one_has_only_times_of_its_own() -> None:
    text = "\n".join(show_rank({**REPORT, "predicted": PREDICTED}, "pp2", None))
    assert "this rank alone 1.500 s" in text
    assert "predicted:" not in text
