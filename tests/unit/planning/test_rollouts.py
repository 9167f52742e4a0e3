"""Plans for rollouts: the weights of a decoder, and the cache of the sampled completions."""

from __future__ import annotations

import pytest

from llmsuite.contract.registry import Registry
from llmsuite.planning.communication import TENSOR
from llmsuite.planning.cost import FAST, HARDWARE, Hardware, total_bytes
from llmsuite.planning.memory import full_micro_batch
from llmsuite.recipe.resolve import plan_run
from tests.support.paths import ROOT
from tests.support.planned_runs import estimated

RECIPE = ROOT / "recipes" / "llama" / "grpo.json"


def test_each_rank_that_reads_data_has_whole_weights(registry: Registry) -> None:
    plan = plan_run(RECIPE, ["--parallel.pipeline_parallel_degree=4", "--launch.num_devices=16"], registry)
    first, *middle, last = estimated(plan).stages
    whole = 2 * 8_030_261_248  # Llama 3.1 8B in bf16
    assert [stage.decoder for stage in (first, *middle, last)] == [whole, 0, 0, whole]
    assert all(stage.cache == 0 for stage in middle)
    assert first.peak >= first.between_steps + first.decoder + first.cache


def test_weights_for_rollouts_are_not_there_in_passes(registry: Registry) -> None:
    words = ["--engine.recompute=none", "--rollout.batch_size=16"]
    for stage in estimated(plan_run(RECIPE, words, registry)).stages:
        assert stage.held > stage.decoder + stage.cache
        assert stage.peak == stage.between_steps + stage.held + stage.buffers


def test_a_cache_has_keys_and_values_of_the_sampled_batch(registry: Registry) -> None:
    plan = plan_run(RECIPE, ["--rollout.batch_size=16"], registry)
    (stage, *_) = estimated(plan).stages
    a_token = 32 * 2 * 8 * 128 * 2  # layers, keys and values, key heads, their size, bytes
    assert stage.cache == 2 * 16 * 2048 * a_token


def test_a_reference_is_cut_as_the_weights_are(registry: Registry) -> None:
    for words in (["--grpo.reference=copy"], ["--grpo.reference=some/run", "--parallel.sharding=stage3"]):
        given = estimated(plan_run(RECIPE, [*words, "--grpo.beta=0.1"], registry)).stages
        plain = estimated(plan_run(RECIPE, words[1:], registry)).stages
        for with_reference, without in zip(given, plain, strict=True):
            assert with_reference.reference == without.parameters > 0
            assert with_reference.peak - without.peak >= without.parameters
            assert without.reference == 0


def test_a_micro_batch_has_all_completions_of_its_prompts(registry: Registry) -> None:
    plan = plan_run(RECIPE, ["--train.micro_batch_size=2"], registry)
    assert full_micro_batch(plan.model, plan.data, plan.parallel, plan.train).rows == 16


def test_answers_at_evaluations_take_the_same(registry: Registry) -> None:
    words = ["--generation.max_new_tokens=64", "--generation.batch_size=4"]
    for stage in estimated(plan_run(RECIPE.with_name("sft.json"), words, registry)).stages:
        assert stage.decoder == 2 * 8_030_261_248
        assert stage.cache == 2 * 4 * 2048 * 32 * 2 * 8 * 128 * 2


@pytest.mark.parametrize("name", ["dpo", "sft"])
def test_other_stages_have_none(registry: Registry, name: str) -> None:
    for stage in estimated(plan_run(RECIPE.with_name(f"{name}.json"), [], registry)).stages:
        assert stage.decoder == stage.cache == 0


def test_a_run_whose_server_draws_has_none(registry: Registry) -> None:
    words = ["--rollout.engine=openai", '--rollout.openai.urls=["http://a"]']
    for stage in estimated(plan_run(RECIPE, words, registry)).stages:
        assert stage.decoder == stage.cache == 0


def test_a_critic_has_weights_moments_and_gradients_of_its_own(registry: Registry) -> None:
    words = ["--engine.precision=fp32", "--parallel={}", "--launch.num_devices=1"]
    (stage,) = estimated(plan_run(RECIPE.with_name("ppo.json"), words, registry)).stages
    embedding = 128256 * 4096
    each = 8_030_261_248 - embedding + 4096  # a score head in place of the output projection
    assert stage.critic == 3 * 4 * each
    assert stage.critic_peak >= stage.gradients + 4 * each
    assert stage.peak >= stage.between_steps + stage.critic_peak
    assert stage.between_steps >= 4 * 3 * (8_030_261_248 + each)


def test_a_step_has_the_passes_of_the_critic_too(registry: Registry) -> None:
    """One pass more than a step of a reward model, to judge the rollout."""
    words = ["--ppo.reference=none", "--ppo.beta=0", "--parallel={}", "--launch.num_devices=2"]
    found = estimated(plan_run(RECIPE.with_name("ppo.json"), words, registry))
    critic = found.critic
    (cost,) = found.costs
    assert critic is not None
    head = 2 * 4096 * 128256 * found.batch.supervised
    each = cost.forward - head
    passes = found.num_micro_batches * 2  # of both ranks
    recomputed = 1
    assert critic.flops == pytest.approx((1 + 1 + 2 + recomputed) * each * passes)
    assert found.flops == pytest.approx((3 * cost.forward + recomputed * each) * passes + critic.flops)
    device = HARDWARE["h100"]
    alone = [seconds - of_critic for seconds, of_critic in zip(found.step_seconds(device), critic.step_seconds(device))]
    assert all(0 < of_critic < own * 2 for of_critic, own in zip(critic.step_seconds(device), alone))
    values = 8_030_261_248 - 128256 * 4096 + 4096
    (counts,) = critic.traffic
    assert total_bytes(counts) == pytest.approx(4 * values, rel=1e-3)  # gradients, in float32


def test_the_critic_sends_what_its_passes_send(registry: Registry) -> None:
    """Inside of tensor parallel groups, as often as the model does in as many passes through its layers."""
    words = ['--parallel={"tensor_parallel_degree": 2}', "--launch.num_devices=2", "--engine.recompute=none"]
    found = estimated(plan_run(RECIPE.with_name("ppo.json"), words, registry))
    assert found.critic is not None
    calls = [
        sum(count for m, count in counts.items() if m.axis == TENSOR and "MLP" in m.why.upper())
        for counts in (found.traffic[0], found.critic.traffic[0])
    ]
    assert calls[0] == calls[1]  # one pre-pass each: of the reference, and of the critic


def test_the_time_of_a_rollout(registry: Registry) -> None:
    words = ["--rollout.batch_size=64", "--parallel={}", "--launch.num_devices=8"]
    plan = plan_run(RECIPE, words, registry)
    recipe = plan.recipe
    device = HARDWARE["h100"]
    times = estimated(plan).rollout_seconds(device)
    assert times is not None
    weights = 2 * 8_030_261_248
    a_token = 32 * 2 * 8 * 128 * 2
    rows = 64
    sampled = 1024
    before = 1024
    steps = recipe.train.global_batch_size / 8 * 8 * sampled / rows
    fetched = steps * (weights + rows * (before + sampled / 2) * a_token) / (device.memory_bandwidth * FAST.bandwidth)
    assert fetched < times[0] < 1.1 * fetched  # reading from memory takes longest, and prompts a little
    assert times[1] > 1.5 * times[0]


def test_no_time_where_servers_sample_or_the_memory_speed_is_unknown(registry: Registry) -> None:
    served = ["--rollout.engine=openai", '--rollout.openai.urls=["http://a"]']
    assert estimated(plan_run(RECIPE, served, registry)).rollout_seconds(HARDWARE["h100"]) is None
    assert estimated(plan_run(RECIPE, [], registry)).rollout_seconds(Hardware(1e12, 1e9, 1e9, 1e9)) is None
    assert estimated(plan_run(RECIPE.with_name("sft.json"), [], registry)).rollout_seconds(HARDWARE["h100"]) is None
