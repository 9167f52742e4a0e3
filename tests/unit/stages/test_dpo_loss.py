"""Log-probabilities of answers against a naive computation, and what the DPO stage makes of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.base.cache import isolated_cache
from llmsuite.engine.guard import NonFiniteLoss
from llmsuite.models.dense_plan import PLAN
from llmsuite.parallel.recompute import recompute_layers
from llmsuite.stages.answers import answer_logps
from llmsuite.stages.dpo import DpoStage
from llmsuite.stages.pairs import Pair
from llmsuite.stages.reference import LogpTable
from tests.support import alone, dpo_case

LOSSES = ("sigmoid", "hinge", "ipo", "ipo_mean")
LN2 = 0.6931472


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMSUITE_CACHE", str(isolated_cache(tmp_path)))


def some_pairs(stage: DpoStage, count: int = 6) -> list[Pair]:
    return dpo_case.pairs(stage, dpo_case.rows(count))[0]


# log-probabilities


def naive_logp(model: Any, prompt: list[int], answer: list[int]) -> float:
    """Logits of every position, one sequence at a time, normalised in float64."""
    with paddle.no_grad():
        logits = model(paddle.to_tensor([prompt + answer])).numpy()[0].astype("float64")
    top = logits.max(-1, keepdims=True)
    logps = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return float(sum(logps[len(prompt) - 1 + i, token] for i, token in enumerate(answer)))


@pytest.mark.parametrize("tied", [False, True])
def test_answer_logps_are_the_naive_ones(tied: bool) -> None:
    stage = dpo_case.stage()
    model = dpo_case.model(tie_word_embeddings=tied)
    pairs = some_pairs(stage)
    expected = [naive_logp(model, p.prompt, p.chosen) for p in pairs]
    expected += [naive_logp(model, p.prompt, p.rejected) for p in pairs]
    with paddle.no_grad():
        found = answer_logps(model, stage.collate(pairs)).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_padding_changes_no_logp() -> None:
    """One by one against batched: within 1e-5, or what float32 resolves of the longer answers' 100 and more."""
    stage = dpo_case.stage()
    model = dpo_case.model()
    pairs = some_pairs(stage)
    batch = stage.collate(pairs)
    assert len({len(pair.prompt) + len(pair.chosen) for pair in pairs}) > 3
    with paddle.no_grad():
        together = answer_logps(model, batch).numpy()
        alone = np.stack([answer_logps(model, stage.collate([pair])).numpy() for pair in pairs], 1).reshape(-1)
        np.testing.assert_allclose(together, alone, rtol=2e-7, atol=1e-5)
        # what stands in the padding does not matter at all
        sequences = [p.prompt + p.chosen for p in pairs] + [p.prompt + p.rejected for p in pairs]
        for ids, sequence in zip(batch["input_ids"], sequences):
            rest = ids[len(sequence) - 1 :]
            rest[:] = np.arange(3, 3 + len(rest))
        assert np.array_equal(answer_logps(model, batch).numpy(), together)


# the stage


def first_step(stage: DpoStage, model: Any, pairs: list[Pair], **train: Any) -> dict[str, float]:
    optimizer = alone.optimizer(dict(model.named_parameters()), dpo_case.train_section(**train), total_steps=4)
    return alone.step(1, [pairs[:4], pairs[4:]], stage, model, optimizer)


@pytest.mark.parametrize(("kind", "loss"), [("sigmoid", LN2), ("hinge", 1.0), ("ipo", 25.0), ("ipo_mean", 25.0)])
def test_the_first_step_starts_from_the_reference(kind: str, loss: float) -> None:
    stage = dpo_case.stage(loss=kind)
    model = dpo_case.model()
    pairs = some_pairs(stage)
    stage.before_training(model, pairs)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    metrics = first_step(stage, model, pairs)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    for name in ("rewards/margin", "rewards/chosen", "rewards/rejected"):
        assert abs(metrics[name]) <= 1e-6 * abs(metrics["logps/rejected"])
    expected = [naive_logp(dpo_case.model(), pair.prompt, pair.chosen) for pair in pairs]
    assert metrics["logps/chosen"] == pytest.approx(np.mean(expected), rel=1e-6)
    assert metrics["grad_norm"] > 0.1


@pytest.mark.parametrize("kind", LOSSES)
def test_a_step_raises_the_margin_of_chosen_over_rejected_answers(kind: str) -> None:
    stage = dpo_case.stage(loss=kind)
    model = dpo_case.model()
    pairs = some_pairs(stage)
    stage.before_training(model, pairs)
    first_step(stage, model, pairs, learning_rate=0.01)
    with paddle.no_grad():
        sums = {
            name: float(total) / weight
            for name, (total, weight) in stage.loss(model, stage.collate(pairs)).sums.items()
        }
    assert sums["rewards/margin"] > 0.01
    assert sums["rewards/margin"] == pytest.approx(sums["rewards/chosen"] - sums["rewards/rejected"], rel=1e-5)
    assert sums["rewards/accuracy"] == 1


@pytest.mark.parametrize("kind", LOSSES)
def test_metrics_of_known_log_ratios(kind: str) -> None:
    stage = dpo_case.stage(loss=kind, beta=0.2)
    model = dpo_case.model()
    pairs = some_pairs(stage, 3)
    with paddle.no_grad():
        logps = answer_logps(model, stage.collate(pairs)).numpy().astype("float64")
    # the reference thinks less of the first chosen answer by 1.5, more of the second by 0.5, of the third by 1
    ratios = np.array([[1.5, -0.5, -1.0], [0.5, 0.5, -3.0]])
    keys = np.array([[answer.key for answer in pair.answers] for pair in pairs]).T
    stage._reference.table = LogpTable(dict(zip(keys.flat, (logps.reshape(2, 3) - ratios).flat)))
    margins = np.array([0.2, -0.2, 0.4])  # 0.2 times (1.5 - 0.5, -0.5 - 0.5, -1 + 3)
    terms = stage.loss(model, stage.collate(pairs))
    assert terms.weight == 3
    by_hand = {
        "sigmoid": 0.5981389 + 0.7981389 + 0.5130153,
        "hinge": 0.8 + 1.2 + 0.6,
        "ipo": 1.5**2 + 3.5**2 + 0.5**2,  # log-ratio differences 1, -1 and 2, less 2.5
        # the same per token
        "ipo_mean": sum((r[0] / len(p.chosen) - r[1] / len(p.rejected) - 2.5) ** 2 for r, p in zip(ratios.T, pairs)),
    }
    assert float(terms.total) == pytest.approx(by_hand[kind], rel=2e-5)
    found = {name: float(total) for name, (total, weight) in terms.sums.items() if weight == 3}
    assert found == pytest.approx(
        {
            "rewards/chosen": 0.2 * (1.5 - 0.5 - 1),
            "rewards/rejected": 0.2 * (0.5 + 0.5 - 3),
            "rewards/margin": margins.sum(),
            "rewards/accuracy": 2,
            "logps/chosen": logps[:3].sum(),
            "logps/rejected": logps[3:].sum(),
        },
        rel=1e-5,
        abs=2e-5,
    )
    assert all(total.stop_gradient for total, _ in terms.sums.values())


def test_recompute_changes_no_gradient() -> None:
    stage = dpo_case.stage()
    model = dpo_case.model()
    pairs = some_pairs(stage)
    stage.before_training(model, pairs)
    gradients = []
    for again in (False, True):
        if again:
            recompute_layers(model, PLAN, every=1)
        stage.loss(model, stage.collate(pairs)).total.backward()
        gradients.append([parameter.grad.numpy() for parameter in model.parameters()])
        model.clear_gradients(set_to_zero=False)
    assert all(np.array_equal(a, b) for a, b in zip(*gradients))


def test_a_broken_model_is_not_trained() -> None:
    """Paddle's cross entropy on cpu gives a finite loss for logits that are not a number; only the gradient is not."""
    stage = dpo_case.stage()
    model = dpo_case.model()
    pairs = some_pairs(stage)
    stage.before_training(model, pairs)
    up_proj = model.model.layers[3].mlp.up_proj.weight
    broken = up_proj.numpy()
    broken[5, 7] = math.nan
    up_proj.set_value(paddle.to_tensor(broken))
    before = {name: parameter.numpy() for name, parameter in model.named_parameters()}
    with pytest.raises(NonFiniteLoss, match=r"^step 1: "):
        first_step(stage, model, pairs)
    for name, parameter in model.named_parameters():
        assert np.array_equal(parameter.numpy(), before[name], equal_nan=True)
