"""Detection of slow ranks. All ranks wait for the slowest one, so only the time in which a rank does not wait
differs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from llmsuite.parallel.mesh import AXES, Mesh


def stragglers(mesh: Mesh, busy: Sequence[float]) -> dict[str, float]:
    """Compute metrics that name the slowest rank, and for every axis of the mesh the coordinate that is slowest on
    average.

    Args:
        mesh: mesh of any rank.
        busy: seconds per step in which each rank did not wait for others.

    Returns:
        "straggler/rank", "straggler/over_median" (its time divided by the median of all, minus 1), and
        "straggler/AXIS".
    """
    slowest = int(np.argmax(busy))
    median = statistics.median(busy)
    over_median = busy[slowest] / median - 1 if median else 0.0
    metrics = {"straggler/rank": float(slowest), "straggler/over_median": over_median}
    on_grid = np.asarray(busy)[mesh.grid]
    for axis, name in enumerate(AXES):
        if mesh.grid.shape[axis] > 1:
            others = tuple(i for i in range(len(AXES)) if i != axis)
            metrics[f"straggler/{name}"] = float(np.argmax(on_grid.mean(others)))
    return metrics
