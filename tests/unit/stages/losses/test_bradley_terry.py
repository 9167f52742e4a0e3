"""-log s(c - r - margin), of the scores of both answers."""

from functools import partial

from llmsuite.stages.preference_losses import bradley_terry
from tests.support.by_hand import check, near, slopes


def test_losses_equal_those_by_hand() -> None:
    # ln(1 + e^-(c - r))
    check(bradley_terry, [(3, 3), (2, 1), (-1, 0), (0.5, -1.5)], [0.6931472, 0.3132617, 1.3132617, 0.1269280])


def test_a_margin_is_added_to_the_difference() -> None:
    # ln(1 + e^-0.5)
    check(partial(bradley_terry, margin=0.5), [(2, 1)], [0.4740770])


def test_gradients_equal_those_by_hand() -> None:
    # s(-(c - r)), up and down
    assert slopes(bradley_terry, 2, 1) == near(-0.2689414, 0.2689414)
