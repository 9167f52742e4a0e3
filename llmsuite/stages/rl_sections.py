"""The recipe sections of stages with rollouts. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from llmsuite.contract.schema.numbers import NonNegativeFloat, PositiveInt
from llmsuite.contract.schema.section import Section
from llmsuite.contract.specs import PrePass, StageProfile
from llmsuite.stages.eval_metrics import rollout_metrics


@dataclasses.dataclass(kw_only=True)
class EvalRolloutSection(Section):
    """Sampling of completions in evaluations, with the same random numbers in each."""

    num_generations: PositiveInt = 1
    """Completions of each prompt."""
    temperature: NonNegativeFloat = 0.0
    """Logits are divided by it; 0 for greedy decoding."""
    pass_at: list[PositiveInt] = dataclasses.field(default_factory=lambda: [1])
    """Report pass@k for these k: the probability that at least one of k completions is right (Chen et al. 2021, arXiv
    2107.03374), which means that its reward is pass_reward or more."""
    pass_reward: float = 1.0
    """The minimum reward of a right completion."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.pass_at and max(self.pass_at) > self.num_generations:
            yield "pass_at", f"has {max(self.pass_at)}, more than num_generations = {self.num_generations}"
        if self.temperature == 0 and self.num_generations > 1:
            how = "raise eval_rollout.temperature, or set this to 1"
            yield "num_generations", f"is {self.num_generations}, all alike at temperature 0; {how}"


def directory_of(reference: str | None) -> str | None:
    """The directory in a key `reference`; None for a value that is not a directory."""
    if reference in ("none", "adapter_off", "copy", "cache"):
        return None
    return reference


Normaliser = Literal["sequence_mean", "token_mean", "constant"]
_NORMALISERS: Mapping[str, Normaliser] = {
    "grpo": "sequence_mean",
    "dapo": "token_mean",
    "dr_grpo": "constant",
    "cispo": "token_mean",
    "sapo": "sequence_mean",
}
_CLIPS: Mapping[str, tuple[str, ...]] = {"cispo": ("clip_ratio/high",), "sapo": ()}
"""Metrics of clipping, for losses without the two bounds of PPO's clip."""


class ClippedPolicy(Section):
    """Base of the sections of stages with a clipped policy loss and a KL penalty to a reference."""

    epsilon: float
    epsilon_high: float | None
    updates: int
    beta: float
    reference: str
    entropy_coef: float
    rollout_correction: Literal["none", "tis", "mis"]
    correction_level: Literal["token", "sequence"]
    correction_cap: float

    def policy_profile(self, kl_in: str, loss: str = "dapo") -> StageProfile:
        """Pre-passes: log-probabilities before the first of several updates, or for a KL penalty in the reward with a
        rollout correction; and those of the reference. `kl_in` and `loss` are those of `GrpoSection`."""
        sums = ["ratio", *_CLIPS.get(loss, ("clip_ratio/low", "clip_ratio/high")), "logprob_gap"]
        corrects = self.rollout_correction != "none"
        if corrects:
            sums += ["correction", "correction/bounded"]
        prepasses: list[PrePass] = []
        if self.updates > 1 or (corrects and kl_in == "reward" and self.beta > 0):
            prepasses.append(PrePass(kind="model"))
        if self.reference != "none":
            sums.append("kl")
            kind: Literal["adapters_off", "reference"] = "reference"
            if self.reference == "adapter_off":
                kind = "adapters_off"
            prepasses.append(PrePass(kind=kind))
        if self.entropy_coef:
            sums.append("entropy/exact")
        return StageProfile(
            sums=tuple(sums),
            prepasses=tuple(prepasses),
            updates=self.updates,
            reference=directory_of(self.reference),
            max_metrics=("logprob_gap/max",),
            entropy=self.entropy_coef > 0,
            evaluates=rollout_metrics,
        )

    @property
    def upper(self) -> float:
        """`epsilon_high` with its default applied."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.rollout_correction == "none":
            for key in ("correction_level", "correction_cap"):
                yield key, "has no effect while rollout_correction is none; set that too, or remove it"

    def reference_problems(self) -> Iterator[tuple[str, str]]:
        """A KL penalty without a reference, or a reference without a KL penalty."""
        if self.beta > 0 and self.reference == "none":
            yield "beta", f"is {self.beta}, but reference is none; set that to adapter_off or copy, or beta to 0"
        if self.beta == 0 and self.reference != "none":
            yield "reference", f"is {self.reference}, but beta is 0, so it has no effect; set it to none"


@dataclasses.dataclass(kw_only=True)
class GrpoSection(ClippedPolicy):
    """Group relative policy optimisation and its relatives: the advantage of a completion is its reward relative to the
    others of its prompt."""

    loss: Literal["grpo", "dapo", "dr_grpo", "cispo", "sapo"] = "dapo"
    """The objective, and the averaging over tokens. With PPO's clip, grpo: the mean over completions of the mean over
    their tokens (Shao et al. 2024, arXiv 2402.03300); dapo: the mean over all tokens of the global batch (Yu et al.
    2025, arXiv 2503.14476); dr_grpo: the sum of the tokens, divided by the number of completions and
    rollout.max_completion_length (Liu et al. 2025, arXiv 2503.20783). cispo: no token loses its gradient, ratios are
    bounded by 1 + epsilon_high (MiniMax 2025, arXiv 2506.13585), averaged as dapo. sapo: a soft gate instead of the
    clip (Gao et al. 2025, arXiv 2511.20347), averaged as grpo."""
    advantage: Literal["group", "rloo", "reinforce", "reinforce_baseline"] = "group"
    """The baseline of a reward. group: the mean of its group (GRPO); rloo: the mean of the others of its group
    (Ahmadian et al. 2024, arXiv 2402.14740); reinforce: none, reinforce_baseline: the mean of its group
    (REINFORCE++, Hu 2025, arXiv 2501.03262: scale_rewards is batch)."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the standard deviation of the rewards of the group, of those of the global batch, or not
    at all, as Dr. GRPO."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """sequence: the ratio of a completion is the geometric mean of those of its tokens (GSPO, Zheng et al. 2025, arXiv
    2507.18071)."""
    epsilon: NonNegativeFloat = 0.2
    """Clip the ratio of a token's probability to that under the rollout weights below 1 - epsilon."""
    epsilon_high: NonNegativeFloat | None = None
    """Clip the ratio above 1 + epsilon_high. Default: epsilon."""
    dual_clip: Annotated[float, Ge(1)] | None = None
    """Bound the ratio of completions with a negative advantage too (Ye et al. 2020, arXiv 1912.09729). null: no
    bound."""
    updates: PositiveInt = 1
    """Optimizer steps for each rollout, which samples this many global batches of prompts; each step trains on one. 1:
    every step samples with the weights that it updates, and all ratios are 1."""
    rollout_correction: Literal["none", "tis", "mis"] = "none"
    """Weight each token by the ratio of its probability under the trained model to that under the engine or the older
    weights that sampled it. tis: at most correction_cap (truncated, Yao et al. 2025); mis: 0 outside of
    [1 / correction_cap, correction_cap] (masked, Liu et al. 2025; IcePop, arXiv 2510.18855)."""
    correction_level: Literal["token", "sequence"] = "token"
    """sequence: the weight of a completion is the geometric mean of those of its tokens."""
    correction_cap: Annotated[float, Gt(1)] = 2.0
    """Bound of the weights of rollout_correction."""
    beta: NonNegativeFloat = 0.0
    """Coefficient of the KL divergence from the reference model in the loss."""
    kl: Literal["k1", "k2", "k3", "k1+", "k3+"] = "k3"
    """The estimator of the KL divergence from a token (Schulman 2020). k1+ and k3+ have the gradient of k2, which is
    that of the divergence."""
    kl_in: Literal["loss", "reward"] = "loss"
    """reward: subtract beta times the KL divergence from the reward of each token, estimated by k1 with the rollout's
    log-probabilities, or with `updates` or a rollout_correction those of the weights before the first update; a token's
    advantage is the sum of the rewards from that token on (REINFORCE++, Hu 2025, arXiv 2501.03262). With advantage
    reinforce or reinforce_baseline; scale_rewards batch normalises over all tokens of the rollout."""
    reference: str = "none"
    """The reference model: none; the initial one, as adapter_off (the model without its adapters, which needs
    `lora.rank`) or as copy (a second copy of the weights, sharded in the same way); or the directory of a run or of
    another model of the same shape, whose weights are held like a copy."""
    entropy_coef: NonNegativeFloat = 0.0
    """Coefficient of an entropy bonus: the mean over the tokens of completions, over the full vocabulary at the
    temperature of the rollout (as in PPO, Schulman et al. 2017, arXiv 1707.06347, eq. 9)."""
    mask_truncated: bool = False
    """Give truncated completions no gradient."""
    count_truncated: bool = False
    """With mask_truncated: count truncated completions in the mean of the loss, as if their loss was 0 (as in
    ms-swift's overlong_filter). false: the mean is over the others."""
    overlong_buffer: PositiveInt | None = None
    """Length penalty of DAPO: in this many tokens before rollout.max_completion_length, or from the first token of a
    completion, up to 1 is subtracted from its reward, linearly. null: no penalty."""
    patience: PositiveInt | None = 50
    """Stop the run after this many consecutive rollouts in which no group has completions of different rewards, so that
    there is nothing to learn. null: never."""

    def profile(self) -> StageProfile:
        return self.policy_profile(self.kl_in, self.loss)

    @property
    def normaliser(self) -> Normaliser:
        """The averaging of the losses of tokens, as in `rl_losses.token_weights`."""
        return _NORMALISERS[self.loss]

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from self.reference_problems()
        if self.kl_in == "reward" and self.beta == 0:
            yield "kl_in", "is reward, but beta is 0; set that too, or kl_in to loss"
        if self.kl_in == "reward" and not self.advantage.startswith("reinforce"):
            yield "kl_in", f"is reward, but advantage {self.advantage} is computed by completion; choose reinforce"
        if self.kl_in == "reward" and self.kl not in ("k1", "k3"):
            yield "kl", f"is {self.kl}, which is for kl_in loss; in the reward it is k1"
        if self.dual_clip is not None and self.dual_clip <= 1 + self.upper:
            yield "dual_clip", f"is {self.dual_clip}; it has to be above 1 + epsilon_high = {1 + self.upper}"
        if self.advantage.startswith("reinforce") and self.scale_rewards == "group":
            yield "scale_rewards", f"is group, but advantage {self.advantage} is scaled over the batch; set it to batch"

    def unused(self) -> Iterator[tuple[str, str]]:
        yield from super().unused()
        if self.beta == 0:
            yield "kl", "has no effect while beta is 0; set that too, or remove it"
        if not self.mask_truncated:
            yield "count_truncated", "has no effect without mask_truncated; set that too, or remove it"
        of_clip: Mapping[str, tuple[str, ...]] = {
            "cispo": ("epsilon", "dual_clip"),
            "sapo": ("epsilon", "epsilon_high", "dual_clip"),
        }
        for key in of_clip.get(self.loss, ()):
            yield key, f"has no effect with loss {self.loss}; remove it"
