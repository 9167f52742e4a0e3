"""The recipe section of stage ppo. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from llmsuite.contract.schema.numbers import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt
from llmsuite.contract.schema.section import Section
from llmsuite.contract.specs import CriticProfile, StageProfile
from llmsuite.stages.rl_sections import ClippedPolicy


@dataclasses.dataclass(kw_only=True)
class CriticSection(Section):
    """The critic: a second model, with a score head, which predicts the return before each token."""

    weights: str | None = None
    """The initial weights: a model directory or a run, of the shape of the trained model; best a reward model. null:
    the weights of the trained model, with a score head initialised from the seed."""
    learning_rate: PositiveFloat | None = None
    """The critic's learning rate, with the schedule of the section train. null: train.learning_rate."""
    value_clip: PositiveFloat | None = 0.2
    """Clip the value of a token to within this distance of the value before the updates. null: no clipping."""


@dataclasses.dataclass(kw_only=True)
class PpoSection(ClippedPolicy):
    """Proximal policy optimisation with a critic (Schulman et al. 2017, arXiv 1707.06347), as used in RLHF (Ouyang et
    al. 2022, arXiv 2203.02155)."""

    gamma: Fraction = 1.0
    """The discount of rewards per token."""
    gae_lambda: Fraction = 0.95
    """Generalised advantage estimation (Schulman et al. 2015, arXiv 1506.02438): 0 for one-step temporal
    differences, 1 for full returns."""
    whiten_advantages: bool = True
    """Normalise advantages over all tokens of the rollout."""
    epsilon: NonNegativeFloat = 0.2
    """Clip the ratio of a token's probability to that under the rollout weights below 1 - epsilon."""
    epsilon_high: NonNegativeFloat | None = None
    """Clip the ratio above 1 + epsilon_high. Default: epsilon."""
    dual_clip: Annotated[float, Ge(1)] | None = None
    """Bound the ratio of tokens with a negative advantage too, such as by 3 (Ye et al. 2020, arXiv 1912.09729). null:
    no bound."""
    updates: PositiveInt = 1
    """Optimizer steps for each rollout, which samples this many global batches of prompts; each step trains on one. 1:
    every step samples with the weights that it updates, and all ratios are 1."""
    rollout_correction: Literal["none", "tis", "mis"] = "none"
    """Correction as in `grpo.rollout_correction`: weight each token in the loss of the policy by the ratio of its
    probability under the trained model to that under the server or the older weights that sampled it. Rewards, values
    and the loss of the critic are not weighted."""
    correction_level: Literal["token", "sequence"] = "token"
    """sequence: the weight of a completion is the geometric mean of those of its tokens."""
    correction_cap: Annotated[float, Gt(1)] = 2.0
    """Bound of the weights of rollout_correction."""
    beta: NonNegativeFloat = 0.0
    """Coefficient of the KL divergence from the reference model, which is subtracted from the reward of each token
    (k1): with the rollout's log-probabilities, or with `updates` or a rollout_correction those of the weights before
    the first update."""
    kl_target: PositiveFloat | None = None
    """Target of the KL divergence in nats, summed over a completion: after each rollout beta is multiplied by
    1 + kl_rate x (divergence / target - 1), where the bracket is clipped to [-0.2, 0.2] (Ziegler et al. 2019,
    arXiv 1909.08593, section 2.2). null: beta is constant."""
    kl_rate: Annotated[float, Gt(0), Le(1)] = 0.1
    """The rate of adaptation of beta: with 0.1 by at most 2% a rollout, with 1 by 20%. Other suites define it as the
    completions of a rollout over a horizon, such as 1024 over 10000."""
    reference: str = "none"
    """The reference model: none; the initial one, as adapter_off (the model without its adapters, which needs
    `lora.rank`) or as copy (a second copy of the weights, sharded in the same way); or the directory of a run or of
    another model of the same shape, whose weights are held like a copy."""
    entropy_coef: NonNegativeFloat = 0.0
    """Coefficient of an entropy bonus: the mean over the tokens of completions, over the full vocabulary at the
    temperature of the rollout (arXiv 1707.06347, eq. 9)."""
    mask_truncated: bool = False
    """Give truncated completions no gradient."""
    overlong_buffer: PositiveInt | None = None
    """Length penalty of DAPO: in this many tokens before rollout.max_completion_length, or from the first token of a
    completion, up to 1 is subtracted from its reward, linearly. null: no penalty."""
    patience: PositiveInt | None = 50
    """Stop the run after this many consecutive rollouts in which all completions have the same reward. null: never."""
    critic: CriticSection = dataclasses.field(default_factory=CriticSection)
    """The critic, a second model that predicts the return of the rest of a completion."""

    # settings of the code shared with grpo, which are not keys of ppo

    loss: ClassVar[Literal["dapo"]] = "dapo"
    normaliser: ClassVar[Literal["token_mean"]] = "token_mean"
    importance_sampling_level: ClassVar[Literal["token"]] = "token"
    advantage: ClassVar[Literal["reinforce"]] = "reinforce"
    scale_rewards: ClassVar[Literal["none"]] = "none"
    kl: ClassVar[Literal["k3"]] = "k3"
    kl_in: ClassVar[Literal["reward"]] = "reward"

    def profile(self) -> StageProfile:
        critic = CriticProfile(
            key="ppo.critic",
            weights=self.critic.weights,
            learning_rate=self.critic.learning_rate,
            sums=("critic/error", "critic/clip_ratio"),
        )
        return dataclasses.replace(self.policy_profile(self.kl_in), critic=critic)

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from self.reference_problems()
        if self.beta == 0 and self.kl_target is not None:
            yield (
                "kl_target",
                "adapts beta, which is 0; set beta to its initial value, such as 0.05, or remove this key",
            )
        if self.dual_clip is not None and self.dual_clip <= 1 + self.upper:
            yield "dual_clip", f"is {self.dual_clip}; it has to be above 1 + epsilon_high = {1 + self.upper}"

    def unused(self) -> Iterator[tuple[str, str]]:
        yield from super().unused()
        if self.kl_target is None:
            yield "kl_rate", "has no effect while kl_target is null; set that too, or remove it"
