"""A loss in chunks of tokens is that of one process that computes it at once, on every mesh; and is as planned."""

from __future__ import annotations

import dataclasses

import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import GRADIENT_LIMIT, LIMIT, Case, compare, many_processes, one_process, plan_of, run_cases
from tests.parity.lora import case
from tests.parity.planned import check_truth
from tests.parity.points import Point, point

CHUNK = 7
CHUNKED = (f"--engine.loss_chunk_tokens={CHUNK}",)
TP = {"tensor_parallel_degree": 2}
SP = {"tensor_parallel_degree": 2, "sequence_parallel": True}
ALONE = ("--train.micro_batch_size=8",)
HEAD = {"run": ('--lora.target_modules=["lm_head", "layers.2.*"]',), "optimizer": "adamw"}
POINTS: dict[str, Point] = {
    "tp2 in sequences": point(tp=2, sequence_parallel=True, loss_chunk=CHUNK),
    "tp2, tied": point(tp=2, tied=True, loss_chunk=CHUNK, stage="tokens"),
    # data ranks have other numbers of tokens, and of chunks
    "stage3, tied": point(sharding="stage3", data_ranks=2, tied=True, loss_chunk=CHUNK, recompute="full"),
    "stage3": point(sharding="stage3", data_ranks=2, loss_chunk=CHUNK, stage="tokens"),
}
ADAPTERS: dict[str, tuple[Case, Case]] = {
    name: (case(f"one {kind}", words=ALONE, **run), case(name, 2, parallel, CHUNKED, **run))  # type: ignore[arg-type]
    for name, kind, parallel, run in (
        ("adapters, tp2 in sequences", "adapters", SP, {}),
        ("adapters, tp2, dpo", "adapters, dpo", TP, {"stage": "dpo"}),
        ("adapters, stage3", "adapters", {"sharding": "stage3"}, {}),
        ("adapter of the head, tp2", "adapter of the head", TP, HEAD),
        ("adapter of the head, stage3", "adapter of the head", {"sharding": "stage3"}, HEAD),
    )
}
RUNS: dict[str, tuple[Case, Case]] = {
    name: (one_process(p), dataclasses.replace(many_processes(p), trace=True)) for name, p in POINTS.items()
} | {name: (one, dataclasses.replace(many, trace=True)) for name, (one, many) in ADAPTERS.items()}


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs everything; what was printed of the cases that did not end well."""
    ones = {one.name: one for one, _ in RUNS.values()}
    return run_cases(runner, [*ones.values(), *(many for _, many in RUNS.values())])


@pytest.mark.parametrize("name", RUNS)
def test_equal_to_one_process_at_once(runner: Runner, failed: dict[str, str], name: str) -> None:
    one, many = RUNS[name]
    for run in (one, many):
        assert run.name not in failed, failed[run.name]
    # a second factor begins at zero: it is nothing but a sum of gradients, and has no more digits than those
    stem, limit = ("adapter_model", GRADIENT_LIMIT) if name in ADAPTERS else ("model", LIMIT)
    assert compare(runner, one.name, many.name, stem, limit).problems == []


@pytest.mark.parametrize("name", RUNS)
def test_runs_are_as_planned(runner: Runner, failed: dict[str, str], name: str) -> None:
    many = RUNS[name][1]
    assert many.name not in failed, failed[many.name]
    check_truth(runner.directory / many.name, plan_of(many))
