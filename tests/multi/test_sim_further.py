"""Meshes and programs on the simulated accelerator (`tests.device`).

Distributed tensors are not there in float32: Paddle 3.3.1 adds a second gradient of one on CPU and CUDA only, and the
engine adds them itself in 16 bits only.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from tests.device import SimBackend, library_directory
from tests.multi.conftest import Runner
from tests.parity.cases import Case, compare, many_processes, once, one_process, run_cases
from tests.parity.condition import nudged
from tests.parity.points import point
from tests.support.paths import ROOT
from tests.support.sim_runs import of, run_on_sim, run_with_sim
from tests.support.standin_runs import ONE, RUN, problems

MESHES = {
    "pp2": point(pp=2, **RUN),
    "dp2": point(data_ranks=2, **RUN),
    "stage1": point(sharding="stage1", data_ranks=2, offload=True, **RUN),
    "stage3": point(sharding="stage3", data_ranks=2, recompute="full", **RUN),
}
PROGRAMS = "--engine.mode=to_static"
ROUNDED = {"tp2 sp": point(tp=2, sequence_parallel=True, **RUN), "pp2, bf16": point(pp=2, **RUN)}


def small(case: Case) -> Case:
    """With one sequence in a micro-batch, so that every mesh computes the same 16-bit numbers."""
    return dataclasses.replace(case, words=once([*case.words, "--train.micro_batch_size=1"]))


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs everything; what was printed of the cases that did not end well."""
    cases = [of(one_process(next(iter(MESHES.values()))), "one"), of(ONE, "programs", "fp32", PROGRAMS)]
    cases += [of(many_processes(mesh), name) for name, mesh in MESHES.items()]
    cases += [of(small(ONE), "one, bf16", "bf16"), of(small(ONE), "one, fp16", "fp16")]
    cases += [of(many_processes(mesh), name, "bf16") for name, mesh in ROUNDED.items()]
    return run_cases(runner, [ONE, *nudged(ONE)]) | run_on_sim(runner, cases)


@pytest.mark.parametrize("name", ["one", "programs", *MESHES])
def test_it_equals_the_cpu(runner: Runner, failed: dict[str, str], name: str) -> None:
    assert not {ONE.name, name} & failed.keys(), failed
    assert compare(runner, ONE.name, name).problems == []


@pytest.mark.parametrize("name", ROUNDED)
def test_a_mesh_equals_one_process_in_16_bits(runner: Runner, failed: dict[str, str], name: str) -> None:
    assert not {ONE.name, "one, bf16", name} & failed.keys(), failed
    assert problems(runner, "one, bf16", name, "tp" in name) == []


@pytest.mark.parametrize("name", ["one, bf16", "one, fp16"])
def test_16_bits_are_close_to_float32(runner: Runner, failed: dict[str, str], name: str) -> None:
    assert not {ONE.name, name} & failed.keys(), failed
    assert problems(runner, ONE.name, name, cuts=True) == []


@pytest.mark.parametrize("fast", [True, False])
def test_paddle_gives_memory_of_programs_back_too_early(fast: bool) -> None:
    """If not, Paddle has mended it: the entry in docs/notes/upstream.md can go, and the flag of `CustomBackend`."""
    environment = {**os.environ, **SimBackend().variables(1, 0), "FLAGS_fast_eager_deletion_mode": str(int(fast))}
    environment["CUSTOM_DEVICE_ROOT"] = str(library_directory())
    command = [sys.executable, "-m", "tests.device.early_release"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (run.returncode == 0) == (not fast), run.stderr
    assert ("not ordered: copy to device" in run.stderr) == fast, run.stderr


def test_the_doctor_names_what_a_device_loses(runner: Runner) -> None:
    """A build without the kernel that adds, as a plug-in of a vendor may be; it needs no plugin of llmsuite. Paddle
    adds on the host, and the result is not written where it belongs."""
    root = str(library_directory("add|add_grad"))
    code, printed = run_with_sim(runner, "llmsuite", "doctor", "--device=sim", CUSTOM_DEVICE_ROOT=root)
    assert code == 2, printed
    bad = [line for line in printed.splitlines() if line.startswith("BAD")]
    assert any("view, add_" in line and "gradients of ranks and micro-batches are lost" in line for line in bad), bad
    assert "ok    view, scale_" in printed, printed
    assert "ok    random state" in printed, printed
    assert "no kernel in float32 add" in printed, printed


def test_kernels_and_messages_of_the_device(runner: Runner) -> None:
    """Every operation forward and backward, and all messages of two ranks, by Paddle's name of the device alone."""
    code, printed = run_with_sim(runner, "llmsuite", "doctor", "--kernels", "--device=sim", "--num_devices=2")
    assert code == 0, printed
    assert printed.splitlines()[-1] == "ok    all of sim"
    for words in ("sim, bf16", "sim, fp16", "attention       head 192, documents", "pipeline, 1F1B  float16   right"):
        assert words in printed, printed


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_the_first_day(runner: Runner, device: str) -> None:
    file = runner.directory / f"day-{device}.json"
    words = f"--first-day={file}", "--size=tiny", f"--device={device}"
    root = str(library_directory()) if device == "sim" else ""
    code, printed = run_with_sim(runner, "llmsuite", "doctor", *words, CUSTOM_DEVICE_ROOT=root)
    assert code == 0, printed
    acts = {act["name"]: act for act in json.loads(file.read_text())["acts"]}
    assert {"sft", "sft-bf16", "dpo", "pipeline", "program", "resume", "serve"} <= acts.keys()
    assert all(act["problems"] == [] for act in acts.values())
    assert acts["resume"]["losses"] == acts["sft"]["losses"]
