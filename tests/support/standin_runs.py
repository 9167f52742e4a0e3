"""Runs on CPU processes that stand in for GPUs."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.multi.conftest import Runner
from tests.parity.cases import LIMIT, Case, compare_gradients, few, one_process
from tests.parity.condition import bf16_gradient_limits, bf16_metric_limits
from tests.parity.points import point

RUN: dict[str, Any] = {"stage": "tokens", "tied": False, "optimizer": "sgd", "micro_batch_size": 1}
MESHES = few(
    {
        "pp2": point(pp=2, **RUN),
        "stage1": point(sharding="stage1", data_ranks=2, offload=True, **RUN),
        "stage3": point(sharding="stage3", data_ranks=2, recompute="full", **RUN),
        "tp2 sp": point(tp=2, sequence_parallel=True, **RUN),
        "tp2 pp2": point(tp=2, pp=2, recompute="full", **RUN),
        "dp2": point(data_ranks=2, **RUN),
        "stage2 pp2": point(pp=2, sharding="stage2", data_ranks=2, **RUN),
        "pp4": point(pp=4, schedule="FThenB", **RUN),
        "interleaved stage3": point(pp=2, schedule="interleaved", sharding="stage3", data_ranks=2, **RUN),
        "tp2 selective": point(tp=2, recompute="selective", **RUN),
    },
    "dp2", "stage2 pp2", "pp4", "interleaved stage3", "tp2 selective",
)  # fmt: skip
FLIPPED = 2.0**-16


def of(case: Case, name: str, mutation: str | None = None, precision: str = "bf16", **more: Any) -> Case:
    """A case on the stand-in."""
    words = [*case.words, "--device=standin", f"--engine.precision={precision}"]
    return dataclasses.replace(case, name=name, words=words, mutation=mutation, **more)


ONE = one_process(next(iter(MESHES.values())))


def problems(
    runner: Runner, one: str, many: str, cuts: bool = False, wide: Case = ONE, later: float = FLIPPED**0.5
) -> list[str]:
    """What is beyond the limits; `cuts`: sums are rounded in parts, or activations in one of the runs only. `wide`: the
    run in float32, whose condition the limits are from. `later`: without cuts, the part of them that is for the steps
    behind the first."""
    close = bf16_metric_limits(runner, wide)
    found = []
    for step, (ours, theirs) in enumerate(zip(runner.metrics(one), runner.metrics(many), strict=True), 1):
        assert ours["tokens"] == theirs["tokens"]
        for key, limit in close.items():
            limit *= 2  # not only inputs of products are rounded, as there, but what comes out too
            if not cuts:
                limit = LIMIT if step == 1 else max(LIMIT, limit * later)
            far = abs(theirs[key] / ours[key] - 1)
            print(f"{many}, step {step}: {key} {far:.1e} of at most {limit:.1e}")
            found += [f"step {step}: {key} differs by {far:.1e}"] if not far <= limit else []
    gradients = compare_gradients(runner, one, many, *((0.0, bf16_gradient_limits(runner, wide)) if cuts else ()))
    print(f"{many}: gradients {gradients.gradients:.1e}")
    return found + gradients.problems
