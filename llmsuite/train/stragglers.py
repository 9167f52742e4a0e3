"""Which rank is slow. All wait for it, so their steps take as long: what differs is how long a rank does not wait."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from llmsuite.parallel.mesh import AXES, Mesh


def stragglers(mesh: Mesh, busy: Sequence[float]) -> dict[str, float]:
    """Metrics that name the slowest rank, and on every axis of the mesh the coordinate that is slowest on average.

    Args:
        mesh: of any rank.
        busy: seconds a step in which each rank did not wait for others.

    Returns:
        "straggler/rank", "straggler/over_median" (its time over the median of all, less 1), and "straggler/AXIS".
    """
    slowest = int(np.argmax(busy))
    median = statistics.median(busy)
    found = {"straggler/rank": float(slowest), "straggler/over_median": busy[slowest] / median - 1 if median else 0.0}
    on_grid = np.asarray(busy)[mesh.grid]
    for axis, name in enumerate(AXES):
        if mesh.grid.shape[axis] > 1:
            others = tuple(i for i in range(len(AXES)) if i != axis)
            found[f"straggler/{name}"] = float(np.argmax(on_grid.mean(others)))
    return found
