"""-log s(beta c - beta r - gamma), of the mean log-probabilities c and r of the tokens of both answers."""

from functools import partial

from llmsuite.stages.preference_losses import simpo
from tests.support.by_hand import check, near, slopes

PLACES = [(-1, -1), (-0.5, -1.5), (-2, -1)]


def test_losses_equal_those_by_hand() -> None:
    # beta 2, gamma 1/2: ln(1 + e^-m) of m = -0.5, 1.5, -2.5
    check(partial(simpo, beta=2, gamma=0.5), PLACES, [0.9740770, 0.2014133, 2.5788897])


def test_without_margin_an_equal_pair_costs_ln_2() -> None:
    check(partial(simpo, beta=2, gamma=0), [(-1, -1), (-3, -3)], [0.6931472, 0.6931472])


def test_smoothed_values() -> None:
    # 0.9 ln(1 + e^-1.5) + 0.1 ln(1 + e^1.5)
    check(partial(simpo, beta=2, gamma=0.5, smoothing=0.1), PLACES[1:2], [0.3514133])


def test_gradients_equal_those_by_hand() -> None:
    # beta s(-m), up and down: at m = 1.5 that is 2 x 0.1824255
    assert slopes(partial(simpo, beta=2, gamma=0.5), -0.5, -1.5) == near(-0.3648510, 0.3648510)
