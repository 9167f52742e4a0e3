"""The recipe sections of the built-in stages. Imports no Paddle, so that recipes can be checked without it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Annotated, Literal

from annotated_types import Ge, Lt

from llmsuite.contract.schema.numbers import (
    Fraction,
    MixWeight,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from llmsuite.contract.schema.section import Section
from llmsuite.contract.specs import PrePass, StageProfile
from llmsuite.stages.eval_metrics import loss_metrics

PENALTIES = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
"""Penalties of sampling, and the values that switch them off."""

_SMOOTHED = ("sigmoid", "simpo", "cpo")
_REFERENCE_FREE = ("simpo", "cpo", "orpo")


@dataclasses.dataclass(kw_only=True)
class DpoSection(Section):
    """Direct preference optimisation: trains on pairs of a chosen and a rejected answer."""

    loss: Literal["sigmoid", "ipo", "ipo_mean", "hinge", "kto_pair", "simpo", "cpo", "orpo"] = "sigmoid"
    """sigmoid: Rafailov et al. 2023 (arXiv 2305.18290); hinge: Zhao et al. 2023 (SLiC-HF, arXiv 2305.10425);
    ipo: Azar et al. 2023 (arXiv 2310.12036); ipo_mean: with log-ratios divided by the tokens of the answer, what TRL
    and PaddleNLP call ipo; kto_pair: KTO's on pairs; without a reference model, simpo: Meng et al. 2024 (arXiv
    2405.14734), cpo: Xu et al. 2024 (arXiv 2401.08417), and orpo: Hong et al. 2024 (arXiv 2403.07691)."""
    beta: PositiveFloat = 0.1
    """Strength of the penalty for deviation from the reference; tau of ipo and ipo_mean, lambda of orpo."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    """Assumed share of pairs whose labels are swapped (conservative DPO); for the losses sigmoid, simpo and cpo."""
    gamma: NonNegativeFloat = 0.0
    """Target margin of simpo between the rewards of both answers."""
    sft_weight: NonNegativeFloat = 0.0
    """Weight of an SFT term: the mean negative log-probability of the tokens of chosen answers. 1 with orpo."""
    sft_mean: Literal["tokens", "answers", "micro_batches"] = "tokens"
    """Mean of the SFT term. tokens: over the tokens of all chosen answers of the global batch; answers: over the tokens
    of each chosen answer, then over these answers; micro_batches: over the tokens of the chosen answers of each
    micro-batch, then over micro-batches by their pairs, as in ms-swift. Evaluations then have the mean over tokens."""
    reference: Literal["cache", "adapter_off", "none"] | None = None
    """Source of the log-probabilities of the reference model, which is the initial model. cache: computed before the
    first step and cached on disk; adapter_off: computed in each step by the model without its adapter, which needs
    `lora.rank`; none: no reference. Default: "none" for simpo, cpo and orpo, else "cache"."""

    def profile(self) -> StageProfile:
        """Pre-passes: the number of tokens for the term of `sft_weight`, then the reference, then the KL divergence of
        the model from it."""
        sums = ["rewards/chosen", "rewards/rejected", "rewards/margin", "rewards/accuracy"]
        sums += ["logps/chosen", "logps/rejected"]
        prepasses: list[PrePass] = []
        if self.effective_sft_weight:
            sums.append("nll/chosen")
            if self.sft_mean != "answers":
                prepasses.append(PrePass(kind="batch", sums=("pairs_per_token",)))
        if self.reference_from == "adapter_off":
            prepasses.append(PrePass(kind="adapters_off"))
        if self.loss == "kto_pair":
            prepasses.append(PrePass(kind="model", sums=("kl/chosen", "kl/rejected")))
        return StageProfile(sums=tuple(sums), prepasses=tuple(prepasses), rows_per_sample=2, evaluates=loss_metrics())

    @property
    def reference_from(self) -> str:
        """`reference` with its default applied."""
        return self.reference or ("none" if self.loss in _REFERENCE_FREE else "cache")

    @property
    def effective_sft_weight(self) -> float:
        """Weight of the mean negative log-probability of the tokens of chosen answers."""
        if self.loss == "orpo":
            return 1.0
        return self.sft_weight

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.reference in ("cache", "adapter_off") and self.loss in _REFERENCE_FREE:
            yield "reference", f"is {self.reference}, but loss {self.loss} uses no reference; remove it"
        if self.reference == "none" and self.loss not in _REFERENCE_FREE:
            free = f"{', '.join(_REFERENCE_FREE[:-1])} or {_REFERENCE_FREE[-1]}"
            yield "reference", f"is none, but loss {self.loss} needs one; set it to cache, or loss to {free}"

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.loss not in _SMOOTHED:
            known = f"{', '.join(_SMOOTHED[:-1])} and {_SMOOTHED[-1]}"
            yield "label_smoothing", f"works with loss {known} only, and loss is {self.loss}; set it to 0"
        if self.loss != "simpo":
            yield "gamma", f"is the margin of simpo, and loss is {self.loss}; set it to 0"
        if self.loss == "orpo":
            yield "sft_weight", "has no effect with loss orpo, which has this term with weight 1; set it to 0"
        if not self.effective_sft_weight:
            yield "sft_mean", "has no effect without an SFT term; set sft_weight, or remove it"


@dataclasses.dataclass(kw_only=True)
class RmSection(Section):
    """Reward model: a score for each answer, such that chosen answers score higher than rejected ones."""

    margin: NonNegativeFloat = 0.0
    """Margin by which a chosen answer should score higher (Touvron et al. 2023, arXiv 2307.09288, eq. 2), in
    rows without a column `margin`."""
    center_rewards: NonNegativeFloat = 0.0
    """Weight of a centering term: the square of the sum of both scores, which keeps them around 0 (Eisenstein et al.
    2023, arXiv 2312.09244)."""

    def profile(self) -> StageProfile:
        sums = ("rewards/chosen", "rewards/rejected", "rewards/margin", "rewards/accuracy")
        return StageProfile(sums=sums, rows_per_sample=2, evaluates=loss_metrics())


@dataclasses.dataclass(kw_only=True)
class KtoSection(Section):
    """Kahneman-Tversky optimisation: trains on single answers that are desirable or undesirable, without pairs."""

    loss: Literal["kto", "apo_zero"] = "kto"
    """kto: Ethayarajh et al. 2024 (arXiv 2402.01306); apo_zero: D'Oosterlinck et al. 2024 (arXiv 2408.06266), without
    an estimate of the divergence from the reference."""
    beta: PositiveFloat = 0.1
    """Strength of the penalty for deviation from the reference."""
    desirable_weight: PositiveFloat = 1.0
    """Weight of a desirable answer in the loss. Where one kind of answers is more frequent, choose weights for which
    both kinds have about the same total weight."""
    undesirable_weight: PositiveFloat = 1.0
    """Weight of an undesirable answer in the loss."""
    reference: Literal["cache", "adapter_off"] = "cache"
    """Source of the log-probabilities of the reference model, which is the initial model. cache: computed before the
    first step and cached on disk; adapter_off: computed in each step by the model without its adapter, which needs
    `lora.rank`."""

    def profile(self) -> StageProfile:
        """Pre-passes: the reference of all answers, then the KL divergence of the model from it on the unrelated
        ones."""
        estimates_kl = self.loss == "kto"
        sums = ["rewards/desirable", "rewards/undesirable"]
        prepasses: list[PrePass] = []
        if self.reference == "adapter_off":
            prepasses.append(PrePass(kind="adapters_off", rows=2 if estimates_kl else 1))
        if estimates_kl:
            sums.append("kl")
            prepasses.append(PrePass(kind="model", sums=("kl",)))
        return StageProfile(sums=tuple(sums), prepasses=tuple(prepasses), evaluates=loss_metrics())


@dataclasses.dataclass(kw_only=True)
class SftSection(Section):
    """Supervised fine-tuning on the assistant's turns of conversations, including the token that ends each turn."""

    truncate: bool = False
    """Truncate conversations to data.max_length tokens instead of dropping them. Either is counted and reported."""
    loss: Literal["nll", "dft"] = "nll"
    """Loss of a token. nll: its negative log-probability; dft: that times its probability, without a gradient through
    the latter (dynamic fine-tuning, Wu et al. 2025, arXiv 2508.05629)."""

    def profile(self) -> StageProfile:
        sums = ("tokens/likely", "nll") if self.loss == "dft" else ("tokens/likely",)
        return StageProfile(sums=sums, evaluates=loss_metrics("tokens/accuracy"))


@dataclasses.dataclass(kw_only=True)
class InferSection(Section):
    """Generation of answers to prompts, without training; `llmsuite generate --help` has the same options."""

    max_new_tokens: PositiveInt = 128
    """Longest answer, in tokens."""
    min_new_tokens: NonNegativeInt = 0
    """Shortest answer, in tokens."""
    stop: list[str] = dataclasses.field(default_factory=list)
    """Texts that end an answer; the answer does not include them."""
    generation_config: Literal["auto", "ignore"] = "auto"
    """auto: those of temperature, top_k, top_p, min_p and repetition_penalty that are null are read from the model's
    generation_config.json; ignore: they are not. Tokens that end an answer are always read from it."""
    temperature: NonNegativeFloat | None = None
    """0 for greedy decoding; null also, if generation_config.json has none."""
    top_k: NonNegativeInt | None = None
    """Sample from this many of the most likely tokens; 0 for all."""
    top_p: Fraction | None = None
    """Sample from the most likely tokens that together reach this probability."""
    min_p: Fraction | None = None
    """Sample from tokens with at least this share of the probability of the most likely one."""
    repetition_penalty: PositiveFloat | None = None
    """Logits of tokens in prompt or answer are divided by it where positive, else multiplied."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it is in the answer."""
    presence_penalty: float = 0.0
    """Subtracted from a token's logit once if it is in the answer."""
    num_return_sequences: PositiveInt = 1
    """Answers to each prompt."""
    num_beams: PositiveInt = 1
    """Above 1: beam search instead of sampling."""
    length_penalty: float = 1.0
    """Beam search divides a score by the length raised to this power."""
    logprobs: NonNegativeInt | None = None
    """Return the log-probabilities of the tokens, and of this many of the most likely tokens at each step."""
    batch_size: PositiveInt = 8
    """Number of answers that are decoded in one batch."""
    raw: bool = False
    """Complete prompts as plain text, without a chat template."""
    system: str | None = None
    """A system turn for conversations without one."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.min_new_tokens > self.max_new_tokens:
            yield "min_new_tokens", f"is {self.min_new_tokens}, above max_new_tokens = {self.max_new_tokens}"
        if not all(self.stop):
            yield "stop", "has an empty text, which would end every answer; remove it"
        if self.num_beams > 1:
            yield from self._without_effect_on_beams()
        if 1 < self.num_beams < self.num_return_sequences:
            yield "num_return_sequences", f"is {self.num_return_sequences}, more than num_beams = {self.num_beams}"
        if self.raw and self.system is not None:
            yield "system", "does not go with raw, which has no turns; remove one of them"

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.num_beams == 1:
            yield "length_penalty", "has no effect without num_beams; remove it"
        else:
            yield "generation_config", "has no effect with num_beams: beam search does not sample; remove it"

    def unused_elsewhere(self) -> Iterator[tuple[str, str]]:
        yield "model.load", "has no effect in stage infer, where the weights have to match the model; remove it"
        if self.raw:
            yield "data.chat_template", "has no effect with infer.raw; remove it"

    def _without_effect_on_beams(self) -> Iterator[tuple[str, str]]:
        of_sampling = {
            "temperature": bool(self.temperature),
            "stop": bool(self.stop),
            "logprobs": self.logprobs is not None,
        }
        for key, is_set in of_sampling.items():
            if is_set:
                yield key, "does not go with num_beams: beam search does not sample; remove it"
        penalties = {
            "repetition_penalty": self.repetition_penalty,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
        }
        for key, value in penalties.items():
            if value not in (None, PENALTIES[key]):
                yield key, "does not go with num_beams: beam search has no penalties but length_penalty; remove it"


@dataclasses.dataclass(kw_only=True)
class PretrainSection(Section):
    """Next-token prediction over text: samples of data.max_length tokens, cut from concatenated documents."""

    mix: dict[str, MixWeight] = dataclasses.field(default_factory=dict)
    """More files to train on, named as in data.train, each with its number of samples for each sample of data.train, or
    null to use each of its samples once."""
    split: str | None = None
    """Without data.eval: the proportions of the documents for training, for evaluation, and left out, such as
    "969,30,1"."""
    max_eval_samples: PositiveInt | None = None
    """Number of samples to evaluate on, evenly spaced. Default: all."""
    documents: Literal["blank_lines", "lines", "files"] = "blank_lines"
    """The separator of documents in a .txt file; an indexed corpus has its own boundaries."""
    key: str = "text"
    """The key of the text in rows of .jsonl, .csv, .tsv and .parquet."""
    document_mask: bool = False
    """In a sample with several documents, let each token attend only to its own document, start the positions of each
    document at 0, and mask its first token in the loss, as no token of the document predicts it."""

    def profile(self) -> StageProfile:
        return StageProfile(evaluates=loss_metrics())

    def unused_elsewhere(self) -> Iterator[tuple[str, str]]:
        yield "data.format", "has no effect in stage pretrain, which reads documents; remove it"
        yield "data.mix", "has no effect in stage pretrain, which uses pretrain.mix; set that instead"
        yield "data.holdout", "has no effect in stage pretrain, which uses pretrain.split; set that instead"
        yield "data.sample", "has no effect in stage pretrain, whose samples are no rows; remove it"
        yield "data.system", "has no effect in stage pretrain, which renders no conversations; remove it"
        yield "data.ignore_columns", "has no effect in stage pretrain, which reads one column; remove it"
        yield "data.fill", "has no effect in stage pretrain, which reads documents; remove it"
        yield "data.chat_template_kwargs", "has no effect in stage pretrain, which renders no conversations; remove it"

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.split is None:
            return
        parts = self.split.split(",")
        numbers = [float(part) for part in parts if re.fullmatch(r"[0-9]+(\.[0-9]+)?", part)]
        if len(parts) not in (2, 3) or len(numbers) != len(parts) or not (numbers[0] and numbers[1]):
            yield "split", f'is {self.split!r}; it has to be such as "969,30,1": the first two numbers above 0'
