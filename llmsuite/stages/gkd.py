"""Generalised knowledge distillation (Agarwal et al. 2023, arXiv 2306.13649): docs/guide/distillation.md.

rows -> token ids with a loss mask on the assistant's turns, as in `sft`, or on answers sampled from the model -> hidden
states of the teacher and of the model -> divergence of the model's distribution over the vocabulary from that of the
teacher, at each supervised token.

Shapes: N tokens with a weight above 0.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.base.typing import Tensor
from llmsuite.contract.schema.rollout import RolloutSection
from llmsuite.data.encoding import encode_continuations
from llmsuite.engine.batch import flat_targets, tensor, total
from llmsuite.engine.stage import Batch, LossTerms, RolloutResult, RolloutStage, Stage, StageContext
from llmsuite.models.divergence import Comparison
from llmsuite.rl.completion import Completion
from llmsuite.rl.completion_rows import completion_metrics, completion_rows
from llmsuite.rl.rollouts import RolloutPrompt, Rollouts
from llmsuite.stages.completions import sampling_params
from llmsuite.stages.gkd_section import GkdSection
from llmsuite.stages.language_model import WeightedTokens, hidden_at_positions
from llmsuite.stages.sft import Rendered, SftStage, Unusable


@dataclasses.dataclass(frozen=True, eq=False)
class PromptedTokens(WeightedTokens):
    """A conversation whose last answer may be replaced by one that is sampled."""

    prompt_length: int = 0
    """Number of tokens before the last answer."""


@dataclasses.dataclass(frozen=True)
class SampledAnswers:
    """The answers that were sampled for a conversation: a sample after `roll_out`."""

    answers: Sequence[WeightedTokens]
    """The prompt with each answer, whose tokens have weight 1."""


class GkdStage(SftStage, RolloutStage[Any]):
    """Trains on the distributions of a teacher at the tokens of the assistant's turns. Rows, samples and batches are
    those of `sft`. With `gkd.on_policy` the model samples answers in a part of the steps."""

    truncate_key = "gkd.truncate"
    batch_layout = Stage.batch_layout  # a teacher runs in no step program

    def __init__(self, section: GkdSection, context: StageContext):
        super().__init__(section, context)
        self._mtp_weight = 0.0  # a teacher has no MTP layers: refused before the run
        self._profile = section.profile()
        self._beta = section.beta
        self._temperature = section.temperature
        self._sft_weight = section.sft_weight
        self._by_micro_batch = section.mean == "micro_batches"
        self._last_turn = section.last_turn
        self._row_length = section.row_length
        self._rollout: RolloutSection | None = None
        """How answers are sampled; None where none are."""
        if section.on_policy:
            self._rollout = context.sections["rollout"]
        self._answer_end: list[int] = []
        """Tokens of `gkd.answer_end`."""
        if section.answer_end is not None:
            tokenizer = context.tokenizer
            (self._answer_end,) = encode_continuations([section.answer_end], tokenizer, tokenizer.encode_batch)
        self._comparison: Comparison | None = None
        """With the teacher; None on ranks without the last layers."""

    def before_training(self, model: Any, samples: Iterable[WeightedTokens]) -> None:
        """Load the teacher, on the ranks that compute the loss."""
        if model.is_last:
            self._comparison = Comparison(self.context.teacher(), self._beta, self._temperature)

    # data

    def _sample(
        self,
        rendered: Rendered,
        parts: Sequence[tuple[list[int], list[int]]],
        borders: Sequence[tuple[list[int], list[int]]],
    ) -> WeightedTokens:
        """The sample of a conversation, with the length of its prompt if answers are sampled. Raises Unusable."""
        if self._last_turn and len(parts) > 1:
            has_thoughts = bool(rendered.thoughts) and rendered.thoughts[-1] is not None
            borders = borders[-1:] if has_thoughts else ()
            rendered = dataclasses.replace(rendered, weights=rendered.weights[-1:])
            parts = parts[-1:]
        sample = super()._sample(rendered, parts, borders)
        if self._rollout is None:
            return sample
        before, _ = parts[-1]
        length = len(before)
        if rendered.row.is_plain:  # special tokens may be in front of it
            (supervised,) = np.nonzero(sample.weights)
            length = int(supervised[0]) if len(supervised) else len(sample.ids)
        longest = self._max_length - self._rollout.max_completion_length - len(self._answer_end)
        if self._row_length is not None and len(sample.ids) > self._row_length:
            raise Unusable(f"longer than gkd.row_length {self._row_length}")
        if not before:
            raise Unusable("with an empty prompt (no answer to it can be sampled)")
        if length > longest:
            raise Unusable(
                f"with a prompt of more than {longest} tokens (data.max_length less rollout.max_completion_length)"
            )
        return PromptedTokens(sample.ids, sample.weights, sample.begins, length)

    def row_lengths(self, samples: Sequence[WeightedTokens | SampledAnswers]) -> np.ndarray:
        """The length of each sample in a row, [samples, 1], or of its sampled answers, [samples, answers]."""
        return np.array([_lengths(_answers(sample)) for sample in samples], dtype="int64")

    def collate(self, samples: Sequence[WeightedTokens | SampledAnswers]) -> Batch:
        """A batch with padding on the right, or with all samples in one row. With `gkd.mean` micro_batches its weights
        are divided by their sum."""
        batch = super().collate([answer for sample in samples for answer in _answers(sample)])
        batch["is_sampled"] = any(isinstance(sample, SampledAnswers) for sample in samples)
        if self._by_micro_batch:
            weight = batch["weight"]
            batch["token_weight"] = weight
            batch["weights"] = batch["weights"] / np.float32(weight or 1)
            batch["weight"] = 1.0  # also without supervised tokens: then the mean is 0
        return batch

    # rollouts

    def roll_out(self, step: int, samples: Sequence[PromptedTokens], rollouts: Rollouts) -> RolloutResult:
        """Sample answers to the prompt of each conversation."""
        assert self._rollout is not None, "only called with gkd.on_policy"
        decode = self.context.tokenizer.decode
        prompts = []
        for sample in samples:
            ids = sample.ids[: sample.prompt_length].tolist()
            prompts.append(RolloutPrompt(tuple(ids), text=decode(ids, skip_special_tokens=False)))
        scored = rollouts.sample(prompts, step, sampling_params(self._rollout), _no_scores, 0)
        none = np.full(scored.scores.shape[:2], np.nan)
        return RolloutResult(
            [SampledAnswers(list(map(self._ended, group))) for group in scored.groups],
            completion_metrics(list(itertools.chain(*scored.groups))),
            completion_rows(scored.groups, scored.scores, (), none, none, version=scored.version),
        )

    def _ended(self, completion: Completion) -> WeightedTokens:
        """The prompt and a completion of it, with `gkd.answer_end`. All tokens after the prompt have weight 1."""
        answer = list(completion.ids)
        if self._answer_end and answer[-1] != self._answer_end[0]:
            answer += self._answer_end
        ids = np.array([*completion.prompt_ids, *answer], dtype="int32")
        weights = np.zeros(len(ids), dtype="float32")
        weights[len(completion.prompt_ids) :] = 1
        return WeightedTokens(ids, weights)

    def evaluate_rollouts(self, samples: Sequence[Any], rollouts: Rollouts) -> Mapping[str, float]:
        raise AssertionError("evaluations compute the loss on the answers in the data")

    # loss

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        """Sum over the supervised tokens, each with the weight of its turn."""
        taught = self._taught(batch)  # before the model's own activations need memory
        hidden = hidden_at_positions(model, batch)  # [N, D]
        weights = tensor(batch, "weights")
        weight = total(batch, "weight")
        if self._by_micro_batch and not model.training:  # evaluations are split into other micro-batches on each mesh
            weights = weights * batch["token_weight"]
            weight = batch["token_weight"]
        if not self._sft_weight:
            divergence = model.token_divergence(hidden, taught, self._comparison)
            return LossTerms((divergence * weights).sum(), weight, self._profile.checked({}))
        divergence, nll = model.token_divergence_and_nll(hidden, taught, flat_targets(batch), self._comparison)
        compared = (divergence * weights).sum()
        own = (nll * weights).sum()
        sums = {"divergence": (compared.detach(), weight), "nll": (own.detach(), weight)}
        sft_weight = 0.0 if batch["is_sampled"] else self._sft_weight
        return LossTerms(compared + sft_weight * own, weight, self._profile.checked(sums))

    @paddle.no_grad()
    def _taught(self, batch: Batch) -> Tensor | None:
        """Hidden states of the teacher at the positions of a batch, [N, E]; None on ranks without the last layers."""
        if self._comparison is None:
            return None
        return hidden_at_positions(self._comparison.teacher, batch)


def _answers(sample: WeightedTokens | SampledAnswers) -> Sequence[WeightedTokens]:
    """The sequences that a sample has in a batch."""
    return sample.answers if isinstance(sample, SampledAnswers) else [sample]


def _lengths(answers: Sequence[WeightedTokens]) -> list[int]:
    """The number of inputs of each sequence."""
    return [answer.num_inputs for answer in answers]


def _no_scores(completions: Sequence[Completion]) -> np.ndarray:
    """Nothing is rewarded: [completions, 0]."""
    return np.zeros([len(completions), 0])
