"""Distillation: the loss of a batch by the published formula, from the logits of both models."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.builtin import llmsuite_register_stages
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.data.rows import Conversation
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.pipeline import PipelineStage
from llmsuite.stages.gkd import GkdStage
from llmsuite.stages.gkd_section import GkdSection
from llmsuite.stages.language_model import WeightedTokens
from tests.support import sft_case, tiny_llama

STUDENT = dataclasses.replace(tiny_llama.CONFIG, vocab_size=512, max_position_embeddings=128)
TEACHER = dataclasses.replace(STUDENT, hidden_size=32, num_hidden_layers=3)
ROWS: list[Conversation] = [
    sft_case.talk("Say hello.", "Hello!", "Again.", "Hello, again.", supervised=(False, True)),
    sft_case.talk("What is it?", "Good day to you."),
]
WEIGHTED: Conversation = dataclasses.replace(ROWS[1], weights=(1.0, 0.25))


def stage_with(section: GkdSection, teacher: Any, padding_free: bool = False) -> GkdStage:
    context = dataclasses.replace(
        sft_case.make_stage().context, stage_name="gkd", load_teacher=lambda: teacher, padding_free=padding_free
    )
    return GkdStage(section, context)


def alone(model: Any) -> PipelineStage:
    """The model as a stage gets it, without a pipeline."""
    return PipelineStage([model], Mesh(Degrees(1, 1, 1, 1), 0), model.config.hidden_size, [], None)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def expected(section: GkdSection, student: Any, teacher: Any, samples: list[WeightedTokens]) -> tuple[float, float]:
    """Sums of the weighted divergences and of the weighted negative log-probabilities, row by row in float64."""
    divergences = nlls = 0.0
    for sample in samples:
        ids = paddle.to_tensor(sample.ids[:-1].astype("int64")).unsqueeze(0)
        own, taught = (model(ids).numpy()[0].astype("float64") for model in (student, teacher))
        log_p, log_q = (log_softmax(logits / section.temperature) for logits in (own, taught))
        p, q = np.exp(log_p), np.exp(log_q)
        if section.beta == 0:
            each = (q * (log_q - log_p)).sum(-1)
        elif section.beta == 1:
            each = (p * (log_p - log_q)).sum(-1)
        else:
            log_m = np.log(section.beta * q + (1 - section.beta) * p)
            each = section.beta * (q * (log_q - log_m)).sum(-1) + (1 - section.beta) * (p * (log_p - log_m)).sum(-1)
        nll = -np.take_along_axis(log_softmax(own), sample.ids[1:, None].astype("int64"), 1)[:, 0]
        divergences += float((each * sample.weights[1:]).sum())
        nlls += float((nll * sample.weights[1:]).sum())
    return divergences, nlls


@pytest.mark.parametrize("padding_free", [False, True])
@pytest.mark.parametrize(
    "section",
    [GkdSection(), GkdSection(beta=0.0, temperature=2.0), GkdSection(beta=1.0), GkdSection(beta=0.2, sft_weight=0.5)],
    ids=str,
)
def test_the_loss_is_the_divergence_at_supervised_tokens(section: GkdSection, padding_free: bool) -> None:
    student = tiny_llama.model(STUDENT, seed=1)
    teacher = tiny_llama.model(TEACHER, seed=2)
    stage = stage_with(section, teacher, padding_free)
    model = alone(student)
    samples, dropped = sft_case.samples(stage, *ROWS, WEIGHTED)
    assert not dropped
    assert len({float(w) for sample in samples for w in sample.weights}) == 3
    stage.before_training(model, samples)
    terms = stage.loss(model, stage.collate(samples))
    divergences, nlls = expected(section, student, teacher, samples)
    np.testing.assert_allclose(float(terms.total), divergences + section.sft_weight * nlls, rtol=2e-5)
    assert terms.weight == pytest.approx(sum(float(sample.weights.sum()) for sample in samples))
    if section.sft_weight:
        np.testing.assert_allclose(float(terms.sums["divergence"][0]), divergences, rtol=2e-5)
        np.testing.assert_allclose(float(terms.sums["nll"][0]), nlls, rtol=2e-5)
    else:
        assert not terms.sums


def test_only_the_student_gets_gradients() -> None:
    student = tiny_llama.model(STUDENT, seed=1)
    teacher = tiny_llama.model(TEACHER, seed=2)
    student.train()
    stage = stage_with(GkdSection(sft_weight=0.1), teacher)
    model = alone(student)
    samples, _ = sft_case.samples(stage, *ROWS)
    stage.before_training(model, samples)
    terms = stage.loss(model, stage.collate(samples))
    assert isinstance(terms.total, paddle.Tensor)
    terms.total.backward()
    assert all(parameter.grad is not None for parameter in student.parameters())
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_a_long_conversation_is_dropped_with_the_key_of_its_own_section() -> None:
    stage = stage_with(GkdSection(), None)
    stage._max_length = 8
    _, dropped = sft_case.samples(stage, ROWS[0])
    (reason,) = dropped
    assert "gkd.truncate is false" in reason


def test_the_profile_names_the_teacher() -> None:
    (spec,) = (spec for spec in llmsuite_register_stages() if spec.name == "gkd")
    section = GkdSection(teacher="models/large", teacher_precision="bf16", beta=1.0, sft_weight=0.1)
    profile = spec.profile(section)  # type: ignore[union-attr]
    assert profile.sums == ("divergence", "nll")
    assert profile.teacher is not None
    assert (profile.teacher.weights, profile.teacher.precision) == ("models/large", "bf16")
    assert (profile.teacher.has_mixture, profile.teacher.with_nll) == (False, True)
    assert profile.has_several_losses
