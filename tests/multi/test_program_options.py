"""Whole steps as programs with what changes a model, its passes or its rows: they equal the same steps op by op in one
process, and go on from each other's checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from tests.multi.conftest import Runner
from tests.multi.programs import (
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
from tests.parity.cases import (
    GRADIENT_LIMIT,
    LIMIT,
    OPTIMIZERS,
    STEPS,
    Case,
    Comparison,
    compare,
    few,
    norm,
    once,
    run_cases,
)
from tests.parity.qat import FLIPPED

PASSES = (
    '--engine.fused_passes=["eliminate_transpose","common_subexpression_elimination_pass","dead_code_elimination_pass"]',
)
PACKED = "--data.packing=best_fit"
SELECTIVE = ("--engine.recompute=selective",)
FULL = ("--engine.recompute=full",)
SGD = OPTIMIZERS["sgd"]
ADAMW = OPTIMIZERS["adamw"]
FOUR = ("--model.config.num_hidden_layers=4",)


@dataclasses.dataclass(frozen=True)
class Job:
    """What is computed."""

    recipe: str
    words: tuple[str, ...]
    mutation: str | None = None
    """How the CPU computes: with its kernels, or without."""
    stem: str = "model"
    """Of the files with what is trained."""
    limit: float = LIMIT
    """How far that may be off, as a part of what has changed."""
    rounds: bool = False
    """Whether weights are rounded, so that their last bits may decide."""


QAT = "--qat.weight_bits=8"
REFT = ("--lora.rank=null", "--reft.rank=4", PACKED, "--train.learning_rate=0.05")
PREFIX = ("--lora.rank=null", "--prefix.tokens=6", PACKED, "--train.max_grad_norm=null", "--train.learning_rate=10")
NETWORK = (*PREFIX, "--prefix.projection=true", "--prefix.projection_hidden_size=12", "--train.learning_rate=2")
PAIRS = (PACKED, "--data.max_length=256", "--data.train=data/preference/eval.jsonl")
JOBS = {
    "kernels": Job("gpt/sft", SGD),
    "scores": Job("llama/sft", SGD, "plain_kernels"),
    "scores of documents": Job("qwen/sft", (*ADAMW, PACKED), "plain_kernels"),
    "qat": Job("llama/pretrain", (*ADAMW, "--pretrain.split=null", QAT), rounds=True),
    "qat sgd": Job("llama/sft", (*SGD, QAT, "--train.learning_rate=0.05"), rounds=True),
    "reft": Job("llama/sft", (*ADAMW, *REFT), stem="reft", limit=1e-5),  # as tests/multi/test_reft.py has it
    "prefix": Job("llama/sft", (*SGD, *PREFIX), stem="adapter_model", limit=GRADIENT_LIMIT),
    "prefix of gpt": Job(
        "gpt/sft", (*ADAMW, *PREFIX, "--train.learning_rate=0.3"), None, "adapter_model", GRADIENT_LIMIT
    ),
    "network": Job("llama/sft", (*SGD, *NETWORK), stem="adapter_state", limit=GRADIENT_LIMIT),
    "dpo": Job("llama/dpo", (*SGD, *PAIRS)),
    "orpo": Job("llama/orpo", (*SGD, *PAIRS)),
    "rm": Job("llama/rm", (*SGD, *PAIRS, "--rm.margin=0.5", "--train.learning_rate=0.05")),
}
JOBS |= {f"{job} of 4 layers": dataclasses.replace(JOBS[job], words=(*JOBS[job].words, *FOUR))
         for job in ("scores", "qat", "reft", "prefix", "dpo")}  # fmt: skip
OF_TWO: Mapping[str, Mapping[str, Any]] = {"stage3": STAGE3, "tp2": {**TP2, **SP}, "pp2": PP2}
"""Meshes of two ranks."""
AGAIN = "scores", "scores of documents", "kernels"
OTHERS = "qat", "qat sgd", "reft", "prefix", "network", "dpo", "orpo", "rm"
_RUNS: dict[str, tuple[str, int, Mapping[str, Any], tuple[str, ...]]] = {
    # job, ranks, mesh, words
    **{f"{job}, attention again": (job, 1, {}, SELECTIVE) for job in AGAIN},
    **{f"{job}, {mesh}": (job, 2, OF_TWO[mesh], SELECTIVE) for job in AGAIN for mesh in OF_TWO},
    **{f"scores, {mesh}, passes": ("scores", 2, OF_TWO[mesh], PASSES) for mesh in OF_TWO},
    "scores, interleaved, passes": ("scores of 4 layers", 2, INTERLEAVED, PASSES),
    "scores, interleaved": ("scores of 4 layers", 2, INTERLEAVED, SELECTIVE),
    **{f"{job}, one": (job, 1, {}, ()) for job in OTHERS},
    **{f"{job}, {mesh}": (job, 2, OF_TWO[mesh], ()) for job in OTHERS for mesh in OF_TWO},
    **{f"{job}, interleaved": (f"{job} of 4 layers", 2, INTERLEAVED, ()) for job in ("qat", "reft", "prefix", "dpo")},
    **{f"{job}, tp2, again": (job, 2, TP2, FULL) for job in ("qat sgd", "reft", "prefix")},
    **{f"{job}, pp2, again": (job, 2, PP2, FULL) for job in ("qat sgd", "reft", "prefix")},
    **{f"prefix, {mesh}, attention again": ("prefix", 2, OF_TWO[mesh], SELECTIVE) for mesh in OF_TWO},
    "network, attention again": ("network", 1, {}, SELECTIVE),
    "prefix of gpt, tp2": ("prefix of gpt", 2, OF_TWO["tp2"], ()),
    **{
        f"{job}, tp2 pp2": (job, 4, {**TP2, **SP, **PP2}, ()) for job in ("qat", "reft", "prefix", "dpo", "rm")
    },
    **{
        f"{job}, dp2 pp2 stage3": (job, 4, {**PP2, **STAGE3}, ()) for job in ("qat", "reft", "prefix", "dpo", "rm")
    },
}  # fmt: skip
_RUNS.pop("network, pp2")  # which is refused
KEPT = (
    "scores, tp2", "scores, pp2, passes", "scores of documents, stage3", "kernels, pp2", "qat, stage3", "qat sgd, tp2",
    "reft, tp2", "prefix, pp2", "network, stage3", "dpo, pp2", "rm, tp2",
)  # fmt: skip
"""Those that `make test-further` runs."""
RUNS = few(_RUNS, *(name for name in _RUNS if name not in KEPT))


def _one(job: str) -> Case:
    """The run of a job op by op, in one process."""
    found = JOBS[job]
    words = once([*WORDS, *found.words, *SAVES, "--train.micro_batch_size=2"])
    return Case(job, 1, words, found.mutation, f"recipes/{found.recipe}.json")


ONES = {job: _one(job) for job, *_ in RUNS.values()}
MANY = {name: on_mesh(ONES[job], name, ranks, mesh, *words) for name, (job, ranks, mesh, words) in RUNS.items()}
MUTANT = dataclasses.replace(MANY["qat sgd, tp2"], name="own part", mutation="weight_scale_of_own_part")
GO_ON = "qat, stage3", "reft, tp2", "prefix, pp2", "rm, tp2"
"""Of these, runs in other modes go on from each other's checkpoints."""


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs all cases; what was printed of those that did not end well."""
    return run_cases(runner, [*ONES.values(), *MANY.values(), MUTANT])


def _compare(runner: Runner, job: str, one: str, many: str) -> Comparison:
    """A run beside another of its job, which is dynamic and in one process."""
    if not JOBS[job].rounds:
        return compare(runner, one, many, JOBS[job].stem, JOBS[job].limit, falls=False, has_gradients=False)
    found = Comparison()
    moments = [runner.weights(name, 1, "optimizer") for name in (one, many)]
    # the first step's weights are equal to the bit, and with AdamW its gradients are in the first moments
    for name, value in moments[0].items():
        far = norm(moments[1][name] - value) / norm(value)
        found.gradients = max(found.gradients, found.check(name, far, GRADIENT_LIMIT))
    for a, b in zip(runner.metrics(one), runner.metrics(many), strict=True):
        for key, flipped in FLIPPED.items():
            limit = LIMIT if a["step"] == 1 else flipped
            found.metrics = max(found.metrics, found.check(f"step {a['step']}: {key}", abs(b[key] / a[key] - 1), limit))
    return found


@pytest.mark.parametrize("name", RUNS)
def test_equals_the_dynamic_mode(runner: Runner, failed: dict[str, str], name: str) -> None:
    job = RUNS[name][0]
    for run in (job, name):
        assert run not in failed, failed[run]
    found = _compare(runner, job, job, name)
    print(f"{name}: metrics {found.metrics:.1e}, change {found.change:.1e}, gradients {found.gradients:.1e}")
    assert found.problems == []
    assert len({record["loss"] for record in runner.metrics(name)}) == STEPS


def test_a_scale_that_is_not_of_the_whole_matrix_is_noticed(runner: Runner, failed: dict[str, str]) -> None:
    assert not {"qat sgd", MUTANT.name} & failed.keys(), failed
    assert _compare(runner, "qat sgd", "qat sgd", MUTANT.name).problems != []


def test_runs_go_on_in_either_mode(runner: Runner, failed: dict[str, str]) -> None:
    """Programs of two ranks from the first checkpoint of a dynamic run in one process, and dynamic ranks from that of
    the programs."""
    again: dict[str, tuple[str, Case]] = {}
    for name in GO_ON:
        job = RUNS[name][0]
        assert not failed.keys() & {job, name}, failed
        again[f"{name}, from one"] = (job, MANY[name])
        again[f"{name}, dynamic"] = (name, op_by_op(MANY[name]))
    resume_from_first(runner, again)
    for name in again:
        job = RUNS[name.removesuffix(", from one").removesuffix(", dynamic")][0]
        theirs = runner.metrics(job)[1:]
        ours = runner.metrics(name)
        assert [record["step"] for record in ours] == [2, 3]
        for a, b in zip(theirs, ours):
            for key in ("loss", "grad_norm"):
                limit = FLIPPED[key] if JOBS[job].rounds else LIMIT
                assert b[key] == pytest.approx(a[key], rel=limit), name
