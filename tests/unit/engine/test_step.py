"""Arithmetic of the loss ledger, and steps whose loss or gradient is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.engine.guard import Guard, LossSpike, NonFiniteLoss
from llmsuite.engine.rules import GROWTH_STEPS, LOWEST, LossScale
from llmsuite.parallel import collective
from llmsuite.parallel.loss_ledger import LossLedger, LossTerms, total_of
from llmsuite.parallel.optimizer import Optimizer
from tests.support import alone, dpo_case


def scalar(value: float) -> Any:
    return paddle.to_tensor(value, dtype="float32")


@given(st.lists(st.tuples(st.integers(-1000, 1000), st.integers(0, 50), st.integers(0, 9)), min_size=1, max_size=8))
def test_sums_are_divided_by_the_sum_of_their_own_weights(booked: list[tuple[int, int, int]]) -> None:
    ledger = LossLedger()
    for total, weight, other in booked:
        ledger.add(LossTerms(scalar(total), float(weight), {"accuracy": (scalar(total / 2), float(other))}))
        ledger.count(tokens=weight, stop=1)
    weight, metrics = ledger.reduce()
    totals, weights, others = (sum(column) for column in zip(*booked))
    assert weight == weights
    expected = {"tokens": weights, "stop": len(booked)}
    # what nothing was booked on has no mean, rather than one of 0
    expected |= {"loss": totals / weights} if weights else {}
    expected |= {"accuracy": totals / 2 / others} if others else {}
    assert metrics == pytest.approx(expected, rel=1e-6)


def test_a_micro_batch_without_weight_changes_nothing() -> None:
    ledger = LossLedger()
    ledger.add(LossTerms(scalar(6), 3.0))
    ledger.add(LossTerms(scalar(0), 0.0))
    assert ledger.reduce() == (3.0, {"loss": 2.0})


def test_ranks_are_added_up_before_anything_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, of which this one has the smaller part."""
    other = {"loss": (90.0, 9.0), "accuracy": (4.0, 4.0), "tokens": 100.0}
    added = [other["loss"][0], other["accuracy"][0], other["loss"][1], other["accuracy"][1], other["tokens"]]
    monkeypatch.setattr(
        collective, "sum_over_run", lambda values: [float(a) + b for a, b in zip(values, added, strict=True)]
    )
    ledger = LossLedger()
    ledger.add(LossTerms(scalar(1), 1.0, {"accuracy": (scalar(0), 1.0)}))
    ledger.count(tokens=7)
    assert ledger.reduce() == (10.0, {"loss": 9.1, "accuracy": 0.8, "tokens": 107.0})


def test_the_ledger_keeps_no_graph() -> None:
    weight = paddle.create_parameter([2], "float32")
    total = (weight * weight).sum()
    ledger = LossLedger()
    ledger.add(LossTerms(total, 1.0))
    assert ledger.reduce()[0] == 1.0
    assert all(t.stop_gradient for sums in ledger._sums.values() for t in sums)
    assert not total.stop_gradient


class Scripted:
    """Its samples are factors: the loss is factor * sum(weight), and its gradient the factor."""

    def collate(self, samples: Sequence[float]) -> dict[str, Any]:
        return {"factors": samples, "num_tokens": len(samples), "num_supervised": len(samples)}

    def loss(self, model: Any, batch: dict[str, Any]) -> LossTerms:
        total = sum((model.weight * factor).sum() for factor in batch["factors"])
        return LossTerms(total, float(len(batch["factors"])))


class InfiniteGradient(Scripted):
    """The loss is finite, its gradient at 0 is not."""

    def loss(self, model: Any, batch: dict[str, Any]) -> LossTerms:
        return LossTerms(paddle.sqrt(model.weight * 0.0).sum(), 1.0)


def trained() -> tuple[Any, Optimizer]:
    """A model after one good AdamW step, always the same."""
    paddle.seed(7)
    model = paddle.nn.Linear(3, 2, bias_attr=False)
    train = dpo_case.train_section(optimizer="adamw", weight_decay=0.1, max_grad_norm=1.0)
    optimizer = alone.optimizer(dict(model.named_parameters()), train, total_steps=4)
    alone.step(1, [[1.0], [2.0, -0.5]], Scripted(), model, optimizer)
    return model, optimizer


@pytest.mark.parametrize(
    ("objective", "factor"),
    [(Scripted(), math.inf), (Scripted(), -math.inf), (Scripted(), math.nan), (InfiniteGradient(), 1.0)],
)
def test_a_step_that_is_not_finite_updates_nothing(objective: Scripted, factor: float) -> None:
    model, optimizer = trained()
    before = model.weight.numpy()
    state = alone.state(optimizer)
    assert state, "there is something that could have been spoilt"
    with pytest.raises(NonFiniteLoss, match=r"^step 17: loss is .*nothing was updated.*train\.learning_rate") as caught:
        alone.step(17, [[1.0], [factor], [2.0]], objective, model, optimizer)
    assert isinstance(caught.value, UserError)
    assert np.array_equal(model.weight.numpy(), before)
    assert alone.same(alone.state(optimizer), state)


def test_metrics_of_a_step() -> None:
    model, optimizer = trained()
    weight = model.weight.numpy().astype("float64")
    metrics = alone.step(2, [[1.0, 2.0], [3.0]], Scripted(), model, optimizer, stop=True)
    assert metrics.pop("reader_seconds") >= 0
    assert metrics == pytest.approx(
        {
            "loss": 6 * weight.sum() / 3,
            "grad_norm": 2 * math.sqrt(6),
            "learning_rate": 0.05,
            "tokens": 3,
            "supervised_tokens": 3,
            "stop": 1,
        },
        rel=1e-5,
        abs=1e-6,
    )


def test_gradients_are_complete_after_the_last_backward_pass() -> None:
    """Gradients are reduced over the ranks during that pass."""
    model, optimizer = trained()
    (shard,) = optimizer.shards
    is_last: list[bool] = []
    model.weight._register_backward_hook(lambda: is_last.append(shard.is_last_pass))
    alone.step(2, [[1.0, 2.0], [3.0], [1.0]], Scripted(), model, optimizer)
    assert is_last == [False, False, True]


def test_a_loss_that_depends_on_no_parameter_is_refused() -> None:
    class Detached(Scripted):
        def loss(self, model: Any, batch: dict[str, Any]) -> LossTerms:
            return LossTerms(scalar(1), 1.0)

    model, optimizer = trained()
    with pytest.raises(UserError, match=r"^step 1: the stage's loss depends on no trained parameter"):
        alone.step(1, [[1.0]], Detached(), model, optimizer)


@pytest.mark.parametrize(
    ("returned", "said"), [(scalar(1), "a Tensor"), (LossTerms(paddle.ones([3]), 1.0), r"a total of shape \[3\]")]
)
def test_a_loss_of_another_type_is_refused(returned: Any, said: str) -> None:
    with pytest.raises(UserError, match=rf"^the stage's `loss` returned {said}; it has to return LossTerms\(total"):
        total_of(returned)


def test_a_bad_step_may_be_skipped() -> None:
    model, optimizer = trained()
    before = model.weight.numpy()
    state = alone.state(optimizer)
    guard = Guard(on_nonfinite="skip", on_spike="roll_back", spike_factor=3.0, norms=[2.0] * 8)
    metrics = alone.step(2, [[1.0], [math.nan]], Scripted(), model, optimizer, guard=guard)
    assert metrics["skipped"] == 1
    assert "loss" not in metrics, "JSON has no NaN"
    metrics = alone.step(3, [[100.0]], Scripted(), model, optimizer, guard=guard)
    assert (metrics["skipped"], metrics["roll_back"]) == (1, 1)
    assert metrics["grad_norm"] == pytest.approx(100 * math.sqrt(6), rel=1e-6)
    assert np.array_equal(model.weight.numpy(), before)
    assert alone.same(alone.state(optimizer), state)
    # nothing of their gradients is left
    follower, its_optimizer = trained()
    metrics = alone.step(4, [[1.0]], Scripted(), model, optimizer, guard=guard)
    alone.step(4, [[1.0]], Scripted(), follower, its_optimizer)
    assert "skipped" not in metrics
    assert np.array_equal(model.weight.numpy(), follower.weight.numpy())


def test_a_spike_may_stop_the_run() -> None:
    model, optimizer = trained()
    guard = Guard(on_spike="stop", spike_factor=10.0, norms=[2.0] * 8)
    with pytest.raises(
        LossSpike, match=r"^step 2: gradient norm 244\.9 is 122 times the usual 2, .* nothing was updated"
    ):
        alone.step(2, [[100.0]], Scripted(), model, optimizer, guard=guard)


# loss scaling


@pytest.mark.parametrize("value", [2.0**-3, 1.0, 2.0**16])
def test_a_scaled_loss_teaches_the_same(value: float) -> None:
    (plain, optimizer), (scaled, other) = trained(), trained()
    metrics = alone.step(2, [[1.0, 2.0], [3.0]], Scripted(), plain, optimizer)
    found = alone.step(2, [[1.0, 2.0], [3.0]], Scripted(), scaled, other, scale=LossScale(value))
    assert (found.pop("loss_scale"), found.pop("skipped")) == (value, 0)
    assert {**found, "reader_seconds": 0} == {**metrics, "reader_seconds": 0}  # powers of two round nothing
    assert np.array_equal(plain.weight.numpy(), scaled.weight.numpy())


def test_a_step_that_overflows_is_skipped_and_the_scale_halved() -> None:
    model, optimizer = trained()
    before = model.weight.numpy()
    state = alone.state(optimizer)
    scale = LossScale(1024.0, good_steps=5)
    metrics = alone.step(2, [[1.0], [2.0]], InfiniteGradient(), model, optimizer, scale=scale)
    assert (metrics["skipped"], metrics["loss_scale"], scale) == (1, 1024.0, LossScale(512.0, 0))
    assert "grad_norm" not in metrics, "JSON has no infinities"
    assert np.array_equal(model.weight.numpy(), before)
    assert alone.same(alone.state(optimizer), state)
    # nothing of its gradients is left
    follower, its_optimizer = trained()
    alone.step(3, [[1.0]], Scripted(), model, optimizer, scale=scale)
    alone.step(3, [[1.0]], Scripted(), follower, its_optimizer)
    assert np.array_equal(model.weight.numpy(), follower.weight.numpy())


def test_the_run_ends_at_the_lowest_loss_scale() -> None:
    model, optimizer = trained()
    scale = LossScale(LOWEST * 2)
    alone.step(2, [[1.0]], InfiniteGradient(), model, optimizer, scale=scale)
    assert scale.value == LOWEST
    with pytest.raises(NonFiniteLoss, match=r"nothing was updated\. The loss scale is at its lowest, 6e-05\."):
        alone.step(3, [[1.0]], InfiniteGradient(), model, optimizer, scale=scale)


@given(st.lists(st.booleans(), max_size=40), st.integers(0, GROWTH_STEPS - 1))
def test_the_scale_doubles_after_enough_good_steps_in_a_row(finite: list[bool], good: int) -> None:
    scale = LossScale(1024.0, good)
    expected = 1024.0
    for each in finite:
        if each:
            scale.grow()
            good += 1
            if good == GROWTH_STEPS:
                expected = expected * 2
                good = 0
        else:
            lowest = expected <= LOWEST
            assert scale.back_off() == (not lowest)
            expected, good = (expected, good) if lowest else (expected / 2, 0)
        assert (scale.value, scale.good_steps) == (expected, good)
    assert scale.value >= LOWEST
