"""Saves of ranks that share no directory."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path

from llmsuite.checkpoint.local_storage import LocalStorage
from llmsuite.checkpoint.save import begin, save
from llmsuite.launch.leaders import Leaders
from tests.support.saves_together import job_of

RANKS = [range(2), range(2, 3)]


def disks() -> dict[int, LocalStorage]:
    """The machine of each rank of three."""
    first, second = Pipe()
    leaders = {0: Leaders({1: first}), 1: None, 2: Leaders({0: second})}
    return {rank: LocalStorage(int(rank == 2), RANKS, leaders[rank]) for rank in range(3)}


def save_apart(
    roots: tuple[Path, Path],
    step: int,
    before: Callable[[], None] = lambda: None,
    of: dict[int, LocalStorage] | None = None,
) -> list[BaseException | None]:
    """Write a checkpoint of three ranks on two machines; returns how the two that lead ended."""
    of = of or disks()
    jobs = [
        dataclasses.replace(job_of(roots[of[rank].machine], step, rank), disk=of[rank], rank=rank) for rank in range(3)
    ]
    for rank in (0, 2):
        assert jobs[rank].is_lead
        begin(jobs[rank])
    before()
    save(jobs[1])
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return [future.exception(60) for future in [pool.submit(save, jobs[rank]) for rank in (0, 2)]]


def roots_of(root: Path) -> tuple[Path, Path]:
    return root / "0", root / "1"
