"""Bad steps in whole-step programs: judged as op by op, and nothing is updated in them, on every mesh."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from typing import Any

import numpy as np
import pytest

from tests.multi.bad_steps import NO_NUMBER, SPIKE
from tests.multi.conftest import Runner
from tests.multi.programs import FTHENB, PP2, PROGRAM, TP2, WORDS
from tests.parity.cases import LIMIT, OPTIMIZERS, ROUNDING, STATE_LIMIT, Case, few, norm, once
from tests.support.program_jobs import run_apart
from tests.support.standin_runs import of

LAST = 5
SKIPS = (
    "--train.on_nonfinite=skip", "--train.spike_factor=20", f"--train.max_steps={LAST}", "--data.num_workers=0",
    "--checkpoint.save_steps=1", f"--checkpoint.keep_last={LAST}", "--model.config.num_hidden_layers=4",
)  # fmt: skip
JOBS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "sgd": ("llama", "sgd", ()),
    "adamw": ("llama", "adamw", ()),
    # with biases of gates, which are moved behind an update
    "experts": ("deepseek", "sgd", ("--train.weight_decay=0", "--train.expert_bias_rate=0.01")),
}
"""Family, optimizer and words."""
INTERLEAVED = {**PP2, "pipeline_schedule": "interleaved"}
MESHES: dict[str, tuple[str, int, dict[str, Any]]] = few(
    {
        "sgd, one": ("sgd", 1, {}),
        "adamw, one": ("adamw", 1, {}),
        "dp2": ("sgd", 2, {}),
        "stage1": ("adamw", 2, {"sharding": "stage1"}),
        "stage2": ("adamw", 2, {"sharding": "stage2"}),
        "stage3": ("adamw", 2, {"sharding": "stage3"}),
        "stage3, sgd": ("sgd", 2, {"sharding": "stage3"}),
        "tp2": ("adamw", 2, {**TP2, "sequence_parallel": True}),
        "tp2, sgd": ("sgd", 2, TP2),
        "pp2": ("adamw", 2, PP2),
        "pp2, sgd, FThenB": ("sgd", 2, {**PP2, **FTHENB}),
        "interleaved": ("adamw", 2, INTERLEAVED),
        "interleaved, sgd": ("sgd", 2, INTERLEAVED),
        "experts, one": ("experts", 1, {}),
        "experts, ep2": ("experts", 2, {"expert_parallel_degree": 2}),
        "experts, pp2": ("experts", 2, PP2),
        "experts, interleaved": ("experts", 2, INTERLEAVED),
        "tp2 pp2 dp2 stage1": ("adamw", 8, {**TP2, **PP2, "sharding": "stage1"}),
        "tp2 dp2 interleaved stage3": ("sgd", 8, {**TP2, **INTERLEAVED, "sharding": "stage3"}),
    },
    *("dp2", "stage2", "stage3, sgd", "tp2, sgd", "pp2", "interleaved, sgd", "experts, one", "experts, ep2"),
    *("experts, pp2", "experts, interleaved"),
    *("tp2 pp2 dp2 stage1", "tp2 dp2 interleaved stage3"),
)  # fmt: skip

FP16: dict[str, tuple[str, int, dict[str, Any]]] = few(
    {"fp16": ("adamw", 1, {}), "fp16, sgd": ("sgd", 1, {}), "fp16, stage2": ("adamw", 2, {"sharding": "stage2"}),
     "fp16, tp2": ("sgd", 2, TP2)},
    "fp16, sgd", "fp16, tp2",
)  # fmt: skip
"""With parameters in fp16, whose loss is scaled."""


def _case(name: str, job: str, ranks: int, parallel: dict[str, Any], *more: str) -> Case:
    """Each data rank has two micro-batches or more."""
    place = (f"--parallel={json.dumps(parallel)}", f"--launch.num_devices={ranks}", "--train.micro_batch_size=2")
    family, optimizer, own = JOBS[job]
    words = once([*WORDS, *OPTIMIZERS[optimizer], *SKIPS, *own, *place, *more])
    return Case(name, ranks, words, recipe=f"recipes/{family}/sft.json")


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs everything; what was printed of the cases that did not end well."""
    ones = {job: _case(f"{job}, dynamic", job, 1, {}) for job, *_ in [*MESHES.values(), *FP16.values()]}
    many = [_case(name, *mesh, *PROGRAM) for name, mesh in MESHES.items()]
    many += [of(_case(name, *mesh, *PROGRAM), name, precision="fp16") for name, mesh in FP16.items()]
    narrow = {job: of(ones[job], f"{ones[job].name}, fp16", precision="fp16") for job, *_ in FP16.values()}
    return run_apart(runner, [*ones.values(), *narrow.values(), *many], "tests.multi.bad_steps")


def _records(runner: Runner, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (runner.directory / name / "metrics.jsonl").read_text().splitlines()]


def _state(runner: Runner, name: str, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((runner.directory / name / f"checkpoints/step-{step}/state.json").read_text())
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_judges_as_op_by_op(runner: Runner, failed: dict[str, str], mesh: str) -> None:
    one = f"{MESHES[mesh][0]}, dynamic"
    assert not {one, mesh} & failed.keys(), failed
    ours = _records(runner, mesh)
    theirs = _records(runner, one)
    assert [record["step"] for record in theirs if record.get("skipped")] == [NO_NUMBER, SPIKE]
    assert len(ours) == len(theirs) == LAST
    for a, b in zip(ours, theirs):
        assert a.get("skipped") == b.get("skipped")
        for key in ("loss", "grad_norm", "learning_rate", "tokens"):
            assert (key in a) == (key in b), (a, b)
            assert a.get(key, 0) == pytest.approx(b.get(key, 0), rel=LIMIT), (a["step"], key)
    for key, value in _state(runner, one, LAST).items():
        expected = pytest.approx(value, rel=LIMIT) if key == "norms" else value
        assert _state(runner, mesh, LAST)[key] == expected, key
    first, last, found = (runner.weights(n, s) for n, s in ((one, 1), (one, LAST), (mesh, LAST)))
    assert last.keys() == found.keys()
    for name, value in last.items():
        allowed = LAST * ROUNDING * norm(value) + LIMIT * norm(value - first[name])
        assert norm(found[name] - value) <= allowed, name
    slots, found = (runner.weights(run, LAST, "optimizer") for run in (one, mesh))
    assert slots.keys() == found.keys()
    for name, value in slots.items():
        assert norm(found[name] - value) <= STATE_LIMIT * norm(value), name


@pytest.mark.parametrize("mesh", FP16)
def test_the_scale_of_the_loss_is_that_of_steps_op_by_op(runner: Runner, failed: dict[str, str], mesh: str) -> None:
    """A step that overflows halves it, as one whose loss is no number does, and neither is asked of the guard."""
    one = f"{FP16[mesh][0]}, dynamic, fp16"
    assert not {one, mesh} & failed.keys(), failed
    for name in (one, mesh):
        found = [(record["loss_scale"], record["skipped"], "grad_norm" in record) for record in _records(runner, name)]
        good = (0, True)
        bad = (1, False)
        assert found == [(1024, *good), (1024, *bad), (512, *good), (512, *bad), (256, *good)], name
        state = _state(runner, name, LAST)
        assert (state["loss_scale"], state["good_steps"], state["bad_steps"]) == (256, 1, 0)
    for a, b in zip(_records(runner, mesh), _records(runner, one)):  # as close as two roundings can be
        for key in ("loss", "grad_norm"):
            assert a.get(key, 0) == pytest.approx(b.get(key, 0), rel=1e-2), (a["step"], key)


@pytest.mark.parametrize("mesh", [*MESHES, *FP16])
def test_bad_steps_change_no_bit(runner: Runner, failed: dict[str, str], mesh: str) -> None:
    assert mesh not in failed, failed
    for stem in ("model", "optimizer"):
        steps = [runner.weights(mesh, step, stem) for step in range(1, LAST + 1)]
        for step, (before, after) in enumerate(itertools.pairwise(steps), 2):
            same = [name for name, value in before.items() if value.tobytes() == after[name].tobytes()]
            expected = len(before) if step in (NO_NUMBER, SPIKE) else 0
            assert len(same) == expected, (step, stem, same)


@pytest.mark.parametrize(("mesh", "step"), [("adamw, one", SPIKE), ("stage1", NO_NUMBER)])
def test_goes_on_behind_a_bad_step(runner: Runner, failed: dict[str, str], mesh: str, step: int) -> None:
    """Bit for bit, from the checkpoint of the bad step."""
    assert mesh not in failed, failed
    again = f"{mesh}, from {step}"
    checkpoint = f"checkpoints/step-{step}"
    shutil.copytree(runner.directory / mesh / checkpoint, runner.directory / again / checkpoint)
    case = dataclasses.replace(_case(again, *MESHES[mesh], *PROGRAM), resume=True)
    assert run_apart(runner, [case], "tests.multi.bad_steps") == {}
    for stem in ("model", "optimizer"):
        whole, found = (runner.weights(name, LAST, stem) for name in (mesh, again))
        assert whole.keys() == found.keys()
        assert all(np.array_equal(whole[key], found[key]) for key in whole)
    assert _state(runner, again, LAST) == _state(runner, mesh, LAST)
