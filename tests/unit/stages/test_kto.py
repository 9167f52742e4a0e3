"""The KTO stage: rows to batches, which answer is unrelated to which prompt, and a step however it is cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base.cache import isolated_cache
from llmsuite.data.rows import Message, Unpaired
from llmsuite.engine.stage import DropCounts
from llmsuite.stages.answers import Answer, answer_logps
from llmsuite.stages.kto import KtoStage, LabelledAnswer, _answers, unrelated_answers
from tests.support import alone, dpo_case
from tests.support.kto_case import ROWS, made
from tests.support.recorded_steps import Recording, cut

# samples


def test_an_unrelated_answer_is_the_next_to_another_prompt() -> None:
    _, samples, _ = made()
    assert [sample.desirable for sample in samples] == [True, False, True, False, True]
    answers = [sample.answer for sample in samples]
    for sample, other in zip(samples, (2, 2, 3, 4, 0)):
        assert sample.unrelated == Answer(sample.answer.prompt, answers[other].ids)
    longest = max(map(len, answers))
    # the fourth answer does not fit after the longer prompts
    shorter = unrelated_answers(answers, longest - 1)
    assert shorter[2] in (None, Answer(answers[2].prompt, answers[3].ids), Answer(answers[2].prompt, answers[4].ids))


some = st.lists(st.integers(3, 9), min_size=1, max_size=4)


@given(st.lists(st.builds(Answer, some, some), max_size=6), st.integers(2, 8))
def test_unrelated_answers_fit_and_are_to_another_prompt(answers: list[Answer], max_length: int) -> None:
    found = unrelated_answers(answers, max_length)
    assert len(found) == len(answers)
    for answer, other in zip(answers, found):
        fitting = [a for a in answers if a.prompt != answer.prompt and len(answer.prompt) + len(a.ids) <= max_length]
        assert (other is None) == (not fitting)
        if other is not None:
            assert other.prompt == answer.prompt
            assert len(other) <= max_length
            assert any(a.ids == other.ids for a in fitting)


def test_rows_that_would_train_nothing_are_counted() -> None:
    stage, _, _ = made()
    answers = [Message("assistant", text) for text in (" ", "2<|im_end|>3")]
    rows = [*ROWS, *(Unpaired(ROWS[0].prompt, answer, True) for answer in answers)]
    counts = DropCounts(Path("rows.jsonl"), read=len(rows))
    assert len(stage.make_samples(rows, counts)) == len(ROWS)
    assert counts.dropped == {"with an empty answer": 1, "with the end-of-sequence token inside an answer": 1}
    longest = max(len(sample.answer) for sample in made()[1])
    _, samples, counts = made(max_length=longest - 1)
    assert len(samples) == len(ROWS) - 1
    too_long = f"longer than data.max_length {longest - 1} (the end of an answer would be cut off)"
    assert counts.dropped == {too_long: 1}


# a step


def step(
    stage: KtoStage, samples: list[LabelledAnswer], sizes: list[int]
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    model = dpo_case.model()
    train = dpo_case.train_section(max_grad_norm=None)
    optimizer = Recording(alone.shards(dict(model.named_parameters())), train, total_steps=4)
    metrics = alone.step(1, cut(samples, sizes), stage, model, optimizer)
    del metrics["reader_seconds"]
    return metrics, optimizer.gradients


@pytest.mark.parametrize("loss", ["kto", "apo_zero"])
def test_a_step_is_the_published_one_however_it_is_cut(
    loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMSUITE_CACHE", str(isolated_cache(tmp_path)))
    stage, samples, _ = made(loss=loss, beta=0.5, desirable_weight=1.5)
    stage.before_training(dpo_case.model(), samples)
    stage._reference.table = dpo_case.MovedLogps(stage._reference.table, -1.0, list(_answers(samples)))

    def ratios(answers: list[Answer]) -> np.ndarray:
        with paddle.no_grad():
            logps = answer_logps(dpo_case.model(), stage._collate(answers)).numpy()
        return (logps - stage._reference.logps_of(answers)).astype("float64")

    found = ratios([sample.answer for sample in samples])
    z = 0.0
    if loss == "kto":
        z = max(0.0, ratios([sample.unrelated for sample in samples if sample.unrelated]).mean())
        assert z > 0.1, z
    signs = np.array([1 if sample.desirable else -1 for sample in samples])
    expected = np.where(signs > 0, 1.5, 1.0) / (1 + np.exp(0.5 * (found - z) * signs))

    metrics, gradients = step(stage, samples, [5])
    assert metrics["loss"] == pytest.approx(expected.mean(), rel=2e-6)
    assert metrics["rewards/desirable"] == pytest.approx(0.5 * found[signs > 0].mean(), rel=1e-4)
    assert metrics["rewards/undesirable"] == pytest.approx(0.5 * found[signs < 0].mean(), rel=1e-4)
    assert metrics.get("kl", 0.0) == pytest.approx(z, rel=1e-4)
    for sizes in ([2, 3], [1, 1, 1, 1, 1]):
        again, others = step(stage, samples, sizes)
        assert again == pytest.approx(metrics, rel=1e-5, abs=2e-5)
        assert again["loss"] == pytest.approx(metrics["loss"], rel=1e-6)
        for key, value in gradients.items():
            assert np.linalg.norm(others[key] - value) <= 1e-5 * np.linalg.norm(value), (sizes, key)


def test_a_z_of_each_micro_batch_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMSUITE_CACHE", str(isolated_cache(tmp_path)))
    stage, samples, _ = made(beta=0.5)
    stage.before_training(dpo_case.model(), samples)
    stage._reference.table = dpo_case.MovedLogps(stage._reference.table, -1.0, list(_answers(samples)))
    alone_each = [step(stage, [sample], [1])[0]["loss"] for sample in samples]
    assert abs(np.mean(alone_each) - step(stage, samples, [5])[0]["loss"]) > 1e-3
