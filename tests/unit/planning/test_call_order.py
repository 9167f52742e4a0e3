"""The calls of ranks are matched before any rank starts: what differs is named, with rank and call."""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.cli.main import main
from llmsuite.contract.registry import Registry
from llmsuite.parallel.schedule import Action
from llmsuite.parallel.timeline import orders
from llmsuite.planning import call_order
from llmsuite.planning.call_order import Call, Group, calls_of_ranks, first_problem
from llmsuite.planning.estimate import micro_batches
from llmsuite.planning.layout import Layout
from llmsuite.planning.memory import full_micro_batch
from llmsuite.recipe.resolve import plan_run
from tests.support.allocated import RECIPE, run_plan
from tests.support.planned_runs import checked_order

Calls = dict[int, list[Call]]


def calls_of(*words: str) -> Calls:
    plan = run_plan(RECIPE, "--launch.num_devices=8", *words)
    batch = full_micro_batch(plan.model, plan.data, plan.parallel, plan.train)
    pp = plan.parallel.degrees.pp
    count = micro_batches(plan.parallel, plan.train, batch)
    layout = Layout(plan.model, plan.parallel)
    return calls_of_ranks(layout, plan.train, batch, min(count, 2 * pp + count % pp))


MESHES = {
    "tensor, pipeline, stage 1": (),
    "interleaved, stage 2, tied": (
        '--parallel={"pipeline_parallel_degree": 4, "pipeline_schedule": "interleaved", "sharding": "stage2"}',
        "--model.config.tie_word_embeddings=true",
        *("--device=cpu", "--engine.precision=fp32"),  # gpu refuses the schedule
    ),
    "stage 3": ('--parallel={"sharding": "stage3", "sharding_parallel_degree": 4}',),
}
PLAYED = {name: calls_of(*words) for name, words in MESHES.items()}


@pytest.mark.parametrize("recipe", sorted(glob.glob("recipes/*/*.json")))
def test_the_ranks_of_every_recipe_meet(recipe: str, registry: Registry) -> None:
    plan = plan_run(recipe, (), registry)
    if plan.train.stage.trains:
        simulated = checked_order(plan)
        assert simulated is not None
        assert (simulated.num_calls > 0) == (plan.parallel.degrees.num_ranks > 1)


@settings(max_examples=40)
@given(st.sampled_from(sorted(PLAYED)), st.data())
def test_a_call_that_is_left_out_is_found(name: str, data: st.DataObject) -> None:
    calls, rank, at = _place(PLAYED[name], data)
    left_out = calls[rank].pop(at)
    problem = first_problem(calls)
    assert str(left_out.group) in problem
    assert f"rank {rank} makes" in problem


@settings(max_examples=40)
@given(st.sampled_from(sorted(PLAYED)), st.data())
def test_calls_of_a_group_in_another_order_are_found(name: str, data: st.DataObject) -> None:
    calls, rank, at = _place(PLAYED[name], data)
    own = calls[rank]
    later = [i for i in range(at + 1, len(own)) if own[i].group is own[at].group and own[i] != own[at]]
    if not later:
        return
    own[at], own[later[0]] = own[later[0]], own[at]
    number = sum(call.group is own[at].group for call in own[: at + 1])
    problem = first_problem(calls)
    assert problem.startswith(f"call {number} of the {own[at].group}: ")
    assert f"rank {rank} makes {own[at]}" in problem


@settings(max_examples=40)
@given(st.sampled_from(sorted(PLAYED)), st.data())
def test_another_shape_is_found(name: str, data: st.DataObject) -> None:
    calls, rank, at = _place(PLAYED[name], data)
    call = calls[rank][at]
    calls[rank][at] = call._replace(size=(*call.size, 7))
    assert f"rank {rank} makes {calls[rank][at]}" in first_problem(calls)


def _place(simulated: Calls, data: st.DataObject) -> tuple[Calls, int, int]:
    """A copy of the calls, and one of them."""
    calls = {rank: list(own) for rank, own in simulated.items()}
    rank = data.draw(st.sampled_from(sorted(calls)))
    return calls, rank, data.draw(st.integers(0, len(calls[rank]) - 1))


def test_groups_in_another_order_wait_for_ever() -> None:
    """Each group's ranks agree; which group comes first they do not."""
    a = Group("a", (0, 1))
    b = Group("b", (0, 1))
    first = Call(a, "all_reduce", (8,), "x")
    second = Call(b, "all_reduce", (8,), "y")
    assert first_problem({0: [first, second], 1: [first, second]}) == ""
    assert first_problem({0: [first, second], 1: [second, first]}) == (
        "2 ranks wait for each other for ever: rank 0 waits in all_reduce [8] (x) for rank 1; "
        "rank 1 waits in all_reduce [8] (y) for rank 0"
    )


def _swapped(kind: Any, stages: int, count: int, chunks: int) -> Sequence[Sequence[Action]]:
    """The schedule, but on the last stage the first two forward passes in another order."""
    every = [list(actions) for actions in orders(kind, stages, count, chunks)]
    forward = [i for i, action in enumerate(every[-1]) if action.forward][:2]
    every[-1][forward[0]], every[-1][forward[1]] = every[-1][forward[1]], every[-1][forward[0]]
    return every


def _late(kind: Any, stages: int, count: int, chunks: int) -> Sequence[Sequence[Action]]:
    """The first stage goes back over each micro-batch before it takes the next, the last one goes back at the end."""
    every = [list(actions) for actions in orders(kind, stages, count, chunks)]
    every[0].sort(key=lambda action: (action.micro_batch, not action.forward))
    every[-1].sort(key=lambda action: (not action.forward, action.micro_batch))
    return every


def _short(kind: Any, stages: int, count: int, chunks: int) -> Sequence[Sequence[Action]]:
    """The second stage forgets its last backward pass."""
    every = [list(actions) for actions in orders(kind, stages, count, chunks)]
    every[1].pop()
    return every


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (_swapped, "makes receive (activations of micro-batch 1 for part 1)"),
        (_late, "ranks wait for each other for ever: rank 0 waits in receive (gradients of micro-batch 0 for part 0)"),
        (_short, "makes none"),
    ],
)
def test_a_schedule_that_is_wrong_starts_no_rank(
    schedule: Callable[..., Any], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(call_order, "orders", schedule)
    plan = run_plan(RECIPE, "--launch.num_devices=8", "--train.global_batch_size=16")
    with pytest.raises(UserError, match="the calls of this run's ranks do not match") as caught:
        checked_order(plan)
    assert said in str(caught.value)
    words = ("--smoke", "--output_dir=/nonexistent/order")
    for command in ("run", "plan"):
        assert main([command, RECIPE, *words]) == 2
        assert "the calls of this run's ranks do not match" in capsys.readouterr().err


def test_parameters_of_another_order_on_one_stage_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third party's shard plan may do that."""
    plan = run_plan(RECIPE, "--launch.num_devices=8", '--parallel={"sharding": "stage1"}')
    parameters = call_order.Layout.parameters

    def turned(self: Any, mesh: Any) -> Any:
        found = parameters(self, mesh)
        return found[::-1] if mesh.rank == 1 else found

    monkeypatch.setattr(call_order.Layout, "parameters", turned)
    with pytest.raises(UserError, match=r"of the sharding of ranks 0, 1.*rank 0 makes all_gather .*embed.*; rank 1"):
        checked_order(plan)


def test_the_command_says_that_they_meet(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", RECIPE]) == 0
    assert "of 8 ranks, those that differ, simulated; their" in capsys.readouterr().out


def test_a_big_mesh_is_no_more_work_than_its_pipeline() -> None:
    words = ("--launch.num_devices=8", "--launch.nnodes=1024", "--train.global_batch_size=65536")
    simulated = checked_order(run_plan(RECIPE, *words))
    assert simulated is not None
    small = checked_order(
        run_plan(RECIPE, "--launch.num_devices=8", "--launch.nnodes=4", "--train.global_batch_size=256")
    )
    assert small is not None
    assert simulated.num_ranks == small.num_ranks
    assert dataclasses.astuple(simulated) == dataclasses.astuple(small)
