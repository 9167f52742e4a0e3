"""However a batch is split into micro-batches, the step is the same: one division by the sum of all weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.base.cache import isolated_cache
from llmsuite.engine.passes import MicroBatchLoader, Passes, evaluate
from llmsuite.parallel.loss_ledger import LossTerms
from llmsuite.stages.dpo import DpoStage
from llmsuite.stages.pairs import Pair
from tests.support import alone, dpo_case
from tests.support.recorded_steps import Recording, cut

Arrays = dict[str, np.ndarray]
CUTS = [[8], [4, 4], [2, 2, 2, 2], [1] * 8, [5, 3], [1, 6, 1]]
TOLERANCE = 1e-6


# DPO


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[DpoStage, list[Pair]]:
    """Eight pairs of different lengths, and the stage with the reference of a model other than the policy."""
    stage = dpo_case.stage()
    pairs, _ = dpo_case.pairs(stage, dpo_case.rows(8))
    assert len({len(pair.prompt) for pair in pairs}) > 3
    assert len({len(pair.rejected) for pair in pairs}) > 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMSUITE_CACHE", str(isolated_cache(tmp_path_factory.mktemp("cache"))))
        stage.before_training(dpo_case.model(seed=1), pairs)
    return stage, pairs


def dpo_step(case: tuple[DpoStage, list[Pair]], sizes: Sequence[int]) -> tuple[dict[str, float], Arrays, Arrays]:
    """Metrics, gradients and parameters of one SGD step."""
    stage, pairs = case
    model = dpo_case.model(seed=2)
    train = dpo_case.train_section(max_grad_norm=None)
    optimizer = Recording(alone.shards(dict(model.named_parameters())), train, total_steps=4)
    metrics = alone.step(1, cut(pairs, sizes), stage, model, optimizer)
    metrics.pop("reader_seconds")
    return metrics, optimizer.gradients, {n: p.numpy() for n, p in model.named_parameters()}


@pytest.fixture(scope="module")
def whole(case: tuple[DpoStage, list[Pair]]) -> tuple[dict[str, float], Arrays, Arrays]:
    return dpo_step(case, [8])


@pytest.fixture(scope="module")
def terms(case: tuple[DpoStage, list[Pair]]) -> Arrays:
    """For each parameter, the mean over the pairs of the norm of a pair's own gradient."""
    stage, pairs = case
    model = dpo_case.model(seed=2)
    norms: dict[str, list[float]] = {}
    for pair in pairs:
        stage.loss(model, stage.collate([pair])).total.backward()
        for name, parameter in model.named_parameters():
            norms.setdefault(name, []).append(float(np.linalg.norm(parameter.grad.numpy())))
        model.clear_gradients(set_to_zero=False)
    return {name: np.mean(values) for name, values in norms.items()}


@pytest.mark.parametrize("sizes", CUTS[1:], ids=str)
def test_dpo_steps_are_equal(
    sizes: list[int],
    case: tuple[DpoStage, list[Pair]],
    whole: tuple[dict[str, float], Arrays, Arrays],
    terms: Arrays,
) -> None:
    """Differences are relative to the size of what is added up.

    A gradient: the norm of the difference to the mean norm of the pairs' own gradients, of which 30 per cent at
    least are left when they are added up. A reward or margin: to beta times the log-probabilities it is the
    difference of. The rest: to itself.
    """
    metrics, gradients, parameters = dpo_step(case, sizes)
    expected, expected_gradients, expected_parameters = whole
    assert metrics.keys() == expected.keys()
    assert expected["tokens"] > expected["supervised_tokens"] > 0
    reward = 0.1 * (abs(expected["logps/chosen"]) + abs(expected["logps/rejected"]))
    for name, value in expected.items():
        size = reward if name in ("rewards/chosen", "rewards/rejected", "rewards/margin") else abs(value)
        assert abs(metrics[name] - value) <= TOLERANCE * size, name
    assert gradients.keys() == expected_gradients.keys() == parameters.keys() == terms.keys()
    for name, gradient in expected_gradients.items():
        assert np.linalg.norm(gradient) > 0.3 * terms[name], name
        assert np.linalg.norm(gradients[name] - gradient) <= TOLERANCE * terms[name], name
    for name, values in expected_parameters.items():
        assert np.abs(parameters[name] - values).max() <= TOLERANCE * np.abs(values).max(), name


def test_the_dpo_update_is_large_enough_to_be_compared(whole: tuple[dict[str, float], Arrays, Arrays]) -> None:
    start = {name: parameter.numpy() for name, parameter in dpo_case.model(seed=2).named_parameters()}
    for name, values in whole[2].items():
        assert np.abs(values - start[name]).max() > 1e-4 * np.abs(values).max(), name


def test_a_mean_of_means_would_be_seen_in_dpo(case: tuple[DpoStage, list[Pair]]) -> None:
    stage, pairs = case
    model = dpo_case.model(seed=2)
    means = []
    for part in cut(pairs, [1, 6, 1]):
        found = stage.loss(model, stage.collate(part))
        means.append(float(found.total) / found.weight)
    together = stage.loss(model, stage.collate(pairs))
    loss = float(together.total) / together.weight
    assert abs(np.mean(means) - loss) > 1e-3 * loss


# a loss weighted by tokens, whose number differs between micro-batches


class TokenRegression:
    """Squared error of each token of a sample, every token weighing 1; token (features [4], target)."""

    def collate(self, samples: Sequence[np.ndarray]) -> dict[str, Any]:
        tokens = np.concatenate(samples)
        return {"tokens": tokens, "num_samples": len(samples), "num_tokens": len(tokens), "num_supervised": len(tokens)}

    def loss(self, model: Any, batch: dict[str, Any]) -> LossTerms:
        tokens = paddle.to_tensor(batch["tokens"])
        errors = model(tokens[:, :4]).flatten() - tokens[:, 4]
        squared = errors.square()
        sums = {
            "bias": (errors.detach().sum(), float(batch["num_tokens"])),
            # a metric with another weight than the loss: the largest error of each micro-batch
            "worst": (squared.detach().max(), float(batch["num_samples"])),
        }
        return LossTerms(squared.sum(), float(batch["num_tokens"]), sums)


LENGTHS = [1, 30, 2, 17, 1, 1, 40, 3]


def token_samples() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    # longer samples have larger targets, so that weights and losses go together
    return [
        np.concatenate([rng.standard_normal([n, 4]), n / 10 + rng.standard_normal([n, 1])], 1).astype("float32")
        for n in LENGTHS
    ]


def token_model() -> Any:
    model = paddle.nn.Linear(4, 1)
    model.weight.set_value(paddle.to_tensor([[0.5], [-0.25], [1.0], [0.75]]))
    return model


@pytest.mark.parametrize("sizes", CUTS, ids=str)
def test_steps_with_ragged_token_weights_are_equal(sizes: list[int]) -> None:
    samples = token_samples()
    model = token_model()
    every = np.concatenate(samples).astype("float64")
    x = every[:, :4]
    y = every[:, 4:]
    error = x @ model.weight.numpy().astype("float64") - y
    loss = (error**2).mean()
    gradient = 2 * x.T @ error / len(x)
    before = model.weight.numpy().astype("float64")

    train = dpo_case.train_section(max_grad_norm=None)
    optimizer = Recording(alone.shards(dict(model.named_parameters())), train, total_steps=4)
    micro_batches = cut(samples, sizes)
    metrics = alone.step(1, micro_batches, TokenRegression(), model, optimizer)

    assert metrics["loss"] == pytest.approx(loss, rel=TOLERANCE)
    assert metrics["bias"] == pytest.approx(error.mean(), rel=TOLERANCE)
    assert metrics["tokens"] == metrics["supervised_tokens"] == sum(LENGTHS)
    found = optimizer.gradients["weight"]
    assert np.linalg.norm(found - gradient) <= TOLERANCE * np.linalg.norm(gradient)
    np.testing.assert_allclose(model.weight.numpy(), before - 0.05 * gradient, rtol=TOLERANCE)
    norm = np.sqrt((gradient**2).sum() + (2 * error.mean()) ** 2)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=TOLERANCE)

    # the same batch, with each micro-batch divided by its own weight: far off, so the comparison above says something
    cuts = [np.concatenate(batch).astype("float64") for batch in micro_batches]
    errors = [part[:, :4] @ before - part[:, 4:] for part in cuts]
    mean_of_means = np.mean([(e**2).mean() for e in errors])
    wrong_gradient = np.mean([2 * part[:, :4].T @ e / len(e) for part, e in zip(cuts, errors)], axis=0)
    assert metrics["worst"] == pytest.approx(sum((e**2).max() for e in errors) / len(samples), rel=TOLERANCE)
    if len(sizes) > 1:
        assert abs(mean_of_means - loss) > 1e-3 * loss
        assert np.linalg.norm(wrong_gradient - gradient) > 1e-3 * np.linalg.norm(gradient)


@pytest.mark.parametrize("sizes", CUTS, ids=str)
def test_evaluation_is_weighted_the_same_way(sizes: list[int]) -> None:
    samples = token_samples()
    model = token_model()
    every = np.concatenate(samples).astype("float64")
    error = every[:, :4] @ model.weight.numpy().astype("float64") - every[:, 4:]
    part: Any = alone.AnyModel(model)
    passes = Passes(TokenRegression(), part, "1F1B")
    metrics = evaluate(MicroBatchLoader(cut(samples, sizes), TokenRegression().collate), passes)
    padded = [*cut(samples, sizes), samples[:1]]
    assert metrics == evaluate(MicroBatchLoader(padded, TokenRegression().collate), passes, len(sizes))
    assert metrics["loss"] == pytest.approx((error**2).mean(), rel=TOLERANCE)
    assert metrics["bias"] == pytest.approx(error.mean(), rel=TOLERANCE)
    assert model.training
    assert model.weight.grad is None
