"""The generalised Jensen-Shannon divergence: values of TRL, and of the published formula, with its gradient."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.models.divergence import Comparison, OverVocabulary, divergence

OWN = np.array([[2.0 * math.sin(1.0 + 3 * i + 7 * j) for j in range(5)] for i in range(3)])
TAUGHT = np.array([[3.0 * math.cos(2.0 + 5 * i + 2 * j) for j in range(5)] for i in range(3)])
WEIGHTS = np.array([1.0, 2.0, 3.0])

TRL: dict[tuple[float, float], tuple[list[float], list[float], float]] = {
    (0.0, 1.0): (
        [1.311804154061, 1.400508119013, 0.922612205549],
        [0.291792129474, 0.405126182518, -0.729768752797, 0.021976831924, 0.010873608882],
        1.211641492874,
    ),
    (0.0, 0.7): (
        [1.647005305786, 2.049754626138, 1.307752054604],
        [0.441641039076, 0.678372422386, -1.152324392811, 0.026899435262, 0.005411496087],
        1.668170662176,
    ),
    (0.1, 1.0): (
        [0.116152396074, 0.123508253224, 0.08269199032],
        [0.023710001548, 0.033156281585, -0.058998913949, 0.001308499269, 0.000824131548],
        0.107450879873,
    ),
    (0.5, 1.0): (
        [0.336329198423, 0.362712332084, 0.245804552854],
        [0.055361593773, 0.080660176256, -0.13539145453, -0.001848994092, 0.001218678595],
        0.314948694454,
    ),
    (0.5, 0.7): (
        [0.419689931692, 0.476139672521, 0.336233717081],
        [0.075753462809, 0.11782728943, -0.195810668507, 0.001476605195, 0.000753311072],
        0.410687773765,
    ),
    (0.9, 1.0): (
        [0.160995504243, 0.187994200397, 0.117976067326],
        [0.021810590516, 0.038271231568, -0.055380225208, -0.004423909913, -0.000277686963],
        0.155655257322,
    ),
    (1.0, 1.0): (
        [2.314734659333, 3.352362554491, 1.799063902455],
        [0.213548060066, 0.702995327727, -0.798930183726, -0.101797833944, -0.015815370122],
        2.488720372093,
    ),
    (1.0, 0.7): (
        [4.158464273294, 5.938666796446, 3.017622243715],
        [0.261817024006, 1.378613890667, -1.511156922789, -0.117791537151, -0.011482454733],
        4.371584437818,
    ),
}
"""(beta, temperature) -> divergence of each token, gradient of the first one's logits, mean over the tokens: by
`generalized_jsd_loss` of trl/experimental/gkd at f2cd5771 with torch 2.13, in float64."""


def divergences(own: np.ndarray, beta: float, temperature: float, dtype: str = "float64") -> tuple[Any, Any]:
    """The divergence of each token, and the gradient of the logits of their sum with `WEIGHTS`."""
    logits = paddle.to_tensor(own.astype(dtype), stop_gradient=False)
    found = divergence(logits, paddle.to_tensor(TAUGHT.astype(dtype)), Comparison(None, beta, temperature))
    (found * paddle.to_tensor(WEIGHTS.astype(dtype))).sum().backward()
    return found.numpy(), logits.grad.numpy()


def published(own: np.ndarray, beta: float, temperature: float) -> np.ndarray:
    """Eq. 1 of arXiv 2306.13649 as it stands there, with its two limits."""
    p, q = (np.exp(logits / temperature) for logits in (own, TAUGHT))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)

    def kl(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.sum(a * np.log(a / b), -1)

    if beta in (0, 1):
        return kl(p, q) if beta else kl(q, p)
    mixture = beta * q + (1 - beta) * p
    return beta * kl(q, mixture) + (1 - beta) * kl(p, mixture)


@pytest.mark.parametrize(("beta", "temperature"), TRL)
def test_is_that_of_trl(beta: float, temperature: float) -> None:
    expected, gradient, mean = TRL[beta, temperature]
    found, found_gradient = divergences(OWN, beta, temperature)
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    np.testing.assert_allclose(found_gradient[0], gradient, rtol=1e-8, atol=1e-11)
    np.testing.assert_allclose(found.mean(), mean, rtol=1e-10)


@pytest.mark.parametrize("beta", [0.0, 0.01, 0.3, 0.5, 0.99, 1.0])
def test_is_that_of_the_paper_with_its_gradient(beta: float) -> None:
    own = np.random.default_rng(7).normal(size=OWN.shape) * 2
    found, gradient = divergences(own, beta, 1.5)
    np.testing.assert_allclose(found, published(own, beta, 1.5), rtol=1e-10)
    step = 1e-6
    for index in np.ndindex(*own.shape):
        moved = np.zeros_like(own)
        moved[index] = step
        ends = [published(own + sign * moved, beta, 1.5) @ WEIGHTS for sign in (1, -1)]
        assert gradient[index] == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-5, abs=1e-8)


def test_a_model_equal_to_its_teacher_has_no_loss() -> None:
    for beta in (0.0, 0.5, 1.0):
        found, gradient = divergences(TAUGHT, beta, 1.0, "float32")
        np.testing.assert_allclose(found, 0, atol=1e-6)
        np.testing.assert_allclose(gradient, 0, atol=1e-6)


def test_large_logits_do_not_overflow() -> None:
    for beta in (0.0, 0.5, 1.0):
        found, gradient = divergences(OWN * 1000, beta, 1.0, "float32")
        assert np.isfinite(found).all()
        assert np.isfinite(gradient).all()


class _Recorded(OverVocabulary):
    """Keeps what a rank gives to its reductions."""

    def __init__(self) -> None:
        self.given: list[np.ndarray] = []

    def sum(self, numbers: Any) -> Any:
        self.given.append(numbers.numpy())
        return numbers

    def max(self, numbers: Any) -> Any:
        self.given.append(numbers.numpy())
        return numbers


def test_reductions_are_over_tokens_only() -> None:
    # the numbers that ranks exchange do not depend on the vocabulary: maxima, sums of exponentials, divergences
    for beta, shapes in ((0.5, [(2, 3), (2, 3), (2, 3)]), (0.0, [(2, 3), (2, 3), (3,)])):
        ranks = _Recorded()
        logits = paddle.to_tensor(OWN)
        divergence(logits, paddle.to_tensor(TAUGHT), Comparison(None, beta, 1.0), ranks)
        assert [given.shape for given in ranks.given] == shapes


def test_a_padded_vocabulary_changes_nothing() -> None:
    padding = np.full([3, 2], -1e30)
    for beta in (0.0, 0.5, 1.0):
        comparison = Comparison(None, beta, 1.0)
        found = [
            divergence(*(paddle.to_tensor(np.concatenate([x, *more], 1)) for x in (OWN, TAUGHT)), comparison).numpy()
            for more in ([], [padding])
        ]
        np.testing.assert_allclose(found[0], found[1], rtol=1e-12)
