"""What a plan counts for rollouts: the weights that a decoder has, and the cache of what is drawn."""

from __future__ import annotations

import pytest

from llmsuite.planning.estimate import estimate
from llmsuite.planning.memory import full_micro_batch
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.resolve import plan_run
from tests.paths import ROOT

RECIPE = ROOT / "recipes" / "llama" / "grpo.json"


def test_each_rank_that_reads_data_has_whole_weights(registry: Registry) -> None:
    plan = plan_run(RECIPE, ["--parallel.pipeline_parallel_degree=4", "--launch.num_devices=16"], registry)
    first, *middle, last = estimate(plan).stages
    whole = 2 * 8_030_261_248  # Llama 3.1 8B in bf16
    assert [stage.decoder for stage in (first, *middle, last)] == [whole, 0, 0, whole]
    assert all(stage.cache == 0 for stage in middle)
    assert first.peak - first.decoder >= first.parameters


def test_a_cache_has_keys_and_values_of_what_is_drawn_at_once(registry: Registry) -> None:
    plan = plan_run(RECIPE, ["--rollout.batch_size=16"], registry)
    (stage, *_) = estimate(plan).stages
    a_token = 32 * 2 * 8 * 128 * 2  # layers, keys and values, key heads, their size, bytes
    assert stage.cache == 2 * 16 * 2048 * a_token


def test_a_reference_is_cut_as_the_weights_are(registry: Registry) -> None:
    for words in (["--grpo.reference=copy"], ["--grpo.reference=some/run", "--parallel.sharding=stage3"]):
        given = estimate(plan_run(RECIPE, [*words, "--grpo.beta=0.1"], registry)).stages
        plain = estimate(plan_run(RECIPE, words[1:], registry)).stages
        for with_reference, without in zip(given, plain, strict=True):
            assert with_reference.reference == without.parameters > 0
            assert with_reference.peak - without.peak >= without.parameters
            assert without.reference == 0


def test_a_micro_batch_has_all_completions_of_its_prompts(registry: Registry) -> None:
    assert full_micro_batch(plan_run(RECIPE, ["--train.micro_batch_size=2"], registry)).rows == 16


def test_answers_at_evaluations_take_the_same(registry: Registry) -> None:
    words = ["--generation.max_new_tokens=64", "--generation.batch_size=4"]
    for stage in estimate(plan_run(RECIPE.with_name("sft.json"), words, registry)).stages:
        assert stage.decoder == 2 * 8_030_261_248
        assert stage.cache == 2 * 4 * 2048 * 32 * 2 * 8 * 128 * 2


@pytest.mark.parametrize("name", ["dpo", "sft"])
def test_other_stages_have_none(registry: Registry, name: str) -> None:
    for stage in estimate(plan_run(RECIPE.with_name(f"{name}.json"), [], registry)).stages:
        assert stage.decoder == stage.cache == 0


def test_a_run_whose_server_draws_has_none(registry: Registry) -> None:
    words = ["--rollout.engine=openai", '--rollout.openai.urls=["http://a"]']
    for stage in estimate(plan_run(RECIPE, words, registry)).stages:
        assert stage.decoder == stage.cache == 0


def test_a_critic_has_weights_moments_and_gradients_of_its_own(registry: Registry) -> None:
    words = ["--engine.precision=fp32", "--parallel={}", "--launch.num_devices=1"]
    (stage,) = estimate(plan_run(RECIPE.with_name("ppo.json"), words, registry)).stages
    embedding = 128256 * 4096
    each = 8_030_261_248 - embedding + 4096  # a score head in place of the output projection
    assert stage.critic == 3 * 4 * each
    assert stage.beside_critic >= stage.gradients + 4 * each
    assert stage.peak >= stage.between_steps + stage.beside_critic
    assert stage.between_steps >= 4 * 3 * (8_030_261_248 + each)
