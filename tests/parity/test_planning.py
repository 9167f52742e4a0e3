"""What `llmsuite plan` says a rank sends in a step is what passes through the communication library, and what it says
lives in memory is what Paddle's allocator counts."""

from __future__ import annotations

import collections
import json
import math
from typing import Any

import pytest

from llmsuite.cli import commands
from llmsuite.engine.mesh import Mesh
from llmsuite.planning.activations import Pass
from llmsuite.planning.communication import AXES, PIPELINE, RUN, Message, Traffic
from llmsuite.planning.estimate import anatomy_of
from llmsuite.planning.layout import Layout
from llmsuite.planning.memory import documents_of, memory
from llmsuite.plugins import builtin
from llmsuite.plugins.manager import PluginInfo, load_plugins
from llmsuite.recipe.resolve import RunPlan, plan_run
from tests.multi.conftest import Runner
from tests.parity import token_stage
from tests.parity.cases import RECIPES, Case, run_cases

TP, SP = {"tensor_parallel_degree": 2}, {"tensor_parallel_degree": 2, "sequence_parallel": True}
PP = {"pipeline_parallel_degree": 2}
KEPT, STATIC, TIED = (
    ("--engine.recompute=none",),
    ("--engine.mode=to_static",),
    ("--model.config.tie_word_embeddings=true",),
)
AGAIN = ("--engine.recompute=full",)
TWO = ("--train.micro_batch_size=2",)
RUNS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "stage 2": ("llama/sft", {"sharding": "stage2"}, ()),
    "stage 3": ("llama/sft", {"sharding": "stage3"}, ()),
    "stage 3, tied, kept": ("llama/sft", {"sharding": "stage3"}, (*KEPT, *TIED)),
    "tensor": ("tokens", TP, TWO),
    "compiled sequence": ("llama/sft", SP, (*STATIC, *TWO)),
    "compiled sequence, kept": ("llama/sft", SP, (*STATIC, *TWO, *KEPT)),
    "reward model": ("llama/rm", SP, ()),
    "qwen": ("qwen/sft", TP, ()),
    "gpt, sequence": ("gpt/sft", SP, ()),
    "gpt, sequence, kept": ("gpt/sft", SP, KEPT),
    "deepseek": ("deepseek/sft", TP, AGAIN),
    "deepseek, sequence": ("deepseek/sft", SP, ()),
    "deepseek, compiled": ("deepseek/sft", SP, (*STATIC, *AGAIN)),
    "deepseek, experts": ("deepseek/sft", {"expert_parallel_degree": 2, "sharding": "stage2"}, AGAIN),
    "deepseek, pipeline": ("deepseek/sft", PP, ()),
    "adapters": ("llama/lora", TP, ()),
    "adapters, kept": ("llama/lora", TP, KEPT),
    "adapters, sequence": ("llama/lora", SP, ()),
    "adapters, sequence, kept": ("llama/lora", SP, KEPT),
    "adapters, stage 3": ("llama/lora", {"sharding": "stage3"}, ()),
}
ALONE = {
    "one, again": ("llama/sft", AGAIN),
    "one, kept": ("llama/dpo", KEPT),
    "one, selective": ("qwen/sft", ("--engine.recompute=selective",)),
    "one, gpt": ("gpt/sft", KEPT),
    "one, deepseek": ("deepseek/sft", KEPT),
}
COMMON = (
    "--train.max_steps=2", "--train.global_batch_size=4", "--data.eval=null", "--checkpoint.save_steps=null",
    "--data.group_by_length=false",
)  # fmt: skip


def _case(name: str) -> Case:
    if name in ALONE:
        recipe, more = ALONE[name]
        parallel, num_ranks = {}, 1
    else:
        (recipe, parallel, more), num_ranks = RUNS[name], 2
    more = more if TWO[0] in more else (*more, "--train.micro_batch_size=1")
    words = [*COMMON, f"--launch.num_devices={num_ranks}", f"--parallel={json.dumps(parallel)}", *more]
    return Case(name, num_ranks, words, recipe=RECIPES.get(recipe, f"recipes/{recipe}.json"), trace=True)


@pytest.fixture(scope="module")
def runs(runner: Runner) -> Runner:
    assert run_cases(runner, map(_case, [*ALONE, *RUNS])) == {}
    return runner


@pytest.mark.parametrize("name", RUNS)
def test_a_step_sends_what_is_planned(runs: Runner, name: str) -> None:
    """Calls and bytes of each operation, group and size of message, on every rank."""
    plan = _plan(name)
    layout, anatomy = Layout(plan), anatomy_of(plan)
    for rank in range(2):
        record, mesh = _record(runs, name, rank), Mesh(plan.degrees, rank)
        planned: collections.Counter[Any] = collections.Counter()
        for message, count in Traffic(layout, anatomy, mesh, _passes(plan, record), False).counts.items():
            if message.is_exact:
                key = _ranks(mesh, message), message.operation, math.prod(message.shape) * message.num_bytes
                planned[key] += count
        found: collections.Counter[Any] = collections.Counter()
        for ranks, operation, shape, width, count in record["messages"]:
            # what Paddle has made for itself is along tp, and the pairs of a pipeline are not known by name
            group = tuple(ranks) if ranks is not None else None if operation == "send" else (0, 1)
            if not (operation == "send" and group is not None):  # rows on their way to experts
                found[group, operation, math.prod(shape) * width] += count
        assert found == planned, rank


@pytest.mark.parametrize("name", ALONE)
def test_what_lives_in_memory_is_what_is_planned(runs: Runner, name: str) -> None:
    """Between steps, with all gradients, and between passes."""
    plan, record = _plan(name), _record(runs, name, 0)
    (planned,) = memory(Layout(plan), anatomy_of(plan), _passes(plan, record))
    found = record["memory"]
    assert planned.between_steps == pytest.approx(found["between_steps"], rel=0.01)
    assert planned.between_steps + planned.gradients == pytest.approx(found["gradients"], rel=0.01)
    assert planned.between_steps + planned.held == pytest.approx(found["between_passes"], rel=0.05)


def _plan(name: str) -> RunPlan:
    registry = load_plugins(builtin, commands)
    registry.add(PluginInfo("tokens", "tests", "tokens", plugin=token_stage))
    case = _case(name)
    return plan_run(case.recipe, case.words, registry, smoke=True)


def _record(runs: Runner, name: str, rank: int) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((runs.directory / name / f"traffic-{rank}.json").read_text())
    return record


def _passes(plan: RunPlan, record: dict[str, Any]) -> list[Pass]:
    return [Pass(*sizes, documents_of(plan)) for sizes in record["micro_batches"]]


def _ranks(mesh: Mesh, message: Message) -> tuple[int, ...] | None:
    """Of a message's group; None for what goes to a neighbour."""
    if message.axis == PIPELINE:
        return None
    if message.axis in (RUN, "tied"):
        return 0, 1
    place = mesh.of_experts if message.of_experts else mesh
    (row,) = (row for row in place.rows(*AXES[message.axis]) if mesh.rank in row)
    return tuple(int(rank) for rank in row)
