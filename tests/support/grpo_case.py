"""The stage `grpo`, a tiny model, fixed completions, and rollouts with fixed rewards, for tests of stages too."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.contract.registry import Registry
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.devices.ops import Ops
from llmsuite.engine.data import make_stage
from llmsuite.inference.sampling import log_softmax
from llmsuite.models.dense import DenseLM
from llmsuite.models.families.llama import LlamaConfig
from llmsuite.models.initial_values import initial_values
from llmsuite.recipe.resolve import plan_run
from llmsuite.rl.completion import Completion
from llmsuite.rl.rollouts import RolloutPrompt, Scored
from llmsuite.stages.grpo import Group, GrpoStage
from tests.support.paths import DATA, ROOT

RECIPE = ROOT / "recipes" / "llama" / "grpo.json"
SHAPE = LlamaConfig(
    vocab_size=19, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=64,
)  # fmt: skip
PROMPTS = [[3, 4, 5], [6, 7], [8, 3, 9, 2]]
LENGTHS = [[3, 1, 5], [2, 7, 4], [1, 1, 6]]


def stage(registry: Registry, *words: str, padding_free: bool = False) -> GrpoStage:
    plan = plan_run(RECIPE, ["--rollout.max_completion_length=7", *words], registry, smoke=True)
    made = make_stage(
        plan.model,
        plan.data,
        plan.parallel,
        plan.train,
        registry,
        lambda: "",
        TextTokenizer(DATA / "tokenizer"),
        padding_free,
    )
    assert isinstance(made, GrpoStage)
    made.context = dataclasses.replace(made.context, caches_tokens=False)
    return made


def model() -> DenseLM:
    found = DenseLM(SHAPE, Ops())
    for name, parameter in found.named_parameters():
        parameter.set_value(initial_values(0, name, parameter.shape, 0.3) + (parameter.ndim == 1))
    return found


def groups(by_token: bool = False) -> list[Group]:
    """Three groups with advantages, or with the same numbers as rewards for token-level advantages."""
    rng = np.random.default_rng(0)
    found = []
    for number, (prompt, lengths) in enumerate(zip(PROMPTS, LENGTHS)):
        rows = [rng.integers(2, 19, length).tolist() for length in lengths]
        completions = [completion(prompt, row, group=number, number=i) for i, row in enumerate(rows)]
        counted = np.array([True, number != 1, True])
        numbers = rng.normal(size=3)
        if by_token:
            found.append(Group(completions, counted, rewards=numbers))
        else:
            found.append(Group(completions, counted, advantages=numbers))
    return found


def advantages_of(group: Group) -> np.ndarray:
    assert group.rewards is None
    assert group.advantages is not None
    return group.advantages


def rewards_of(group: Group) -> np.ndarray:
    assert group.advantages is None
    assert group.rewards is not None
    return group.rewards


def completion(prompt: Sequence[int], ids: Sequence[int], **more: Any) -> Completion:
    values = {"finish_reason": "stop", "text": "a", "columns": {}, "group": 0, "number": 0, **more}
    return Completion(prompt_ids=tuple(prompt), ids=ids, logprobs=[-1.0] * len(ids), **values)


def logps(live: DenseLM, c: Completion, temperature: float) -> np.ndarray:
    """Log-probability of each token, from a forward pass of its own."""
    ids = [*c.prompt_ids, *c.ids]
    with paddle.no_grad():
        logits = live(paddle.to_tensor([ids])).numpy()[0]
    next_logits = logits[len(c.prompt_ids) - 1 : -1] / temperature
    return np.array([log_softmax(row)[token] for row, token in zip(next_logits, c.ids)])


class Given:
    """Rollouts with these rewards."""

    def __init__(self, rewards: Sequence[Sequence[float]], truncated: bool = False):
        self._rewards = np.array(rewards, "float64")
        self._reason = "length" if truncated else "stop"
        self.next_samples = None

    def sample(self, prompts: Sequence[RolloutPrompt], *args: Any, **more: Any) -> Scored:
        count = self._rewards.shape[1]
        made = [
            [completion(p.ids, [5, 6, 7], group=i, number=n, finish_reason=self._reason) for n in range(count)]
            for i, p in enumerate(prompts)
        ]
        return Scored(made, self._rewards[..., None])


SAMPLES = [RolloutPrompt((1, 2)), RolloutPrompt((3,))]


class Stream:
    """Rollouts whose prompts have their own rewards, by their first token, and next prompts of the data."""

    def __init__(self, rewards: dict[int, list[float]], next_prompts: Sequence[int] = ()):
        self.rewards = rewards
        self.left = list(next_prompts)
        self.calls = list[tuple[list[int], int]]()

    def next_samples(self, count: int) -> list[RolloutPrompt]:
        taken = self.left[:count]
        self.left = self.left[count:]
        return [RolloutPrompt((first,)) for first in taken]

    def sample(self, prompts: Sequence[RolloutPrompt], *args: Any, **more: Any) -> Scored:
        before = args[-1]
        self.calls.append(([p.ids[0] for p in prompts], len(before)))
        found = Given([self.rewards[p.ids[0]] for p in prompts]).sample(prompts)
        groups = [[dataclasses.replace(c, group=c.group + len(before)) for c in group] for group in found.groups]
        return Scored(groups, found.scores)
