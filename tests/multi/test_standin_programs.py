"""Programs with parameters in 16 bits, on CPU processes that stand in for GPUs (`tests.standin`): whole steps, which
update float32 masters and scale the loss of fp16 themselves, and layers in fp16, whose loss is scaled outside of them.

They are as close to the same steps op by op as two roundings can be, see `tests.multi.test_standin_further`.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tests.multi.conftest import Runner
from tests.multi.programs import PP2, PROGRAM, SAVES, TP2, WORDS
from tests.parity.cases import OPTIMIZERS, STEPS, Case, few, once, run_cases
from tests.parity.condition import bf16_change_limits, bf16_metric_limits, nudged
from tests.parity.lora import LORA
from tests.support.far_changes import far_changes
from tests.support.standin_runs import of

LAYERS = ("--engine.mode=to_static",)
SP = {"sequence_parallel": True}
TIED = ("--model.config.tie_word_embeddings=true",)
ADAMW = OPTIMIZERS["adamw"]
JOBS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sft": ("llama/sft", OPTIMIZERS["sgd"]),
    "tied": ("qwen/sft", (*ADAMW, *TIED)),
    "lora": ("llama/lora", (*OPTIMIZERS["sgd"], *LORA)),
    "experts": ("qwen_moe/sft", (*OPTIMIZERS["sgd"], "--train.weight_decay=0", "--train.expert_balance_loss=0.3")),
    # at a rate at which rounding sends few tokens to other experts
    "deepseek": (
        "deepseek/sft",
        (*OPTIMIZERS["sgd"], "--train.weight_decay=0", "--train.expert_bias_rate=0.01", "--train.learning_rate=0.05"),
    ),
    # with rows of several documents, whose mask is the kernel's
    "reft": ("llama/sft", (*ADAMW, "--reft.rank=4", "--data.packing=best_fit", "--train.learning_rate=0.05")),
    "rm": ("llama/rm", (*OPTIMIZERS["sgd"], "--data.packing=best_fit", "--train.learning_rate=0.05")),
}
EXPERTS = ("experts", "deepseek")
STEM = {"lora": "adapter_model", "reft": "reft"}
RUNS: dict[str, tuple[str, str, int, Mapping[str, Any], tuple[str, ...]]] = few(
    {
        "step": ("sft", "bf16", 1, {}, PROGRAM),
        "step, tied": ("tied", "bf16", 1, {}, PROGRAM),
        "step, lora": ("lora", "bf16", 1, {}, PROGRAM),
        "step, tp2": ("sft", "bf16", 2, {**TP2, **SP}, PROGRAM),
        "step, experts": ("experts", "bf16", 1, {}, (*PROGRAM, "--engine.recompute=full")),
        "step, experts, tp2": ("experts", "bf16", 2, {**TP2, **SP}, PROGRAM),
        "step, experts, ep2": ("experts", "bf16", 2, {"expert_parallel_degree": 2, "sharding": "stage2"}, PROGRAM),
        "step, experts, fp16": ("experts", "fp16", 1, {}, PROGRAM),
        "step, experts, fp16, tp2": ("experts", "fp16", 2, {**TP2, **SP}, PROGRAM),
        "step, deepseek": ("deepseek", "bf16", 1, {}, PROGRAM),
        "step, deepseek, tp2": ("deepseek", "bf16", 2, {**TP2, **SP}, PROGRAM),
        "step, deepseek, fp16, ep2": ("deepseek", "fp16", 2, {"expert_parallel_degree": 2}, PROGRAM),
        "step, stage2": ("sft", "bf16", 2, {"sharding": "stage2"}, (*PROGRAM, "--engine.recompute=full")),
        "step, reft, tp2": ("reft", "bf16", 2, {**TP2, **SP}, PROGRAM),
        "step, rm, tp2": ("rm", "bf16", 2, {**TP2, **SP}, PROGRAM),
        "step, pp2": ("sft", "bf16", 2, PP2, PROGRAM),
        "step, tied, pp2": ("tied", "bf16", 2, PP2, (*PROGRAM, "--engine.recompute=full")),
        "step, lora, pp2": ("lora", "bf16", 2, PP2, PROGRAM),
        "step, experts, pp2": ("experts", "bf16", 2, PP2, PROGRAM),
        "step, deepseek, pp2": ("deepseek", "bf16", 2, PP2, PROGRAM),
        "step, rm, tp2 pp2": ("rm", "bf16", 4, {**TP2, **SP, **PP2}, PROGRAM),
        "step, stage3": ("sft", "bf16", 2, {"sharding": "stage3"}, (*PROGRAM, "--engine.recompute=full")),
        "step, tied, stage3": ("tied", "bf16", 2, {"sharding": "stage3"}, PROGRAM),
        "step, lora, stage3": ("lora", "bf16", 2, {"sharding": "stage3"}, PROGRAM),
        "step, experts, stage3": ("experts", "bf16", 2, {"sharding": "stage3"}, PROGRAM),
        "step, stage3, pp2": ("sft", "bf16", 4, {"sharding": "stage3", **PP2}, PROGRAM),
        "step, fp16, pp2": ("sft", "fp16", 2, PP2, PROGRAM),
        "step, fp16, stage3": ("sft", "fp16", 2, {"sharding": "stage3"}, PROGRAM),
        "step, fp16": ("sft", "fp16", 1, {}, PROGRAM),
        "step, fp16, lora": ("lora", "fp16", 1, {}, PROGRAM),
        "step, fp16, tp2": ("sft", "fp16", 2, {**TP2, **SP}, PROGRAM),
        "step, fp16, stage2": ("sft", "fp16", 2, {"sharding": "stage2"}, (*PROGRAM, "--engine.recompute=full")),
        "layers, fp16": ("sft", "fp16", 1, {}, LAYERS),
        "layers, fp16, tp2": ("sft", "fp16", 2, {**TP2, **SP}, LAYERS),
        "layers, fp16, pp2": ("sft", "fp16", 2, PP2, LAYERS),
        "layers, fp16, stage3": ("sft", "fp16", 2, {"sharding": "stage3"}, LAYERS),
    },
    "step, tied, pp2", "step, lora, pp2", "step, experts, pp2", "step, deepseek, pp2", "step, rm, tp2 pp2",
    "step, tied, stage3", "step, lora, stage3", "step, experts, stage3", "step, stage3, pp2", "step, fp16, stage3",
    "step, tied", "step, experts", "step, experts, tp2", "step, experts, ep2", "step, stage2",
    "step, experts, fp16", "step, experts, fp16, tp2", "step, deepseek", "step, deepseek, fp16, ep2",
    "step, reft, tp2", "step, rm, tp2", "step, fp16, lora", "step, fp16, stage2",
    "layers, fp16, tp2", "layers, fp16, stage3",
)  # fmt: skip
"""Job, precision, ranks, mesh and words."""

RESUMED = [name for name in ("step", "step, pp2", "step, stage3", "step, stage3, pp2") if name in RUNS]
"""Those that are also continued from their first checkpoint."""


def _case(job: str, ranks: int = 1, parallel: Mapping[str, Any] | None = None, *more: str) -> Case:
    recipe, words = JOBS[job]
    place = (f"--parallel={json.dumps(parallel or {})}", f"--launch.num_devices={ranks}", "--train.micro_batch_size=2")
    return Case(job, ranks, once([*WORDS, "--data.max_length=256", *words, *SAVES, *place, *more]),
                recipe=f"recipes/{recipe}.json")  # fmt: skip


NEEDED = {job: {precision for own, precision, *_ in RUNS.values() if own == job} for job in JOBS}
WIDE = {job: dataclasses.replace(_case(job), name=f"{job}, float32") for job in NEEDED if NEEDED[job]}


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs everything; what was printed of the cases that did not end well."""
    cases = [run for wide in WIDE.values() for run in (wide, *nudged(wide))]
    cases += [of(_case(job), f"{job}, {p}", precision=p) for job in WIDE for p in sorted(NEEDED[job])]
    for name, (job, precision, *how, words) in RUNS.items():
        cases.append(of(_case(job, *how, *words), name, precision=precision))
    failed = run_cases(runner, cases)
    again = []
    for begun in (*RESUMED, "sft, bf16"):
        assert begun not in failed, failed[begun]
        name = f"{begun}, again"
        (job, precision, *how, words) = RUNS.get(begun, RUNS["step"])
        shutil.copytree(runner.directory / begun / "checkpoints/step-1", runner.directory / name / "checkpoints/step-1")
        again.append(of(_case(job, *how, *words), name, precision=precision, resume=True))
    return failed | run_cases(runner, again)


@pytest.mark.parametrize("name", RUNS)
def test_a_program_is_as_close_as_rounding_allows(runner: Runner, failed: dict[str, str], name: str) -> None:
    job, precision, *_ = RUNS[name]
    one = f"{job}, {precision}"
    assert not {WIDE[job].name, one, name} & failed.keys(), [failed.get(run) for run in (WIDE[job].name, one, name)]
    _check(runner, job, one, name)


def _check(runner: Runner, job: str, one: str, many: str, first: int = 1) -> None:
    """Metrics from a step on, and what has changed in parameters; twice what rounded inputs of products explain, as
    what comes out is rounded too."""
    limits = bf16_metric_limits(runner, WIDE[job])
    ours, theirs = ([m for m in runner.metrics(run) if m["step"] >= first] for run in (one, many))
    for a, b in zip(ours, theirs, strict=True):
        assert a["tokens"] == b["tokens"]
        assert a.get("loss_scale") == b.get("loss_scale")
        assert not b.get("skipped")
        for key, limit in limits.items():
            # behind an update a token may go to another expert: that is no rounding of its gradient
            if job in EXPERTS and key == "grad_norm" and a["step"] > 1:
                continue
            far = abs(b[key] / a[key] - 1)
            print(f"{many}, step {a['step']}: {key} {far:.1e} of at most {2 * limit:.1e}")
            assert far <= 2 * limit, (a["step"], key)
    if job in EXPERTS:
        return  # rounding decides where single tokens are routed, and so what single experts learn
    stem = STEM.get(job, "model")
    changes = bf16_change_limits(runner, WIDE[job], stem)
    found = far_changes(masters(runner, one, stem), masters(runner, many, stem))
    worst = max(found, key=lambda parameter: found[parameter] / changes[parameter])
    print(f"{many}: change of {worst} {found[worst]:.1e} of at most {2 * changes[worst]:.1e}")
    assert found[worst] <= 2 * changes[worst]


def masters(runner: Runner, name: str, stem: str) -> list[dict[str, np.ndarray]]:
    """The float32 parameters after the first step and after the last one, by the names of their files."""
    found = [runner.weights(name, step, "optimizer") for step in (1, STEPS)]
    names = {file: _own_name(file) for file in runner.weights(name, STEPS, stem)}
    return [{file: state[f"{own}/master"] for file, own in names.items()} for state in found]


def _own_name(file: str) -> str:
    """The name of a parameter in the model, of that in a file of adapters or of the model."""
    own = file.removeprefix("base_model.model.")
    return own if own == file else own.removesuffix(".weight")


def test_a_program_is_not_float32(runner: Runner, failed: dict[str, str]) -> None:
    assert not {WIDE["sft"].name, "step"} & failed.keys(), failed
    name = "model.embed_tokens.weight"  # other matrices lie the other way round in files of models
    wide = [{name: runner.weights(WIDE["sft"].name, step)[name]} for step in (1, STEPS)]
    assert far_changes(wide, [{name: own[name]} for own in masters(runner, "step", "model")])[name] > 1e-3


def test_parameters_are_their_masters_rounded(runner: Runner, failed: dict[str, str]) -> None:
    """And a master has bits that its parameter has not: the next step goes on from it."""
    assert "step" not in failed, failed["step"]
    (_, last), parameters = masters(runner, "step", "model"), runner.weights("step", STEPS)
    for name, value in parameters.items():
        rounded = last[name].astype(value.dtype)
        assert np.array_equal(value, rounded) or np.array_equal(value.T, rounded), name
        assert (last[name].view("uint32") & 0xFFFF).any(), name


@pytest.mark.parametrize("begun", RESUMED)
def test_a_program_goes_on_bit_by_bit(runner: Runner, failed: dict[str, str], begun: str) -> None:
    assert not {begun, f"{begun}, again"} & failed.keys(), failed
    for stem in ("model", "optimizer"):
        whole, again = (runner.weights(name, STEPS, stem) for name in (begun, f"{begun}, again"))
        assert whole.keys() == again.keys()
        assert [name for name, value in whole.items() if value.tobytes() != again[name].tobytes()] == []


def test_a_program_goes_on_from_steps_op_by_op(runner: Runner, failed: dict[str, str]) -> None:
    assert not {"sft, bf16", "sft, bf16, again"} & failed.keys(), failed
    _check(runner, "sft", "sft, bf16", "sft, bf16, again", first=2)
