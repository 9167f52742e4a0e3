"""The log of a rank's calls, and what is made of the logs of ranks that wait for each other."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.launch import calls, hang
from llmsuite.launch.calls import Call, CallLog

PAIR = types.SimpleNamespace(id=7, ranks=[0, 1])


def call(number: int, what: str = "all_reduce", shape: str = "[8]", group: str = "g", **more: Any) -> Call:
    values = {"dtype": "float32", "step": 1, "where": "x.py:1 f", "began": float(number), "ended": number + 0.5}
    return Call(group=group, number=number, what=what, shape=shape, ranks=(0, 1), **{**values, **more})


def test_calls_are_read_as_they_were_made(tmp_path: Path) -> None:
    log = CallLog(tmp_path / "3.calls")
    assert calls.read(tmp_path / "3.calls") == []
    log.step(2)
    first = log.begin("all_reduce", PAIR, None, [4, 8], "paddle.float32")
    log.end(first)
    log.begin("reshard", object(), [0, 2], [1], "paddle.int64")
    one, two = calls.read(tmp_path / "3.calls")
    assert (one.group, one.ranks, one.number, one.what, one.shape) == ("7 of 0-1", (0, 1), 1, "all_reduce", "[4, 8]")
    assert (one.dtype, one.step, one.where.endswith(" test_calls_are_read_as_they_were_made")) == ("float32", 2, True)
    assert one.began <= one.ended <= two.began
    assert (two.ended, two.ranks, two.number) == (0.0, (0, 2), 1)
    assert calls.progress(tmp_path / "3.calls") == (4, 2)
    assert calls.progress(tmp_path / "4.calls") == (0, 0)


def test_only_the_last_calls_are_kept(tmp_path: Path) -> None:
    log = CallLog(tmp_path / "0.calls")
    first = log.begin("all_reduce", PAIR, None, [1], "x")
    for _ in range(calls._NUM_SLOTS):
        log.end(log.begin("all_reduce", PAIR, None, [1], "x"))
    log.end(first)  # whose place another call has
    found = calls.read(tmp_path / "0.calls")
    assert sorted(c.number for c in found) == list(range(2, calls._NUM_SLOTS + 2))


def test_a_call_that_raises_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_log", CallLog(tmp_path / "0.calls"))
    tensor = types.SimpleNamespace(shape=[2], dtype="paddle.float32")
    with pytest.raises(OSError), calls.recorded("all_reduce", tensor, PAIR):  # noqa: PT011
        raise OSError
    with calls.recorded("all_to_all", tensor, PAIR, same=False):
        pass
    raised, done = calls.read(tmp_path / "0.calls")
    assert (raised.ended, raised.shape) == (0.0, "[2]")
    assert done.ended > 0
    assert done.shape == ""


def test_equal_calls_do_not_differ() -> None:
    made = [call(1), call(2, "all_gather"), call(3, "send")]
    other = [call(1), call(2, "all_gather"), call(3, "receive"), call(4)]
    assert list(hang.differences({0: made, 1: other})) == []


@given(st.integers(1, 9), st.sampled_from([{"what": "all_gather"}, {"shape": "[9]"}, {"dtype": "int64"}, {"step": 2}]))
def test_the_first_difference_is_reported(number: int, change: dict[str, Any]) -> None:
    made = [call(n) for n in range(1, 11)]
    other = [call(n, **change) if n >= number else call(n) for n in range(3, 11)]
    (difference,) = hang.differences({0: made, 1: other, 2: made})
    assert difference.startswith("ranks 0, 2 make all_reduce [8] float32 (call ")
    assert f"(call {max(3, number)} of ranks 0, 1;" in difference
    assert "; rank 1 makes " in difference


def test_a_rank_that_lags_is_named() -> None:
    ahead = [call(1), call(2, ended=0.0)]
    slow = [call(1)]
    (found,) = hang.missing({0: ahead, 1: slow})
    assert (found.rank, found.waiting, found.call.number) == (1, (0,), 2)
    lines, culprits = hang.explain({0: ahead, 1: slow}, now=10.0)
    assert lines[0].startswith("rank 0: has waited for 8.0 s in all_reduce")
    assert lines[1].startswith("rank 1: is in no recorded call; its last call ended 8.5 s ago")
    assert lines[2].startswith("rank 1 has not reached all_reduce [8] float32 (call 2 of ranks 0, 1")
    assert culprits == [1]


def test_a_rank_that_waits_for_another_is_not_the_one_to_blame() -> None:
    """0 waits for 1, which waits for 2, which does nothing."""
    a = call(5, ended=0.0)
    b = Call("h", (1, 2), 3, "broadcast", "[2]", "float32", 1, "y.py:2 g", 1.0, 0.0)
    lines, culprits = hang.explain({0: [a], 1: [call(4), b], 2: []}, now=10.0)
    assert culprits == [2]
    assert any(line.startswith("rank 2 has not reached broadcast [2] float32 (call 3 of ranks 1, 2") for line in lines)
    assert "rank 2: has made no call yet" in lines


def test_ranks_without_recorded_calls_are_reported() -> None:
    assert hang.explain({0: [call(1, ended=0.0)]}, now=2.0)[0][-1] == "no calls are recorded here for rank 1"


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    made = {0: [call(1), call(2)], 3: []}
    hang.write_calls(made, tmp_path)
    assert hang.read_written(tmp_path, 0.0) == made
    assert hang.read_written(tmp_path, 1e12) == {}


def test_a_run_hangs_when_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(hang.time, "monotonic", lambda: clock[0])
    watch = hang.HangDetector(tmp_path, [0, 1], 10.0)

    def after(seconds: float) -> bool:
        clock[0] += seconds
        return watch.is_stalled()

    assert not after(1000)  # no rank has started
    logs = [CallLog(tmp_path / f"{rank}.calls") for rank in (0, 1)]
    logs[0].step(1)
    assert not after(1)
    assert not after(29)  # reading and compiling may take longer
    assert after(2)
    for log in logs:
        log.step(2)
    assert not after(0)
    assert not after(9)
    logs[1].step(2)
    assert not after(2)
    assert after(11)
    assert not hang.HangDetector(tmp_path, [0, 1], None).is_stalled()


def test_a_rank_that_left_early_is_named() -> None:
    made = {0: [call(1), call(2)], 1: [call(1)], 2: [Call(**{**vars(call(9, group="other")), "ranks": (0, 2)})]}
    assert list(hang.left_early(made, [2])) == []
    (text,) = hang.left_early(made, [1])
    assert text == f"rank 1 has left with exit code 0 before {call(2)}, which the others have made"
    assert list(hang.left_early(made, [])) == []
