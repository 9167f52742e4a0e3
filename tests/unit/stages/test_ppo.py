"""What the stage `ppo` learns from fixed completions: advantages and returns by token, the critic's loss, and rules."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.base.errors import RecipeError
from llmsuite.contract.registry import Registry
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.engine.data import make_stage
from llmsuite.engine.stage import Batch
from llmsuite.recipe.critic import critic_plans
from llmsuite.recipe.resolve import RunPlan, plan_run
from llmsuite.rl.advantages import gae
from llmsuite.stages.grpo import Group
from llmsuite.stages.ppo import PpoStage
from tests.support.grpo_case import groups, rewards_of
from tests.support.paths import DATA, ROOT
from tests.support.sampled import sampled_positions

RECIPE = ROOT / "recipes" / "llama" / "ppo.json"
BETA = 0.05
SERVED = ("--rollout.engine=openai", '--rollout.openai.urls=["http://127.0.0.1:8000"]')


def planned(registry: Registry, *words: str) -> RunPlan:
    return plan_run(RECIPE, ["--rollout.max_completion_length=7", *words], registry, smoke=True)


def stage(registry: Registry, *words: str) -> PpoStage:
    plan = planned(registry, *words)
    made = make_stage(
        plan.model, plan.data, plan.parallel, plan.train, registry, lambda: "", TextTokenizer(DATA / "tokenizer")
    )
    assert isinstance(made, PpoStage)
    return made


def judged(made: PpoStage, sizes: tuple[int, ...]) -> list[Batch]:
    """Batches of the groups, with what the reference and the critic say."""
    rng = np.random.default_rng(3)
    rest = groups(by_token=True)
    batches = list[Batch]()
    for size in sizes:
        batches.append(made.collate(rest[:size]))
        rest = rest[size:]
        count = len(batches[-1]["targets"])
        batches[-1]["reference"] = rng.normal(-1, 0.5, count).astype("float32")
        batches[-1]["values"] = rng.normal(0, 1, count).astype("float32")
    return batches


def joined(batches: list[Batch], name: str) -> np.ndarray:
    return np.concatenate([batch[name] for batch in batches]).astype("float64")


@pytest.mark.parametrize("sizes", [(3,), (2, 1)])
def test_advantages_and_returns(registry: Registry, sizes: tuple[int, ...]) -> None:
    made = stage(registry, "--ppo.gamma=0.9", "--ppo.gae_lambda=0.8")
    batches = judged(made, sizes)
    metrics = made.finish_rollout(batches, list)
    flat = [
        (c, r, counts)
        for g in groups(by_token=True)
        for c, r, counts in zip(g.completions, rewards_of(g), g.is_trained)
    ]
    values = iter(joined(batches, "values"))
    reference = iter(joined(batches, "reference"))
    rewards = []
    critic = []
    kl = []
    counted = []
    for c, reward, counts in flat:
        logps = [next(reference) for _ in c.ids]
        rewards.append([-BETA * (own - other) for own, other in zip(c.logprobs, logps)])
        rewards[-1][-1] += reward
        critic.append([next(values) for _ in c.ids])
        kl.append(sum(c.logprobs) - sum(logps))
        counted += [counts] * len(c.ids)
    advantages, returns = (np.concatenate(rows) for rows in gae(rewards, critic, 0.9, 0.8))
    known = advantages[counted]
    error = (returns - np.concatenate(critic))[counted]
    expected = (advantages - known.mean()) / known.std(ddof=1)
    np.testing.assert_allclose(joined(batches, "advantages"), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(joined(batches, "returns"), returns, rtol=1e-5, atol=1e-6)
    wanted = {
        "returns": returns[counted].mean(),
        "critic/values": np.concatenate(critic)[counted].mean(),
        "critic/explained_variance": 1 - error.var() / returns[counted].var(),
        "kl/completion": np.mean(kl),
        "beta": BETA,
    }
    assert metrics == pytest.approx(wanted, rel=1e-6)


def test_observations_take_no_part_in_advantages(registry: Registry) -> None:
    made = stage(registry, "--ppo.gamma=0.9", "--ppo.gae_lambda=0.8", "--ppo.whiten_advantages=false")
    episodes = list[Group]()
    rest = groups(by_token=True)
    for group in rest:
        rows = []
        for c in group.completions:
            sampled_mask = [i % 3 != 1 for i in range(len(c.ids))]
            rows.append(
                dataclasses.replace(c, sampled_mask=sampled_mask, logprobs=[-1.0 - i for i in range(sum(sampled_mask))])
            )
        episodes.append(dataclasses.replace(group, completions=rows))
    assert any(len(c.ids) > c.num_sampled for group in episodes for c in group.completions)
    batch = made.collate(episodes)
    flat = [(c, reward) for group in episodes for c, reward in zip(group.completions, rewards_of(group))]
    count = sum(c.num_sampled for c, _ in flat)
    rng = np.random.default_rng(3)
    batch["reference"] = rng.normal(-1, 0.5, count).astype("float32")
    critic = Scores(rng.normal(0, 1, count).astype("float32"))
    batch["values"] = made.values(critic, batch).numpy()
    length = batch["input_ids"].shape[1]
    before = [row * length + len(c.prompt_ids) - 1 for row, (c, _) in enumerate(flat)]
    assert critic.places.tolist() == [begin + t for begin, (c, _) in zip(before, flat) for t in sampled_positions(c)]
    made.finish_rollout([batch], list)
    values = iter(joined([batch], "values"))
    reference = iter(joined([batch], "reference"))
    rewards = []
    value_rows = []
    for c, reward in flat:
        rewards.append([-BETA * (logprob - next(reference)) for logprob in c.logprobs])
        rewards[-1][-1] += reward
        value_rows.append([next(values) for _ in c.logprobs])
    advantages, returns = (np.concatenate(rows) for rows in gae(rewards, value_rows, 0.9, 0.8))
    np.testing.assert_allclose(joined([batch], "advantages"), advantages, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(joined([batch], "returns"), returns, rtol=1e-5, atol=1e-6)


def test_without_whitening_an_advantage_is_the_return_less_the_value(registry: Registry) -> None:
    made = stage(registry, "--ppo.whiten_advantages=false")
    batches = judged(made, (3,))
    made.finish_rollout(batches, list)
    expected = joined(batches, "returns") - joined(batches, "values")
    np.testing.assert_allclose(joined(batches, "advantages"), expected, rtol=1e-5, atol=1e-6)


class Scores:
    """A critic that says of every token the same, and its hidden states are its positions."""

    def __init__(self, values: np.ndarray):
        self.values = paddle.to_tensor(values, stop_gradient=False)

    def hidden_states(self, input_ids: Any, **more: Any) -> tuple[Any, list[Any]]:
        return paddle.arange(input_ids.size, dtype="float32").reshape([*input_ids.shape, 1]), []

    def scores(self, hidden: Any) -> Any:
        self.places = hidden.squeeze(-1).numpy().astype("int64")
        return self.values * 1.0


def test_the_value_of_a_token_is_that_of_the_state_in_front_of_it(registry: Registry) -> None:
    made = stage(registry)
    (batch,) = judged(made, (3,))
    critic = Scores(batch["values"])
    made.values(critic, batch)
    length = batch["input_ids"].shape[1]
    flat = [c for g in groups(by_token=True) for c in g.completions]
    expected = [row * length + len(c.prompt_ids) - 1 + t for row, c in enumerate(flat) for t in range(len(c.ids))]
    assert critic.places.tolist() == expected


def test_the_loss_of_the_critic(registry: Registry) -> None:
    made = stage(registry)
    (batch,) = judged(made, (3,))
    made.finish_rollout([batch], list)
    moved = batch["values"] + np.random.default_rng(4).normal(0, 0.3, len(batch["values"])).astype("float32")
    critic = Scores(moved)
    terms = made.critic_loss(critic, batch)
    near = batch["values"] + np.clip(moved - batch["values"], -0.2, 0.2)
    losses = np.maximum((moved - batch["returns"]) ** 2, (near - batch["returns"]) ** 2) / 2
    counted = batch["weights"] > 0
    assert 0 < counted.sum() < len(counted)
    assert float(terms.total) == pytest.approx(losses[counted].sum(), rel=1e-5)
    assert terms.weight == counted.sum()
    share = (np.abs(moved - batch["values"]) > 0.2)[counted]
    assert float(terms.sums["critic/clip_ratio"][0]) == share.sum()
    terms.total.backward()
    assert not critic.values.grad.numpy()[~counted].any()


@pytest.mark.parametrize(("rate", "words"), [(0.1, ()), (0.7, ("--ppo.kl_rate=0.7",))])
def test_the_weight_of_the_divergence_follows_its_target(
    registry: Registry, rate: float, words: tuple[str, ...]
) -> None:
    made = stage(registry, "--ppo.kl_target=1.0", *words)
    batches = judged(made, (3,))
    found = made.finish_rollout(batches, list)
    change = 1 + rate * np.clip(found["kl/completion"] / 1.0 - 1, -0.2, 0.2)
    assert found["beta"] == BETA
    again = stage(registry, "--ppo.kl_target=1.0")
    again.load_state(json.loads(json.dumps(made.state())))
    assert again.finish_rollout(judged(again, (3,)), list)["beta"] == pytest.approx(BETA * change)


def test_the_critic_is_a_run_with_other_weights_head_and_rate(registry: Registry, tmp_path: Path) -> None:
    plan = planned(registry, "--lora.rank=4", "--ppo.reference=adapter_off", f"--ppo.critic.weights={tmp_path}")
    critic = critic_plans(plan.model, plan.parallel, plan.train)
    assert critic is not None
    assert (critic.model.config.head, plan.model.config.head) == ("score", "language_model")
    assert critic.model.weights == tmp_path
    assert critic.train.section.learning_rate == 1e-3
    assert critic.model.lora.rank is None
    assert critic.train.section.weight_decay == plan.train.section.weight_decay
    assert plan.model.lora.rank == 4


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("ppo.beta", ["--ppo.reference=none"]),
        ("ppo.reference", ["--ppo.beta=0"]),
        ("ppo.kl_target", ["--ppo.beta=0", "--ppo.reference=none", "--ppo.kl_target=1"]),
        ("ppo.kl_rate", ["--ppo.kl_rate=0.5"]),
        ("ppo.dual_clip", ["--ppo.dual_clip=1.1"]),
        ("ppo.gamma", ["--ppo.gamma=1.1"]),
        ("ppo.advantage", ["--ppo.advantage=group"]),
        ("engine.precision", ["--engine.precision=fp16"]),
        ("checkpoint.save_steps", ["--ppo.updates=4", "--checkpoint.save_steps=2"]),
        ("ppo.reference", ["--lora.rank=8"]),
        ("rollout.max_staleness", ["--rollout.max_staleness=1"]),
        ("rollout.max_staleness", [*SERVED, "--rollout.max_staleness=1"]),
        ("ppo.correction_cap", ["--ppo.correction_cap=3"]),
        ("rollout.dynamic_sampling", ["--rollout.dynamic_sampling=true", "--rollout.num_generations=4"]),
    ],
)
def test_keys_that_cancel_each_other_are_refused(registry: Registry, key: str, words: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        plan_run(RECIPE, words, registry)
    assert key in [problem.key for problem in caught.value.problems]


def test_a_critic_of_another_shape_is_refused(registry: Registry, tmp_path: Path) -> None:
    config = planned(registry).model.config.to_hf()
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    with pytest.raises(RecipeError, match=r"ppo\.critic\.weights.*intermediate_size is 96 there"):
        planned(registry, f"--ppo.critic.weights={tmp_path}")
    (tmp_path / "config.json").write_text(json.dumps(config))
    planned(registry, f"--ppo.critic.weights={tmp_path}").check_files()


def test_a_missing_critic_is_an_error(registry: Registry) -> None:
    with pytest.raises(RecipeError, match=r"ppo\.critic\.weights: no/such is not a directory with a model"):
        planned(registry, "--ppo.critic.weights=no/such").check_files()
