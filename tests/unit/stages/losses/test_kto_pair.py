"""Half of 1 - s(beta (c - z_r)) and 1 - s(beta (z_c - r)), of the log-ratios of both answers."""

from functools import partial

from llmsuite.stages.preference_losses import kto_pair
from tests.support.by_hand import check, near, slopes


def test_losses_equal_those_by_hand() -> None:
    # beta 1/2. At the reference everything is 0: half of 1/2 and 1/2
    check(partial(kto_pair, kl_chosen=0, kl_rejected=0, beta=0.5), [(0, 0)], [0.5])
    # c = 1 and r = -1 with z_c = 0.6 and z_r = 0: s(-0.5) = 0.3775407 and s(-0.8) = 0.3100255
    check(partial(kto_pair, kl_chosen=0.6, kl_rejected=0, beta=0.5), [(1, -1)], [0.3437831])
    # c = -2 and r = 3 with z_c = 0 and z_r = 0.4: s(1.2) = 0.7685248 and s(1.5) = 0.8175745
    check(partial(kto_pair, kl_chosen=0, kl_rejected=0.4, beta=0.5), [(-2, 3)], [0.7930496])


def test_gradients_equal_those_by_hand() -> None:
    # at the reference each answer is pushed by beta / 4, of which a half
    assert slopes(partial(kto_pair, kl_chosen=0, kl_rejected=0, beta=0.5), 0, 0) == near(-0.0625, 0.0625)
