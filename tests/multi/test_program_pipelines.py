"""Pipelines of whole-step programs, beyond two stages of one chunk each, equal the same steps op by op."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multi.conftest import Runner
from tests.multi.programs import (
    FTHENB,
    INTERLEAVED,
    PP2,
    SAVES,
    SP,
    STAGE3,
    TP2,
    WORDS,
    on_mesh,
    op_by_op,
    resume_from_first,
)
from tests.parity.cases import OPTIMIZERS, Case, few, once, run_cases
from tests.support.program_jobs import ADAPTERS, FURTHER, JOBS, STAGES, compare_job

LOSSES = {
    f"dpo {loss}": ("llama/dpo", (*OPTIMIZERS["sgd"], f"--dpo.loss={loss}", *more))
    for loss, more in {"ipo": ("--dpo.beta=0.01",), "ipo_mean": (), "hinge": (), "simpo": ()}.items()
}
"""Jobs of losses that no other test has on ranks. That of `ipo` is the square of how far a difference of whole answers,
which float32 knows to 1e-5, is from 1 / (2 beta): with the beta here that is 4e-7 of it, with 0.1 would be 4e-6."""
ON_TP = ("dpo", "kto_pair", "rm", "kto", "lora")
"""As `FURTHER`, with SGD: on eight ranks AdamW brings the rounding of an adapter to the limit, 3.0e-6 (2.4e-6 op by
op)."""
PP4 = {"pipeline_parallel_degree": 4}
AGAIN = "--engine.recompute=full"
ONE_EXECUTOR = "--device=standin"
"""Paddle's own plan in one executor, as on GPUs, in place of an executor for each job."""
FOUR = "--train.micro_batch_size=2"
"""Rows of a micro-batch where a data rank makes four of eight rows; two where it has half of them."""
ON_RANKS: dict[str, tuple[str, int, int, dict[str, Any], tuple[str, ...]]] = {
    # the job, layers, ranks, mesh, words
    "pp4 adamw": ("sft adamw", 4, 4, PP4, (FOUR,)),
    "pp4 sgd, FThenB": ("sft sgd", 5, 4, {**PP4, **FTHENB, "pipeline_cut": [2, 3, 4]}, (FOUR,)),
    "pp4 tied": ("tied", 4, 4, PP4, (FOUR,)),
    "pp4 masked documents": ("masked documents", 4, 4, PP4, (FOUR,)),
    "pp4, again": ("sft sgd", 4, 4, PP4, (FOUR, AGAIN)),
    # two micro-batches are as many as there are stages
    "interleaved adamw": ("sft adamw", 4, 2, INTERLEAVED, ()),
    "interleaved sgd": ("sft sgd", 5, 2, {**INTERLEAVED, "pipeline_cut": [1, 3, 4]}, (FOUR,)),
    "three chunks": ("sft adamw", 6, 2, {**INTERLEAVED, "virtual_pipeline_degree": 3}, (FOUR,)),
    "interleaved, tied": ("tied", 4, 2, INTERLEAVED, (FOUR,)),
    "interleaved, masked documents": ("masked documents", 4, 2, INTERLEAVED, (FOUR,)),
    "interleaved gpt": ("gpt", 4, 2, INTERLEAVED, (FOUR,)),
    "interleaved, again": ("sft adamw", 4, 2, INTERLEAVED, (FOUR, AGAIN)),
    "pp4 interleaved": ("sft sgd", 8, 4, {**PP4, "pipeline_schedule": "interleaved"}, (FOUR,)),
    "pp4 adamw, one executor": ("sft adamw", 4, 4, PP4, (FOUR, ONE_EXECUTOR)),
    "interleaved dpo, one executor": ("dpo", 4, 2, INTERLEAVED, (FOUR, ONE_EXECUTOR)),
    "dp2 pp2 stage3 FThenB, one executor": ("sft sgd", 5, 4, {**PP2, **FTHENB, **STAGE3}, (FOUR, ONE_EXECUTOR)),
    "tp2 interleaved": ("sft adamw", 4, 4, {**TP2, **SP, **INTERLEAVED}, (FOUR,)),
    "dp2 interleaved stage1": ("sft adamw", 4, 4, {**INTERLEAVED, "sharding": "stage1"}, (FOUR,)),
    "pp2, again": ("sft adamw", 4, 2, PP2, (FOUR, AGAIN)),
    "pp2, every second again": ("sft sgd", 4, 2, PP2, (FOUR, AGAIN, "--engine.recompute_every=2")),
    "tp2 pp2, again": ("sft adamw", 4, 4, {**TP2, **SP, **PP2}, (FOUR, AGAIN)),
    "tp2 pp2 dp2 stage1": ("sft adamw", 4, 8, {**TP2, **SP, **PP2, "sharding": "stage1"}, (FOUR,)),
    "tp2 pp2 dp2": ("sft sgd", 4, 8, {**TP2, **PP2}, (FOUR,)),
    "tp2 dp2 interleaved stage2": ("sft adamw", 4, 8, {**TP2, **SP, **INTERLEAVED, "sharding": "stage2"}, (FOUR,)),
    "dp2 pp2 stage3 adamw": ("sft adamw", 4, 4, {**PP2, **STAGE3}, (FOUR,)),
    "dp2 pp2 stage3 sgd, FThenB": ("sft sgd", 5, 4, {**PP2, **FTHENB, **STAGE3}, (FOUR,)),
    "dp2 pp2 stage3 tied": ("tied", 4, 4, {**PP2, **STAGE3}, (FOUR,)),
    "dp2 pp2 stage3 gpt": ("gpt", 4, 4, {**PP2, **STAGE3}, (FOUR,)),
    "dp2 pp2 stage3, again": ("sft adamw", 4, 4, {**PP2, **STAGE3}, (FOUR, AGAIN)),
    "dp2 interleaved stage3": ("sft adamw", 4, 4, {**INTERLEAVED, **STAGE3}, (FOUR,)),
    "dp2 interleaved stage3, again": ("sft sgd", 4, 4, {**INTERLEAVED, **STAGE3}, (FOUR, AGAIN)),
    "dp2 interleaved stage3 tied": ("tied", 4, 4, {**INTERLEAVED, **STAGE3}, (FOUR,)),
    "tp2 pp2 dp2 stage3": ("sft adamw", 4, 8, {**TP2, **SP, **PP2, **STAGE3}, (FOUR,)),
    "tp2 dp2 interleaved stage3": ("sft sgd", 4, 8, {**TP2, **SP, **INTERLEAVED, **STAGE3}, (FOUR,)),
    **{f"dp2 pp2 stage3 {job}": (job, 4, 4, {**PP2, **STAGE3}, (FOUR,)) for job in FURTHER},
    **{f"dp2 interleaved stage3 {job}": (job, 4, 4, {**INTERLEAVED, **STAGE3}, (FOUR,)) for job in FURTHER},
    **{f"pp4 {job}": (job, 4, 4, PP4, (FOUR,)) for job in (*STAGES, *ADAPTERS, *LOSSES)},
    **{f"interleaved {job}": (job, 4, 2, INTERLEAVED, (FOUR,)) for job in (*STAGES, *ADAPTERS)},
    **{f"pp2 {job}, again": (job, 4, 2, PP2, (FOUR, AGAIN)) for job in (*STAGES, *ADAPTERS)},
    **{f"interleaved {job}, again": (job, 4, 2, INTERLEAVED, (FOUR, AGAIN)) for job in FURTHER},
    **{f"dp2 interleaved {job}": (job, 4, 4, {**INTERLEAVED, "sharding": "stage2"}, (FOUR,)) for job in FURTHER},
    **{f"tp2 interleaved {job}": (job, 4, 4, {**TP2, **SP, **INTERLEAVED}, (FOUR,)) for job in ON_TP},
    **{f"tp2 pp2 dp2 {job}": (job, 4, 8, {**TP2, **SP, **PP2, "sharding": "stage1"}, (FOUR,)) for job in ON_TP},
}
KEPT = ("interleaved dpo", "pp4 kto", "pp2 lora adamw, again", "dp2 pp2 stage3 adamw")
"""Of stages that compare answers, of adapters, and with `stage3`, those that `make test-further` runs."""
MESHES = few(
    ON_RANKS,
    *("pp4 sgd, FThenB", "pp4, again", "pp4 interleaved", "three chunks", "interleaved gpt", "interleaved, again"),
    *("tp2 interleaved", "dp2 interleaved stage1", "pp2, every second again", "tp2 pp2, again"),
    *("tp2 pp2 dp2", "tp2 dp2 interleaved stage2"),
    *(
        mesh
        for mesh, (job, *_) in ON_RANKS.items()
        if (job in (*STAGES, *ADAPTERS, *LOSSES) or "stage3" in mesh) and mesh not in KEPT
    ),
)


def _one(job: str, layers: int) -> Case:
    """The run of a job op by op, in one process."""
    recipe, words = (JOBS | LOSSES)[job]
    given = once([*WORDS, *words, f"--model.config.num_hidden_layers={layers}", *SAVES])
    return Case(f"{job}, {layers} layers", 1, given, recipe=f"recipes/{recipe}.json")


def _many(mesh: str) -> Case:
    job, layers, ranks, parallel, more = MESHES[mesh]
    return on_mesh(_one(job, layers), mesh, ranks, parallel, *more)


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs all cases; what was printed of those that did not end well."""
    ones = {case.name: case for case in (_one(job, layers) for job, layers, *_ in MESHES.values())}
    return run_cases(runner, [*ones.values(), *map(_many, MESHES)])


@pytest.mark.parametrize("mesh", MESHES)
def test_equals_one_process(runner: Runner, failed: dict[str, str], mesh: str) -> None:
    job, layers, *_ = MESHES[mesh]
    one = _one(job, layers).name
    assert not failed.keys() & {one, mesh}, failed
    assert compare_job(runner, job, one, mesh).problems == []


@pytest.mark.parametrize("mesh", ["pp4 adamw", "interleaved adamw", "dp2 pp2 stage3 adamw"])
def test_goes_on_in_either_mode(runner: Runner, failed: dict[str, str], mesh: str) -> None:
    """A pipeline of programs from the first checkpoint of a dynamic process, and dynamic ranks from that of the
    pipeline."""
    job, layers, *_ = MESHES[mesh]
    one = _one(job, layers)
    many = _many(mesh)
    assert not failed.keys() & {one.name, mesh}, failed
    again = {f"{mesh}, from one": (one.name, many), f"dynamic, from {mesh}": (mesh, op_by_op(many))}
    resume_from_first(runner, again)
    theirs = runner.metrics(one.name)[1:]
    for name in again:
        ours = runner.metrics(name)
        assert [record["step"] for record in ours] == [2, 3]
        for a, b in zip(theirs, ours):
            assert [b[key] for key in ("loss", "grad_norm")] == pytest.approx([a["loss"], a["grad_norm"]], rel=1e-6)
