"""What the stage `online_dpo` makes of completions: pairs, and the losses of `dpo` on them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.base.errors import RecipeError, UserError
from llmsuite.contract.registry import Registry
from llmsuite.recipe.resolve import plan_run
from llmsuite.rl.rollouts import RolloutPrompt, Scored
from tests.support.grpo_case import Given, Stream, completion, logps, model
from tests.support.llama_reference import load
from tests.support.online_dpo_case import RECIPE, batches, pairs, stage
from tests.support.paths import REFERENCE

LOSSES = {
    "sigmoid": lambda chosen, rejected: np.log1p(np.exp(-0.1 * (chosen - rejected))),
    "ipo": lambda chosen, rejected: (chosen - rejected - 5.0) ** 2,  # as TRL's online DPO has it
    "hinge": lambda chosen, rejected: np.maximum(0.0, 1 - 0.1 * (chosen - rejected)),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_losses_are_those_of_dpo_on_the_sampled_pairs(registry: Registry, loss: str, temperature: float) -> None:
    live = model()
    expected = []
    for pair in (pair for pair in pairs() if pair.is_trained):
        chosen, rejected = (logps(live, c, temperature).sum() + 20.0 for c in (pair.chosen, pair.rejected))
        expected.append(LOSSES[loss](chosen, rejected))  # type: ignore[no-untyped-call]
    for size, padding_free in ((1, False), (2, True), (3, False)):
        made = stage(
            registry, f"--online_dpo.loss={loss}", f"--rollout.temperature={temperature}", padding_free=padding_free
        )
        terms = [made.loss(live, batch) for batch in batches(made, size)]
        assert sum(t.weight for t in terms) == 2
        assert sum(float(t.total) for t in terms) / 2 == pytest.approx(np.mean(expected), rel=2e-5)
        margin = sum(float(t.sums["rewards/margin"][0]) for t in terms)
        counted = [pair for pair in pairs() if pair.is_trained]
        wanted = [
            logps(live, p.chosen, temperature).sum() - logps(live, p.rejected, temperature).sum() for p in counted
        ]
        assert margin == pytest.approx(0.1 * sum(wanted), rel=2e-4)


def test_pairs_that_do_not_count_have_no_gradient(registry: Registry) -> None:
    made = stage(registry, "--online_dpo.sft_weight=0.5")
    live = model()
    (batch,) = batches(made, 3)
    number, tokens = made.prepass("batch", live, batch)["pairs_per_token"]
    assert (number, tokens) == (2.0, 3 + 1)  # tokens of the chosen answers that count
    batch["prepass_stats"] = {"pairs_per_token": 0.5}
    before = made.loss(live, batch)
    batch["reference"][[1, 4]] = 300.0
    after = made.loss(live, batch)
    assert float(before.total) == float(after.total)
    for name in ("rewards/margin", "rewards/accuracy", "logps/chosen", "nll/chosen"):
        assert float(before.sums[name][0]) == float(after.sums[name][0]), name


PROMPTS = [RolloutPrompt((1, 2)), RolloutPrompt((3,)), RolloutPrompt((4,)), RolloutPrompt((5,))]


def test_best_and_worst_are_taken_and_ties_left_out(registry: Registry) -> None:
    made = stage(registry, "--reward.max_failed=1")
    nan = np.nan
    rewards = [[0.5, 2.0, nan, -1.0], [1.0, 1.0, 1.0, 1.0], [nan, nan, 3.0, nan], [nan, 0.0, 1.0, nan]]
    rolled = made.roll_out(1, PROMPTS, Given(rewards))  # type: ignore[arg-type]
    numbers = [(pair.chosen.number, pair.rejected.number) for pair in rolled.samples]
    assert numbers == [(1, 3), (0, 1), (0, 1), (2, 1)]
    assert [pair.is_trained for pair in rolled.samples] == [True, False, False, True]
    kinds = ("pairs/tied", "pairs/missing", "groups/without_signal", "pairs/reward_margin")
    assert [rolled.metrics[kind] for kind in kinds] == [0.25, 0.25, 0.5, (3.0 + 1.0) / 2]
    sides = [row["advantage"] for row in rolled.completions]
    assert sides == [None, 1.0, None, -1.0, *[None] * 8, None, -1.0, 1.0, None]
    batch = made.collate(rolled.samples)
    assert (batch["weight"], batch["pair_weights"].tolist()) == (2.0, [1.0, 0.0, 0.0, 1.0])


def test_other_prompts_replace_ties(registry: Registry) -> None:
    stream = Stream({1: [1.0, 1.0], 2: [0.0, 1.0], 3: [1.0, 0.0]}, [3])
    made = stage(registry, "--rollout.dynamic_sampling=true")
    rolled = made.roll_out(1, [RolloutPrompt((1,)), RolloutPrompt((2,))], stream)  # type: ignore[arg-type]
    assert [pair.chosen.prompt_ids for pair in rolled.samples] == [(2,), (3,)]
    assert [(pair.chosen.number, pair.is_trained) for pair in rolled.samples] == [(1, True), (0, True)]
    assert rolled.metrics["groups/sampled"] == 3


def test_a_run_of_ties_stops(registry: Registry) -> None:
    made = stage(registry, "--online_dpo.patience=2")
    made.roll_out(1, PROMPTS[:1], Given([[1.0, 1.0]]))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"online_dpo\.patience"):
        made.roll_out(2, PROMPTS[:1], Given([[1.0, 1.0]]))  # type: ignore[arg-type]


def test_the_gap_is_that_of_the_tokens(registry: Registry) -> None:
    made = stage(registry)
    live = model()
    given = [
        dataclasses.replace(
            pair,
            **{
                side: dataclasses.replace(c, logprobs=(logps(live, c, 1.0) + 0.01).tolist())
                for side, c in (("chosen", pair.chosen), ("rejected", pair.rejected))
            },
        )
        for pair in pairs()
    ]
    batch = made.collate(given)
    batch["reference"] = np.zeros(6)
    total, count = made.loss(live, batch).sums["logprob_gap"]
    assert float(total) / count == pytest.approx(0.01, abs=1e-5)
    with pytest.raises(UserError, match="belong to another distribution than the sampled one"):
        made.after_step(1, {"logprob_gap": 0.11})


def _refused(registry: Registry, words: Sequence[str]) -> list[str | None]:
    with pytest.raises(RecipeError) as caught:
        plan_run(RECIPE, words, registry)
    return [problem.key for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("rollout.num_generations", ["--rollout.num_generations=1"]),
        ("online_dpo.reference", ["--lora.rank=8"]),
        ("online_dpo.reference", ["--online_dpo.reference=adapter_off"]),
        ("online_dpo.reference", ["--online_dpo.reference=none"]),
        ("online_dpo.reference", ["--online_dpo.reference=some/run", "--lora.rank=8"]),
        ("online_dpo.reference", ["--online_dpo.reference=some/run", "--online_dpo.loss=orpo"]),
        ("online_dpo.reference", ["--online_dpo.loss=simpo", "--online_dpo.reference=copy"]),
        ("online_dpo.reference", ["--online_dpo.reference=cache"]),
        ("online_dpo.gamma", ["--online_dpo.gamma=0.5"]),
        ("train.on_nonfinite", ["--train.on_nonfinite=roll_back"]),
    ],
)
def test_keys_that_cancel_each_other_are_refused(registry: Registry, key: str, words: list[str]) -> None:
    assert key in _refused(registry, words)


def test_the_reference_is_a_copy_unless_there_are_adapters(registry: Registry) -> None:
    def kinds(*words: str) -> list[str]:
        return [prepass.kind for prepass in plan_run(RECIPE, words, registry).train.profile.prepasses]

    assert kinds() == ["reference"]
    assert kinds("--lora.rank=8", "--online_dpo.reference=adapter_off") == ["adapters_off"]
    assert kinds("--online_dpo.loss=kto_pair", "--online_dpo.sft_weight=1") == ["batch", "reference", "model"]
    assert kinds("--online_dpo.loss=simpo") == []
    assert kinds("--online_dpo.reference=some/run") == ["reference"]
    assert plan_run(RECIPE, ["--online_dpo.reference=some/run"], registry).train.profile.reference == "some/run"


def test_a_reference_that_is_not_there_is_named(registry: Registry) -> None:
    plan = plan_run(RECIPE, ["--online_dpo.reference=no/such/run"], registry, smoke=True)
    with pytest.raises(RecipeError, match=r"online_dpo\.reference: no/such/run is not a directory with a model"):
        plan.check_files()


def test_a_micro_batch_has_the_rows_of_pairs(registry: Registry) -> None:
    assert plan_run(RECIPE, ["--rollout.num_generations=8"], registry).train.rows_per_sample == 2


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_numbers_are_those_of_trl(registry: Registry, loss: str) -> None:
    fixed = json.loads((REFERENCE / "rl" / "online_dpo.json").read_text())
    words = [f"--online_dpo.loss={loss}", f"--online_dpo.beta={fixed['beta']}"]
    groups = [
        [completion(prompt, ids, group=i, number=n) for n, ids in enumerate(both)]
        for i, (prompt, both) in enumerate(zip(fixed["prompts"], fixed["completions"]))
    ]

    class Fixed:
        next_samples = None

        def sample(self, *args: Any, **more: Any) -> Scored:
            return Scored(groups, np.array(fixed["rewards"])[..., None])

    for size, padding_free in ((1, False), (3, False), (2, True)):
        made = stage(registry, *words, padding_free=padding_free)
        samples = made.roll_out(1, [RolloutPrompt(tuple(prompt)) for prompt in fixed["prompts"]], Fixed()).samples  # type: ignore[arg-type]
        live = load(REFERENCE / "llama" / fixed["model"])
        reference = load(REFERENCE / "llama" / fixed["model"])
        for parameter in reference.parameters():
            parameter.set_value(parameter * fixed["reference_factor"])
        terms = []
        for i in range(0, 3, size):
            batch = made.collate(samples[i : i + size])
            with paddle.no_grad():
                made.prepass("reference", reference, batch)
            terms.append(made.loss(live, batch))
            terms[-1].total.backward()
        gradient = np.concatenate([p.grad.numpy().ravel() for p in live.parameters()]).astype("float64") / 3
        wanted = fixed["trl"][loss]
        assert sum(float(t.total) for t in terms) / 3 == pytest.approx(wanted["loss"], rel=1e-5)
        assert np.linalg.norm(gradient) == pytest.approx(wanted["grad_norm"], rel=1e-5)
        margin = sum(float(t.sums["rewards/margin"][0]) for t in terms) / 3
        assert margin == pytest.approx(wanted["margin"], abs=2e-5)
