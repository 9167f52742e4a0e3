"""The name of the metric that decides which checkpoint is best is checked before a run starts."""

from __future__ import annotations

import pytest

from llmsuite.base.errors import RecipeError
from llmsuite.base.resources import bundled
from llmsuite.contract.registry import Registry
from llmsuite.engine.generation import METRIC_NAMES
from llmsuite.recipe.plans import known_direction
from llmsuite.recipe.resolve import plan_run
from llmsuite.recipe.rules.metrics import GENERATION_METRICS

SUMS = {
    "sft": "loss tokens/likely tokens/accuracy",
    "lora": "loss tokens/likely tokens/accuracy",
    "pretrain": "loss",
    "gkd": "loss",
    "dpo": "loss logps/chosen logps/rejected rewards/chosen rewards/rejected rewards/margin rewards/accuracy",
    "rm": "loss rewards/chosen rewards/rejected rewards/margin rewards/accuracy",
    "kto": "loss kl rewards/desirable rewards/undesirable",
}
DRAWN = (
    "reward reward/std entropy completions/length completions/length_ended completions/truncated pass@1 "
    "rewards/missing rewards/format rewards/format/std episodes/turns"
)
METRICS = {**SUMS, "grpo": DRAWN, "online_dpo": DRAWN, "ppo": DRAWN}


def check(registry: Registry, stage: str, metric: str, *words: str) -> None:
    given = [f"--checkpoint.best_metric={metric}", *words]
    plan_run(bundled("recipes") / "llama" / f"{stage}.json", given, registry, smoke=True)


@pytest.mark.parametrize("stage", METRICS)
def test_metrics_of_evaluations_are_accepted(registry: Registry, stage: str) -> None:
    for metric in METRICS[stage].split():
        check(registry, stage, f"eval/{metric}")


@pytest.mark.parametrize("stage", METRICS)
def test_another_name_is_refused_with_the_nearest(registry: Registry, stage: str) -> None:
    wrong, near = ("eval/lss", "eval/loss") if stage in SUMS else ("eval/rewrd", "eval/reward")
    with pytest.raises(RecipeError, match=rf"checkpoint\.best_metric: is '{wrong}'.*did you mean '{near}'\?"):
        check(registry, stage, wrong)
    with pytest.raises(RecipeError, match=r"checkpoint\.best_metric: is '(loss|reward)'"):
        check(registry, stage, near.removeprefix("eval/"))


@pytest.mark.parametrize("metric", ["rewards/formt", "rewards/exact", "rewards/format_std", "pass@8", "pass@"])
def test_only_rewards_and_numbers_of_the_recipe_are_taken(registry: Registry, metric: str) -> None:
    more = ("--eval_rollout.pass_at=[1,4]", "--eval_rollout.num_generations=4", "--eval_rollout.temperature=1")
    for name in ("rewards/format", "pass@4"):
        check(registry, "grpo", f"eval/{name}", *more)
    with pytest.raises(RecipeError, match=rf"checkpoint\.best_metric: is 'eval/{metric}'"):
        check(registry, "grpo", f"eval/{metric}", *more)


def test_metrics_of_answers_and_further_tokens_need_their_keys(registry: Registry) -> None:
    assert GENERATION_METRICS == METRIC_NAMES
    for name in METRIC_NAMES:
        check(registry, "sft", f"eval/{name}", "--generation.max_new_tokens=4")
        with pytest.raises(RecipeError, match=r"checkpoint\.best_metric"):
            check(registry, "sft", f"eval/{name}")
    with pytest.raises(RecipeError, match=r"checkpoint\.best_metric"):
        check(registry, "pretrain", "eval/mtp_loss")


DIRECTIONS = {
    "lowest": "eval/loss eval/math/loss eval/mtp_loss eval/nll eval/perplexity",
    "highest": "eval/tokens/accuracy eval/math/tokens/accuracy eval/tokens/likely eval/rewards/accuracy "
    "eval/rewards/margin eval/reward eval/pass@4 eval/bleu4 eval/rouge1 eval/rougel eval/exact_match",
}


@pytest.mark.parametrize("best_is", DIRECTIONS)
def test_early_stopping_goes_in_the_direction_of_its_metric(registry: Registry, best_is: str) -> None:
    for metric in DIRECTIONS[best_is].split():
        assert known_direction(metric) == best_is
    for metric in ("eval/logps/chosen", "eval/entropy", "eval/rewards/loss", "eval/reward/std"):
        assert known_direction(metric) is None


STOPPING = ("--train.eval_steps=1", "--train.early_stopping.patience=2")


def test_a_direction_is_that_of_the_recipe_where_it_has_one(registry: Registry) -> None:
    def best(stage: str, metric: str, *words: str) -> tuple[str | None, str]:
        given = [*STOPPING, f"--train.early_stopping.metric={metric}", *words]
        plan = plan_run(bundled("recipes") / "llama" / f"{stage}.json", given, registry, smoke=False).train
        return plan.best_metric, plan.best_is

    accuracy = "eval/rewards/accuracy"
    assert best("dpo", accuracy) == (accuracy, "highest")
    assert best("dpo", "eval/loss") == ("eval/loss", "lowest")
    assert best("grpo", "eval/reward") == ("eval/reward", "highest")
    assert best("dpo", accuracy, f"--checkpoint.best_metric={accuracy}") == (accuracy, "lowest")
    chosen = "eval/logps/chosen"
    both = (f"--checkpoint.best_metric={chosen}", "--checkpoint.best_is=highest")
    assert best("dpo", chosen, *both) == (chosen, "highest")
    with pytest.raises(RecipeError, match=rf"metric: is '{chosen}', whose name does not tell.*set checkpoint.best_met"):
        best("dpo", chosen)
