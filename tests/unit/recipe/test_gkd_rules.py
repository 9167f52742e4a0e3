"""Rules of distillation on answers of the student, and of its mean by micro-batch."""

from __future__ import annotations

import pytest

from llmsuite.base.errors import RecipeError
from llmsuite.base.resources import bundled
from llmsuite.contract.registry import Registry
from llmsuite.recipe.resolve import RunPlan, plan_run


def planned(registry: Registry, *words: str, recipe: str = "gkd-on-policy", smoke: bool = False) -> RunPlan:
    return plan_run(bundled("recipes") / "llama" / f"{recipe}.json", words, registry, smoke=smoke)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data.packing=best_fit",), "data.packing: is best_fit, but answers are sampled to the prompt of each"),
        (("--data.num_workers=1",), "data.num_workers: is 1, but batches of a rollout cannot be prepared in advance"),
        (
            ("--rollout.dynamic_sampling=true", "--rollout.num_generations=2"),
            "rollout.dynamic_sampling: is true, but stage gkd rewards no answers",
        ),
        (("--rollout.max_rounds=3",), "rollout.max_rounds: has no effect"),
        (("--rollout.max_logprob_gap=0.5",), "rollout.max_logprob_gap: has no effect in stage gkd"),
        (("--rollout.max_staleness=1", "--rollout.engine=openai"), "stage gkd does not support asynchronous rollouts"),
        (("--rollout.max_completion_length=2048",), "which leaves no room for a prompt in data.max_length 2048"),
        (("--lora.rank=4", "--lora.dropout=0.1"), "lora.dropout: is 0.1, but completions are sampled without dropout"),
        (
            ("--train.on_spike=roll_back", "--train.spike_factor=9"),
            "train.on_spike: is roll_back, which stage gkd does not support",
        ),
        (("--gkd.on_policy=0", "--gkd.answer_end=x"), "gkd.answer_end: has no effect while on_policy is 0"),
        (("--gkd.answer_end=",), "gkd.answer_end: is empty"),
        (("--gkd.on_policy=0", "--gkd.row_length=9"), "gkd.row_length: has no effect while on_policy is 0"),
        (("--gkd.truncate=true", "--gkd.row_length=9"), "gkd.row_length: drops conversations that truncate would"),
        (("--gkd.on_policy=0",), "rollout.num_generations: has no effect while gkd.on_policy is 0"),
        (
            ("--gkd.mean=micro_batches", "--train.micro_batch_size=2"),
            "data.group_by_length: puts samples of one length",
        ),
        (
            ("--gkd.mean=micro_batches", "--train.micro_batch_tokens=4096"),
            "train.micro_batch_tokens: is 4096, but gkd.mean averages each micro-batch by itself",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(registry: Registry, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        planned(registry, *words)
    assert message in str(error.value)


def test_answers_are_sampled_only_where_a_share_is_set(registry: Registry) -> None:
    plan = planned(registry).train
    assert (plan.profile.updates, plan.profile.on_policy, plan.profile.evaluates_rollouts) == (1, 0.5, False)
    assert plan.samples_in_training_processes
    assert plan.rows_per_sample == 1
    plan = planned(registry, recipe="gkd").train
    assert plan.profile.updates == 0
    assert plan.rollout is None
    assert not plan.samples_in_training_processes


def test_micro_batches_of_one_row_may_be_grouped_by_length(registry: Registry) -> None:
    assert planned(registry, "--gkd.mean=micro_batches").data.section.group_by_length
    words = ("--gkd.mean=micro_batches", "--train.micro_batch_size=2", "--data.group_by_length=false")
    assert planned(registry, *words).train.section.micro_batch_size == 2


def test_a_smoke_run_samples_short_answers(registry: Registry) -> None:
    assert planned(registry, smoke=True).train.rollout.max_completion_length == 16
    assert planned(registry, "--rollout.max_completion_length=8", smoke=True).train.rollout.max_completion_length == 8
