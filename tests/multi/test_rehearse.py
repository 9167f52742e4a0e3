"""`llmsuite rehearse` of a model of true width and few layers, beside `llmsuite plan`: two independent counts."""

from __future__ import annotations

import collections
import functools
import json
import math
import time
import uuid
from collections.abc import Mapping
from typing import Any

import pytest

from llmsuite.contract.registry import load_plugins
from llmsuite.parallel.mesh import GROUP_AXES, RUN, Mesh
from llmsuite.planning.communication import PIPELINE
from llmsuite.planning.estimate import Estimate, estimate
from llmsuite.recipe.resolve import plan_run
from tests.multi.conftest import Runner
from tests.support.rehearsed import MODEL, RECIPE, WORDS
from tests.tools.faults import MARK, marked


def mesh(num_devices: int, engine: Mapping[str, Any] | None = None, **parallel: Any) -> list[str]:
    """Keys of a strategy."""
    words = [f"--launch.num_devices={num_devices}", f"--parallel={json.dumps(parallel)}"]
    return [*words, *(f"--engine.{key}={json.dumps(value)}" for key, value in (engine or {}).items())]


STRATEGIES = {
    "one": mesh(1),
    "one, recompute": mesh(1, {"recompute": "full"}),
    "dp2": mesh(2),
    "stage1": mesh(4, sharding="stage1"),
    "stage2": mesh(4, sharding="stage2"),
    "stage3": mesh(4, sharding="stage3"),
    "tp2": mesh(2, tensor_parallel_degree=2),
    "tp2 sp": mesh(2, tensor_parallel_degree=2, sequence_parallel=True),
    "pp2": mesh(2, pipeline_parallel_degree=2, pipeline_schedule="1F1B"),
    "pp2, interleaved": mesh(2, pipeline_parallel_degree=2, pipeline_schedule="interleaved", virtual_pipeline_degree=2),
    "pp2 tp2 sp, stage1": mesh(
        8,
        pipeline_parallel_degree=2,
        pipeline_schedule="1F1B",
        tensor_parallel_degree=2,
        sequence_parallel=True,
        sharding="stage1",
    ),
    "one, recompute selective": mesh(1, {"recompute": "selective"}),
    "stage1, offload": mesh(4, {"offload_optimizer": True}, sharding="stage1"),
    "stage3, recompute": mesh(4, {"recompute": "full"}, sharding="stage3"),
    "tp2 sp, stage2": mesh(4, tensor_parallel_degree=2, sequence_parallel=True, sharding="stage2"),
    "tp4 sp, recompute": mesh(4, {"recompute": "full"}, tensor_parallel_degree=4, sequence_parallel=True),
    "pp2, interleaved, stage1, every second layer recomputed": mesh(
        4,
        {"recompute": "full", "recompute_every": 2},
        pipeline_parallel_degree=2,
        pipeline_schedule="interleaved",
        virtual_pipeline_degree=2,
        sharding="stage1",
    ),
}
EXPERTS = {
    "family": "qwen_moe",
    "preset": "qwen3-30b-a3b",
    "tokenizer": "data/tokenizer",
    "config": {"num_hidden_layers": 2},
}
RUNS = {name: [RECIPE, *WORDS, *words] for name, words in STRATEGIES.items()}
"""Recipes with their keys."""
_OF_EXPERTS = ["recipes/qwen_moe/pretrain.json", f"--model={json.dumps(EXPERTS)}", "--train.global_batch_size=8"]
RUNS["ep4 of experts, stage1"] = [*_OF_EXPERTS, *mesh(4, expert_parallel_degree=4, sharding="stage1")]
RUNS["ep2 tp2 sp of experts, stage2"] = [
    *_OF_EXPERTS,
    *mesh(4, expert_parallel_degree=2, tensor_parallel_degree=2, sequence_parallel=True, sharding="stage2"),
]
RUNS["tp2 sp, LoRA"] = [
    RECIPE,
    *WORDS,
    *mesh(2, tensor_parallel_degree=2, sequence_parallel=True),
    "--lora.rank=16",
]
MORE_FLOPS = {"one, recompute selective": 0.01, "tp2 sp, LoRA": 0.01, "ep2 tp2 sp of experts, stage2": 0.002}
"""What a step may have above the plan, where that is not 0.1%: the plan counts neither attention that is computed again
by itself, nor the products of adapters, nor gates on each tensor parallel rank."""


@functools.cache
def planned(name: str) -> Estimate:
    """The arithmetic."""
    recipe, *words = RUNS[name]
    plan = plan_run(recipe, [*words, "--device=gpu"], load_plugins())
    return estimate(plan.model, plan.data, plan.parallel, plan.train)


@pytest.fixture(scope="module")
def rehearsed(runner: Runner) -> dict[str, list[dict[str, Any]]]:
    """The reports of one rank of each pipeline stage, by strategy; each is made when a test first needs it."""

    class Reports(dict[str, list[dict[str, Any]]]):
        def __missing__(self, name: str) -> list[dict[str, Any]]:
            process = runner.start("rehearse", *RUNS[name], "--json")
            printed, _ = process.communicate()
            assert process.returncode == 0, printed
            self[name] = json.loads(printed[printed.index("[\n") :])
            return self[name]

    return Reports()


@pytest.mark.parametrize("name", RUNS)
def test_memory_is_that_of_the_plan(rehearsed: dict[str, list[dict[str, Any]]], name: str) -> None:
    for report, stage in zip(rehearsed[name], planned(name).stages, strict=True):
        found = report["peak_bytes"]
        print(f"{name}, stage {stage.stage}: {found / 2**30:.2f} GiB, {found / stage.peak - 1:+.2%} of the plan")
        assert abs(found / stage.peak - 1) < 0.01, (found, stage)


@pytest.mark.parametrize("name", RUNS)
def test_flops_are_those_of_the_plan(rehearsed: dict[str, list[dict[str, Any]]], name: str) -> None:
    found = planned(name)
    degrees = found.parallel_plan.degrees
    for stage, report in enumerate(rehearsed[name]):
        costs = found.costs[stage :: degrees.pp]
        expected = sum(cost.forward + cost.backward for cost in costs) * found.num_micro_batches / degrees.tp
        far = report["flops"] / expected - 1
        print(f"{name}, stage {stage}: {report['flops'] / 1e12:.2f} TFLOP, {far:+.2%} of the plan")
        assert -0.001 < far < MORE_FLOPS.get(name, 0.001), (report["flops"], expected)


@pytest.mark.parametrize("name", [name for name in RUNS if not name.startswith("one")])
def test_messages_are_those_of_the_plan(rehearsed: dict[str, list[dict[str, Any]]], name: str) -> None:
    found = planned(name)
    for stage, report in enumerate(rehearsed[name]):
        assert messages(report) == planned_messages(found, stage), stage


def messages(report: Mapping[str, Any]) -> dict[tuple[str, str], int]:
    """Bytes by operation and group. What is received is counted where it is sent."""
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    for row in report["messages"]:
        if row["name"] != "recv":
            found[row["name"], row["group"]] += round(row["bytes"])
    return dict(found)


def planned_messages(found: Estimate, stage: int) -> dict[tuple[str, str], int]:
    """`messages` by arithmetic."""
    degrees = found.parallel_plan.degrees
    each = degrees.num_ranks // degrees.pp
    own = Mesh(degrees, stage * each)
    sizes: collections.Counter[tuple[str, str]] = collections.Counter()
    for message, count in found.traffic[stage].items():
        if message.axis == RUN:
            ranks = list(range(degrees.num_ranks))
        elif message.axis == PIPELINE:
            is_forward = message.why.startswith("activations") or message.shape == (5,)
            other = (stage + (1 if is_forward else -1)) % degrees.pp  # interleaved, the last sends to the first
            ranks = sorted([stage * each, other * each])
        else:
            of_axis = own.expert_mesh if message.axis == "ep" else own
            rows = of_axis.rows(*GROUP_AXES[message.axis])
            ranks = next(row.tolist() for row in rows if own.rank in row)
        # of all ranks together
        times = len(ranks) if message.operation == "all_gather" else 1
        size = math.prod(message.shape) * message.num_bytes * count * times
        sizes[message.operation, "ranks " + ",".join(map(str, ranks))] += size
    return dict(sizes)


def test_a_step_reads_the_device_twice(rehearsed: dict[str, list[dict[str, Any]]]) -> None:
    """The loss with the metrics, and the norm of the gradients."""
    (report,) = rehearsed["one"]
    assert {row["place"].partition(":")[0] for row in report["reads"]} == {"parallel/collective.py"}
    assert sum(row["count"] for row in report["reads"]) == 2


def test_a_step_is_played_on_a_device(runner: Runner) -> None:
    trace = runner.directory / "step.json"
    process = runner.start(
        "rehearse", RECIPE, *WORDS, *STRATEGIES["tp2"], "--hardware=h100", f"--trace={trace}", "--json"
    )
    printed, _ = process.communicate()
    assert process.returncode == 0, printed
    (report,) = json.loads(printed[printed.index("[\n") :])
    found = report["predicted"]
    # whatever the host takes: no device is faster than its data sheet
    assert found["busy_seconds"] > report["flops"] / 989e12
    assert found["step_seconds"] >= max(found["busy_seconds"], found["host_seconds"])
    assert 0 < found["mfu"] < 1
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    on_device = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in events} == {"rank 0"}
    assert {"matmul", "flash_attn", "all_reduce", "fused_adam"} <= {event["name"] for event in on_device}
    assert len(on_device) == report["launches"] + sum(row["count"] for row in (*report["reads"], *report["uploads"]))


def test_the_line_that_runs_out_of_memory_is_named(runner: Runner) -> None:
    layers = {**MODEL, "config": {"num_hidden_layers": 32}}
    process = runner.start(
        "rehearse", RECIPE, f"--model={json.dumps(layers)}", "--train.global_batch_size=8", *mesh(1), "--hardware=h100"
    )
    printed, _ = process.communicate()
    assert process.returncode == 1, printed
    assert "fails in step 1 at parallel/optimizer.py:" in printed
    assert "Out of memory" in printed
    assert "of 74.5 GiB are allocated" in printed


def test_a_rank_ends_with_the_command_that_has_started_it(runner: Runner) -> None:
    mark = uuid.uuid4().hex
    process = runner.start("rehearse", RECIPE, *WORDS, *STRATEGIES["one"], **{MARK: mark})
    deadline = time.monotonic() + 120
    while len(marked(mark)) < 3:  # it, the supervisor of the rank, and the rank
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 30
    while left := marked(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
