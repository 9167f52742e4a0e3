"""The recipe section of the stage `gkd`. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from llmsuite.contract.schema.numbers import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt
from llmsuite.contract.schema.rollout import RolloutSection
from llmsuite.contract.schema.section import Section
from llmsuite.contract.specs import StageProfile, TeacherProfile
from llmsuite.stages.eval_metrics import loss_metrics


@dataclasses.dataclass(kw_only=True)
class GkdSection(Section):
    """Generalised knowledge distillation: trains on the distributions of a teacher over the tokens of the assistant's
    turns in the data, or of answers that the model samples (Agarwal et al. 2023, arXiv 2306.13649)."""

    teacher: str | None = None
    """The teacher: a model directory, a run, or a name on a hub, of any family and size, with the tokens of the
    model."""
    teacher_preset: str | None = None
    """Published shape of the teacher, by which a recipe is checked and planned without its weights. Without `teacher`
    the teacher has random values, for tests."""
    teacher_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the teacher's shape, as in `model.config`, in addition to those of the preset."""
    teacher_precision: Literal["fp32", "bf16", "fp16"] | None = None
    """Precision of the teacher's parameters and activations. Default: engine.precision."""
    beta: Annotated[float, Ge(0), Le(1)] = 0.5
    """Weight of the teacher in the mixture with which both distributions are compared, in the generalised
    Jensen-Shannon divergence. 0: the divergence KL(teacher || model); 1: KL(model || teacher)."""
    temperature: PositiveFloat = 1.0
    """Logits of both models are divided by it before they are compared."""
    on_policy: Fraction = 0.0
    """Share of the steps that train on answers sampled from the model, with the keys of section rollout, in place of
    the last answer of each conversation: lambda of the paper, lmbda of TRL. Each step is one with this probability,
    by the seed. Above 0 a run needs memory for sampling."""
    sft_weight: NonNegativeFloat = 0.0
    """Weight of an SFT term: the negative log-probability of the tokens in the data, at temperature 1. Steps on sampled
    answers have none."""
    mean: Literal["tokens", "micro_batches"] = "tokens"
    """The averaging of the loss. tokens: over the supervised tokens of the global batch; micro_batches: the mean of the
    means over the tokens of each micro-batch, as in TRL and ms-swift."""
    last_turn: bool = False
    """Supervise only the last turn of the assistant in each conversation, as TRL and ms-swift do."""
    answer_end: str | None = None
    """Text that is appended to each sampled answer and supervised, unless the answer ends with the first token of it,
    such as the end of a turn: ms-swift ends truncated answers so. null: answers end as they were sampled."""
    row_length: PositiveInt | None = None
    """Maximum number of tokens of a conversation in the data, where answers are sampled and data.max_length has room
    for them too. Longer conversations are dropped. null: data.max_length."""
    truncate: bool = False
    """Truncate conversations to data.max_length tokens instead of dropping them. Either is counted and reported."""

    def profile(self) -> StageProfile:
        sums = ("divergence", "nll") if self.sft_weight else ()
        return StageProfile(
            sums=sums,
            updates=1 if self.on_policy else 0,
            on_policy=self.on_policy or 1.0,
            evaluates_rollouts=False,
            teacher=TeacherProfile(
                key="gkd.teacher",
                weights=self.teacher,
                preset=self.teacher_preset,
                config=self.teacher_config,
                precision=self.teacher_precision,
                has_mixture=0 < self.beta < 1,
                with_nll=self.sft_weight > 0,
            ),
            evaluates=loss_metrics(),
        )

    def unused(self) -> Iterator[tuple[str, str]]:
        if not self.on_policy:
            yield "answer_end", "has no effect while on_policy is 0; set that, or remove it"
            yield "row_length", "has no effect while on_policy is 0; set data.max_length, and remove it"

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.answer_end == "":
            yield "answer_end", "is empty; set it to null"
        if self.row_length is not None and self.truncate:
            yield "row_length", "drops conversations that truncate would shorten; remove one of them"

    def unused_elsewhere(self) -> Iterator[tuple[str, str]]:
        if not self.on_policy:
            for field in dataclasses.fields(RolloutSection):
                yield f"rollout.{field.name}", "has no effect while gkd.on_policy is 0; set that, or remove it"
            return
        yield "rollout.dynamic_sampling", "is true, but stage gkd rewards no answers; set it to false"
        yield "rollout.max_rounds", "has no effect in stage gkd, which has no dynamic sampling; remove it"
        yield (
            "rollout.max_logprob_gap",
            "has no effect in stage gkd, whose loss is the same for all answers that are sampled; remove it",
        )
