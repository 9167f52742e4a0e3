"""-log s(m), of the difference m of both rewards; with smoothing e: -(1 - e) log s(m) - e log s(-m)."""

import math
from functools import partial

import numpy as np
import paddle
import pytest

from llmsuite.stages.preference_losses import sigmoid
from tests.support.by_hand import check, near, slopes


def test_losses_equal_those_by_hand() -> None:
    # ln(1 + e^-m): at 0 it is ln 2
    check(sigmoid, [(0,), (1,), (-1,), (2,), (-4,)], [0.6931472, 0.3132617, 1.3132617, 0.1269280, 4.0181499])


def test_smoothed_values() -> None:
    # 0.9 ln(1 + e^-m) + 0.1 ln(1 + e^m)
    smoothed = partial(sigmoid, smoothing=0.1)
    check(smoothed, [(0,), (1,), (-1,), (2,)], [0.6931472, 0.4132617, 1.2132617, 0.3269280])


def test_gradients_equal_those_by_hand() -> None:
    # it pushes the margin up everywhere, by s(-m)
    assert [*slopes(sigmoid, 0), *slopes(sigmoid, 2), *slopes(sigmoid, -2)] == near(-0.5, -0.1192029, -0.8807971)
    # with smoothing it stops at m = ln((1 - e) / e), and turns round after it
    smoothed = partial(sigmoid, smoothing=0.1)
    assert slopes(smoothed, math.log(9)) == near(0)
    assert slopes(smoothed, 3)[0] > 0 > slopes(smoothed, 2)[0]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_far_margins_neither_overflow_nor_lose_the_slope(smoothing: float) -> None:
    losses = sigmoid(paddle.to_tensor([-1e4, 1e4]), smoothing).numpy()
    np.testing.assert_allclose(losses, [1e4 * (1 - smoothing), 1e4 * smoothing], rtol=1e-6)
    assert slopes(partial(sigmoid, smoothing=smoothing), -1e4) == near(-(1 - smoothing))
