"""Group relative policy optimisation (Shao et al. 2024, arXiv 2402.03300) and its relatives: docs/guide/rl.md.

prompts -> completions drawn by the model, a group for each prompt -> rewards -> advantages -> log-probabilities of the
completions -> loss, by how much likelier a token is than when it was drawn.

Shapes: C completions, T tokens of completions, one completion after the other.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.data.rows import Prompt
from llmsuite.errors import UserError
from llmsuite.rl.advantages import (
    Scale,
    advantages,
    overlong_penalty,
    pass_at,
    returns_to_go,
    whitened,
    without_signal,
)
from llmsuite.rl.completion import Completion
from llmsuite.rl.drawing import Drawing
from llmsuite.rl.rewards import Rewards
from llmsuite.rl.rollouts import RolloutPrompt, Rollouts, Scored
from llmsuite.rl.table import completion_rows
from llmsuite.stages import rl_losses
from llmsuite.stages.answers import Answer, pack_rows
from llmsuite.stages.by_token import Total, is_counted, put_advantages, rewards_by_token
from llmsuite.stages.language_model import hidden_at_positions
from llmsuite.stages.rl_sections import GrpoSection
from llmsuite.train.stage import Batch, DropCounts, LossTerms, PrePassKind, RolledOut, Stage, StageContext, Sums
from llmsuite.typing import Tensor


@dataclasses.dataclass(frozen=True)
class Group:
    """The completions of a prompt with their advantages: a sample, once it is completed."""

    completions: Sequence[Completion]
    advantages: np.ndarray
    """[completions]. Where there are advantages by token, the rewards that these are made of."""
    is_counted: np.ndarray
    """[completions], bool: those that are learnt from."""

    @property
    def answers(self) -> list[Answer]:
        return [Answer(list(c.prompt_ids), list(c.ids)) for c in self.completions]


class GrpoStage(Stage["RolloutPrompt | Group"]):
    """Makes completions likelier that have more reward than others of their prompt."""

    row_kind = "prompt"

    def __init__(self, section: GrpoSection, context: StageContext):
        super().__init__(section, context)
        recipe: Any = context.recipe
        rollout, evaluation = recipe.rollout, recipe.eval_rollout
        self._loss, self._normaliser, self._level = section.loss, section.normaliser, section.importance_sampling_level
        self._low, self._high, self._dual = section.epsilon, section.upper, section.dual_clip
        self._estimator, self._scale = section.advantage, section.scale_rewards
        self._beta, self._kl, self._kl_in = section.beta, section.kl, section.kl_in
        self._masks_truncated, self._overlong = section.mask_truncated, section.overlong_buffer
        self._patience, self._profile = section.patience, section.profile()
        self._max_gap, self._longest = rollout.max_logprob_gap, rollout.max_completion_length
        self._temperature = rollout.temperature
        self._drawing = Drawing(rollout.num_generations, self._longest, rollout.temperature, rollout.batch_size)
        self._eval_drawing = dataclasses.replace(
            self._drawing, num_generations=evaluation.num_generations, temperature=evaluation.temperature
        )
        self._pass_at, self._pass_reward = list(evaluation.pass_at), evaluation.pass_reward
        self._longest_prompt = recipe.data.max_length - self._longest
        self._template = context.template()
        self._rewards = Rewards(recipe.reward, context.rewards)
        self._idle = 0
        """Rollouts in a row in which no group has a signal."""
        self._gaps: list[Tensor] = []

    # data

    def make_samples(self, rows: Sequence[Prompt], counts: DropCounts) -> list[RolloutPrompt]:
        """Prompts that leave room for a completion."""
        texts, kept = [], []
        for number, row in enumerate(rows):
            try:
                texts.append(self._template.render(row.messages, add_generation_prompt=True, tools=row.tools))
                kept.append(row)
            except UserError as error:
                counts.bad(number, str(error))
        prompts = []
        for row, text, ids in zip(kept, texts, self.context.encode(texts)):
            if not ids:
                counts.drop("with a prompt of no tokens (nothing would predict the completion)")
            elif len(ids) > self._longest_prompt:
                counts.drop(
                    f"with a prompt of more than {self._longest_prompt} tokens (data.max_length less "
                    "rollout.max_completion_length)"
                )
            else:
                prompts.append(RolloutPrompt(tuple(ids), row.columns, text))
        return prompts

    def row_lengths(self, samples: Sequence[RolloutPrompt | Group]) -> np.ndarray | None:
        """[groups, completions], the last token of each being a target only; where the prompt is shared, [groups, 1]:
        once, and all completions."""
        if not all(isinstance(sample, Group) for sample in samples):
            return None
        rows = [[len(a) - 1 for a in sample.answers] for sample in samples]  # type: ignore[union-attr]
        if self.context.padding_free:
            prompts = [len(sample.completions[0].prompt_ids) for sample in samples]  # type: ignore[union-attr]
            rows = [[sum(row) - (len(row) - 1) * prompt] for row, prompt in zip(rows, prompts)]
        return np.array(rows, "int64")

    def collate(self, samples: Sequence[RolloutPrompt | Group]) -> Batch:
        """All completions of the groups: one a row with padding on the right, or all in one row, where those of a
        prompt share it."""
        groups = [sample for sample in samples if isinstance(sample, Group)]
        if len(groups) < len(samples):  # prompts have nothing to train on
            return {"num_tokens": sum(len(s.ids) for s in samples if isinstance(s, RolloutPrompt)), "num_supervised": 0}
        answers, one_row = [answer for group in groups for answer in group.answers], self.context.padding_free
        rows = [answers] if one_row else [[answer] for answer in answers]
        batch = pack_rows(rows, self.context.tokenizer.pad_id, self.context.length_multiple, shares_prompts=one_row)
        lengths = np.array([len(answer.ids) for answer in answers])
        counted = np.concatenate([group.is_counted for group in groups])
        weights, weight = rl_losses.token_weights(self._normaliser, lengths[counted], self._longest)
        batch["weights"] = np.zeros(lengths.sum(), "float32")
        batch["weights"][np.repeat(counted, lengths)] = weights
        batch["weight"] = weight
        batch["completion_lengths"] = lengths.tolist()
        batch["rewards"] = np.concatenate([group.advantages for group in groups])
        batch["advantages"] = np.repeat(batch["rewards"], lengths).astype("float32")
        drawn = [logprob for group in groups for c in group.completions for logprob in c.logprobs]
        batch["drawn"] = np.array(drawn, "float32")
        return batch

    # rollouts

    def roll_out(self, step: int, samples: Sequence[RolloutPrompt | Group], rollouts: Rollouts) -> RolledOut:
        """Draw a group for each prompt, and compare the rewards."""
        scored = self._draw(samples, step, self._drawing, rollouts)
        rewards, metrics = self._judge(scored)
        flat = np.array([c for group in scored.groups for c in group], object)
        if self._overlong is not None:
            lengths = np.array([len(c.ids) for c in flat])
            rewards = rewards + overlong_penalty(lengths, self._longest, self._overlong).reshape(rewards.shape)
        number = np.repeat(np.arange(len(rewards)), rewards.shape[1])
        scale: Scale = "none" if self._by_token else self._scale
        found = advantages(rewards.ravel(), number, self._estimator, scale).reshape(rewards.shape)
        counted = ~np.isnan(rewards)
        if self._masks_truncated:
            counted &= ~np.array([c.truncated for c in flat]).reshape(counted.shape)
        metrics["groups/without_signal"] = float(without_signal(rewards.ravel(), number).mean())
        compared = np.zeros_like(number) if self._estimator == "reinforce" else number
        self._check_signal(step, bool(without_signal(rewards.ravel(), compared).all()))
        groups = [Group(*parts) for parts in zip(scored.groups, found, counted)]
        names = self._rewards.names
        shown = np.full_like(found, np.nan) if self._by_token else found
        rows = completion_rows(scored.groups, scored.scores, names, rewards, shown, version=step - 1)
        return RolledOut(groups, metrics, rows)

    @property
    def _by_token(self) -> bool:
        """Whether `finish_rollout` makes advantages by token, of those of completions."""
        return self._kl_in == "reward"

    def finish_rollout(self, batches: Sequence[Batch], total: Total) -> Mapping[str, float]:
        """With the divergence in the reward: what comes from each token on, normalised over all tokens of the rollout
        (REINFORCE++, arXiv 2501.03262)."""
        if self._by_token:
            returns = [row for batch in batches for row in returns_to_go(rewards_by_token(batch, self._beta))]
            if self._scale == "batch":
                counted = [counts for batch in batches for counts in is_counted(batch)]
                returns = whitened(returns, counted=counted, total=total)
            put_advantages(batches, returns)
        return {}

    def evaluate_rollouts(self, samples: Sequence[RolloutPrompt | Group], rollouts: Rollouts) -> Mapping[str, float]:
        """Rewards, lengths, and pass@k."""
        scored = self._draw(samples, 0, self._eval_drawing, rollouts)
        rewards, metrics = self._judge(scored)
        right = (np.nan_to_num(rewards, nan=-np.inf) >= self._pass_reward).sum(1)
        for k in self._pass_at:
            metrics[f"pass@{k}"] = float(np.mean([pass_at(int(c), rewards.shape[1], k) for c in right]))
        return metrics

    def _draw(
        self, samples: Sequence[RolloutPrompt | Group], step: int, drawing: Drawing, rollouts: Rollouts
    ) -> Scored:
        prompts = [sample for sample in samples if isinstance(sample, RolloutPrompt)]
        assert len(prompts) == len(samples), "completed twice"
        score = functools.partial(self._rewards.score, total=len(prompts) * drawing.num_generations)
        scored = rollouts.draw(prompts, step, drawing, score, len(self._rewards.names))
        self._rewards.check(scored.scores)
        return scored

    def _judge(self, scored: Scored) -> tuple[np.ndarray, dict[str, float]]:
        """Rewards [prompts, completions], NaN where one is missing, and the metrics of completions and rewards."""
        rewards = self._rewards.total(scored.scores)
        flat = list(itertools.chain(*scored.groups))
        lengths = [len(c.ids) for c in flat]
        logprobs = np.concatenate([c.logprobs for c in flat])
        metrics = {
            "reward": _mean(rewards),
            "reward/std": _std(rewards),
            "rewards/missing": float(np.isnan(rewards).mean()),
            "entropy": float(-logprobs.mean()),  # an estimate without bias: the tokens are drawn from the model
            "completions/length": float(np.mean(lengths)),
            "completions/length_max": float(np.max(lengths)),
            "completions/truncated": float(np.mean([c.truncated for c in flat])),
        }
        for i, name in enumerate(self._rewards.names):
            metrics[f"rewards/{name}"], metrics[f"rewards/{name}/std"] = (
                measure(scored.scores[..., i]) for measure in (_mean, _std)
            )
        return rewards, metrics

    def _check_signal(self, step: int, is_idle: bool) -> None:
        """Raises UserError after `patience` rollouts without a signal."""
        self._idle = self._idle + 1 if is_idle else 0
        if self._patience is not None and self._idle >= self._patience:
            raise UserError(
                f"step {step}: in {self._idle} rollouts in a row (grpo.patience) all completions of each prompt had "
                "the same reward, so there is nothing to learn; look at completions.jsonl. Are the prompts too easy or "
                "too hard, are completions truncated before they can be right, does the reward never apply, or has too "
                "high a learning rate made the model say one thing only?"
            )

    def state(self) -> dict[str, Any]:
        return {"idle": self._idle}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._idle = int(state.get("idle", 0))

    # loss

    def prepass(self, kind: PrePassKind, model: Any, batch: Batch) -> Sums:
        """Log-probabilities of the tokens before the first update, or by the reference."""
        batch["old" if kind == "model" else "reference"] = self._logps(model, batch).numpy()
        return {}

    def _logps(self, model: Any, batch: Batch) -> Tensor:
        """[T]: log-probabilities of the tokens under the distribution they were drawn from."""
        hidden = hidden_at_positions(model, batch)  # [T, D]
        if self._temperature != 1:
            hidden = hidden / self._temperature  # as logits are linear in it
        return -model.token_nll(hidden, paddle.to_tensor(batch["targets"]))

    def loss(self, model: Any, batch: Batch) -> LossTerms:
        """Sum over the tokens; those of completions that do not count weigh 0."""
        logps = self._logps(model, batch)
        taken, weights = paddle.to_tensor(batch["advantages"]), paddle.to_tensor(batch["weights"])
        completions = rl_losses.Completions(batch["completion_lengths"])
        old = paddle.to_tensor(batch["old"]) if "old" in batch else logps.detach()
        ratio = rl_losses.ratios(logps, old, self._level, completions)
        if self._loss == "cispo":
            losses = rl_losses.cispo(ratio, logps, taken, 1 + self._high)
        elif self._loss == "sapo":
            losses = rl_losses.sapo(ratio, taken)
        else:
            losses = rl_losses.clipped(ratio, taken, self._low, self._high, self._dual)
        low, high = rl_losses.clip_shares(ratio, taken, self._low, self._high)
        gap = (old - paddle.to_tensor(batch["drawn"])).abs()
        if getattr(model, "is_last", True):
            self._gaps.append(gap.max())
        observed = {"ratio": ratio, "clip_ratio/low": low, "clip_ratio/high": high, "logprob_gap": gap}
        if "reference" in batch:
            observed["kl"] = rl_losses.kl(logps, paddle.to_tensor(batch["reference"]), self._kl)
            losses = losses + self._beta * observed["kl"] if self._kl_in == "loss" else losses
        count = float(len(batch["targets"]))
        sums = {name: (values.detach().sum(), count) for name, values in observed.items()}
        return LossTerms((losses * weights).sum(), batch["weight"], self._profile.checked(sums))

    def maxima(self) -> Mapping[str, float]:
        """The largest difference of a token's log-probabilities."""
        gaps, self._gaps = self._gaps, []
        return {"logprob_gap/max": float(paddle.stack(gaps).max())} if gaps else {}

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Check that rollouts and training compute the same model, and the reference the initial one."""
        if self._max_gap is not None and metrics["logprob_gap"] > self._max_gap:
            raise UserError(
                f"step {step}: log-probabilities of tokens as they were drawn and as the training pass computes them "
                f"differ by {metrics['logprob_gap']:.3g} on average, more than rollout.max_logprob_gap "
                f"{self._max_gap}: what would be learnt is not what was drawn"
            )


def _mean(values: np.ndarray) -> float:
    """Mean of those that are there; 0 if none is."""
    return float(np.nanmean(values)) if not np.isnan(values).all() else 0.0


def _std(values: np.ndarray) -> float:
    return float(np.nanstd(values)) if not np.isnan(values).all() else 0.0
