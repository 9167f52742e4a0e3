"""Base of the stages that train on sampled completions: prompts, rewards, dynamic sampling and evaluations."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.base.errors import AgreedError, UserError
from llmsuite.base.files import sha256_of
from llmsuite.base.python_files import python_function
from llmsuite.contract.schema.environment import EnvironmentSection
from llmsuite.contract.schema.reward import RewardSection
from llmsuite.contract.schema.rollout import RolloutSection
from llmsuite.data.rows import Prompt
from llmsuite.engine.stage import DropCounts, RolloutStage, StageContext, StatefulStage
from llmsuite.inference.group_sampling import SamplingParams
from llmsuite.rl.advantages import pass_at, zero_variance_groups
from llmsuite.rl.completion_rows import completion_metrics
from llmsuite.rl.dynamic_sampling import SampledBatch, sample_until_full
from llmsuite.rl.episodes import Episodes, with_parts
from llmsuite.rl.rewards import Rewards
from llmsuite.rl.rollouts import RolloutMismatch, RolloutPrompt, Rollouts, Scored
from llmsuite.stages.rl_sections import EvalRolloutSection

_ROUNDING = 1e-9
"""Tolerance of a sum of weighted rewards: 0.2 + 0.7 + 0.1 is less than 1 in floating point."""


def sampling_params(rollout: RolloutSection) -> SamplingParams:
    """The sampling of the section `rollout`."""
    return SamplingParams(
        rollout.num_generations,
        rollout.max_completion_length,
        rollout.temperature,
        rollout.batch_size,
        rollout.top_k,
        rollout.top_p,
    )


class CompletionStage(RolloutStage[Any], StatefulStage[Any]):
    """Base of stages with rollouts. A sample is a prompt until `roll_out` completes it."""

    row_kind = "prompt"
    row_by_row = True

    def __init__(self, section: Any, context: StageContext):
        """`section` has `patience`. The stage has the sections `rollout`, `reward` and `eval_rollout`, and
        `environment` if the stage can train on episodes."""
        super().__init__(section, context)
        sections = context.sections
        rollout: RolloutSection = sections["rollout"]
        evaluation: EvalRolloutSection = sections["eval_rollout"]
        reward: RewardSection = sections["reward"]
        environment: EnvironmentSection | None = sections.get("environment")
        self._patience = section.patience
        self._max_completion_length = rollout.max_completion_length
        self._max_gap = rollout.max_logprob_gap
        self._temperature = rollout.temperature
        self._sampling_params = sampling_params(rollout)
        self._eval_sampling_params = dataclasses.replace(
            self._sampling_params, num_generations=evaluation.num_generations, temperature=evaluation.temperature
        )
        self._is_dynamic = rollout.dynamic_sampling
        self._max_rounds = rollout.max_rounds if self._is_dynamic else 1
        self._pass_at = list(evaluation.pass_at)
        self._pass_reward = evaluation.pass_reward
        self._max_prompt_length = context.data.max_length - self._max_completion_length
        self._template = context.template()
        self._episodes = self._make_episodes(environment)
        rewards = with_parts(context.rewards, self._episodes)
        self._rewards = Rewards(reward, rewards, context.reward_services)
        names = list(reward.functions)
        if environment is not None and environment.name is not None:
            names.append(environment.name)
        self._files = {found[0]: "" for name in names if (found := python_function(name)) is not None}
        """Python files with rewards and environment, with the digests that they had when this run read them."""
        self._idle_rollouts = 0
        """Consecutive rollouts in which no group has a signal."""

    def _make_episodes(self, section: EnvironmentSection | None) -> Episodes | None:
        """The player of episodes with the recipe's environment; None for completions of one turn."""
        if section is None or section.name is None:
            return None
        tokenizer = self.context.tokenizer
        return Episodes(section, self.context.environments, self._template, tokenizer, self.context.data.max_length)

    def before_reading(self) -> None:
        """Load rewards and environment."""
        self._files = {file: sha256_of(Path(file)) for file in self._files}
        self._rewards.load()
        if self._episodes is not None:
            self._episodes.load()

    def make_samples(self, rows: Sequence[Prompt], counts: DropCounts) -> list[RolloutPrompt]:
        """Prompts that leave room for a completion of the maximum length."""
        texts = []
        kept = []
        template = self._template.prerender_prompts(rows)
        for number, row in enumerate(rows):
            try:
                texts.append(template.prompt(row.messages, row.tools, row.template_kwargs))
                kept.append((number, row))
            except UserError as error:
                counts.bad(number, str(error))
        prompts = []
        for (number, row), text, ids in zip(kept, texts, self.context.encode(texts)):
            if not ids:
                counts.drop("with a prompt of no tokens (nothing would predict the completion)", number)
            elif len(ids) > self._max_prompt_length:
                counts.drop(
                    f"with a prompt of more than {self._max_prompt_length} tokens (data.max_length less "
                    "rollout.max_completion_length)",
                    number,
                )
            else:
                prompts.append(
                    RolloutPrompt(tuple(ids), row.columns, text, row.messages, row.tools, row.template_kwargs)
                )
        return prompts

    def _sample_batch(self, step: int, samples: Sequence[Any], rollouts: Rollouts) -> SampledBatch:
        """Completions of the samples; with dynamic sampling, prompts without a signal are replaced."""

        def useful(scored: Scored) -> np.ndarray:
            if not self._is_dynamic:
                return np.ones(len(scored.groups), bool)
            rewards = self._rewards.total(scored.scores)
            return ~zero_variance_groups(rewards.ravel(), np.repeat(np.arange(len(rewards)), rewards.shape[1]))

        def sample(prompts: Sequence[Any], before: Sequence[Any]) -> Scored:
            return self._sample(prompts, step, self._sampling_params, rollouts, before)

        batch = sample_until_full(samples, sample, useful, rollouts.next_samples, self._max_rounds)
        self._rewards.check(batch.scored.scores)
        return batch

    def evaluate_rollouts(self, samples: Sequence[Any], rollouts: Rollouts) -> Mapping[str, float]:
        """Sample and score completions. Returns the metrics of rewards, lengths and pass@k."""
        scored = self._sample(samples, 0, self._eval_sampling_params, rollouts)
        self._rewards.check(scored.scores)
        rewards, metrics = self._reward_metrics(scored)
        right = (np.nan_to_num(rewards, nan=-np.inf) >= self._pass_reward - _ROUNDING).sum(1)
        for k in self._pass_at:
            metrics[f"pass@{k}"] = float(np.mean([pass_at(int(c), rewards.shape[1], k) for c in right]))
        return metrics

    def _sample(
        self,
        samples: Sequence[Any],
        step: int,
        sampling_params: SamplingParams,
        rollouts: Rollouts,
        before: Sequence[RolloutPrompt] = (),
    ) -> Scored:
        prompts = [sample for sample in samples if isinstance(sample, RolloutPrompt)]
        assert len(prompts) == len(samples), "a sample was completed before"
        score = functools.partial(
            self._rewards.score, total=(len(prompts) + len(before)) * sampling_params.num_generations
        )
        play = None if self._episodes is None else self._episodes.play
        return rollouts.sample(prompts, step, sampling_params, score, len(self._rewards.names), before, play=play)

    def _reward_metrics(self, scored: Scored) -> tuple[np.ndarray, dict[str, float]]:
        """Rewards [prompts, completions], NaN where one is missing; and the metrics of completions and rewards."""
        rewards = self._rewards.total(scored.scores)
        flat = list(itertools.chain(*scored.groups))
        metrics = {
            "reward": _mean(rewards),
            "reward/std": _std(rewards),
            "rewards/missing": float(np.isnan(rewards).mean()),
            **completion_metrics(flat),
        }
        if self._episodes is not None:
            metrics["episodes/turns"] = float(np.mean([c.num_turns for c in flat]))
            metrics["episodes/observed"] = float(np.mean([len(c.ids) - c.num_sampled for c in flat]))
        for i, name in enumerate(self._rewards.names):
            metrics[f"rewards/{name}"] = _mean(scored.scores[..., i])
            metrics[f"rewards/{name}/std"] = _std(scored.scores[..., i])
        return rewards, metrics

    def _check_signal(self, step: int, is_idle: bool) -> None:
        """Raise AgreedError after `patience` consecutive rollouts without a signal."""
        self._idle_rollouts = self._idle_rollouts + 1 if is_idle else 0
        if self._patience is not None and self._idle_rollouts >= self._patience:
            key = f"{self.context.stage_name}.patience"
            raise AgreedError(
                f"step {step}: in {self._idle_rollouts} rollouts in a row ({key}) all completions of each prompt had "
                "the same reward, so there is nothing to learn; look at completions.jsonl. Are the prompts too easy or "
                "too hard, are completions truncated before they can be right, does the reward never apply, or has a "
                "learning rate that is too high collapsed the model to one output?"
            )

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Check that the rollout engine and the trainer compute the same log-probabilities. Raises RolloutMismatch."""
        gap = metrics.get("logprob_gap", 0.0)  # a skipped step has only its finite metrics
        if self._max_gap is not None and not gap <= self._max_gap:
            raise RolloutMismatch(
                f"step {step}: log-probabilities of tokens from the rollout and from the training pass "
                f"differ by {gap:.3g} on average, more than rollout.max_logprob_gap "
                f"{self._max_gap}: the gradient would belong to another distribution than the sampled one"
            )

    def state(self) -> dict[str, Any]:
        return {"idle": self._idle_rollouts, "files": self._files}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._idle_rollouts = int(state.get("idle", 0))
        for file, digest in state.get("files", {}).items():
            if self._files.get(file, digest) != digest:
                self.context.report(f"warning: {file} has changed since; its current content is used from here on")


def _mean(values: np.ndarray) -> float:
    """Mean of the values that are not NaN; 0 if all are."""
    return float(np.nanmean(values)) if not np.isnan(values).all() else 0.0


def _std(values: np.ndarray) -> float:
    return float(np.nanstd(values)) if not np.isnan(values).all() else 0.0
