"""Small runs on some meshes that are stopped, and the processes they leave."""

from __future__ import annotations

import time
from pathlib import Path

SMALL = ("--train.global_batch_size=8", "--train.micro_batch_size=2")


MESHES = {
    1: ("--launch.num_devices=1", "--parallel={}"),
    2: ("--launch.num_devices=2", '--parallel={"pipeline_parallel_degree":2}'),
    4: ("--launch.num_devices=4", '--parallel={"pipeline_parallel_degree":4}'),
}


def children_of(pid: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 25
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, f"still there: {pids}"
        time.sleep(0.05)
