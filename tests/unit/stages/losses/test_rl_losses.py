"""Losses of online RL against TRL's numbers, and against tables from the papers where TRL has none."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsuite.devices.ops import entropy_of_sums, nll_and_entropy
from llmsuite.rl.advantages import advantages
from llmsuite.stages import rl_losses
from llmsuite.stages.rl_losses import ClipRange, Completions
from tests.support.by_hand import check, near, slopes
from tests.support.paths import REFERENCE

NORMALISERS = {"grpo": "sequence_mean", "sapo": "sequence_mean", "dr_grpo": "constant"}
"""TRL's losses that are not means over all tokens."""


@functools.cache
def trl() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((REFERENCE / "rl" / "trl.json").read_text())
    return found


def tensor(values: Any, dtype: str = "float32") -> Any:
    return paddle.to_tensor(np.array(values), dtype=dtype)


def policy_loss(settings: dict[str, Any], ratio: Any, logps: Any, advantage: Any) -> Any:
    """Loss of each token, by TRL's names."""
    kind = settings["loss_type"]
    low = settings["epsilon"]
    high = settings.get("epsilon_high", low)
    if kind == "cispo":
        return rl_losses.cispo(ratio, logps, advantage, high)
    if kind == "sapo":
        return rl_losses.sapo(ratio, advantage)
    return rl_losses.ppo_clip(ratio, advantage, ClipRange(low, high, settings.get("delta")))


def _id(case: dict[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in case["settings"].items())


@pytest.mark.parametrize("case", trl()["cases"], ids=_id)
def test_as_trl(case: dict[str, Any]) -> None:
    known = trl()["given"]
    wanted = case["settings"]
    lengths = np.array(known["lengths"])
    rewards = [reward for group in known["rewards"] for reward in group]
    groups = np.repeat(range(len(known["rewards"])), len(known["rewards"][0]))
    scale = wanted.get("scale_rewards", "group")
    found = advantages(rewards, groups, "group", scale)
    np.testing.assert_allclose(found, case["advantages"], rtol=1e-6, atol=1e-7)

    kept = np.ones(len(lengths), bool)
    if wanted.get("mask_truncated_completions"):
        kept[known["truncated"]] = False
    tokens = np.repeat(kept, lengths)
    places = Completions(lengths[kept].tolist())
    logps, old, reference, rollout = (
        tensor(np.array(known[name])[tokens]) for name in ("logps", "old", "reference", "rollout")
    )
    logps.stop_gradient = False
    advantage = places.broadcast(tensor(found[kept]))
    level = wanted.get("importance_sampling_level", "token")
    ratio = rl_losses.ratios(logps, old, level, places)
    losses = policy_loss(wanted, ratio, logps, advantage)
    if wanted.get("use_vllm"):
        mask = wanted["vllm_importance_sampling_mode"].endswith("mask")
        cap = wanted["vllm_importance_sampling_clip_max"]
        weights = rl_losses.importance_weights(old, rollout, "token", places, cap, mask)
        np.testing.assert_allclose(weights.numpy(), case["correction"], rtol=1e-5)
        losses = losses * weights
    if beta := wanted.get("beta", 0.0):
        kl = rl_losses.kl(logps, reference, "k3")
        if wanted["use_bias_correction_kl"]:
            kl = kl * ratio
        np.testing.assert_allclose(float(kl.mean()), case["kl"], rtol=1e-6)
        losses = losses + beta * kl
    kind: Any = NORMALISERS.get(wanted["loss_type"], "token_mean")
    each, weight = rl_losses.token_weights(kind, lengths[kept].tolist(), known["max_length"])
    loss = (losses * paddle.to_tensor(each)).sum() / weight
    loss.backward()
    np.testing.assert_allclose(float(loss), case["loss"], rtol=1e-5)
    gradient = np.array(case["gradient"])
    np.testing.assert_allclose(logps.grad.numpy(), gradient[tokens], rtol=1e-5, atol=1e-5 * np.abs(gradient).max())
    assert not gradient[~tokens].any()


def test_trl_has_each_loss_at_each_level_with_kl_and_without() -> None:
    found = {
        tuple(case["settings"].get(key) for key in ("loss_type", "importance_sampling_level", "beta"))
        for case in trl()["cases"]
    }
    losses = ("grpo", "dr_grpo", "bnpo", "dapo", "cispo", "sapo")
    assert {(loss, level, beta) for loss in losses for level in ("token", "sequence") for beta in (0.0, 0.1)} <= found
    assert any(any(case["gradient"]) for case in trl()["cases"])


# ragged rows


@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_completions_are_summed_and_broadcast_like_slices(lengths: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    values = random.normal(size=sum(lengths))
    each = random.normal(size=len(lengths))
    places = Completions(lengths)
    parts = np.split(values, np.cumsum(lengths)[:-1])
    np.testing.assert_allclose(places.sum(tensor(values, "float64")).numpy(), [p.sum() for p in parts], atol=1e-12)
    np.testing.assert_allclose(places.mean(tensor(values, "float64")).numpy(), [p.mean() for p in parts], atol=1e-12)
    np.testing.assert_array_equal(places.broadcast(tensor(each, "float64")).numpy(), np.repeat(each, lengths))


@given(
    st.lists(st.integers(1, 7), min_size=2, max_size=8),
    st.sampled_from(["sequence_mean", "token_mean", "constant"]),
    st.data(),
)
def test_weights_do_not_depend_on_how_the_batch_is_cut(lengths: list[int], kind: Any, data: Any) -> None:
    cut = data.draw(st.integers(1, len(lengths) - 1))
    whole, weight = rl_losses.token_weights(kind, lengths, 7)
    parts = [rl_losses.token_weights(kind, part, 7) for part in (lengths[:cut], lengths[cut:])]
    np.testing.assert_array_equal(np.concatenate([part for part, _ in parts]), whole)
    assert sum(number for _, number in parts) == weight


def test_weights_by_hand() -> None:
    def weights(kind: Any) -> tuple[list[float], float]:
        each, weight = rl_losses.token_weights(kind, [1, 4], 8)
        return each.tolist(), weight

    assert weights("sequence_mean") == ([1, 0.25, 0.25, 0.25, 0.25], 2)
    assert weights("token_mean") == ([1] * 5, 5)
    assert weights("constant") == ([0.125] * 5, 2)


# single formulas


def test_the_ratio_of_a_sequence_is_the_geometric_mean() -> None:
    places = Completions([2, 1])
    found = rl_losses.ratios(tensor([0.1, 0.5, -0.2]), tensor([0.0, 0.0, 0.0]), "sequence", places)
    np.testing.assert_allclose(found.numpy(), [math.exp(0.3), math.exp(0.3), math.exp(-0.2)], rtol=1e-6)
    found = rl_losses.ratios(tensor([0.1, 0.5, -0.2]), tensor([0.0, 0.0, 0.0]), "token", places)
    np.testing.assert_allclose(found.numpy(), np.exp([0.1, 0.5, -0.2]), rtol=1e-6)


def test_the_ratio_of_unchanged_weights_is_exactly_one() -> None:
    logps = tensor(-np.random.default_rng(0).exponential(size=40))
    for level in ("token", "sequence"):
        assert (rl_losses.ratios(logps, logps.clone(), level, Completions([7, 13, 20])).numpy() == 1.0).all()


def test_clip_and_its_slopes() -> None:
    def loss(ratio: Any, advantage: Any) -> Any:
        return rl_losses.ppo_clip(ratio, advantage, ClipRange(0.2, 0.28))

    places = [(1.0, 2.0), (1.5, 2.0), (0.5, 2.0), (1.5, -2.0), (0.5, -2.0)]
    check(loss, places, [-2.0, -2.56, -1.0, 3.0, 1.6])
    assert slopes(loss, 1.5, 2.0)[:1] == near(0.0)
    assert slopes(loss, 0.5, 2.0)[:1] == near(-2.0)
    assert slopes(loss, 1.5, -2.0)[:1] == near(2.0)
    assert slopes(loss, 0.5, -2.0)[:1] == near(0.0)


def test_dual_clip_is_the_formula_of_its_paper() -> None:
    """max(min(r A, clip(r) A), c A) for negative A; the first two alone for positive A."""
    ratio, advantage = np.meshgrid(np.linspace(0.05, 6, 40), [-1.5, -0.1, 0.0, 0.2, 2.0])
    plain = np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
    wanted = -np.where(advantage < 0, np.maximum(plain, 3.0 * advantage), plain)
    found = rl_losses.ppo_clip(tensor(ratio, "float64"), tensor(advantage, "float64"), ClipRange(dual=3.0))
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12)


def test_clip_shares_are_where_there_is_no_slope() -> None:
    ratio = tensor([0.5, 0.5, 1.0, 1.5, 1.5])
    ratio.stop_gradient = False
    advantage = tensor([1.0, -1.0, 1.0, 1.0, -1.0])
    below, above = rl_losses.clipped_tokens(ratio, advantage, ClipRange())
    assert below.tolist() == [0, 1, 0, 0, 0]
    assert above.tolist() == [0, 0, 0, 1, 0]
    rl_losses.ppo_clip(ratio, advantage, ClipRange()).sum().backward()
    assert (ratio.grad.numpy() == 0).tolist() == [False, True, False, True, False]


def test_cispo_keeps_every_slope() -> None:
    def loss(ratio: Any, logps: Any) -> Any:
        return rl_losses.cispo(ratio, logps, paddle.full_like(logps, 2.0), 1.5)

    check(loss, [(1.2, -0.5), (4.0, -0.5)], [1.2, 1.5])
    assert slopes(lambda logps: loss(paddle.full_like(logps, 4.0), logps), -0.5) == near(-3.0)


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    # logp - ref = 0.5
    [
        ("k1", 0.5, 1.0),
        ("k2", 0.125, 0.5),
        ("k3", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)),
        ("k1+", 0.5, 0.5),
        ("k3+", math.exp(-0.5) - 0.5, 0.5),
    ],
)
def test_estimates_of_the_divergence(kind: Any, value: float, slope: float) -> None:
    def loss(logp: Any) -> Any:
        return rl_losses.kl(logp, paddle.full_like(logp, -2.0), kind)

    check(loss, [(-1.5,)], [value])
    assert slopes(loss, -1.5) == near(slope)


@pytest.mark.parametrize(("kind", "unbiased"), [("k1", True), ("k2", False), ("k3", True)])
def test_estimates_have_the_divergence_as_their_mean(kind: Any, unbiased: bool) -> None:
    """Over all tokens of a small vocabulary, weighed by the model's probabilities."""
    model, reference = (np.array(p) for p in ([0.5, 0.3, 0.2], [0.2, 0.5, 0.3]))
    expected_kl = float((model * np.log(model / reference)).sum())
    found = rl_losses.kl(tensor(np.log(model), "float64"), tensor(np.log(reference), "float64"), kind).numpy()
    assert ((found * model).sum() == pytest.approx(expected_kl, rel=1e-9)) == unbiased


@pytest.mark.parametrize("kind", ["k2", "k1+", "k3+"])
def test_straight_through_estimates_have_the_gradient_of_the_divergence(kind: Any) -> None:
    """The mean over the model's own tokens of the gradient of each, by the logits."""
    logits = np.array([0.4, -0.3, 0.1])
    reference = tensor(np.log([0.2, 0.5, 0.3]), "float64")
    exact = tensor(logits, "float64")
    exact.stop_gradient = False
    logps = paddle.nn.functional.log_softmax(exact)
    (logps.exp() * (logps - reference)).sum().backward()
    estimated = tensor(logits, "float64")
    estimated.stop_gradient = False
    logps = paddle.nn.functional.log_softmax(estimated)
    (logps.exp().detach() * rl_losses.kl(logps, reference, kind)).sum().backward()
    np.testing.assert_allclose(estimated.grad.numpy(), exact.grad.numpy(), rtol=1e-9)


def test_corrections_by_hand() -> None:
    trainer = tensor([0.0, 0.0, 0.0, 0.0])
    rollout = tensor([-1.0, 0.1, 1.0, 2.0])
    places = Completions([3, 1])
    weights = np.exp([1.0, -0.1, -1.0, -2.0])

    def found(level: Any, mask: bool) -> Any:
        return rl_losses.importance_weights(trainer, rollout, level, places, 2.0, mask).numpy()

    np.testing.assert_allclose(found("token", False), np.minimum(weights, 2.0), rtol=1e-6)
    np.testing.assert_allclose(found("token", True), [0, weights[1], 0, 0], rtol=1e-6)
    mean = math.exp(-0.1 / 3)
    np.testing.assert_allclose(found("sequence", False), [mean] * 3 + [math.exp(-2)], rtol=1e-6)
    np.testing.assert_allclose(found("sequence", True), [mean] * 3 + [0], rtol=1e-6)


@given(st.lists(st.floats(-30, 30), min_size=2, max_size=9), st.integers(1, 8))
@settings(deadline=None)
def test_entropies_of_parts_add_up(logits: list[float], cut: int) -> None:
    wide = np.array([logits])
    logps = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    wanted = -(np.exp(logps) * logps).sum()
    nll, entropy = nll_and_entropy(tensor(wide, "float64"), paddle.to_tensor([0]))
    assert entropy.item() == pytest.approx(wanted, abs=1e-9)
    assert nll.item() == pytest.approx(-logps[0, 0], abs=1e-9)
    parts = [part - wide.max() for part in (wide[:, :cut], wide[:, cut:])]
    sums = [sum(function(part).sum(-1) for part in parts) for function in (np.exp, lambda x: x * np.exp(x))]
    found = entropy_of_sums(*(tensor(x, "float64") for x in sums))
    assert found.item() == pytest.approx(wanted, abs=1e-9)


def test_value_loss_takes_the_worse_of_both() -> None:
    def loss(value: Any) -> Any:
        return rl_losses.value_loss(value, paddle.full_like(value, 1.0), paddle.full_like(value, 2.0), 0.2)

    # within the clip; beyond it, where the held value is further from 2; on the other side
    check(loss, [(1.1,), (1.9,), (0.5,)], [0.9**2 / 2, 0.8**2 / 2, 1.5**2 / 2])
    assert slopes(loss, 1.9) == near(0.0)
    assert slopes(loss, 0.5) == near(-1.5)
    assert rl_losses.value_loss(tensor([1.9]), tensor([1.0]), tensor([2.0]), None).item() == pytest.approx(0.005)


def test_value_loss_as_verl() -> None:
    case = json.loads((REFERENCE / "rl" / "verl.json").read_text())["value_loss"]
    values, old, returns, slope = (
        np.concatenate(case[key]) for key in ("values", "old", "returns", "gradient")
    )  # fmt: skip
    leaf = paddle.to_tensor(values, dtype="float64", stop_gradient=False)
    loss = rl_losses.value_loss(leaf, tensor(old, "float64"), tensor(returns, "float64"), case["clip"]).mean()
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], rel=1e-12)
    np.testing.assert_allclose(leaf.grad.numpy(), slope, rtol=1e-10, atol=1e-15)
