"""The section `rollout` of online RL recipes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from llmsuite.contract.schema.numbers import Fraction, NonNegativeInt, PositiveFloat, PositiveInt
from llmsuite.contract.schema.section import Section, subsections


@dataclasses.dataclass(kw_only=True)
class RolloutSection(Section):
    """Sampling of completions from the trained model. An engine has its own keys under `rollout.NAME`."""

    extended_by: ClassVar[str] = "rollout engine"

    engine: str = "local"
    """The rollout engine: local, a second copy of the trained model, in the same processes; openai, servers such as
    `llmsuite serve --rl`; or the engine of a plugin. `llmsuite list engines` shows all."""
    num_generations: PositiveInt = 8
    """Completions of each prompt, its group, which is never split. Batch sizes count prompts."""
    max_completion_length: PositiveInt = 256
    """Maximum length of a completion in tokens, including the end-of-sequence token. Longer ones are truncated.
    data.max_length has to hold prompt and completion."""
    temperature: PositiveFloat = 1.0
    """Logits are divided by it, in rollouts and in the loss; that of stage gkd has gkd.temperature."""
    top_k: NonNegativeInt = 0
    """Sample only from this many of the most likely tokens; 0 for all. The loss keeps the probabilities of the full
    distribution, so ratios are 1 while the sampling weights are those that are trained. Evaluations sample so too."""
    top_p: Fraction = 1.0
    """Sample only from the most likely tokens that together reach this probability; the loss as with top_k."""
    stop: list[str] = dataclasses.field(default_factory=list)
    """Further tokens, as texts, that end a completion, next to the end-of-sequence tokens of the tokenizer and of the
    model's generation_config.json, such as ["<|im_end|>"] for a base model with the chat template of another."""
    batch_size: PositiveInt = 128
    """Completions that a rank samples in one batch. It changes memory and speed, not the completions."""
    dynamic_sampling: bool = False
    """Replace prompts without a signal, whose completions all have the same reward (before the penalty of
    overlong_buffer), by the next prompts of the data (DAPO, Yu et al. 2025, arXiv 2503.14476)."""
    max_rounds: PositiveInt = 10
    """With dynamic_sampling: maximum number of rounds of sampling for a step, each for at most a global batch of
    prompts. Prompts without a signal that are left after the last round give no gradient."""
    max_staleness: NonNegativeInt = 0
    """Maximum number of optimizer steps by which the weights that sample may be older than those that are trained. 0:
    every step trains on completions of its own weights. Above 0 a server samples the completions of later steps during
    a step."""
    max_logprob_gap: PositiveFloat | None = 0.1
    """Stop the run when the log-probabilities of tokens from the rollout and from the training pass differ by more than
    this on average over a step. null: never."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.dynamic_sampling and self.num_generations == 1:
            yield "dynamic_sampling", "compares the completions of a prompt, but num_generations is 1; set it to false"

        if self.top_p == 0:
            yield "top_p", "is 0, which leaves no token to sample from; set it above 0, or top_k to 1"

    def unused(self) -> Iterator[tuple[str, str]]:
        if not self.dynamic_sampling:
            yield "max_rounds", "has no effect without dynamic_sampling; set that, or remove it"
        for engine in subsections(self):
            if engine != self.engine:
                yield engine, f"has no effect with engine {self.engine}; set that to {engine}, or remove it"
