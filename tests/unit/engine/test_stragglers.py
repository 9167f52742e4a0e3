"""The slowest rank, and the slowest coordinate of each axis."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.contract.schema.degrees import Degrees
from llmsuite.engine.stragglers import stragglers
from llmsuite.parallel.mesh import Mesh


def test_the_slowest_rank_is_named_on_every_axis() -> None:
    busy = [1.0] * 8
    busy[6] = 1.5  # pp 1, dp 1, tp 0
    found = stragglers(Mesh(Degrees(pp=2, dp=2, sharding=1, tp=2), 0), busy)
    assert found.pop("straggler/over_median") == pytest.approx(0.5)
    assert found == {"straggler/rank": 6, "straggler/pp": 1, "straggler/dp": 1, "straggler/tp": 0}


@given(st.lists(st.floats(0.1, 9), min_size=4, max_size=4))
def test_an_axis_alone_names_the_rank(busy: list[float]) -> None:
    found = stragglers(Mesh(Degrees(pp=1, dp=4, sharding=1, tp=1), 2), busy)
    assert busy[int(found["straggler/rank"])] == max(busy)
    assert found["straggler/dp"] == found["straggler/rank"]
    assert found["straggler/over_median"] >= 0
