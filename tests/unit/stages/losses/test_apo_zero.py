"""1 - s(beta ratio) of a desirable answer, s(beta ratio) of another."""

from functools import partial

from llmsuite.stages.preference_losses import apo_zero
from tests.support.by_hand import check, near, slopes

WANTED = 1
UNWANTED = 0


def test_losses_equal_those_by_hand() -> None:
    # beta 0.1. Ratio 4: s(-0.4) and s(0.4); ratio -6: s(0.6) and s(-0.6)
    places = [(0, WANTED), (0, UNWANTED), (4, WANTED), (4, UNWANTED), (-6, WANTED), (-6, UNWANTED)]
    check(partial(apo_zero, beta=0.1), places, [0.5, 0.5, 0.4013123, 0.5986877, 0.6456563, 0.3543437])


def test_gradients_equal_those_by_hand() -> None:
    assert slopes(partial(apo_zero, beta=0.1), 0, WANTED)[:1] == near(-0.025)
    assert slopes(partial(apo_zero, beta=0.1), 0, UNWANTED)[:1] == near(0.025)
