"""Merging takes the memory of a few tensors, however large the model is. `make faults` does it with 4 GB."""

from __future__ import annotations

from pathlib import Path

from tests.tools import merge_memory


def test_a_merge_takes_three_times_the_largest_tensor(tmp_path: Path) -> None:
    merge_memory.check(tmp_path, 300)


def test_less_memory_than_a_tensor_is_a_named_error(tmp_path: Path) -> None:
    merge_memory.make(tmp_path / "a", 60)
    done = merge_memory.merge(tmp_path / "a", tmp_path / "b", 2 << 20)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "b: there is not enough memory for it" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "b").exists()
