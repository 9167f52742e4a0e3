"""(m / beta - 1 / (2 beta))^2, of the difference m of both rewards."""

from functools import partial

from llmsuite.stages.preference_losses import ipo
from tests.support.by_hand import check, near, slopes


def test_losses_equal_those_by_hand() -> None:
    # 1 / (2 beta) is 5, then 1
    check(partial(ipo, beta=0.1), [(0,), (0.5,), (1,), (-0.1,), (0.2,)], [25, 0, 25, 36, 9])
    check(partial(ipo, beta=0.5), [(0,), (0.5,), (1,), (0.25,), (-1,)], [1, 0, 1, 0.25, 9])


def test_gradients_equal_those_by_hand() -> None:
    # its minimum is at a log-ratio of 1 / (2 beta), that is at m = 1/2: slope 2 (m / beta - 1 / (2 beta)) / beta
    assert [*slopes(partial(ipo, beta=0.1), 0.4), *slopes(partial(ipo, beta=0.1), 0.6)] == near(-20, 20)
