"""The engine `local`: weights and cache take memory while it samples, and none while the model is trained."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.contract.registry import Registry
from llmsuite.devices.cpu import CpuBackend
from llmsuite.engine.rollouts import RolloutEngine
from llmsuite.inference.group_sampling import SampleRequest, SamplingParams
from llmsuite.inference.load import parameter_shapes
from llmsuite.models.initial_values import initial_values
from llmsuite.recipe.resolve import RunPlan, plan_run
from llmsuite.rl.engine import EngineContext, ReleasableEngine
from llmsuite.rl.local import LocalEngine
from tests.support.paths import ROOT
from tests.support.planned_runs import estimated

PARAMS = SamplingParams(num_generations=3, max_completion_length=6, temperature=1.0, batch_size=4)
REQUESTS = [SampleRequest((7, 5, i), (0, 1, i)) for i in range(4)]


def plan_of(registry: Registry, recipe: str, *words: str) -> RunPlan:
    return plan_run(ROOT / "recipes" / recipe, words, registry, smoke=True)


def weights(plan: RunPlan, seed: int) -> Iterator[tuple[str, Any]]:
    for name, shape in parameter_shapes(plan.model.family, plan.model.config).items():
        yield name, paddle.to_tensor(initial_values(seed, name, shape, 0.1) + (len(shape) == 1))


def sampled_ids(engine: LocalEngine) -> list[list[list[int]]]:
    return [[d.ids for d in group] for group in engine.begin(REQUESTS, PARAMS, {2})()]


def allocated() -> int:
    """Bytes of all tensors of this process."""
    gc.collect()
    return int(paddle.base.core.host_memory_stat_current_value("Allocated", 0))


def has_memory(engine: LocalEngine) -> set[bool]:
    return {parameter._is_initialized() for parameter in engine._model._model.model.parameters()}


@pytest.mark.parametrize("recipe", ["llama/grpo.json", "qwen/grpo.json", "deepseek/grpo.json"])
def test_an_engine_samples_again_after_a_release(registry: Registry, recipe: str) -> None:
    """Whether its attention is fused with others, has biases, or is of another kind."""
    plan = plan_of(registry, recipe)
    engine = LocalEngine(
        EngineContext(plan.model, CpuBackend(), plan.parallel.engine.precision, None, plan.output_dir, True, print)
    )
    assert isinstance(engine, ReleasableEngine)
    assert has_memory(engine) == {False}
    engine.refresh(0, weights(plan, 1))
    first = sampled_ids(engine)
    assert has_memory(engine) == {True}
    engine.release()
    engine.release()
    assert has_memory(engine) == {False}
    engine.refresh(1, weights(plan, 2))
    assert sampled_ids(engine) != first
    engine.release()
    engine.refresh(2, weights(plan, 1))
    assert sampled_ids(engine) == first


@pytest.mark.further
def test_nothing_is_left_of_weights_and_cache(registry: Registry) -> None:
    plan = plan_of(registry, "llama/grpo.json")
    before = allocated()
    size = 4 * sum(math.prod(p.shape) for _, p in weights(plan, 1))
    engine = LocalEngine(
        EngineContext(plan.model, CpuBackend(), plan.parallel.engine.precision, None, plan.output_dir, True, print)
    )
    assert allocated() - before < 0.05 * size
    engine.refresh(0, weights(plan, 1))
    sampled_ids(engine)
    assert allocated() - before >= size
    engine.release()
    assert allocated() - before < 0.05 * size


_TIED = "--model.config.tie_word_embeddings=true"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("llama/grpo.json", ()),
        ("llama/grpo.json", (_TIED, "--model.config.intermediate_size=72")),
        ("qwen/grpo.json", ("--model.config.vocab_size=300",)),
        ("qwen_moe/grpo.json", ()),
        ("deepseek/grpo.json", ()),
    ],
)
def test_a_plan_counts_what_is_held(registry: Registry, recipe: str, words: tuple[str, ...], precision: str) -> None:
    """Weights to the byte, in bf16 those of stored matrices with what fills their last tile; tokens in the cache."""
    alone = ("--parallel={}", "--launch.num_devices=1", "--rollout.batch_size=16", f"--engine.precision={precision}")
    plan = plan_of(registry, recipe, *words, *alone)
    engine = LocalEngine(
        EngineContext(plan.model, CpuBackend(), plan.parallel.engine.precision, None, plan.output_dir, True, print)
    )
    values = list(weights(plan, 1))
    before = allocated()
    engine.refresh(0, values)
    (stage,) = estimated(plan).stages
    assert allocated() - before == stage.decoder
    is_stored = precision == "bf16" and recipe.startswith(("llama", "qwen/"))
    assert (stage.decoder < 0.8 * 4 * sum(value.size for _, value in values)) == is_stored
    _, cache = engine._decoder.forward(np.ones([3, 5], "int64"), np.zeros(3, "int64"), None)
    found = sum(tensor.size * tensor.element_size() for tensor in cache)
    assert found / (3 * 5) == stage.cache / (2 * 16 * plan.data.section.max_length)


class Counting:
    """An engine that counts."""

    def __init__(self) -> None:
        self.refreshed = list[int]()
        self.released = 0

    def refresh(self, version: int, weights: Any) -> None:
        self.refreshed.append(version)
        assert [name for name, _ in weights] == ["a"]

    def release(self) -> None:
        self.released += 1

    def begin(self, *args: Any) -> Any:
        raise AssertionError

    def close(self) -> None:
        pass


def test_weights_are_gathered_once_for_an_evaluation_and_the_next_rollout() -> None:
    inner = Counting()
    gathered = list[int]()

    def values() -> Any:
        gathered.append(1)
        return iter([("a", np.zeros(1))])

    engine, helper = (RolloutEngine(kind, None, values, is_remote=False) for kind in (inner, None))
    for each in (engine, helper):
        each.current(3)  # to evaluate
        each.current(3)  # to sample
        each.release()
        each.current(3)
    assert inner.refreshed == [3, 3]
    assert inner.released == 1
    assert len(gathered) == 4, "ranks that only help gather as often as those that sample"


def test_a_server_keeps_its_weights_while_the_model_is_trained() -> None:
    inner = Counting()
    engine = RolloutEngine(inner, None, lambda: [("a", np.zeros(1))], is_remote=True)
    engine.current(3)
    engine.release()
    engine.current(3)
    assert inner.refreshed == [3]
    assert inner.released == 0
