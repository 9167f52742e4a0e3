"""The recipe section of each built-in stage. Imports no Paddle, so that recipes are checked without it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Annotated, Literal

from annotated_types import Ge, Lt

from llmsuite.schema.numbers import Fraction, MixWeight, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from llmsuite.schema.section import Section
from llmsuite.specs import PrePass, StageProfile

PENALTIES = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
"""Penalties of sampling, and the values that switch them off."""

_SMOOTHED = ("sigmoid", "simpo")
_REFERENCE_FREE = ("simpo", "orpo")


@dataclasses.dataclass(kw_only=True)
class DpoSection(Section):
    """Direct preference optimisation: chosen answers become likelier than rejected ones."""

    loss: Literal["sigmoid", "ipo", "ipo_mean", "hinge", "kto_pair", "simpo", "orpo"] = "sigmoid"
    """sigmoid: Rafailov et al. 2023 (arXiv 2305.18290); hinge: Zhao et al. 2023 (SLiC-HF, arXiv 2305.10425);
    ipo: Azar et al. 2023 (arXiv 2310.12036); ipo_mean: with log-ratios divided by the tokens of the answer, what TRL
    and PaddleNLP call ipo; kto_pair: KTO's on pairs; without a reference model, simpo: Meng et al. 2024 (arXiv
    2405.14734), and orpo: Hong et al. 2024 (arXiv 2403.07691)."""
    beta: PositiveFloat = 0.1
    """How strongly the model is held to the reference; tau of ipo and ipo_mean, lambda of orpo."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0
    """Assumed share of pairs whose labels are swapped (conservative DPO); for the losses sigmoid and simpo."""
    gamma: NonNegativeFloat = 0.0
    """Margin that simpo wants between the rewards of both answers."""
    sft_weight: NonNegativeFloat = 0.0
    """Weight of a second term: the mean negative log-probability of the tokens of chosen answers. For orpo it is 1."""
    reference: Literal["cache", "adapter_off", "none"] | None = None
    """Where log-probabilities of the reference model, the initial one, come from: computed before the first step and
    cached, or in each step from the model without its adapter, which takes `lora.rank`. Default: "none" for simpo
    and orpo, else "cache"."""

    def profile(self) -> StageProfile:
        """Pre-passes: the number of tokens for the term of `sft_weight`, then the reference, then the distance of the
        model from it."""
        sums = ["rewards/chosen", "rewards/rejected", "rewards/margin", "rewards/accuracy"]
        sums += ["logps/chosen", "logps/rejected"]
        prepasses: list[PrePass] = []
        if self.effective_sft_weight:
            sums.append("nll/chosen")
            prepasses.append(PrePass(kind="batch", sums=("pairs_per_token",)))
        if self.reference_from == "adapter_off":
            prepasses.append(PrePass(kind="adapters_off"))
        if self.loss == "kto_pair":
            prepasses.append(PrePass(kind="model", sums=("kl/chosen", "kl/rejected")))
        return StageProfile(sums=tuple(sums), prepasses=tuple(prepasses))

    @property
    def reference_from(self) -> str:
        """`reference`, with its default."""
        return self.reference or ("none" if self.loss in _REFERENCE_FREE else "cache")

    @property
    def effective_sft_weight(self) -> float:
        """Weight of the mean negative log-probability of the tokens of chosen answers."""
        return 1.0 if self.loss == "orpo" else self.sft_weight

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.label_smoothing > 0 and self.loss not in _SMOOTHED:
            known = " and ".join(_SMOOTHED)
            yield "label_smoothing", f"works with loss {known} only, and loss is {self.loss}; set it to 0"
        if self.gamma > 0 and self.loss != "simpo":
            yield "gamma", f"is the margin of simpo, and loss is {self.loss}; set it to 0"
        if self.sft_weight > 0 and self.loss == "orpo":
            yield "sft_weight", "has no effect with loss orpo, which has this term with weight 1; set it to 0"
        if self.reference in ("cache", "adapter_off") and self.loss in _REFERENCE_FREE:
            yield "reference", f"is {self.reference}, but loss {self.loss} compares with no reference; remove it"
        if self.reference == "none" and self.loss not in _REFERENCE_FREE:
            free = " or ".join(_REFERENCE_FREE)
            yield "reference", f"is none, but loss {self.loss} compares with one; set it to cache, or loss to {free}"


@dataclasses.dataclass(kw_only=True)
class RmSection(Section):
    """Reward model: a score for each answer, such that chosen answers score higher than rejected ones."""

    margin: NonNegativeFloat = 0.0
    """How much higher a chosen answer should score (Touvron et al. 2023, arXiv 2307.09288, eq. 2)."""
    center_rewards: NonNegativeFloat = 0.0
    """Weight of a second term: the square of the sum of both scores, which holds them around 0 (Eisenstein et al. 2023,
    arXiv 2312.09244)."""

    def profile(self) -> StageProfile:
        return StageProfile(sums=("rewards/chosen", "rewards/rejected", "rewards/margin", "rewards/accuracy"))


@dataclasses.dataclass(kw_only=True)
class KtoSection(Section):
    """Answers that are wanted become likelier, others less likely; no pairs are needed."""

    loss: Literal["kto", "apo_zero"] = "kto"
    """kto: Ethayarajh et al. 2024 (arXiv 2402.01306); apo_zero: D'Oosterlinck et al. 2024 (arXiv 2408.06266), without
    an estimate of the divergence from the reference."""
    beta: PositiveFloat = 0.1
    """How strongly the model is held to the reference."""
    desirable_weight: PositiveFloat = 1.0
    """Weight of a wanted answer in the loss. Where one kind of answers is more frequent, choose weights with which both
    kinds count about the same in all."""
    undesirable_weight: PositiveFloat = 1.0
    """Weight of an unwanted answer in the loss."""
    reference: Literal["cache", "adapter_off"] = "cache"
    """Where log-probabilities of the reference model, the initial one, come from: computed before the first step and
    cached, or in each step from the model without its adapter, which takes `lora.rank`."""

    def profile(self) -> StageProfile:
        """Pre-passes: the reference of all answers, then the distance of the model from it on the unrelated ones."""
        estimates_kl = self.loss == "kto"
        sums = ["rewards/desirable", "rewards/undesirable"]
        prepasses: list[PrePass] = []
        if self.reference == "adapter_off":
            prepasses.append(PrePass(kind="adapters_off", rows=2 if estimates_kl else 1))
        if estimates_kl:
            sums.append("kl")
            prepasses.append(PrePass(kind="model", sums=("kl",)))
        return StageProfile(sums=tuple(sums), prepasses=tuple(prepasses))


@dataclasses.dataclass(kw_only=True)
class SftSection(Section):
    """Supervised fine-tuning on the assistant's turns of conversations, each with its end."""

    truncate: bool = False
    """Cut conversations after data.max_length tokens and train on what is left; false to drop them. Both are counted
    and reported."""

    def profile(self) -> StageProfile:
        return StageProfile(sums=("tokens/likely",))


@dataclasses.dataclass(kw_only=True)
class InferSection(Section):
    """A model answers prompts, and nothing is trained; see `llmsuite generate --help` too."""

    max_new_tokens: PositiveInt = 128
    """Longest answer, in tokens."""
    min_new_tokens: NonNegativeInt = 0
    """Shortest answer, in tokens."""
    stop: list[str] = dataclasses.field(default_factory=list)
    """Texts that end an answer; they are not part of it."""
    generation_config: Literal["auto", "ignore"] = "auto"
    """auto: what is null of temperature, top_k, top_p, min_p and repetition_penalty is that of the model's
    generation_config.json; ignore: it is not. Tokens that end an answer are taken from it in any case."""
    temperature: NonNegativeFloat | None = None
    """0 is greedy; so is null, where generation_config.json has none."""
    top_k: NonNegativeInt | None = None
    """Choose among this many of the likeliest tokens; 0 for all."""
    top_p: Fraction | None = None
    """Choose among the likeliest tokens that together reach this probability."""
    min_p: Fraction | None = None
    """Choose among tokens with at least this share of the probability of the likeliest one."""
    repetition_penalty: PositiveFloat | None = None
    """Logits of tokens in prompt or answer are divided by it where positive, else multiplied."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it is in the answer."""
    presence_penalty: float = 0.0
    """Subtracted from a token's logit once if it is in the answer."""
    num_return_sequences: PositiveInt = 1
    """Answers to each prompt."""
    num_beams: PositiveInt = 1
    """Above 1: beam search, which draws nothing."""
    length_penalty: float = 1.0
    """Beam search divides a score by the length to this power."""
    logprobs: NonNegativeInt | None = None
    """Return log-probabilities of the tokens, and of this many of the likeliest at each step."""
    batch_size: PositiveInt = 8
    """Number of answers that are decoded together."""
    raw: bool = False
    """Continue prompts as plain text, without chat template."""
    system: str | None = None
    """A system turn in front of conversations that have none."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.min_new_tokens > self.max_new_tokens:
            yield "min_new_tokens", f"is {self.min_new_tokens}, above max_new_tokens = {self.max_new_tokens}"
        if not all(self.stop):
            yield "stop", "has an empty text, which would end every answer; remove it"
        if self.num_beams == 1 and self.length_penalty != 1:
            yield "length_penalty", "has no effect without num_beams; remove it"
        for key in ("temperature", "stop", "logprobs") if self.num_beams > 1 else ():
            if getattr(self, key) not in (0, [], None) or (key == "logprobs" and self.logprobs == 0):
                yield key, "does not go with num_beams: beam search draws nothing; remove it"
        for key, off in PENALTIES.items() if self.num_beams > 1 else ():
            if getattr(self, key) not in (None, off):
                yield key, "does not go with num_beams: beam search has no penalties but length_penalty; remove it"
        if 1 < self.num_beams < self.num_return_sequences:
            yield "num_return_sequences", f"is {self.num_return_sequences}, more than num_beams = {self.num_beams}"
        if self.raw and self.system is not None:
            yield "system", "does not go with raw, which has no turns; remove one of them"


@dataclasses.dataclass(kw_only=True)
class PretrainSection(Section):
    """Next-token prediction over text: samples of data.max_length tokens, cut from the documents joined together."""

    mix: dict[str, MixWeight] = dataclasses.field(default_factory=dict)
    """More files to train on, named as in data.train, each with the number of its samples for one of data.train, or
    with null for each of its samples once."""
    split: str | None = None
    """Without data.eval: the parts of the documents to train on, to evaluate on and to leave out, such as
    "969,30,1"."""
    max_eval_samples: PositiveInt | None = None
    """Evaluate on so many samples, spread evenly. Default: all."""
    documents: Literal["blank_lines", "lines", "files"] = "blank_lines"
    """The separator of documents in a .txt; an indexed corpus knows its own."""
    key: str = "text"
    """The key of the text in rows of .jsonl, .csv, .tsv and .parquet."""
    document_mask: bool = False
    """Where a sample holds several documents, let each token attend to its own only, begin the positions of each
    at 0, and mask its first token in the loss, which nothing of it predicts."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.split is None:
            return
        parts = self.split.split(",")
        numbers = [float(part) for part in parts if re.fullmatch(r"[0-9]+(\.[0-9]+)?", part)]
        if len(parts) not in (2, 3) or len(numbers) != len(parts) or not (numbers[0] and numbers[1]):
            yield "split", f'is {self.split!r}; it has to be such as "969,30,1": the first two numbers above 0'
