"""Merging takes the memory of a few tensors, however large the model is. `make faults` does it with 4 GB."""

from __future__ import annotations

from pathlib import Path

from tests.unit import merge_memory


def test_a_merge_takes_three_times_the_largest_tensor(tmp_path: Path) -> None:
    merge_memory.check(tmp_path, 300)
