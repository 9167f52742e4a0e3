"""The draw of the rollouts of a run that has a share of them."""

from __future__ import annotations

import random

from llmsuite.engine.rollouts import needs_rollout


def test_the_draw_is_that_of_ms_swift() -> None:
    for step in range(50):
        number = random.Random(42 + step).random()
        assert needs_rollout(42, step, 0.5) == (number <= 0.5)
    assert [needs_rollout(42, step, 0.5) for step in range(8)] == [False, True, True, True, False, True, False, True]


def test_a_share_is_that_of_the_steps() -> None:
    for share in (0.1, 0.5, 0.9):
        drawn = sum(needs_rollout(7, step, share) for step in range(4000))
        assert abs(drawn / 4000 - share) < 0.03
    assert all(needs_rollout(7, step, 1.0) for step in range(100))
