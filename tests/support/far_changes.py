"""Changes of parameters that two roundings do not explain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tests.parity.cases import norm

Parameters = Sequence[Mapping[str, np.ndarray]]
"""Of a run, after the first step and after the last one."""


def far_changes(ours: Parameters, theirs: Parameters) -> dict[str, float]:
    """By parameter, how far the changes of a run are from those of another one, as a part of them."""
    changes = [{name: b.astype("float64") - a[name] for name, b in last.items()} for (a, last) in (ours, theirs)]
    return {name: norm(changes[1][name] - change) / norm(change) for name, change in changes[0].items()}
