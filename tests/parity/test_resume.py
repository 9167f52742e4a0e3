"""A checkpoint of any mesh is continued on any other: the numbers and the samples are those of a run never stopped.

Every mesh trains the whole way and leaves a checkpoint in the middle; every mesh then goes on from each of these.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil

import numpy as np
import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import COMMON, OPTIMIZERS, STEPS, Case, run_cases

MIDDLE = 1
LIMIT = 1e-6
STATE_LIMIT = 1e-5
_COUNTED = ("tokens", "supervised_tokens", "epoch")

# name: ranks, what is parallel, further words
MESHES: dict[str, tuple[int, dict[str, object], tuple[str, ...]]] = {
    "one": (1, {}, ("--train.micro_batch_size=8",)),
    "stage3": (2, {"sharding": "stage3", "sharding_parallel_degree": 2}, ("--train.micro_batch_size=2",)),
    "tp4": (4, {"tensor_parallel_degree": 4}, ("--train.micro_batch_size=4",)),
    "tp2-pp2-dp2": (
        8, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}, ("--train.micro_batch_size=2",)
    ),
}  # fmt: skip
# continued only: what is written does not depend on how a step is computed
STATIC = "stage3, static"
TARGETS = {**MESHES, STATIC: (*MESHES["stage3"][:2], (*MESHES["stage3"][2], "--engine.mode=to_static"))}
PAIRS = [(source, target) for source in MESHES for target in TARGETS]
# of one shape on every mesh, and with something for the optimizer to remember
SAME = (
    *COMMON, *OPTIMIZERS["adamw"], f"--checkpoint.save_steps={MIDDLE}", f"--checkpoint.keep_last={STEPS}",
    "--model.config.num_attention_heads=4", "--model.config.num_key_value_heads=4",
    "--model.config.num_hidden_layers=4",
)  # fmt: skip


def _case(name: str, mesh: str, resume: bool = False) -> Case:
    num_ranks, parallel, more = TARGETS[mesh]
    words = [*SAME, f"--launch.num_devices={num_ranks}", f"--parallel={json.dumps(parallel)}", *more]
    return Case(name, num_ranks, words, resume=resume)


def _name(source: str, target: str) -> str:
    return f"{source} then {target}"


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs everything; what was printed of the cases that did not end well."""
    failed = run_cases(runner, [_case(mesh, mesh) for mesh in MESHES])
    cases = []
    for source, target in PAIRS:
        checkpoint = runner.directory / source / "checkpoints" / f"step-{MIDDLE}"
        if source not in failed:
            name = _name(source, target)
            shutil.copytree(checkpoint, runner.directory / name / "checkpoints" / checkpoint.name)
            cases.append(_case(name, target, resume=True))
    return failed | run_cases(runner, cases)


def samples(runner: Runner, name: str) -> dict[int, list[str]]:
    """By step, sha256 of the samples that were consumed, in the order of the stream."""
    parts: dict[int, dict[int, list[list[str]]]] = {}
    for path in sorted((runner.directory / name).glob("samples-*.jsonl")):
        for record in map(json.loads, path.read_text().splitlines()):
            if record["micro_batches"] is not None:
                of_step = parts.setdefault(record["step"], {})
                found = of_step.setdefault(record["data_rank"], record["micro_batches"])
                assert found == record["micro_batches"], "the ranks of one data rank read different samples"
    return {
        step: [sample for in_turn in zip(*(of_step[r] for r in sorted(of_step))) for b in in_turn for sample in b]
        for step, of_step in parts.items()
    }


def _check(runner: Runner, name: str, steps: range) -> None:
    """Compare the steps of a run with those of the one process that was never stopped."""
    whole = {record["step"]: record for record in runner.metrics("one")}
    found = {record["step"]: record for record in runner.metrics(name)}
    assert list(found) == list(steps)
    for step in steps:
        assert {key: found[step][key] for key in _COUNTED} == {key: whole[step][key] for key in _COUNTED}
        for key in ("loss", "grad_norm"):
            assert found[step][key] == pytest.approx(whole[step][key], rel=LIMIT), f"step {step}: {key}"
    theirs = samples(runner, "one")
    ours = samples(runner, name)
    assert list(ours) == list(steps)
    assert [_digest(ours[step]) for step in steps] == [_digest(theirs[step]) for step in steps]


def _digest(of_samples: list[str]) -> str:
    return hashlib.sha256("\n".join(of_samples).encode()).hexdigest()


@pytest.mark.parametrize("mesh", MESHES)
def test_the_run_that_is_never_stopped(runner: Runner, failed: dict[str, str], mesh: str) -> None:
    assert mesh not in failed, failed[mesh]
    _check(runner, mesh, range(1, STEPS + 1))


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_checkpoint_is_continued(runner: Runner, failed: dict[str, str], source: str, target: str) -> None:
    name = _name(source, target)
    assert source not in failed, failed[source]
    assert name not in failed, failed[name]
    _check(runner, name, range(MIDDLE + 1, STEPS + 1))
    for stem, limit in (("model", LIMIT), ("optimizer", STATE_LIMIT)):
        expected = runner.weights("one", STEPS, stem)
        found = runner.weights(name, STEPS, stem)
        assert expected.keys() == found.keys()
        for tensor, value in expected.items():
            assert np.linalg.norm(found[tensor] - value) <= limit * np.linalg.norm(value), tensor


def test_the_samples_and_the_state_would_be_missed(runner: Runner, failed: dict[str, str]) -> None:
    """What is compared differs between the steps, so that one in the place of another is noticed."""
    assert not failed
    of_steps = samples(runner, "one")
    assert len({_digest(found) for found in of_steps.values()}) == STEPS
    assert all(len(found) == 8 for found in of_steps.values())
    losses = [record["loss"] for record in runner.metrics("one")]
    assert all(abs(a / b - 1) > 1e3 * LIMIT for a, b in itertools.pairwise(losses))
    slots = runner.weights("one", MIDDLE, "optimizer")
    assert any(np.abs(value).max() > 0 for value in slots.values())
