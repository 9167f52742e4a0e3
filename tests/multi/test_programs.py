"""Whole steps as programs equal the same steps op by op, and go on from each other's checkpoints."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.multi.conftest import Runner, learnt
from tests.multi.program_slices import BYTES
from tests.multi.programs import FTHENB, PP2, PROGRAM, SAVES, STAGE3, TP2, WORDS, on_mesh, op_by_op
from tests.parity.cases import (
    STEPS,
    Case,
    compare,
    few,
    once,
)
from tests.support.program_jobs import ADAPTERS, FURTHER, JOBS, STAGES, compare_job, run_apart

TWO = ("--train.micro_batch_size=2",)
ON_RANKS: dict[str, tuple[str, int, dict[str, Any], tuple[str, ...]]] = {
    # the job, ranks, mesh and words of programs on several ranks, which accumulate
    "dp2 sgd": ("sft sgd", 2, {}, ()),
    "dp2 packed": ("packed", 2, {}, TWO),
    "stage1": ("sft adamw", 2, {"sharding": "stage1"}, TWO),
    "stage3": ("sft adamw", 2, {"sharding": "stage3"}, TWO),
    "stage3, tied": ("tied", 2, {"sharding": "stage3"}, ()),
    "stage3 of a vocabulary that 2 does not divide": ("gpt", 2, {"sharding": "stage3"}, ()),
    "tp2 adamw": ("sft adamw", 2, {**TP2, "sequence_parallel": True}, ()),
    "tp2 sgd": ("sft sgd", 2, TP2, ()),
    "tp2 of a vocabulary that 2 does not divide": ("gpt", 2, TP2, ()),
    "dp2 kto_pair": ("kto_pair", 2, {}, TWO),
    "tp2 dpo": ("dpo", 2, TP2, TWO),
    "dp2 rm": ("rm", 2, {}, TWO),
    "tp2 rm": ("rm", 2, {**TP2, "sequence_parallel": True}, ()),
    "dp2 kto": ("kto", 2, {}, TWO),
    "tp2 kto": ("kto", 2, TP2, ()),
    "dp2 lora": ("lora", 2, {}, TWO),
    "tp2 lora": ("lora", 2, {**TP2, "sequence_parallel": True}, ()),
    "tp2 full ends": ("full ends", 2, {**TP2, "sequence_parallel": True}, ()),
    "tp2 dp2 stage3": ("sft sgd", 4, {**TP2, "sequence_parallel": True, "sharding": "stage3"}, ()),
    "tp2 dp2 stage2": ("sft adamw", 4, {**TP2, "sharding": "stage2"}, TWO),
    # two micro-batches are as many as there are stages; the others have four
    "pp2 adamw": ("sft adamw", 2, PP2, ()),
    "pp2 sgd, FThenB": ("sft sgd", 2, {**PP2, **FTHENB}, ()),
    "pp2 tied": ("tied", 2, PP2, TWO),
    "pp2 masked documents": ("masked documents", 2, PP2, TWO),
    "pp2 of a vocabulary that 2 does not divide": ("gpt", 2, PP2, ()),
    "tp2 pp2": ("sft adamw", 4, {**TP2, **PP2, "sequence_parallel": True}, TWO),
    "tp2 pp2 packed": ("packed", 4, {**TP2, **PP2}, TWO),
    "tp2 pp2 tied": ("tied", 4, {**TP2, **PP2}, TWO),
    "dp2 pp2": ("sft sgd", 4, PP2, ()),
    "dp2 pp2 stage1": ("sft adamw", 4, {**PP2, "sharding": "stage1"}, TWO),
    **{f"stage3 {job}": (job, 2, STAGE3, TWO) for job in (*STAGES, *ADAPTERS)},
    **{f"pp2 {job}": (job, 2, PP2, TWO) for job in (*STAGES, *ADAPTERS)},
    **{f"tp2 dp2 stage3 {job}": (job, 4, {**TP2, **STAGE3}, TWO) for job in FURTHER},
    **{f"tp2 pp2 {job}": (job, 4, {**TP2, **PP2, "sequence_parallel": True}, TWO) for job in FURTHER},
    **{f"dp2 pp2 {job}": (job, 4, {**PP2, "sharding": "stage1"}, TWO) for job in FURTHER},
}
LEFT = (
    *("tp2 full ends", "tp2 dp2 stage2", "tp2 dp2 stage3", "tp2 dpo", "tp2 kto", "dp2 rm"),
    *("pp2 tied", "pp2 masked documents", "pp2 of a vocabulary that 2 does not divide"),
    *("tp2 pp2", "tp2 pp2 packed", "tp2 pp2 tied", "dp2 pp2", "dp2 pp2 stage1"),
    *(f"{mesh} {job}" for mesh in ("tp2 dp2 stage3", "tp2 pp2", "dp2 pp2") for job in FURTHER),
    *(f"{mesh} {job}" for mesh in ("stage3", "pp2") for job in (*STAGES, *ADAPTERS)),
)
"""Cases that `make test-further` leaves out, but for some of the last line."""
MESHES = few(
    ON_RANKS,
    *sorted({*LEFT} - {"stage3 dpo", "stage3 kto", "stage3 lora adamw", "stage3 kto_pair"}
    - {"pp2 rm", "pp2 kto", "pp2 kto_pair", "pp2 lora adamw"}),
)  # fmt: skip


def _case(job: str, *more: str) -> Case:
    recipe, words = JOBS[job]
    kind = {(): "dynamic", PROGRAM: "program"}[more]
    return Case(f"{job}, {kind}", 1, once([*WORDS, *words, *SAVES, *more]), recipe=f"recipes/{recipe}.json")


def _on_ranks(mesh: str) -> Case:
    job, ranks, parallel, more = MESHES[mesh]
    return on_mesh(_case(job), mesh, ranks, parallel, *more)


GO_ON = ("tp2 adamw", "pp2 adamw", "pp2 kto_pair", "stage3 dpo", "stage3 lora adamw")
"""Of these, runs in other modes go on from each other's checkpoints."""


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs all cases; what was printed of those that did not end well."""
    of_one = [_case(job, *more) for job in JOBS for more in ((), PROGRAM)]
    return run_apart(runner, [*of_one, *map(_on_ranks, MESHES)])


@pytest.mark.parametrize("job", JOBS)
def test_equals_the_dynamic_mode(runner: Runner, failed: dict[str, str], job: str) -> None:
    one = _case(job).name
    many = _case(job, *PROGRAM).name
    assert not failed.keys() & {one, many}, failed
    assert compare_job(runner, job, one, many).problems == []
    if job == "kto":  # whose estimate of how far the model is from where it began has to be tried
        assert runner.metrics(one)[-1]["kl"] > 0.05
    made = [record["programs"] for record in runner.metrics(many)]
    assert made[-1] == (2 if "sft " in job else 1), made


@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_equal_one_process(runner: Runner, failed: dict[str, str], mesh: str) -> None:
    job = MESHES[mesh][0]
    one = _case(job).name
    many = _on_ranks(mesh).name
    assert not failed.keys() & {one, many}, failed
    assert compare_job(runner, job, one, many).problems == []


@pytest.mark.parametrize(("num_frozen", "share"), [(0, 3 / 2), (2, 5 / 6)])
def test_stage3_keeps_slices_between_steps(runner: Runner, tmp_path: Path, num_frozen: int, share: float) -> None:
    """Of parameters, frozen ones too, and of both moments; with whole parameters a rank would keep half of `BYTES`
    more after each step."""
    code, printed = runner.launch(2, "tests.multi.program_slices", str(tmp_path), str(num_frozen))
    assert code == 0, printed
    for rank in range(2):
        kept = json.loads((tmp_path / f"{rank}.json").read_text())
        # of three steps the least: what is kept is kept after each, what is still being freed is not
        assert (share - 0.05) * BYTES < min(kept) < (share + 0.1) * BYTES, kept


def test_two_ranks_go_on_in_either_mode(runner: Runner, failed: dict[str, str]) -> None:
    """Programs of two ranks from the first checkpoint of a dynamic run in one process, and two dynamic ranks from that
    of the programs."""
    again = []
    for mesh in GO_ON:
        job = MESHES[mesh][0]
        program = _on_ranks(mesh)
        assert not failed.keys() & {_case(job).name, mesh}, failed
        again += [
            (job, _case(job).name, dataclasses.replace(program, name=f"{mesh}, again", resume=True)),
            (job, mesh, dataclasses.replace(op_by_op(program), name=f"{mesh}, dynamic", resume=True)),
        ]
    for _, begun, case in again:
        step = Path("checkpoints") / "step-1"
        shutil.copytree(runner.directory / begun / step, runner.directory / case.name / step)
    assert run_apart(runner, [case for _, _, case in again]) == {}
    for job, _, case in again:
        theirs = runner.metrics(_case(job).name)[1:]
        ours = runner.metrics(case.name)
        assert [record["step"] for record in ours] == [2, 3]
        for a, b in zip(theirs, ours):
            expected = pytest.approx([a["loss"], a["grad_norm"]], rel=1e-6)
            assert [b[key] for key in ("loss", "grad_norm")] == expected, case.name


@pytest.mark.parametrize("kind", ["program", "dynamic"])
def test_goes_on_in_either_mode(runner: Runner, failed: dict[str, str], kind: str) -> None:
    """From the first checkpoint of a program: bit for bit as a program, else as close as a dynamic run."""
    begun = _case("sft adamw", *PROGRAM)
    assert begun.name not in failed, failed
    again = runner.directory / f"again, {kind}"
    shutil.copytree(runner.directory / begun.name, again)
    for step in range(2, STEPS + 1):
        shutil.rmtree(again / "checkpoints" / f"step-{step}")
    words = begun.words if kind == "program" else _case("sft adamw").words
    printed = runner.run("run", begun.recipe, "--smoke", *words, f"--output_dir={again}", "--resume")
    assert f"resuming from {again}/checkpoints/step-1" in printed
    if kind == "dynamic":
        assert compare(runner, _case("sft adamw").name, again.name, has_gradients=False).problems == []
        return
    expected, found = (learnt(runner.metrics(name)) for name in (begun.name, again.name))
    assert [{k: v for k, v in record.items() if not k.startswith("program")} for record in found] == [
        {k: v for k, v in record.items() if not k.startswith("program")} for record in expected
    ]
    for stem in ("model", "optimizer"):
        whole, resumed = (runner.weights(name, STEPS, stem) for name in (begun.name, again.name))
        assert whole.keys() == resumed.keys()
        assert all(np.array_equal(whole[key], resumed[key]) for key in whole)
