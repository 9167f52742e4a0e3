"""What stages have in common that learn from completions the model draws: prompts, rewards, rounds and evaluations."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.data.rows import Prompt
from llmsuite.errors import AgreedError, UserError
from llmsuite.files import sha256_of
from llmsuite.python_files import python_function
from llmsuite.rl.advantages import pass_at, without_signal
from llmsuite.rl.drawing import Drawing
from llmsuite.rl.episodes import Episodes, with_parts
from llmsuite.rl.rewards import Rewards
from llmsuite.rl.rollouts import DrawnApart, RolloutPrompt, Rollouts, Scored
from llmsuite.rl.rounds import Filled, draw_until_full
from llmsuite.train.stage import DropCounts, Stage, StageContext

_ROUNDING = 1e-9
"""What a sum of weighted rewards may be off by: 0.2 + 0.7 + 0.1 is less than 1 in floating point."""


class CompletionStage(Stage[Any]):
    """Base of stages with rollouts: samples are prompts until `roll_out` has completed them."""

    row_kind = "prompt"
    row_by_row = True

    def __init__(self, section: Any, context: StageContext):
        """`section` has `patience`; the recipe has the sections `rollout`, `reward` and `eval_rollout`, and
        `environment` where the stage learns from episodes too."""
        super().__init__(section, context)
        recipe: Any = context.recipe
        rollout, evaluation = recipe.rollout, recipe.eval_rollout
        self._patience, self._longest = section.patience, rollout.max_completion_length
        self._max_gap = rollout.max_logprob_gap
        self._temperature = rollout.temperature
        self._drawing = Drawing(rollout.num_generations, self._longest, rollout.temperature, rollout.batch_size)
        self._eval_drawing = dataclasses.replace(
            self._drawing, num_generations=evaluation.num_generations, temperature=evaluation.temperature
        )
        self._is_dynamic = rollout.dynamic_sampling
        self._max_rounds = rollout.max_rounds if self._is_dynamic else 1
        self._pass_at, self._pass_reward = list(evaluation.pass_at), evaluation.pass_reward
        self._longest_prompt = recipe.data.max_length - self._longest
        self._template = context.template()
        self._episodes = self._environment(recipe)
        rewards = with_parts(context.rewards, self._episodes)
        self._rewards = Rewards(recipe.reward, rewards, context.reward_services)
        given = [*recipe.reward.functions, *([] if self._episodes is None else [recipe.environment.name])]
        self._files = {found[0]: "" for key in given if (found := python_function(key)) is not None}
        """Python files with rewards and environment, and the digests that they had when this run read them."""
        self._idle = 0
        """Rollouts in a row in which no group has a signal."""

    def _environment(self, recipe: Any) -> Episodes | None:
        """What plays the episodes of the recipe's environment; None where completions have one turn."""
        section = getattr(recipe, "environment", None)
        if section is None or section.name is None:
            return None
        tokenizer, known = self.context.tokenizer, self.context.environments
        return Episodes(section, known, self._template, tokenizer, recipe.data.max_length)

    def read_all(self, train: Path, evaluation: Path | None) -> tuple[Sequence[Any], Sequence[Any]]:
        """Load rewards and environment first: what is wrong with them is told before the model is loaded."""
        self._files = {file: sha256_of(Path(file)) for file in self._files}
        self._rewards.load()
        if self._episodes is not None:
            self._episodes.load()
        return super().read_all(train, evaluation)

    def make_samples(self, rows: Sequence[Prompt], counts: DropCounts) -> list[RolloutPrompt]:
        """Prompts that leave room for a completion."""
        texts, kept = [], []
        template = self._template.ahead_of_prompts((row.messages, row.tools) for row in rows)
        for number, row in enumerate(rows):
            try:
                texts.append(template.prompt(row.messages, row.tools))
                kept.append((number, row))
            except UserError as error:
                counts.bad(number, str(error))
        prompts = []
        for (number, row), text, ids in zip(kept, texts, self.context.encode(texts)):
            if not ids:
                counts.drop("with a prompt of no tokens (nothing would predict the completion)", number)
            elif len(ids) > self._longest_prompt:
                counts.drop(
                    f"with a prompt of more than {self._longest_prompt} tokens (data.max_length less "
                    "rollout.max_completion_length)",
                    number,
                )
            else:
                prompts.append(RolloutPrompt(tuple(ids), row.columns, text, row.messages, row.tools))
        return prompts

    def _fill(self, step: int, samples: Sequence[Any], rollouts: Rollouts) -> Filled:
        """Completions of the samples, with dynamic sampling until each has a signal or is replaced."""

        def useful(scored: Scored) -> np.ndarray:
            if not self._is_dynamic:
                return np.ones(len(scored.groups), bool)
            rewards = self._rewards.total(scored.scores)
            return ~without_signal(rewards.ravel(), np.repeat(np.arange(len(rewards)), rewards.shape[1]))

        def draw(prompts: Sequence[Any], before: Sequence[Any]) -> Scored:
            return self._draw(prompts, step, self._drawing, rollouts, before)

        filled = draw_until_full(samples, draw, useful, rollouts.further, self._max_rounds)
        self._rewards.check(filled.scored.scores)
        return filled

    def begin_rollout(self, step: int, samples: Sequence[Any], rollouts: Rollouts) -> None:
        """See `Stage`."""
        rollouts.begin(samples, step, self._drawing)

    def evaluate_rollouts(self, samples: Sequence[Any], rollouts: Rollouts) -> Mapping[str, float]:
        """Rewards, lengths, and pass@k."""
        scored = self._draw(samples, 0, self._eval_drawing, rollouts)
        self._rewards.check(scored.scores)
        rewards, metrics = self._judge(scored)
        right = (np.nan_to_num(rewards, nan=-np.inf) >= self._pass_reward - _ROUNDING).sum(1)
        for k in self._pass_at:
            metrics[f"pass@{k}"] = float(np.mean([pass_at(int(c), rewards.shape[1], k) for c in right]))
        return metrics

    def _draw(
        self,
        samples: Sequence[Any],
        step: int,
        drawing: Drawing,
        rollouts: Rollouts,
        before: Sequence[RolloutPrompt] = (),
    ) -> Scored:
        prompts = [sample for sample in samples if isinstance(sample, RolloutPrompt)]
        assert len(prompts) == len(samples), "completed twice"
        score = functools.partial(self._rewards.score, total=(len(prompts) + len(before)) * drawing.num_generations)
        play = None if self._episodes is None else self._episodes.play
        return rollouts.draw(prompts, step, drawing, score, len(self._rewards.names), before, play=play)

    def _judge(self, scored: Scored) -> tuple[np.ndarray, dict[str, float]]:
        """Rewards [prompts, completions], NaN where one is missing, and the metrics of completions and rewards."""
        rewards = self._rewards.total(scored.scores)
        flat = list(itertools.chain(*scored.groups))
        lengths = [c.num_own for c in flat]
        logprobs = np.concatenate([c.logprobs for c in flat])
        metrics = {
            "reward": _mean(rewards),
            "reward/std": _std(rewards),
            "rewards/missing": float(np.isnan(rewards).mean()),
            "entropy": float(-logprobs.mean()),  # an estimate without bias: the tokens are drawn from the model
            "completions/length": float(np.mean(lengths)),
            "completions/length_min": float(np.min(lengths)),
            "completions/length_max": float(np.max(lengths)),
            "completions/truncated": float(np.mean([c.truncated for c in flat])),
        }
        if ended := [c.num_own for c in flat if not c.truncated]:
            metrics["completions/length_ended"] = float(np.mean(ended))
        if self._episodes is not None:
            metrics["episodes/turns"] = float(np.mean([sum(t.role == "assistant" for t in c.turns) for c in flat]))
            metrics["episodes/observed"] = float(np.mean([len(c.ids) - c.num_own for c in flat]))
        for i, name in enumerate(self._rewards.names):
            metrics[f"rewards/{name}"], metrics[f"rewards/{name}/std"] = (
                measure(scored.scores[..., i]) for measure in (_mean, _std)
            )
        return rewards, metrics

    def _check_signal(self, step: int, is_idle: bool) -> None:
        """Raises AgreedError after `patience` rollouts without a signal."""
        self._idle = self._idle + 1 if is_idle else 0
        if self._patience is not None and self._idle >= self._patience:
            key = f"{self.context.recipe.stage}.patience"
            raise AgreedError(
                f"step {step}: in {self._idle} rollouts in a row ({key}) all completions of each prompt had the same "
                "reward, so there is nothing to learn; look at completions.jsonl. Are the prompts too easy or too "
                "hard, are completions truncated before they can be right, does the reward never apply, or has too "
                "high a learning rate made the model say one thing only?"
            )

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Check that rollouts and training compute the same model."""
        gap = metrics.get("logprob_gap", 0.0)  # a step that was skipped has finite metrics only
        if self._max_gap is not None and not gap <= self._max_gap:
            raise DrawnApart(
                f"step {step}: log-probabilities of tokens as they were drawn and as the training pass computes them "
                f"differ by {gap:.3g} on average, more than rollout.max_logprob_gap "
                f"{self._max_gap}: what would be learnt is not what was drawn"
            )

    def state(self) -> dict[str, Any]:
        return {"idle": self._idle, "files": self._files}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._idle = int(state.get("idle", 0))
        for file, digest in state.get("files", {}).items():
            if self._files.get(file, digest) != digest:
                self.context.report(f"warning: {file} was edited since; from here on its present content counts")


def _mean(values: np.ndarray) -> float:
    """Mean of those that are there; 0 if none is."""
    return float(np.nanmean(values)) if not np.isnan(values).all() else 0.0


def _std(values: np.ndarray) -> float:
    return float(np.nanstd(values)) if not np.isnan(values).all() else 0.0
