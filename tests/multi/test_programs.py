"""Whole steps as programs equal the same steps op by op, and go on from each other's checkpoints."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.multi.conftest import Runner, learnt
from tests.multi.program_slices import BYTES
from tests.multi.programs import FTHENB, PP2, PROGRAM, SAVES, STAGE3, TP2, WORDS, on_mesh, op_by_op
from tests.parity.cases import (
    GRADIENT_LIMIT,
    KL_LIMIT,
    OPTIMIZERS,
    STEPS,
    WORKER,
    Case,
    Comparison,
    compare,
    few,
    once,
    plan_of,
    run_cases,
)
from tests.parity.lora import LORA

ADAPTER_OFF = ("--dpo.reference=adapter_off",)
KTO = ("--kto.undesirable_weight=1.5", "--model.config.num_hidden_layers=4")
_JOBS: dict[str, tuple[str, tuple[str, ...]]] = {
    # rows of two buckets, micro-batches that differ in weight
    "sft adamw": ("llama/sft", (*OPTIMIZERS["adamw"], "--data.max_length=512")),
    "sft sgd": ("llama/sft", (*OPTIMIZERS["sgd"], "--data.max_length=512", "--train.micro_batch_size=2")),
    "packed": ("llama/sft", (*OPTIMIZERS["adamw"], "--data.packing=best_fit", "--train.max_grad_norm=null")),
    "pretrain": ("llama/pretrain", (*OPTIMIZERS["adamw"], "--pretrain.split=null")),
    "tied": ("qwen/sft", (*OPTIMIZERS["adamw"], "--model.config.tie_word_embeddings=true")),
    "masked documents": (
        "llama/pretrain",
        (*OPTIMIZERS["sgd"], "--pretrain.split=null", "--pretrain.document_mask=true", "--train.weight_decay=0"),
    ),
    "gpt": ("gpt/sft", (*OPTIMIZERS["sgd"], "--model.config.vocab_size=513")),
    "ernie": ("ernie/sft", OPTIMIZERS["adamw"]),
    "lora": ("llama/lora", (*OPTIMIZERS["sgd"], *LORA)),
    "lora adamw": ("llama/lora", (*OPTIMIZERS["adamw"], *LORA)),
    "mixer": ("llama/lora", (*OPTIMIZERS["sgd"], *LORA, "--lora.method=mixer")),
    "dora": ("llama/lora", (*OPTIMIZERS["adamw"], "--lora.rank=4", "--lora.method=dora")),
    "vera": (
        "llama/lora",
        (*OPTIMIZERS["sgd"], "--lora.rank=4", "--lora.method=vera", "--train.learning_rate=2"),
    ),
    "lora, tied": ("qwen/lora", (*OPTIMIZERS["sgd"], *LORA, "--model.config.tie_word_embeddings=true")),
    "pissa": ("llama/lora", (*OPTIMIZERS["sgd"], *LORA, "--lora.init=pissa")),
    "dpo": ("llama/dpo", OPTIMIZERS["adamw"]),
    "dpo sgd": ("llama/dpo", OPTIMIZERS["sgd"]),
    # its reference, its mean log-ratios and its number of tokens come from passes over the global batch
    "kto_pair": ("llama/dpo", (*OPTIMIZERS["sgd"], *LORA, *ADAPTER_OFF, "--dpo.loss=kto_pair", "--dpo.sft_weight=0.1")),
    "orpo": ("llama/orpo", OPTIMIZERS["sgd"]),
    "rm": ("llama/rm", (*OPTIMIZERS["sgd"], "--rm.margin=0.5", "--train.learning_rate=0.05")),
    "rm adamw": ("llama/rm", (*OPTIMIZERS["adamw"], "--rm.margin=0.5")),
    # deep enough that the model moves from where it began
    "kto": ("llama/kto", (*OPTIMIZERS["sgd"], *KTO)),
    "kto adamw": ("llama/kto", (*OPTIMIZERS["adamw"], *KTO)),
    "kto of adapters": ("llama/kto", (*OPTIMIZERS["adamw"], *KTO, *LORA, "--kto.reference=adapter_off")),
    "rm of adapters": ("llama/rm", (*OPTIMIZERS["sgd"], "--lora.rank=4", "--train.learning_rate=0.05")),
}
JOBS = few(
    _JOBS,
    "mixer",
    "dora",
    "vera",
    "lora, tied",
    "pissa",
    "dpo sgd",
    "rm adamw",
    "kto adamw",
    "kto of adapters",
    "rm of adapters",
)
ADAPTERS = (
    *("lora", "lora adamw", "mixer", "dora", "vera", "lora, tied", "pissa"),
    *("kto_pair", "kto of adapters", "rm of adapters"),
)
"""Jobs that train adapters only."""


TWO = ("--train.micro_batch_size=2",)
STAGES = ("dpo", "dpo sgd", "orpo", "rm", "rm adamw", "kto", "kto adamw")
"""Jobs of preference and reward stages that train all parameters."""
FURTHER = ("dpo", "kto_pair", "rm", "kto", "lora adamw")
"""Jobs that are run on four ranks too."""
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
    *("tp2 dp2 stage2", "tp2 dp2 stage3", "tp2 dpo", "tp2 kto", "dp2 rm"),
    *("pp2 tied", "pp2 masked documents", "pp2 of a vocabulary that 2 does not divide"),
    *("tp2 pp2", "tp2 pp2 packed", "tp2 pp2 tied", "dp2 pp2", "dp2 pp2 stage1"),
    *(f"{mesh} {job}" for mesh in ("tp2 dp2 stage3", "tp2 pp2", "dp2 pp2") for job in FURTHER),
    *(f"{mesh} {job}" for mesh in ("stage3", "pp2") for job in (*STAGES, *ADAPTERS)),
)
"""Cases that `make test` leaves out, but for some of the last line."""
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
NO_FALL = ("sft sgd", "kto", "kto adamw", "kto of adapters")


def compare_job(runner: Runner, job: str, one: str, many: str) -> Comparison:
    """A run beside another of its job, which is dynamic and in one process."""
    # a second factor begins at zero: it is nothing but a sum of gradients, and has no more digits than those
    more = {"stem": "adapter_model", "limit": GRADIENT_LIMIT} if job in ADAPTERS else {}
    found = compare(runner, one, many, falls=job not in NO_FALL, has_gradients=False, **more)
    for ours, theirs in zip(runner.metrics(one), runner.metrics(many)):
        for name in ours.keys() & theirs.keys():
            if "/" not in name or name.startswith("straggler"):
                continue
            if name == "rewards/accuracy" and abs(ours["rewards/margin"]) < 1e-3:
                continue  # the model is its reference, and rounding decides which answer it prefers
            # of differences of log-probabilities, each about -100 and known to 1e-5 by float32
            limit = KL_LIMIT if name.startswith("rewards") else 1e-5 * abs(ours[name])
            found.check(f"step {ours['step']}: {name}", abs(ours[name] - theirs[name]), limit)
    return found


def run_apart(runner: Runner, cases: Sequence[Case], module: str = WORKER) -> dict[str, str]:
    """As `run_cases`, each mesh in processes of its own: a group that is made behind a program may get a number that
    the program has given to one of its rings (Paddle 3.3.1)."""
    by_mesh: dict[tuple[int, ...], list[Case]] = {}
    for case in cases:
        degrees = plan_of(case).degrees
        by_mesh.setdefault((degrees.pp, degrees.tp, degrees.sharding, degrees.dp), []).append(case)
    return {name: printed for alike in by_mesh.values() for name, printed in run_cases(runner, alike, module).items()}


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs all cases; what was printed of those that did not end well."""
    of_one = [_case(job, *more) for job in JOBS for more in ((), PROGRAM)]
    return run_apart(runner, [*of_one, *map(_on_ranks, MESHES)])


@pytest.mark.parametrize("job", JOBS)
def test_equals_the_dynamic_mode(runner: Runner, failed: dict[str, str], job: str) -> None:
    one, many = _case(job).name, _case(job, *PROGRAM).name
    assert not failed.keys() & {one, many}, failed
    assert compare_job(runner, job, one, many).problems == []
    if job == "kto":  # whose estimate of how far the model is from where it began has to be tried
        assert runner.metrics(one)[-1]["kl"] > 0.05
    made = [record["programs"] for record in runner.metrics(many)]
    assert made[-1] == (2 if "sft " in job else 1), made


@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_equal_one_process(runner: Runner, failed: dict[str, str], mesh: str) -> None:
    job = MESHES[mesh][0]
    one, many = _case(job).name, _on_ranks(mesh).name
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
        job, program = MESHES[mesh][0], _on_ranks(mesh)
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
        theirs, ours = runner.metrics(_case(job).name)[1:], runner.metrics(case.name)
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
