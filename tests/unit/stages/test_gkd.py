"""Distillation: the loss of a batch by the published formula, from the logits of both models."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.builtin import llmsuite_register_stages
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.contract.schema.rollout import RolloutSection
from llmsuite.data.rows import Conversation, Message
from llmsuite.inference.group_sampling import SamplingParams
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.pipeline import PipelineStage
from llmsuite.rl.rollouts import RolloutPrompt, Scored
from llmsuite.stages.gkd import GkdStage, PromptedTokens
from llmsuite.stages.gkd_section import GkdSection
from llmsuite.stages.language_model import WeightedTokens
from tests.support import grpo_case, sft_case, tiny_llama

STUDENT = dataclasses.replace(tiny_llama.CONFIG, vocab_size=512, max_position_embeddings=128)
TEACHER = dataclasses.replace(STUDENT, hidden_size=32, num_hidden_layers=3)
ROWS: list[Conversation] = [
    sft_case.talk("Say hello.", "Hello!", "Again.", "Hello, again.", supervised=(False, True)),
    sft_case.talk("What is it?", "Good day to you."),
]
TALK = sft_case.talk("Say hello.", "Hello!", "Again.", "Hello, again.")
WEIGHTED: Conversation = dataclasses.replace(ROWS[1], weights=(1.0, 0.25))


def stage_with(section: GkdSection, teacher: Any, padding_free: bool = False) -> GkdStage:
    context = dataclasses.replace(
        sft_case.make_stage().context,
        stage_name="gkd",
        load_teacher=lambda: teacher,
        padding_free=padding_free,
        sections={"rollout": RolloutSection(num_generations=2, max_completion_length=16)},
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


class Given:
    """Rollouts whose completions of the n-th prompt have n + 2 and n + 3 tokens."""

    def __init__(self) -> None:
        self.prompts: list[RolloutPrompt] = []

    def sample(
        self, prompts: Sequence[RolloutPrompt], step: int, sampling_params: SamplingParams, score: Any, num_scores: int
    ) -> Scored:
        assert (step, num_scores, sampling_params.num_generations) == (3, 0, 2)
        self.prompts = list(prompts)
        groups = []
        for number, prompt in enumerate(prompts):
            found = []
            for i in range(2):
                ids = [7 + number + i] * (number + i + 1) + [2]
                found.append(grpo_case.completion(prompt.ids, ids, group=number, number=i))
            groups.append(found)
        return Scored(groups, score([c for group in groups for c in group]).reshape(len(prompts), 2, 0), version=2)


@pytest.mark.parametrize("padding_free", [False, True])
@pytest.mark.parametrize("mean", ["tokens", "micro_batches"])
def test_the_loss_of_sampled_answers_is_that_of_their_tokens(padding_free: bool, mean: Any) -> None:
    student = tiny_llama.model(STUDENT, seed=1)
    teacher = tiny_llama.model(TEACHER, seed=2)
    section = GkdSection(on_policy=0.5, sft_weight=0.5, mean=mean)
    stage = stage_with(section, teacher, padding_free)
    model = alone(student)
    student.train()
    samples, dropped = sft_case.samples(stage, *ROWS)
    assert not dropped
    stage.before_training(model, samples)
    rollouts: Any = Given()
    result = stage.roll_out(3, samples, rollouts)
    for prompt, sample in zip(rollouts.prompts, samples):
        (supervised,) = np.nonzero(sample.weights)
        last = supervised[np.flatnonzero(np.diff(supervised, prepend=-9) > 1)[-1]]
        assert prompt.ids == tuple(sample.ids[:last].tolist())
        assert prompt.text.endswith("assistant\n")
    assert stage.row_lengths(result.samples).shape == (2, 2)
    rows = [answer for sample in result.samples for answer in sample.answers]
    assert [int(row.weights.sum()) for row in rows] == [2, 3, 3, 4]
    assert result.metrics["completions/length"] == 3.0
    assert [row["reward"] for row in result.completions] == [None] * 4
    assert {row["version"] for row in result.completions} == {2}
    terms = stage.loss(model, stage.collate(result.samples))
    divergences, nlls = expected(section, student, teacher, rows)
    scale = 1 if mean == "tokens" else 12
    assert terms.weight == 12 / scale
    np.testing.assert_allclose(float(terms.total), divergences / scale, rtol=2e-5)  # without a term of the data
    np.testing.assert_allclose(float(terms.sums["nll"][0]), nlls / scale, rtol=2e-5)


def test_a_mean_of_each_micro_batch_counts_once_in_training_and_by_its_tokens_in_evaluations() -> None:
    student = tiny_llama.model(STUDENT, seed=1)
    teacher = tiny_llama.model(TEACHER, seed=2)
    section = GkdSection(mean="micro_batches")
    stage = stage_with(section, teacher)
    model = alone(student)
    samples, _ = sft_case.samples(stage, *ROWS, WEIGHTED)
    stage.before_training(model, samples)
    divergence, _ = expected(section, student, teacher, samples)
    weight = sum(float(sample.weights.sum()) for sample in samples)
    student.train()
    terms = stage.loss(model, stage.collate(samples))
    assert terms.weight == 1
    np.testing.assert_allclose(float(terms.total), divergence / weight, rtol=2e-5)
    student.eval()
    terms = stage.loss(model, stage.collate(samples))
    assert terms.weight == pytest.approx(weight)
    np.testing.assert_allclose(float(terms.total), divergence, rtol=2e-5)


def test_the_last_turn_alone_is_supervised() -> None:
    (all_turns,), _ = sft_case.samples(stage_with(GkdSection(), None), TALK)
    (last,), _ = sft_case.samples(stage_with(GkdSection(last_turn=True, on_policy=1.0), None), TALK)
    np.testing.assert_array_equal(all_turns.ids, last.ids)
    assert isinstance(last, PromptedTokens)
    np.testing.assert_array_equal(last.weights[last.prompt_length :], 1)
    assert not last.weights[: last.prompt_length].any()
    assert all_turns.weights.sum() > last.weights.sum() == all_turns.weights[last.prompt_length :].sum()


def test_prompts_leave_room_for_answers() -> None:
    stage = stage_with(GkdSection(on_policy=1.0, truncate=True), None)
    (sample,), _ = sft_case.samples(stage, TALK)
    assert isinstance(sample, PromptedTokens)
    stage._max_length = sample.prompt_length + 16
    (same,), _ = sft_case.samples(stage, TALK)
    assert isinstance(same, PromptedTokens)
    assert same.prompt_length == sample.prompt_length
    stage._max_length -= 1
    _, (reason,) = sft_case.samples(stage, TALK)
    assert f"with a prompt of more than {sample.prompt_length - 1} tokens" in reason
    _, (reason,) = sft_case.samples(stage, Conversation((Message("assistant", "Some text."),), (True,), is_plain=True))
    assert "with an empty prompt" in reason


def test_rows_may_be_shorter_than_samples_with_sampled_answers() -> None:
    (sample, *_), _ = sft_case.samples(stage_with(GkdSection(on_policy=0.5), None), *ROWS)
    length = len(sample.ids)
    kept, _ = sft_case.samples(stage_with(GkdSection(on_policy=0.5, row_length=length), None), ROWS[0])
    assert len(kept) == 1
    _, (reason,) = sft_case.samples(stage_with(GkdSection(on_policy=0.5, row_length=length - 1), None), ROWS[0])
    assert reason == f"longer than gkd.row_length {length - 1}"


def test_an_answer_ends_as_asked_for() -> None:
    stage = stage_with(GkdSection(on_policy=1.0, answer_end="<|im_end|>\n"), None)
    end, *rest = stage.context.tokenizer.encode("<|im_end|>\n")
    assert rest
    samples, _ = sft_case.samples(stage, *ROWS)
    stage._max_length = samples[0].prompt_length + 16 + len(rest)  # type: ignore[attr-defined]
    assert len(sft_case.samples(stage, ROWS[0])[1]) == 1, "no room for the end"
    for ids, whole in (([5, 6], [5, 6, end, *rest]), ([5, end], [5, end])):
        found = stage._ended(grpo_case.completion((3, 4), ids))
        np.testing.assert_array_equal(found.ids, [3, 4, *whole])
        np.testing.assert_array_equal(found.weights, [0, 0] + [1] * len(whole))
