"""Advantages against tables worked out by hand from the papers' formulas, and the laws that hold for all of them."""

from __future__ import annotations

import functools
import json
import math
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.rl.advantages import (
    EPSILON,
    Estimator,
    Scale,
    advantages,
    gae,
    overlong_penalty,
    pass_at,
    returns_to_go,
    token_rewards,
    whiten,
    zero_variance_groups,
)
from tests.support.paths import REFERENCE

NAN = float("nan")
REWARDS = [1.0, 0.0, 0.0, 2.0, 0.5, 0.5, NAN, 0.5]
GROUPS = [0, 0, 0, 0, 1, 1, 1, 1]
STD = math.sqrt((0.25**2 + 0.75**2 * 2 + 1.25**2) / 3)
"""Of group 0: the mean is 0.75."""
EXACT = {"rtol": 1e-12, "atol": 1e-15}


@pytest.mark.parametrize(
    ("estimator", "scale", "wanted"),
    [
        ("group", "none", [0.25, -0.75, -0.75, 1.25, 0, 0, 0, 0]),
        ("group", "group", [x / (STD + 1e-4) for x in (0.25, -0.75, -0.75, 1.25)] + [0] * 4),
        # 1 - (0 + 0 + 2) / 3 …
        ("rloo", "none", [1 / 3, -1.0, -1.0, 5 / 3, 0, 0, 0, 0]),
        ("reinforce", "none", [1.0, 0.0, 0.0, 2.0, 0.5, 0.5, 0.0, 0.5]),
        ("reinforce_baseline", "none", [0.25, -0.75, -0.75, 1.25, 0, 0, 0, 0]),
    ],
)
def test_against_a_table(estimator: Any, scale: Any, wanted: list[float]) -> None:
    np.testing.assert_allclose(advantages(REWARDS, GROUPS, estimator, scale), wanted, **EXACT)


def test_the_scale_of_the_batch_is_the_deviation_of_all_known_rewards() -> None:
    known = [r for r in REWARDS if r == r]
    mean = sum(known) / 7
    std = math.sqrt(sum((r - mean) ** 2 for r in known) / 6)
    wanted = [x / (std + 1e-4) for x in (0.25, -0.75, -0.75, 1.25, 0, 0, 0, 0)]
    np.testing.assert_allclose(advantages(REWARDS, GROUPS, "group", "batch"), wanted, **EXACT)


def test_reinforce_plus_plus_normalises_what_the_baseline_leaves() -> None:
    left = [0.25, -0.75, -0.75, 1.25, 0, 0, 0]  # its mean is 0
    std = math.sqrt(sum(x * x for x in left) / 6)
    found = advantages(REWARDS, GROUPS, "reinforce_baseline", "batch")
    np.testing.assert_allclose(found, [x / (std + 1e-4) for x in (0.25, -0.75, -0.75, 1.25, 0, 0, 0, 0)], **EXACT)
    plain = advantages([1.0, 2.0, 6.0], [0, 0, 1], "reinforce", "batch")
    np.testing.assert_allclose(plain, np.array([-2, -1, 3]) / (math.sqrt(7) + EPSILON), **EXACT)


def test_a_single_reward_in_a_group_has_the_advantage_0() -> None:
    for estimator in ("group", "rloo"):
        for scale in ("group", "none"):
            assert advantages([3.0, NAN, NAN], [5, 5, 5], estimator, scale).tolist() == [0, 0, 0]
    assert advantages([None, 1.0, 3.0], [0, 0, 0], scale="none").tolist() == [0.0, -1.0, 1.0]


def test_zero_variance_groups() -> None:
    rewards = [1.0, 1.0, 0.0, 1.0, NAN, 2.0, NAN, NAN]
    assert zero_variance_groups(rewards, [0, 0, 1, 1, 2, 2, 3, 3]).tolist() == [True, False, True, True]


finite = st.floats(-1e3, 1e3)
groups_of_rewards = st.lists(st.lists(finite, min_size=2, max_size=6), min_size=1, max_size=5)


def _flat(groups: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([np.array(g) for g in groups]), np.repeat(range(len(groups)), [len(g) for g in groups])


@given(groups_of_rewards, st.sampled_from(get_args(Estimator)), st.sampled_from(get_args(Scale)), st.randoms())
def test_the_order_of_completions_changes_nothing(groups: Any, estimator: Any, scale: Any, random: Any) -> None:
    rewards, numbers = _flat(groups)
    order = list(range(len(rewards)))
    random.shuffle(order)
    found = advantages(rewards[order], numbers[order], estimator, scale)
    np.testing.assert_allclose(found, advantages(rewards, numbers, estimator, scale)[order], rtol=1e-7, atol=1e-7)


@given(groups_of_rewards, st.sampled_from(["group", "rloo"]), st.sampled_from(get_args(Scale)))
def test_advantages_of_a_group_sum_to_zero(groups: Any, estimator: Any, scale: Any) -> None:
    rewards, numbers = _flat(groups)
    found = advantages(rewards, numbers, estimator, scale)
    for number in set(numbers.tolist()):
        own = found[numbers == number]
        assert abs(own.sum()) <= 1e-9 * max(1.0, abs(own).max()) * 1e3


@given(groups_of_rewards, finite, st.sampled_from(["group", "rloo", "reinforce_baseline"]))
def test_an_equal_reward_for_all_completions_changes_nothing(groups: Any, more: float, estimator: Any) -> None:
    rewards, numbers = _flat(groups)
    np.testing.assert_allclose(
        advantages(rewards + more, numbers, estimator, "none"),
        advantages(rewards, numbers, estimator, "none"),
        atol=1e-8,
    )


@given(groups_of_rewards, st.sampled_from(get_args(Scale)), st.sampled_from(get_args(Estimator)), st.data())
def test_a_missing_reward_is_as_if_the_completion_were_not_there(
    groups: Any, scale: Any, estimator: Any, data: Any
) -> None:
    rewards, numbers = _flat(groups)
    missing = np.array(data.draw(st.lists(st.booleans(), min_size=len(rewards), max_size=len(rewards))))
    found = advantages(np.where(missing, np.nan, rewards), numbers, estimator, scale)
    assert (found[missing] == 0).all()
    np.testing.assert_array_equal(found[~missing], advantages(rewards[~missing], numbers[~missing], estimator, scale))


def test_overlong_completions() -> None:
    found = overlong_penalty([1, 80, 81, 90, 100, 120], max_length=100, buffer=20)
    np.testing.assert_allclose(found, [0, 0, -0.05, -0.5, -1, -1], **EXACT)
    assert overlong_penalty([99, 100, 101], max_length=100, buffer=0).tolist() == [0, 0, -1]


def test_returns_and_token_rewards() -> None:
    rows = token_rewards([1.0, -1.0], [[0.5, 0.25], [1.0]], beta=0.1)
    np.testing.assert_allclose(rows[0], [-0.05, 0.975], **EXACT)
    np.testing.assert_allclose(rows[1], [-1.1], **EXACT)
    np.testing.assert_allclose(returns_to_go(rows, gamma=0.5)[0], [-0.05 + 0.4875, 0.975], **EXACT)
    found = whiten([[1.0, 2.0], [6.0]])
    np.testing.assert_allclose(np.concatenate(found), np.array([-2, -1, 3]) / (math.sqrt(7) + 1e-8), **EXACT)


def test_gae_against_the_sum_of_the_paper() -> None:
    """Eq. 16 as it stands: A_t = sum over l of (gamma lambda)^l delta_{t+l}."""
    gamma = 0.9
    lambda_ = 0.8
    rewards = [[0.0, 0.5, 1.0], [2.0]]
    values = [[0.3, -0.2, 0.7], [1.5]]
    found, returns = gae(rewards, values, gamma, lambda_)
    for reward, value, advantage, target in zip(rewards, values, found, returns):
        following = [*value[1:], 0.0]
        deltas = [r + gamma * n - v for r, n, v in zip(reward, following, value)]
        for t in range(len(reward)):
            wanted = sum((gamma * lambda_) ** (k - t) * deltas[k] for k in range(t, len(reward)))
            assert advantage[t] == pytest.approx(wanted, rel=1e-12)
            assert target[t] == pytest.approx(wanted + value[t], rel=1e-12)


@given(st.lists(st.lists(st.tuples(finite, finite), min_size=1, max_size=8), min_size=1, max_size=4), st.floats(0, 1))
def test_the_full_return_does_not_depend_on_the_critic(rows: Any, gamma: float) -> None:
    rewards, values = ([[pair[i] for pair in row] for row in rows] for i in (0, 1))
    _, returns = gae(rewards, values, gamma, 1.0)
    for row, wanted in zip(returns, returns_to_go(rewards, gamma)):
        np.testing.assert_allclose(row, wanted, rtol=1e-9, atol=1e-8)


@given(st.lists(st.lists(st.tuples(finite, finite), min_size=1, max_size=8), min_size=1, max_size=4), st.floats(0, 1))
def test_one_step_ahead_is_the_error_of_the_critic(rows: Any, gamma: float) -> None:
    rewards, values = ([[pair[i] for pair in row] for row in rows] for i in (0, 1))
    found, _ = gae(rewards, values, gamma, 0.0)
    for row, reward, value in zip(found, rewards, values):
        following = np.array([*value[1:], 0.0])
        np.testing.assert_allclose(row, np.array(reward) + gamma * following - value, rtol=1e-12, atol=1e-12)


@functools.cache
def verl() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((REFERENCE / "rl" / "verl.json").read_text())
    return found


def _near(found: Any, wanted: Any) -> None:
    for row, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(row, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("case", verl()["gae"], ids=lambda case: f"{case['gamma']},{case['lambda']}")
def test_gae_as_verl(case: dict[str, Any]) -> None:
    """Whose masks leave out tokens of an environment, which rows do not have here."""
    found, returns = gae(verl()["rewards"], verl()["values"], case["gamma"], case["lambda"])
    _near(returns, case["returns"])
    _near(whiten(found), case["advantages"])  # verl adds 1e-8 to the variance


def test_reinforce_plus_plus_as_verl() -> None:
    case = verl()["reinforce_pp"]
    returns = returns_to_go(case["rewards"], case["gamma"])
    _near(returns, case["returns"])
    _near(whiten(returns), case["advantages"])


@given(st.lists(st.lists(finite, min_size=1, max_size=6), min_size=2, max_size=6), st.integers(1, 5), st.data())
def test_normalisation_does_not_depend_on_the_ranks(rows: Any, cut: int, data: Any) -> None:
    counted = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    sums: list[list[float]] = []
    expected = whiten(rows, mask=counted, sum_over_ranks=lambda numbers: sums.append(list(numbers)) or list(numbers))
    parts = [rows[:cut], rows[cut:]], [counted[:cut], counted[cut:]]
    for part, counts in zip(*parts):
        given_sums = iter(sums)
        found = whiten(part, mask=counts, sum_over_ranks=lambda numbers: next(given_sums))  # noqa: B023
        for row in found:
            match = expected.pop(0)
            np.testing.assert_allclose(row, match, rtol=1e-9, atol=1e-9)


def test_pass_at_k() -> None:
    assert pass_at(0, 4, 2) == 0
    assert pass_at(3, 4, 2) == 1
    assert pass_at(1, 4, 1) == 0.25
    assert pass_at(1, 4, 2) == pytest.approx(0.5)
    assert pass_at(2, 5, 3) == pytest.approx(1 - 1 / 10)


@given(st.integers(1, 12), st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_with_a_right_one(num_samples: int, data: Any) -> None:
    import itertools

    right = data.draw(st.integers(0, num_samples))
    k = data.draw(st.integers(1, min(4, num_samples)))
    draws = list(itertools.combinations(range(num_samples), k))
    share = sum(any(i < right for i in draw) for draw in draws) / len(draws)
    assert pass_at(right, num_samples, k) == pytest.approx(share)
