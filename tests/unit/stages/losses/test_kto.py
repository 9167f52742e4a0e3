"""1 - s(beta (ratio - z)) of a desirable answer, 1 - s(beta (z - ratio)) of another."""

from functools import partial

from llmsuite.stages.preference_losses import kto
from tests.support.by_hand import check, near, slopes

WANTED = 1
UNWANTED = 0


def test_losses_equal_those_by_hand() -> None:
    # beta 0.1, z = 1. Ratio 4: s(-0.3) and s(0.3); ratio -6: s(0.7) and s(-0.7); ratio z: 1/2
    places = [(4, WANTED), (4, UNWANTED), (-6, WANTED), (-6, UNWANTED), (1, WANTED), (1, UNWANTED)]
    expected = [0.4255575, 0.5744425, 0.6681878, 0.3318122, 0.5, 0.5]
    check(partial(kto, beta=0.1, kl=1.0), places, expected)


def test_gradients_equal_those_by_hand() -> None:
    # beta s (1 - s): wanted answers up, others down
    assert slopes(partial(kto, beta=0.1, kl=1.0), 1, WANTED)[:1] == near(-0.025)
    assert slopes(partial(kto, beta=0.1, kl=1.0), 1, UNWANTED)[:1] == near(0.025)
