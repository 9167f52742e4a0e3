"""-log s(log odds(c) - log odds(r)), of the mean log-probabilities of the tokens of both answers."""

import math

import paddle

from llmsuite.stages.preference_losses import odds_ratio
from tests.support.by_hand import check, near, slopes

# probabilities of a token, their odds p / (1 - p), and ln(1 + odds(r) / odds(c))
CASES = [
    (0.5, 0.5, 0.6931472),  # 1 and 1: ln 2
    (0.8, 0.5, 0.2231436),  # 4 and 1: ln 1.25
    (0.5, 0.8, 1.6094379),  # 1 and 4: ln 5
    (0.9, 0.1, 0.0122701),  # 9 and 1/9: ln(1 + 1/81)
    (0.2, 0.1, 0.3677248),  # 1/4 and 1/9: ln(1 + 4/9)
]


def test_losses_equal_those_by_hand() -> None:
    places = [(math.log(chosen), math.log(rejected)) for chosen, rejected, _ in CASES]
    check(odds_ratio, places, [loss for *_, loss in CASES])


def test_gradients_equal_those_by_hand() -> None:
    # d log odds / d log p = 1 / (1 - p): at 0.8 and 0.5 that is 5 and 2, times s(-ln 4) = 0.2
    assert slopes(odds_ratio, math.log(0.8), math.log(0.5)) == near(-1, 0.4)


def test_answers_that_are_certain_or_impossible() -> None:
    losses = odds_ratio(paddle.to_tensor([0.0, -200.0, 0.0]), paddle.to_tensor([-200.0, 0.0, 0.0])).numpy()
    # odds of a certain answer are taken for a million, of an impossible one for e^-200
    assert losses.tolist() == near(0, 200 + math.log(1e6), math.log(2))
    assert all(map(math.isfinite, slopes(odds_ratio, 0.0, -200.0)))
