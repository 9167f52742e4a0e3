"""What the stage `grpo` learns from fixed completions, and what it says about a rollout."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.data.rows import Message, Prompt
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.devices.ops import Ops
from llmsuite.errors import RecipeError, UserError
from llmsuite.inference.sampling import log_softmax
from llmsuite.models.llama.config import LlamaConfig
from llmsuite.models.llama.layers import Llama
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.resolve import plan_run
from llmsuite.rl.completion import Completion
from llmsuite.rl.rollouts import RolloutPrompt, Scored
from llmsuite.stages import rl_losses
from llmsuite.stages.grpo import Group, GrpoStage
from llmsuite.train.data import make_stage
from llmsuite.train.initial_values import initial_values
from llmsuite.train.stage import DropCounts
from tests.paths import DATA, ROOT

RECIPE = ROOT / "recipes" / "llama" / "grpo.json"
SHAPE = LlamaConfig(
    vocab_size=19, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=64,
)  # fmt: skip
PROMPTS = [[3, 4, 5], [6, 7], [8, 3, 9, 2]]
LENGTHS = [[3, 1, 5], [2, 7, 4], [1, 1, 6]]


def stage(registry: Registry, *words: str, padding_free: bool = False) -> GrpoStage:
    plan = plan_run(RECIPE, ["--rollout.max_completion_length=7", *words], registry, smoke=True)
    made = make_stage(plan, registry, lambda: "", TextTokenizer(DATA / "tokenizer"), padding_free)
    assert isinstance(made, GrpoStage)
    made.context = dataclasses.replace(made.context, keeps_tokens=False)
    return made


def model() -> Llama:
    found = Llama(SHAPE, Ops())
    for name, parameter in found.named_parameters():
        parameter.set_value(initial_values(0, name, parameter.shape, 0.3) + (parameter.ndim == 1))
    return found


def groups() -> list[Group]:
    draw = np.random.default_rng(0)
    found = []
    for number, (prompt, lengths) in enumerate(zip(PROMPTS, LENGTHS)):
        rows = [draw.integers(2, 19, length).tolist() for length in lengths]
        completions = [completion(prompt, row, group=number, number=i) for i, row in enumerate(rows)]
        counted = np.array([True, number != 1, True])
        found.append(Group(completions, draw.normal(size=3), counted))
    return found


def completion(prompt: Sequence[int], ids: Sequence[int], **more: Any) -> Completion:
    values = {"finish_reason": "stop", "text": "a", "columns": {}, "group": 0, "number": 0, **more}
    return Completion(prompt_ids=tuple(prompt), ids=ids, logprobs=[-1.0] * len(ids), **values)


def logps(live: Llama, c: Completion, temperature: float) -> np.ndarray:
    """Log-probability of each token, from a forward pass of its own."""
    ids = [*c.prompt_ids, *c.ids]
    with paddle.no_grad():
        logits = live(paddle.to_tensor([ids])).numpy()[0]
    behind = logits[len(c.prompt_ids) - 1 : -1] / temperature
    return np.array([log_softmax(row)[token] for row, token in zip(behind, c.ids)])


def expected_loss(live: Llama, old: Sequence[np.ndarray], temperature: float, loss: str) -> float:
    """The losses of the papers, completion by completion, with clip 0.2 and 0.28."""
    total, weight = 0.0, 0.0
    flat = [(c, a, k) for group in groups() for c, a, k in zip(group.completions, group.advantages, group.is_counted)]
    for (c, advantage, is_counted), before in zip(flat, old):
        if not is_counted:
            continue
        now = logps(live, c, temperature)
        ratio = np.exp(now - before)
        if loss == "gspo":
            ratio = np.full_like(ratio, np.exp((now - before).mean()))
        terms = -np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage)
        if loss == "cispo":
            terms = -np.minimum(ratio, 1.28) * advantage * now
        total += {"dapo": terms.sum(), "cispo": terms.sum(), "dr_grpo": terms.sum() / 7}.get(loss, terms.mean())
        weight += len(c.ids) if loss in ("dapo", "cispo") else 1
    return total / weight


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo", "cispo", "gspo"])
@pytest.mark.parametrize(("temperature", "padding_free"), [(1.0, False), (0.7, True)])
def test_losses_are_those_of_the_papers(registry: Registry, loss: str, temperature: float, padding_free: bool) -> None:
    words = (
        ["--grpo.loss=grpo", "--grpo.importance_sampling_level=sequence"] if loss == "gspo" else [f"--grpo.loss={loss}"]
    )
    clip = ["--grpo.epsilon_high=0.28", f"--rollout.temperature={temperature}"]
    made, live = stage(registry, *words, *clip, padding_free=padding_free), model()
    moved = np.random.default_rng(1)
    flat = [c for group in groups() for c in group.completions]
    old = [logps(live, c, temperature) + moved.normal(0, 0.3, len(c.ids)) for c in flat]
    batch = made.collate(groups())
    batch["old"] = np.concatenate(old).astype("float32")
    terms = made.loss(live, batch)
    assert float(terms.total) / terms.weight == pytest.approx(expected_loss(live, old, temperature, loss), rel=2e-5)


@pytest.mark.parametrize("padding_free", [False, True])
def test_what_an_environment_says_is_read_and_not_learnt(registry: Registry, padding_free: bool) -> None:
    """The loss is that of the model's own tokens, each after all that stands before it."""
    made, live = stage(registry, padding_free=padding_free), model()
    episodes, count = [], 0
    for group in groups():
        rows = []
        for c, is_counted in zip(group.completions, group.is_counted):
            is_own = [i % 3 != 1 for i in range(len(c.ids))]
            rows.append(dataclasses.replace(c, is_own=is_own, logprobs=[-1.0] * sum(is_own)))
            count += sum(is_own) if is_counted else 0
        episodes.append(dataclasses.replace(group, completions=rows))
    batch = made.collate(episodes)
    assert batch["num_supervised"] == sum(c.num_own for group in episodes for c in group.completions)
    assert batch["completion_lengths"] == [c.num_own for group in episodes for c in group.completions]
    found = made.loss(live, batch)
    assert found.weight == count
    # at a ratio of 1 the clip is not felt, so that the gradient is that of -advantage x log p
    (found.total / found.weight).backward()
    gradient = {name: p.grad.numpy().copy() for name, p in live.named_parameters() if p.grad is not None}
    expected = _gradient_of_own_tokens(episodes, count)
    assert gradient.keys() == expected.keys()
    for name in gradient:
        assert np.abs(gradient[name] - expected[name]).max() <= 1e-6 * max(1.0, np.abs(expected[name]).max()), name


def _gradient_of_own_tokens(episodes: Sequence[Group], count: int) -> dict[str, np.ndarray]:
    """Of -advantage x log p, completion by completion, by forward passes of their own."""
    live = model()
    for group in episodes:
        for c, advantage, is_counted in zip(group.completions, group.advantages, group.is_counted):
            if is_counted:
                logits = live(paddle.to_tensor([[*c.prompt_ids, *c.ids]]))[0]
                behind = logits[len(c.prompt_ids) - 1 : -1]
                found = paddle.nn.functional.log_softmax(behind)[list(range(len(c.ids))), list(c.ids)]
                (-float(advantage) / count * sum(found[i] for i in c.own)).backward()
    return {name: p.grad.numpy() for name, p in live.named_parameters() if p.grad is not None}


def _gradients(made: GrpoStage, size: int) -> tuple[dict[str, np.ndarray], list[float]]:
    live, weight, ratios = model(), 0.0, []
    samples = groups()
    for i in range(0, len(samples), size):
        terms = made.loss(live, made.collate(samples[i : i + size]))
        terms.total.backward()
        weight += terms.weight
        total, count = terms.sums["ratio"]
        ratios.append(float(total) / count)
    return {name: p.grad.numpy() / weight for name, p in live.named_parameters()}, ratios


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo"])
def test_a_gradient_does_not_depend_on_the_cut(registry: Registry, loss: str) -> None:
    whole, ratios = _gradients(stage(registry, f"--grpo.loss={loss}"), 3)
    assert ratios == [1.0]
    for size, padding_free in itertools.product((1, 2, 3), (False, True)):
        found, ratios = _gradients(stage(registry, f"--grpo.loss={loss}", padding_free=padding_free), size)
        assert set(ratios) == {1.0}
        for name, expected in whole.items():
            assert np.abs(found[name] - expected).max() <= 1e-6 * max(1.0, np.abs(expected).max()), name


def _entropies(live: Llama, c: Completion, temperature: float) -> np.ndarray:
    with paddle.no_grad():
        logits = live(paddle.to_tensor([[*c.prompt_ids, *c.ids]])).numpy()[0]
    rows = np.array([log_softmax(row) for row in logits[len(c.prompt_ids) - 1 : -1] / temperature])
    return -(np.exp(rows) * rows).sum(-1)


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo"])
def test_the_entropy_is_a_mean_over_tokens_whatever_the_loss_is(registry: Registry, loss: str) -> None:
    words, live = [f"--grpo.loss={loss}", "--rollout.temperature=0.7"], model()
    counted = [c for g in groups() for c, counts in zip(g.completions, g.is_counted) if counts]
    normaliser = {"dapo": "token_mean", "grpo": "sequence_mean", "dr_grpo": "constant"}[loss]
    weight = rl_losses.entropy_weight(normaliser, [len(c.ids) for c in counted], 7)  # type: ignore[arg-type]
    weighed = [dataclasses.replace(group, entropy_weight=weight) for group in groups()]

    def value(coef: float, size: int) -> float:
        made = stage(registry, *words, f"--grpo.entropy_coef={coef}", padding_free=size == 2)
        terms = [made.loss(live, made.collate(weighed[i : i + size])) for i in range(0, 3, size)]
        return sum(float(t.total) for t in terms) / sum(t.weight for t in terms)

    mean = np.concatenate([_entropies(live, c, 0.7) for c in counted]).mean()
    for size in (1, 2, 3):
        assert value(0.5, size) - value(0.0, size) == pytest.approx(-0.5 * mean, abs=2e-6)


def test_rollouts_weigh_entropies_by_their_own_global_batch(registry: Registry) -> None:
    words = ["--train.global_batch_size=1", "--checkpoint.save_steps=2", "--launch.num_devices=4"]
    rl = ["--grpo.updates=2", "--grpo.entropy_coef=0.1", "--grpo.loss=grpo", "--reward.max_failed=0.5"]
    made = stage(registry, *words, *rl)
    first, second = _roll(made, [[1.0, np.nan, 0.0, 0.0, 0.0], [1.0] * 5]).samples
    assert (first.entropy_weight, second.entropy_weight) == (4 / 12, 5 / 15)
    assert rl_losses.entropy_weight("sequence_mean", [], 7) == 0.0


def test_completions_that_do_not_count_change_nothing(registry: Registry) -> None:
    made, live, changed = stage(registry), model(), groups()
    assert not changed[1].is_counted[1]
    before = made.loss(live, made.collate(changed))
    changed[1].advantages[1] = 1e3
    after = made.loss(live, made.collate(changed))
    assert float(before.total) == float(after.total)
    assert after.weight == sum(map(sum, LENGTHS)) - LENGTHS[1][1]


class Given:
    """Rollouts with these rewards."""

    def __init__(self, rewards: Sequence[Sequence[float]], truncated: bool = False):
        self._rewards = np.array(rewards, "float64")
        self._reason = "length" if truncated else "stop"
        self.further = None

    def draw(self, prompts: Sequence[RolloutPrompt], *args: Any, **more: Any) -> Scored:
        count = self._rewards.shape[1]
        made = [
            [completion(p.ids, [5, 6, 7], group=i, number=n, finish_reason=self._reason) for n in range(count)]
            for i, p in enumerate(prompts)
        ]
        return Scored(made, self._rewards[..., None])


SAMPLES = [RolloutPrompt((1, 2)), RolloutPrompt((3,))]


def _roll(made: GrpoStage, rewards: Sequence[Sequence[float]], step: int = 1, **how: Any) -> Any:
    return made.roll_out(step, SAMPLES, Given(rewards, **how))  # type: ignore[arg-type]


def test_a_rollout_compares_the_completions_of_a_prompt(registry: Registry) -> None:
    rolled = _roll(stage(registry), [[1.0, 0.0], [1.0, 1.0]])
    first, second = rolled.samples
    assert first.advantages == pytest.approx([0.5 / (0.5**0.5 + 1e-4), -0.5 / (0.5**0.5 + 1e-4)])
    assert second.advantages.tolist() == [0.0, 0.0]
    assert {name: rolled.metrics[name] for name in ("reward", "rewards/format", "groups/without_signal")} == {
        "reward": 0.75, "rewards/format": 0.75, "groups/without_signal": 0.5,
    }  # fmt: skip
    assert (rolled.metrics["completions/length"], rolled.metrics["entropy"]) == (3.0, 1.0)


def test_a_missing_reward_is_not_learnt_from(registry: Registry) -> None:
    made = stage(registry, "--reward.max_failed=0.5")
    rolled = _roll(made, [[1.0, np.nan, 0.0], [1.0, 1.0, 0.0]])
    assert rolled.samples[0].is_counted.tolist() == [True, False, True]
    assert rolled.samples[0].advantages[1] == 0
    assert rolled.metrics["rewards/missing"] == pytest.approx(1 / 6)
    with pytest.raises(UserError, match=r"reward\.max_failed"):
        _roll(made, [[np.nan, np.nan, 0.0], [1.0, np.nan, np.nan]])


def test_the_divergence_in_the_reward(registry: Registry) -> None:
    """REINFORCE++, eqs. 4 and 5: by token r 1(end) - beta log(p / p_ref), summed from the token on, normalised."""
    words = ["--grpo.kl_in=reward", "--grpo.beta=0.1", "--grpo.reference=copy", "--grpo.advantage=reinforce"]
    made, samples = stage(registry, *words, "--grpo.scale_rewards=batch"), groups()
    batches = [made.collate(samples[:2]), made.collate(samples[2:])]
    draw, wanted, counted = np.random.default_rng(2), [], []
    for batch, part in zip(batches, (samples[:2], samples[2:])):
        batch["reference"] = draw.normal(-1, 0.5, len(batch["targets"])).astype("float32")
        given = iter(batch["reference"].astype("float64"))
        for c, reward, counts in [x for g in part for x in zip(g.completions, g.advantages, g.is_counted)]:
            rewards = [-0.1 * (logp - next(given)) for logp in c.logprobs]
            rewards[-1] += reward
            wanted += [sum(rewards[t:]) for t in range(len(rewards))]
            counted += [counts] * len(rewards)
    assert made.finish_rollout(batches, list) == {}
    known = np.array(wanted)[counted]
    expected = (np.array(wanted) - known.mean()) / known.std(ddof=1)
    found = np.concatenate([batch["advantages"] for batch in batches])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    live = model()
    assert float(made.loss(live, batches[0]).sums["ratio"][0]) == len(batches[0]["targets"])


def test_rewards_of_one_completion_a_prompt_are_compared_over_the_batch(registry: Registry) -> None:
    made = stage(registry, "--grpo.advantage=reinforce", "--grpo.scale_rewards=batch", "--grpo.patience=2")
    for _ in range(3):
        rolled = _roll(made, [[1.0], [0.0]])
    assert rolled.samples[0].advantages == pytest.approx([0.5 / (0.5**0.5 + 1e-4)])


def test_truncated_completions_are_masked_or_cost(registry: Registry) -> None:
    rewards = [[1.0, 0.0], [1.0, 0.0]]
    masked = _roll(stage(registry, "--grpo.mask_truncated=true"), rewards, truncated=True)
    assert not any(sample.is_counted.any() for sample in masked.samples)
    assert masked.metrics["completions/truncated"] == 1
    assert stage(registry).collate(masked.samples)["weight"] == 0
    costly = _roll(stage(registry, "--grpo.overlong_buffer=6", "--grpo.scale_rewards=none"), rewards)
    assert costly.samples[0].advantages == pytest.approx([0.5, -0.5])  # all are as long
    assert costly.metrics["reward"] == 0.5
    # of 7 tokens 3: longer than a completion may be, the buffer begins with the first
    whole = ["--grpo.overlong_buffer=205", "--grpo.advantage=reinforce", "--grpo.scale_rewards=none"]
    assert _roll(stage(registry, *whole), rewards).samples[0].advantages == pytest.approx([1 - 3 / 7, -3 / 7])


class Stream:
    """Rollouts whose prompts have rewards of their own, by their first token, and further prompts."""

    def __init__(self, rewards: dict[int, list[float]], further: Sequence[int] = ()):
        self.rewards, self.left, self.calls = rewards, list(further), list[tuple[list[int], int]]()

    def further(self, count: int) -> list[RolloutPrompt]:
        taken, self.left = self.left[:count], self.left[count:]
        return [RolloutPrompt((first,)) for first in taken]

    def draw(self, prompts: Sequence[RolloutPrompt], *args: Any, **more: Any) -> Scored:
        before = args[-1]
        self.calls.append(([p.ids[0] for p in prompts], len(before)))
        found = Given([self.rewards[p.ids[0]] for p in prompts]).draw(prompts)
        groups = [[dataclasses.replace(c, group=c.group + len(before)) for c in group] for group in found.groups]
        return Scored(groups, found.scores)


def _sampled(registry: Registry, stream: Stream, first: Sequence[int], *words: str) -> Any:
    made = stage(registry, "--rollout.dynamic_sampling=true", *words)
    return made.roll_out(1, [RolloutPrompt((number,)) for number in first], stream)  # type: ignore[arg-type]


def test_prompts_without_a_signal_are_replaced_by_those_behind(registry: Registry) -> None:
    same, other = [1.0, 1.0], [1.0, 0.0]
    stream = Stream({1: same, 2: other, 3: same, 4: [0.0, 0.0], 5: other, 6: other, 7: other}, [4, 5, 6, 7])
    rolled = _sampled(registry, stream, [1, 2, 3])
    assert stream.calls == [([1, 2, 3], 0), ([4, 5, 6], 3)]  # one of three had a signal: six for two, three at most
    assert [sample.completions[0].prompt_ids for sample in rolled.samples] == [(2,), (5,), (6,)]
    assert all(sample.is_counted.all() and sample.advantages.any() for sample in rolled.samples)
    named = {name: rolled.metrics[f"groups/{name}"] for name in ("without_signal", "drawn", "missing")}
    assert named == {"without_signal": 0.5, "drawn": 6, "missing": 0}
    assert rolled.metrics["reward"] == pytest.approx((2 + 1 + 2 + 0 + 1 + 1) / 12)
    assert [row["group"] for row in rolled.completions[::2]] == [0, 1, 2, 3, 4, 5]
    assert [row["advantage"] != 0 for row in rolled.completions[::2]] == [False, True, False, False, True, True]


def test_rounds_are_bounded_and_what_is_missing_is_counted(registry: Registry) -> None:
    rewards = {1: [1.0, 1.0], 2: [1.0, 0.0], 3: [0.0, 0.0], 4: [0.0, 0.0], 5: [1.0, 0.0]}
    stream = Stream(rewards, [3, 4, 5])
    rolled = _sampled(registry, stream, [1, 2], "--rollout.max_rounds=2")
    assert [drawn for drawn, _ in stream.calls] == [[1, 2], [3, 4]]
    assert [sample.is_counted.tolist() for sample in rolled.samples] == [[False, False], [True, True]]
    assert (rolled.metrics["groups/missing"], rolled.metrics["groups/drawn"]) == (1, 4)
    assert stage(registry).collate(rolled.samples)["weight"] == 6  # tokens of one group


def test_rewards_may_be_missing_of_a_step_not_of_a_round(registry: Registry) -> None:
    rewards = {1: [1.0, 0.0], 2: [1.0, 1.0], 3: [1.0, np.nan], 4: [1.0, 0.0]}
    rolled = _sampled(registry, Stream(rewards, [3, 4]), [1, 2], "--reward.max_failed=0.15")
    assert rolled.metrics["groups/drawn"] == 4
    with pytest.raises(UserError, match=r"reward\.max_failed"):
        _sampled(registry, Stream(rewards, [3, 4]), [1, 2], "--reward.max_failed=0.12")


def test_what_is_taken_off_long_completions_is_no_signal(registry: Registry) -> None:
    class Lengths(Stream):
        def draw(self, prompts: Sequence[RolloutPrompt], *args: Any, **more: Any) -> Scored:
            scored = super().draw(prompts, *args)
            groups = [[dataclasses.replace(c, ids=[5] * (3 + n), logprobs=[-1.0] * (3 + n)) for n, c in enumerate(g)]
                      for g in scored.groups]  # fmt: skip
            return Scored(groups, scored.scores)

    stream = Lengths({1: [1.0, 1.0], 2: [1.0, 0.0]}, [2])
    rolled = _sampled(registry, stream, [1], "--grpo.overlong_buffer=6")
    assert [sample.completions[0].prompt_ids for sample in rolled.samples] == [(2,)]


def test_a_run_without_a_signal_stops(registry: Registry) -> None:
    made = stage(registry, "--grpo.patience=3")
    same, different = [[1.0, 1.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 0.0]]
    for rewards in (same, same, different, same, same):
        _roll(made, rewards)
    again = stage(registry, "--grpo.patience=3")
    again.load_state(made.state())
    for resumed in (made, again):
        with pytest.raises(UserError, match=r"step 9: in 3 rollouts in a row \(grpo.patience\)"):
            _roll(resumed, same, step=9)


def test_what_is_not_what_was_drawn_stops_the_run(registry: Registry) -> None:
    made = stage(registry)
    made.after_step(1, {"logprob_gap": 0.09})
    with pytest.raises(UserError, match="what would be learnt is not what was drawn"):
        made.after_step(1, {"logprob_gap": 0.11})


def test_evaluations_have_pass_at_k(registry: Registry) -> None:
    words = ["--eval_rollout.num_generations=4", "--eval_rollout.temperature=1", "--eval_rollout.pass_at=[1,2,4]"]
    made = stage(registry, *words)
    metrics = made.evaluate_rollouts(SAMPLES, Given([[1.0, 0, 0, 0], [0, 0, 0, 0]]))  # type: ignore[arg-type]
    assert [metrics[f"pass@{k}"] for k in (1, 2, 4)] == [0.125, 0.25, 0.5]


def test_prompts_keep_their_columns_and_leave_room(registry: Registry) -> None:
    made = stage(registry, "--data.max_length=40")
    rows = [Prompt((Message("user", text),), columns={"answer": text}) for text in ("2", "long " * 40)]
    counts = DropCounts(RECIPE, 2)
    (prompt,) = made.make_samples(rows, counts)
    assert prompt.columns == {"answer": "2"}
    assert made.context.tokenizer.decode(prompt.ids).strip().startswith(("user", "2"))
    assert counts.dropped == {
        "with a prompt of more than 33 tokens (data.max_length less rollout.max_completion_length)": 1
    }


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("rollout.max_completion_length", ["--data.max_length=1024"]),
        ("rollout.num_generations", ["--rollout.num_generations=1"]),
        ("checkpoint.save_steps", ["--grpo.updates=4", "--checkpoint.save_steps=2"]),
        ("train.max_steps", ["--grpo.updates=3", "--checkpoint.save_steps=3", "--train.eval_steps=3"]),
        ("train.on_nonfinite", ["--train.on_nonfinite=roll_back"]),
        ("lora.base_dtype", ["--lora.rank=8", "--lora.base_dtype=nf4"]),
        ("lora.dropout", ["--lora.rank=8", "--lora.dropout=0.1"]),
        ("grpo.reference", ["--lora.rank=8", "--grpo.reference=copy", "--grpo.beta=0.1"]),
        ("grpo.reference", ["--grpo.reference=adapter_off", "--grpo.beta=0.1"]),
        ("grpo.reference", ["--grpo.reference=copy"]),
        ("grpo.beta", ["--grpo.beta=0.1"]),
        ("grpo.kl", ["--grpo.kl=k2"]),
        ("grpo.kl_in", ["--grpo.kl_in=reward"]),
        ("grpo.kl_in", ["--grpo.kl_in=reward", "--grpo.beta=0.1", "--grpo.reference=copy"]),
        (
            "grpo.kl",
            [
                "--grpo.kl_in=reward",
                "--grpo.beta=0.1",
                "--grpo.reference=copy",
                "--grpo.advantage=reinforce",
                "--grpo.scale_rewards=batch",
                "--grpo.kl=k2",
            ],
        ),
        ("grpo.epsilon", ["--grpo.loss=cispo", "--grpo.epsilon=0.1"]),
        ("grpo.epsilon_high", ["--grpo.loss=sapo", "--grpo.epsilon_high=0.1"]),
        ("grpo.dual_clip", ["--grpo.dual_clip=1.1"]),
        ("grpo.scale_rewards", ["--grpo.advantage=reinforce"]),
        ("rollout.max_rounds", ["--rollout.max_rounds=3"]),
        ("rollout.dynamic_sampling", ["--rollout.dynamic_sampling=true", "--rollout.num_generations=1"]),
        ("train.num_epochs", ["--rollout.dynamic_sampling=true", "--train.max_steps=null", "--train.num_epochs=1"]),
        ("train.eval_steps", ["--rollout.dynamic_sampling=true", "--train.eval_steps=epoch"]),
        ("data.num_workers", ["--data.num_workers=2"]),
        ("eval_rollout.pass_at", ["--eval_rollout.pass_at=[2]"]),
        ("eval_rollout.num_generations", ["--eval_rollout.num_generations=2"]),
        ("rollout.top_p", ["--rollout.top_p=0.9"]),
        ("reward.functions", ['--reward.functions={"no_such_reward": 1}']),
        ("reward.functions", ['--reward.functions={"environment": 1}']),
        ("environment.name", ["--environment.name=no_such_environment"]),
        ("environment.name", ["--environment.name=no_such_file.py:Game"]),
        ("environment.guess.lowest", ["--environment.name=guess", "--environment.guess.lowest=10"]),
    ],
)
def test_what_cancels_itself_is_refused(registry: Registry, key: str, words: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        plan_run(RECIPE, words, registry)
    assert key in [problem.key for problem in caught.value.problems]
