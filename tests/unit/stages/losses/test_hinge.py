"""max(0, 1 - m), of the difference m of both rewards."""

from llmsuite.stages.preference_losses import hinge
from tests.support.by_hand import check, slopes


def test_losses_equal_those_by_hand() -> None:
    check(hinge, [(0,), (0.25,), (1,), (2,), (-1.5,)], [1, 0.75, 0, 0, 2.5])


def test_the_loss_is_0_from_a_margin_of_1_on() -> None:
    assert slopes(hinge, 0.9) == [-1]
    assert slopes(hinge, 1.1) == [0]
