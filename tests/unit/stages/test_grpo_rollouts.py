"""What the stage `grpo` makes of a rollout: advantages, metrics, other prompts, and when the run stops."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmsuite.base.errors import UserError
from llmsuite.contract.registry import Registry
from llmsuite.data.rows import Message, Prompt
from llmsuite.engine.stage import DropCounts
from llmsuite.rl.rollouts import RolloutPrompt, Scored
from llmsuite.stages import rl_losses
from llmsuite.stages.grpo import GrpoStage
from tests.support.grpo_case import RECIPE, SAMPLES, Given, Stream, advantages_of, groups, model, rewards_of, stage


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


def test_lengths_of_ended_completions_have_their_own_metric(registry: Registry) -> None:
    """Truncated ones hide how long the others are."""
    given = Given([[1.0, 0.0, 0.0]] * 2)
    scored = given.sample(SAMPLES)
    longer = {"ids": [5] * 7, "logprobs": [-1.0] * 7, "finish_reason": "length"}
    scored.groups[0][1] = dataclasses.replace(scored.groups[0][1], **longer)  # type: ignore[arg-type]
    given.sample = lambda *args, **more: scored  # type: ignore[method-assign]
    metrics = stage(registry).roll_out(1, SAMPLES, given).metrics  # type: ignore[arg-type]
    lengths = {name: metrics[f"completions/{name}"] for name in ("length", "length_min", "length_max", "length_ended")}
    assert lengths == pytest.approx({"length": 22 / 6, "length_min": 3, "length_max": 7, "length_ended": 3})
    assert "completions/length_ended" not in _roll(stage(registry), [[1.0, 0.0]] * 2, truncated=True).metrics


def test_a_completion_without_a_reward_is_not_trained_on(registry: Registry) -> None:
    made = stage(registry, "--reward.max_failed=0.5")
    rolled = _roll(made, [[1.0, np.nan, 0.0], [1.0, 1.0, 0.0]])
    assert rolled.samples[0].is_trained.tolist() == [True, False, True]
    assert rolled.samples[0].advantages[1] == 0
    assert rolled.metrics["rewards/missing"] == pytest.approx(1 / 6)
    with pytest.raises(UserError, match=r"reward\.max_failed"):
        _roll(made, [[np.nan, np.nan, 0.0], [1.0, np.nan, np.nan]])


def test_the_divergence_in_the_reward(registry: Registry) -> None:
    """REINFORCE++, eqs. 4 and 5: by token r 1(end) - beta log(p / p_ref), summed from the token on, normalised."""
    words = ["--grpo.kl_in=reward", "--grpo.beta=0.1", "--grpo.reference=copy", "--grpo.advantage=reinforce"]
    made = stage(registry, *words, "--grpo.scale_rewards=batch")
    samples = groups(by_token=True)
    batches = [made.collate(samples[:2]), made.collate(samples[2:])]
    rng = np.random.default_rng(2)
    wanted = []
    counted = []
    for batch, part in zip(batches, (samples[:2], samples[2:])):
        batch["reference"] = rng.normal(-1, 0.5, len(batch["targets"])).astype("float32")
        given = iter(batch["reference"].astype("float64"))
        for c, reward, counts in [x for g in part for x in zip(g.completions, rewards_of(g), g.is_trained)]:
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


def test_rollouts_weigh_entropies_by_their_own_global_batch(registry: Registry) -> None:
    words = ["--train.global_batch_size=1", "--checkpoint.save_steps=2", "--launch.num_devices=4"]
    rl = ["--grpo.updates=2", "--grpo.entropy_coef=0.1", "--grpo.loss=grpo", "--reward.max_failed=0.5"]
    made = stage(registry, *words, *rl)
    first, second = _roll(made, [[1.0, np.nan, 0.0, 0.0, 0.0], [1.0] * 5]).samples
    assert (first.entropy_weight, second.entropy_weight) == (4 / 12, 5 / 15)
    assert rl_losses.entropy_weight("sequence_mean", [], [], 7) == 0.0


def test_truncated_completions_are_masked_or_cost(registry: Registry) -> None:
    rewards = [[1.0, 0.0], [1.0, 0.0]]
    masked = _roll(stage(registry, "--grpo.mask_truncated=true"), rewards, truncated=True)
    assert not any(sample.is_trained.any() for sample in masked.samples)
    assert masked.metrics["completions/truncated"] == 1
    assert stage(registry).collate(masked.samples)["weight"] == 0
    costly = _roll(stage(registry, "--grpo.overlong_buffer=6", "--grpo.scale_rewards=none"), rewards)
    assert costly.samples[0].advantages == pytest.approx([0.5, -0.5])  # all are as long
    assert costly.metrics["reward"] == 0.5
    # of 7 tokens 3: longer than a completion may be, the buffer begins with the first
    whole = ["--grpo.overlong_buffer=205", "--grpo.advantage=reinforce", "--grpo.scale_rewards=none"]
    assert _roll(stage(registry, *whole), rewards).samples[0].advantages == pytest.approx([1 - 3 / 7, -3 / 7])


def test_masked_completions_count_in_the_mean_of_the_loss(registry: Registry) -> None:
    """As overlong_filter of ms-swift, which divides by all completions of the batch."""
    rewards = [[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    for loss, of_all in (("grpo", 6), ("dr_grpo", 6), ("dapo", 18)):
        words = [f"--grpo.loss={loss}", "--grpo.mask_truncated=true", "--grpo.count_truncated=true"]
        made = stage(registry, *words)
        rolled = _roll(made, rewards, truncated=True)
        batch = made.collate(rolled.samples)
        assert batch["weight"] == of_all, loss
        assert not batch["weights"].any()
    fresh = _roll(stage(registry, *words), rewards)
    assert all((sample.is_counted == sample.is_trained).all() for sample in fresh.samples)
    failed = _roll(stage(registry, *words, "--reward.max_failed=0.5"), [[1.0, np.nan, 0.0], [1.0, 0.0, 0.0]])
    assert [sample.is_counted.sum() for sample in failed.samples] == [2, 3]  # those without a reward do not count


def test_entropies_have_the_weight_of_what_counts() -> None:
    assert rl_losses.entropy_weight("sequence_mean", [2, 4], [2, 4, 6], 7) == 3 / 6
    assert rl_losses.entropy_weight("token_mean", [2, 4], [2, 4, 6], 7) == 12 / 6


def _sampled(registry: Registry, stream: Stream, first: Sequence[int], *words: str) -> Any:
    made = stage(registry, "--rollout.dynamic_sampling=true", *words)
    return made.roll_out(1, [RolloutPrompt((number,)) for number in first], stream)  # type: ignore[arg-type]


def test_prompts_without_a_signal_are_replaced_by_the_next_ones(registry: Registry) -> None:
    same = [1.0, 1.0]
    other = [1.0, 0.0]
    stream = Stream({1: same, 2: other, 3: same, 4: [0.0, 0.0], 5: other, 6: other, 7: other}, [4, 5, 6, 7])
    rolled = _sampled(registry, stream, [1, 2, 3])
    assert stream.calls == [([1, 2, 3], 0), ([4, 5, 6], 3)]  # one of three had a signal: six for two, three at most
    assert [sample.completions[0].prompt_ids for sample in rolled.samples] == [(2,), (5,), (6,)]
    assert all(sample.is_trained.all() and advantages_of(sample).any() for sample in rolled.samples)
    named = {name: rolled.metrics[f"groups/{name}"] for name in ("without_signal", "sampled", "missing")}
    assert named == {"without_signal": 0.5, "sampled": 6, "missing": 0}
    assert rolled.metrics["reward"] == pytest.approx((2 + 1 + 2 + 0 + 1 + 1) / 12)
    assert [row["group"] for row in rolled.completions[::2]] == [0, 1, 2, 3, 4, 5]
    assert [row["advantage"] != 0 for row in rolled.completions[::2]] == [False, True, False, False, True, True]


def test_rounds_are_bounded_and_what_is_missing_is_counted(registry: Registry) -> None:
    rewards = {1: [1.0, 1.0], 2: [1.0, 0.0], 3: [0.0, 0.0], 4: [0.0, 0.0], 5: [1.0, 0.0]}
    stream = Stream(rewards, [3, 4, 5])
    rolled = _sampled(registry, stream, [1, 2], "--rollout.max_rounds=2")
    assert [prompts for prompts, _ in stream.calls] == [[1, 2], [3, 4]]
    assert [sample.is_trained.tolist() for sample in rolled.samples] == [[False, False], [True, True]]
    assert (rolled.metrics["groups/missing"], rolled.metrics["groups/sampled"]) == (1, 4)
    assert stage(registry).collate(rolled.samples)["weight"] == 6  # tokens of one group


def test_rewards_may_be_missing_of_a_step_not_of_a_round(registry: Registry) -> None:
    rewards = {1: [1.0, 0.0], 2: [1.0, 1.0], 3: [1.0, np.nan], 4: [1.0, 0.0]}
    rolled = _sampled(registry, Stream(rewards, [3, 4]), [1, 2], "--reward.max_failed=0.15")
    assert rolled.metrics["groups/sampled"] == 4
    with pytest.raises(UserError, match=r"reward\.max_failed"):
        _sampled(registry, Stream(rewards, [3, 4]), [1, 2], "--reward.max_failed=0.12")


def test_the_penalty_of_long_completions_is_no_signal(registry: Registry) -> None:
    class Lengths(Stream):
        def sample(self, prompts: Sequence[RolloutPrompt], *args: Any, **more: Any) -> Scored:
            scored = super().sample(prompts, *args)
            groups = [[dataclasses.replace(c, ids=[5] * (3 + n), logprobs=[-1.0] * (3 + n)) for n, c in enumerate(g)]
                      for g in scored.groups]  # fmt: skip
            return Scored(groups, scored.scores)

    stream = Lengths({1: [1.0, 1.0], 2: [1.0, 0.0]}, [2])
    rolled = _sampled(registry, stream, [1], "--grpo.overlong_buffer=6")
    assert [sample.completions[0].prompt_ids for sample in rolled.samples] == [(2,)]


def test_a_run_without_a_signal_stops(registry: Registry) -> None:
    made = stage(registry, "--grpo.patience=3")
    same = [[1.0, 1.0], [0.0, 0.0]]
    different = [[1.0, 0.0], [0.0, 0.0]]
    for rewards in (same, same, different, same, same):
        _roll(made, rewards)
    again = stage(registry, "--grpo.patience=3")
    again.load_state(made.state())
    for resumed in (made, again):
        with pytest.raises(UserError, match=r"step 9: in 3 rollouts in a row \(grpo.patience\)"):
            _roll(resumed, same, step=9)


def test_a_gap_between_rollout_and_training_stops_the_run(registry: Registry) -> None:
    made = stage(registry)
    made.after_step(1, {"logprob_gap": 0.09})
    made.after_step(1, {"loss": 1.0})  # a step that was skipped, as the gap was not finite
    with pytest.raises(UserError, match="differ by nan on average"):
        made.after_step(1, {"logprob_gap": float("nan")})
    with pytest.raises(UserError, match="belong to another distribution than the sampled one"):
        made.after_step(1, {"logprob_gap": 0.11})


def test_evaluations_have_pass_at_k(registry: Registry) -> None:
    words = ["--eval_rollout.num_generations=4", "--eval_rollout.temperature=1", "--eval_rollout.pass_at=[1,2,4]"]
    made = stage(registry, *words)
    metrics = made.evaluate_rollouts(SAMPLES, Given([[1.0, 0, 0, 0], [0, 0, 0, 0]]))  # type: ignore[arg-type]
    assert [metrics[f"pass@{k}"] for k in (1, 2, 4)] == [0.125, 0.25, 0.5]


def test_a_sum_of_rewards_that_rounding_leaves_below_the_right_one_is_right(registry: Registry) -> None:
    almost = 0.2 + 0.7 + 0.1
    assert almost < 1
    metrics = stage(registry).evaluate_rollouts(SAMPLES, Given([[almost], [0.99]]))  # type: ignore[arg-type]
    assert metrics["pass@1"] == 0.5


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


@pytest.mark.parametrize("what", ["reward", "environment"])
def test_code_that_cannot_be_loaded_is_an_error_before_the_rows_are_read(
    what: str, registry: Registry, tmp_path: Path
) -> None:
    file = tmp_path / f"own_{what}.py"
    file.write_text("import nothing_of_this_name\n\n\ndef own(completions):\n    return [1.0]\n\n\nclass Own: pass\n")
    word = f'--reward.functions={{"{file}:own": 1}}' if what == "reward" else f"--environment.name={file}:Own"
    made = stage(registry, word)
    with pytest.raises(UserError, match=r"cannot be loaded: ModuleNotFoundError: .*nothing_of_this_name"):
        made.before_reading()


def test_a_reward_that_was_edited_before_a_resume_is_reported(registry: Registry, tmp_path: Path) -> None:
    file = tmp_path / "edited.py"
    word = f'--reward.functions={{"{file}:own": 1}}'
    messages = list[str]()
    saved = []
    for value in ("1.0", "2.0"):
        file.write_text(f"def own(completions):\n    return [{value} for _ in completions]\n")
        made = stage(registry, word)
        made.context = dataclasses.replace(made.context, report=messages.append)
        made.before_reading()
        saved.append(made.state())
    assert messages == []
    made.load_state(saved[1])
    assert messages == []
    made.load_state({"idle": 0})  # of a version that did not know
    assert messages == []
    made.load_state(saved[0])
    assert messages == [f"warning: {file} has changed since; its current content is used from here on"]
