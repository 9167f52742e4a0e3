"""The recipe section of stage ppo. Imports no Paddle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from llmsuite.schema.numbers import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt
from llmsuite.schema.section import Section
from llmsuite.specs import CriticProfile, StageProfile
from llmsuite.stages.rl_sections import ClippedPolicy


@dataclasses.dataclass(kw_only=True)
class CriticSection(Section):
    """The critic: a second model, with a score head, which predicts from each token what the rest will be worth."""

    weights: str | None = None
    """A model directory or a run to begin with, of the shape of the model that is trained: best a reward model. null:
    the weights of the model that is trained, with a score head from the seed."""
    learning_rate: PositiveFloat | None = None
    """Its own learning rate, with the schedule of the section train. null: as train.learning_rate."""
    value_clip: PositiveFloat | None = 0.2
    """The value of a token counts no further than this from the one before the updates. null: do not clip."""


@dataclasses.dataclass(kw_only=True)
class PpoSection(ClippedPolicy, Section):
    """Proximal policy optimisation with a critic (Schulman et al. 2017, arXiv 1707.06347), as RLHF has it (Ouyang et
    al. 2022, arXiv 2203.02155)."""

    gamma: Fraction = 1.0
    """The discount of rewards, for each token."""
    gae_lambda: Fraction = 0.95
    """Generalised advantage estimation (Schulman et al. 2015, arXiv 1506.02438): 0 looks one token ahead by the critic,
    1 takes the rewards to the end."""
    whiten_advantages: bool = True
    """Normalise advantages over all tokens of the rollout."""
    epsilon: NonNegativeFloat = 0.2
    """How far below 1 the ratio to the model that has drawn a token counts."""
    epsilon_high: NonNegativeFloat | None = None
    """How far above 1. Default: as epsilon."""
    dual_clip: Annotated[float, Ge(1)] | None = None
    """Bound the ratio of tokens with a negative advantage too, such as by 3 (Ye et al. 2020, arXiv 1912.09729). null:
    do not."""
    updates: PositiveInt = 1
    """Optimizer steps for each rollout: so many global batches of prompts are drawn at once, and each step learns from
    one. 1: every step draws with the weights it updates, and all ratios are 1."""
    rollout_correction: Literal["none", "tis", "mis"] = "none"
    """As `grpo.rollout_correction`: weigh each token in the loss of the policy by how likely it was for the model that
    is trained, over how likely it was for the server or the older weights that have drawn it. Rewards, values and the
    loss of the critic are not weighed."""
    correction_level: Literal["token", "sequence"] = "token"
    """sequence: the weight of a completion is the geometric mean of those of its tokens."""
    correction_cap: Annotated[float, Gt(1)] = 2.0
    """Bound of the weights of rollout_correction."""
    beta: NonNegativeFloat = 0.0
    """Weight of the divergence from the reference model, which is taken off the reward of each token (k1): of what has
    drawn, or with `updates` or a rollout_correction of the weights before the first update."""
    kl_target: PositiveFloat | None = None
    """Divergence in nats, summed over a completion, that beta is adapted to: after each rollout beta is multiplied by
    1 + kl_rate x (divergence / target - 1), of which the bracket is at most 0.2 either way (Ziegler et al. 2019,
    arXiv 1909.08593, section 2.2). null: beta stays as it is."""
    kl_rate: Annotated[float, Gt(0), Le(1)] = 0.1
    """How fast beta follows kl_target: with 0.1 by 2% a rollout at most, with 1 by 20%. It is what others write as
    completions of a rollout over a horizon, such as 1024 over 10000."""
    reference: str = "none"
    """The reference model: none; the initial one, as adapter_off (the model without its adapters, which takes
    `lora.rank`) or as copy (a second copy of the weights, sharded as they are); or the directory of a run or of another
    model of the same shape, whose weights are kept in the same way."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy in the loss, which is kept high: the mean over the completions' tokens, of the whole
    vocabulary at the temperature of the rollout (arXiv 1707.06347, eq. 9)."""
    mask_truncated: bool = False
    """Learn nothing from completions without an end."""
    overlong_buffer: PositiveInt | None = None
    """Take up to 1 off the reward of a completion, the more the closer it comes to rollout.max_completion_length, from
    so many tokens before that on, or from its first token (DAPO). null: do not."""
    patience: PositiveInt | None = 50
    """Stop the run after so many rollouts in a row in which all completions have the same reward. null: never."""
    critic: CriticSection = dataclasses.field(default_factory=CriticSection)
    """The second model, which predicts what the rest of a completion will be worth."""

    # what the losses that it shares with grpo are told

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
        yield from self.correction_problems()
        if self.beta == 0 and self.kl_target is not None:
            yield "kl_target", "adapts beta, which is 0; set that to where it begins, such as 0.05, or remove this key"
        if self.kl_target is None and self.kl_rate != type(self).__dataclass_fields__["kl_rate"].default:
            yield "kl_rate", "has no effect while kl_target is null; set that too, or remove it"
        if self.dual_clip is not None and self.dual_clip <= 1 + self.upper:
            yield "dual_clip", f"is {self.dual_clip}; it has to be above 1 + epsilon_high = {1 + self.upper}"
