"""The losses of the DPO stage that depend on the whole global batch, or on no reference: the same however it is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.base.cache import BUILT
from llmsuite.contract.schema.section import violations
from llmsuite.engine.passes import MicroBatchLoader, Passes, evaluate
from llmsuite.parallel.pipeline import PipelineStage
from llmsuite.recipe.resolve import RunPlan
from llmsuite.stages.answers import answer_logps
from llmsuite.stages.dpo import DpoStage
from llmsuite.stages.pairs import Pair
from llmsuite.stages.sections import DpoSection
from tests.support import alone, dpo_case
from tests.support.dpo_variants import BY_MICRO_BATCH, VARIANTS, made
from tests.support.recorded_steps import Recording, cut


def step(stage: DpoStage, pairs: list[Pair], sizes: list[int]) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    model = dpo_case.model()
    train = dpo_case.train_section(max_grad_norm=None)
    optimizer = Recording(alone.shards(dict(model.named_parameters())), train, total_steps=4)
    metrics = alone.step(1, cut(pairs, sizes), stage, model, optimizer)
    del metrics["reader_seconds"]
    return metrics, optimizer.gradients


@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_does_not_depend_on_how_it_is_cut(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, pairs = made(name, tmp_path, monkeypatch)
    metrics, gradients = step(stage, pairs, [6])
    for sizes in ([2, 2, 2], [5, 1]):
        found, others = step(stage, pairs, sizes)
        assert found == pytest.approx(metrics, rel=1e-6, abs=2e-6)
        for key, value in gradients.items():
            assert np.linalg.norm(others[key] - value) <= 3e-6 * np.linalg.norm(value), (sizes, key)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_loss_of_a_full_batch(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the published formula in float64, over all pairs at once."""
    stage, pairs = made(name, tmp_path, monkeypatch)
    answers = [pair.answers[side] for side in (0, 1) for pair in pairs]
    with paddle.no_grad():
        logps = answer_logps(dpo_case.model(), stage.collate(pairs)).numpy().astype("float64")
    chosen, _ = np.split(logps, 2)
    sizes = np.array([len(answer.ids) for answer in answers])
    p, q = np.split(np.exp(logps / sizes), 2)
    nll = -chosen.sum() / sizes[: len(pairs)].sum()
    of_answers = -(chosen / sizes[: len(pairs)]).mean()
    ratios = np.split(logps - stage._reference.logps_of(answers), 2) if stage._reference.table else []
    if name == "orpo":
        expected = 0.5 * np.log1p((q / (1 - q)) / (p / (1 - p))).mean() + nll
    elif name == "orpo with sft of answers":
        expected = 0.5 * np.log1p((q / (1 - q)) / (p / (1 - p))).mean() + of_answers
    elif name == "cpo and sft of answers":
        worse = np.split(logps, 2)[1]
        expected = np.log1p(np.exp(-0.5 * (chosen - worse))).mean() + 0.3 * of_answers
    elif name == "simpo":
        expected = np.log1p(np.exp(-(2 * np.log(p) - 2 * np.log(q) - 0.5))).mean()
    elif name == "sigmoid and sft":
        expected = np.log1p(np.exp(-0.1 * (ratios[0] - ratios[1]))).mean() + 0.3 * nll
    else:
        z = [max(0, part.mean()) for part in ratios]
        assert min(z) > 0, "else the estimate of the divergence is not tried"
        parts = 1 / (1 + np.exp(0.5 * (ratios[0] - z[1]))), 1 / (1 + np.exp(0.5 * (z[0] - ratios[1])))
        expected = np.concatenate(parts).mean()
    metrics, _ = step(stage, pairs, [4, 2])
    assert metrics["loss"] == pytest.approx(expected, rel=2e-6)
    model = dpo_case.model()
    part = PipelineStage([model], alone.MESH, model.config.hidden_size, [], None)
    prepasses = [prepass.kind for prepass in stage.section.profile().prepasses]
    batches = MicroBatchLoader([pairs[:5], pairs[5:], pairs[:1]], stage.collate)
    whole = evaluate(batches, Passes(stage, part, "1F1B", prepasses), 2)
    assert whole["loss"] == pytest.approx(expected, rel=2e-6)
    assert ("nll/chosen" in whole) == ("orpo" in name or "sft" in name)


def test_the_sft_term_may_be_a_mean_over_each_micro_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the formula: means over the tokens of each micro-batch, whose weights are its pairs."""
    (name,) = BY_MICRO_BATCH
    stage, pairs = made(name, tmp_path, monkeypatch)
    answers = [pair.answers[side] for side in (0, 1) for pair in pairs]
    with paddle.no_grad():
        logps = answer_logps(dpo_case.model(), stage.collate(pairs)).numpy().astype("float64")
    chosen, _ = np.split(logps, 2)
    sizes = np.array([len(answer.ids) for answer in answers])[: len(pairs)]
    ratios = np.split(logps - stage._reference.logps_of(answers), 2)
    preferred = np.log1p(np.exp(-0.1 * (ratios[0] - ratios[1]))).mean()
    for parts in ([6], [2, 2, 2], [4, 2]):
        borders = np.cumsum(parts)[:-1]
        means = [-a.sum() / b.sum() for a, b in zip(np.split(chosen, borders), np.split(sizes, borders))]
        metrics, _ = step(stage, pairs, parts)
        assert metrics["loss"] == pytest.approx(preferred + 0.3 * np.average(means, weights=parts), rel=2e-6), parts


def test_without_a_reference_nothing_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, _ = made("orpo", tmp_path, monkeypatch)
    assert not stage._reference.table
    assert [path.name for path in tmp_path.iterdir()] == [BUILT]


@pytest.mark.parametrize(
    ("keys", "key", "message"),
    [
        ({"loss": "simpo", "reference": "cache"}, "reference", "loss simpo uses no reference"),
        ({"loss": "orpo", "reference": "adapter_off"}, "reference", "loss orpo uses no reference"),
        ({"loss": "ipo", "reference": "none"}, "reference", "loss ipo needs one; set it to cache"),
        ({"loss": "orpo", "sft_weight": 1.0}, "sft_weight", "loss orpo, which has this term"),
        ({"loss": "orpo", "label_smoothing": 0.1}, "label_smoothing", "works with loss sigmoid, simpo and cpo only"),
        ({"sft_mean": "answers"}, "sft_mean", "has no effect without an SFT term"),
        ({"loss": "cpo", "reference": "cache"}, "reference", "loss cpo uses no reference"),
        ({"gamma": 0.5}, "gamma", "is the margin of simpo, and loss is sigmoid"),
    ],
)
def test_keys_that_do_not_fit_together(keys: dict[str, Any], key: str, message: str) -> None:
    ((found, problem),) = violations(DpoSection(**keys))
    assert found == key
    assert message in problem


def test_micro_batches_that_are_averaged_are_not_grouped_by_length(
    problems: Callable[..., list[Any]], plan: Callable[..., RunPlan]
) -> None:
    keys = {"dpo.sft_weight": 0.1, "dpo.sft_mean": "micro_batches", "train.micro_batch_size": 2}
    (problem,) = problems(keys)
    assert problem.key == "data.group_by_length"
    assert "dpo.sft_mean averages each micro-batch by itself; set it to false" in problem.message
    assert not plan({**keys, "data.group_by_length": False}).recipe.data.group_by_length


def test_answers_have_no_text_after_them(problems: Callable[..., list[Any]]) -> None:
    (problem,) = problems({"dpo.beta": 0.2, "data.end_of_answer": "token_in_text"})
    assert problem.key == "data.end_of_answer"
    assert "stage dpo has no text after its answers" in problem.message


def test_a_reference_without_adapter_takes_one(problems: Callable[..., list[Any]]) -> None:
    (problem,) = problems({"dpo.reference": "adapter_off"})
    assert problem.key == "dpo.reference"
    assert "set lora.rank" in problem.message


def test_a_reference_without_adapter_is_not_that_of_modules_that_are_trained_in_full(
    problems: Callable[..., list[Any]],
) -> None:
    keys = {"lora.rank": 4, "lora.modules_to_save": ["lm_head"]}
    (problem,) = problems({"dpo.reference": "adapter_off", **keys})
    assert problem.key == "dpo.reference"
    assert "set it to cache" in problem.message


def test_defaults_follow_from_the_loss(plan: Callable[..., RunPlan]) -> None:
    for loss, reference in (("sigmoid", "cache"), ("kto_pair", "cache"), ("simpo", "none"), ("orpo", "none")):
        section: Any = plan({"dpo.loss": loss}).recipe
        assert section.dpo.reference_from == reference
