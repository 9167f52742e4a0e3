"""Two machines that share no directory: each keeps its part of a checkpoint, and together they go on from it.

Here they are two launchers on one machine, each with an output_dir of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import PluginSite
from tests.multi.conftest import Process, Runner, learnt
from tests.support.paths import ROOT
from tests.support.ports import free_address

STEPS = 6
COMMON = (
    "--train.global_batch_size=8", "--train.micro_batch_size=2", "--data.eval=null", f"--train.max_steps={STEPS}",
    "--checkpoint.save_steps=2", "--checkpoint.keep_last=2",
)  # fmt: skip
MESH = '--parallel={"tensor_parallel_degree":2,"pipeline_parallel_degree":2}'
OTHER_MESH = '--parallel={"sharding":"stage2"}'
KILL = """
import os, signal
import llmsuite
from llmsuite.checkpoint import local_storage

_real = local_storage._wait_for_all

def _killed(disk):
    _real(disk)
    os.kill(os.getpid(), signal.SIGKILL)

@llmsuite.hookimpl
def llmsuite_step_end(run, step, metrics):
    if step == 3:  # the other machine commits the checkpoint of step 4, and then this one is gone
        local_storage._wait_for_all = _killed
"""

REMOVE = """
import os, shutil
import llmsuite

@llmsuite.hookimpl
def llmsuite_step_end(run, step, metrics):
    if step == 3:
        shutil.rmtree(os.environ["REMOVED"])
"""


def _both(
    runner: Runner, names: Sequence[str], *more: str, num_devices: int = 2, **environment: str
) -> list[tuple[int, str]]:
    """Run machines to their end, each with so many ranks; returns exit code and output of each."""
    master = free_address("127.0.0.1")
    all_of = (f"--launch.nnodes={len(names)}", f"--launch.num_devices={num_devices}", f"--launch.master={master}")
    machines: list[Process] = [
        runner.start_fork(*runner.smoke(name, *COMMON, *all_of, f"--launch.node_rank={k}", *more), **environment)
        for k, name in enumerate(names)
    ]
    outputs = [machine.communicate(timeout=300)[0] for machine in machines]
    return [(int(machine.returncode or 0), output) for machine, output in zip(machines, outputs)]


def _fetched(output: str) -> tuple[float, float]:
    """MB that machines have fetched, and MB that they lacked."""
    found = re.search(r"machines fetch ([\d.]+) MB of it from each other, .* of the ([\d.]+) MB that they lack", output)
    assert found is not None, output
    return float(found[1]), float(found[2])


def _files(run: Path, step: int) -> set[str]:
    return {path.name for path in (run / "checkpoints" / f"step-{step}").iterdir()}


@pytest.fixture(scope="module")
def whole(runner: Runner) -> Path:
    """The run of the same ranks on one machine."""
    runner.run(*runner.smoke("whole", *COMMON, "--launch.num_devices=4", MESH))
    return runner.directory / "whole"


@pytest.fixture(scope="module")
def torn(runner: Runner) -> Path:
    """What a run leaves that is killed when machine 1 has committed step 4 and machine 0 has not, as `torn-N`."""
    site = runner.directory / "site of own disks"
    site.mkdir()
    PluginSite(site).install("kill", KILL)
    path = os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")])
    ends = _both(runner, ("torn-0", "torn-1"), MESH, LLMSUITE_PLUGINS="kill", PYTHONPATH=path)
    assert [code for code, _ in ends] == [1, 1], ends
    assert "rank 0 on machine 0 was killed by SIGKILL" in ends[1][1]
    assert "the machines share no output_dir" in ends[0][1]
    return runner.directory


def _copies(torn: Path, name: str) -> tuple[str, str]:
    names = (f"{name}-0", f"{name}-1")
    for machine, copy in enumerate(names):
        shutil.copytree(torn / f"torn-{machine}", torn / copy)
    return names


def test_killed_between_two_commits_it_goes_on_from_the_checkpoint_before(
    runner: Runner, whole: Path, torn: Path
) -> None:
    steps = [sorted(p.name for p in (torn / f"torn-{k}" / "checkpoints").glob("step-?")) for k in (0, 1)]
    assert steps == [["step-2"], ["step-2", "step-4"]]
    names = _copies(torn, "same")
    ends = _both(runner, names, MESH, "--resume")
    assert [code for code, _ in ends] == [0, 0], ends
    output = ends[0][1]
    assert "step-4 is skipped: no machine has config.json; rank 0 wrote it on machine 0" in output
    fetched, lacking = _fetched(output)
    assert fetched < 0.8 * lacking, "each machine needs its stage of the pipeline"
    assert not list(torn.glob("same-?/checkpoints/*.fetched"))
    assert f"resuming from {runner.directory / 'same-0' / 'checkpoints' / 'step-2'}" in output
    assert learnt(runner.metrics("same-0")) == learnt(runner.metrics("whole"))
    runs = [torn / name for name in names]
    assert [(run / "checkpoints" / "latest").read_text() for run in runs] == ["step-6\n"] * 2
    assert [sorted(p.name for p in (run / "checkpoints").iterdir()) for run in runs] == [
        ["latest", "step-4", "step-6"]
    ] * 2
    # each has its part, and together they are the checkpoint of one disk, byte for byte
    here, there, all_files = (_files(run, STEPS) - {"elsewhere.json"} for run in (*runs, whole))
    assert here & there == {"manifest.json"}
    assert here | there == all_files
    for run in runs:
        for name in _files(run, STEPS) - {"elsewhere.json"}:
            ours, theirs = (r / "checkpoints" / f"step-{STEPS}" / name for r in (run, whole))
            assert ours.read_bytes() == theirs.read_bytes(), name
    elsewhere = json.loads((runs[0] / "checkpoints" / f"step-{STEPS}" / "elsewhere.json").read_text())
    assert {(place["machine"], place["rank"]) for place in elsewhere["files"].values()} == {(1, 2), (1, 3)}

    output = runner.run("merge", str(runs[0]), "-o", str(torn / "half"), expect=2)
    assert "on machine 1; combine them with `llmsuite merge`" in output
    runner.run("merge", str(runs[0]), str(runs[1]), "-o", str(torn / "merged"))
    runner.run("merge", str(whole), "-o", str(torn / "of one disk"))
    merged, of_one = ({p.name: p.read_bytes() for p in (torn / name).iterdir()} for name in ("merged", "of one disk"))
    assert merged == of_one
    assert not (torn / "merged.gathered").exists()


def test_it_goes_on_on_another_mesh(runner: Runner, whole: Path, torn: Path) -> None:
    names = _copies(torn, "other")
    ends = _both(runner, names, OTHER_MESH, "--resume")
    assert [code for code, _ in ends] == [0, 0], ends
    ours = runner.metrics("other-0")
    theirs = runner.metrics("whole")
    assert len(ours) == len(theirs) == STEPS
    for a, b in zip(ours, theirs):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)


def test_without_the_other_part_it_says_which(runner: Runner, torn: Path) -> None:
    names = _copies(torn, "lost")
    shutil.rmtree(torn / names[1])
    ends = _both(runner, names, MESH, "--resume")
    assert [code for code, _ in ends] == [2, 2], ends
    assert "the machines have no complete checkpoint" in ends[0][1]
    assert "rank 2 wrote it on machine 1" in ends[0][1]
    assert _files(torn / names[0], 2) == _files(torn / "torn-0", 2)


# three machines

PIPELINE = ('--parallel={"pipeline_parallel_degree":3}', "--model.config.num_hidden_layers=3")


def test_three_machines_go_on_from_what_each_reads(runner: Runner) -> None:
    """One is killed between two commits, and then each fetches what it lacks of its stage of the pipeline."""
    runner.run(*runner.smoke("one of three", *COMMON, "--launch.num_devices=3", *PIPELINE))
    site = runner.directory / "site of three"
    site.mkdir()
    PluginSite(site).install("kill", KILL)
    path = os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")])
    names = [f"three-{k}" for k in range(3)]
    runs = [runner.directory / name for name in names]
    ends = _both(runner, names, *PIPELINE, num_devices=1, LLMSUITE_PLUGINS="kill", PYTHONPATH=path)
    assert [code for code, _ in ends] == [1, 1, 1], ends
    steps = [sorted(p.name for p in (run / "checkpoints").glob("step-?")) for run in runs]
    assert steps == [["step-2"], ["step-2", "step-4"], ["step-2", "step-4"]]

    # in their places, and changed: each has the stage of another one, so that it fetches its own
    for moved, least, most in ((0, 0.0, 0.1), (1, 0.3, 0.7)):
        names = [f"three-{moved}-{k}" for k in range(3)]
        for k, run in enumerate(runs):
            shutil.copytree(run, runner.directory / names[(k + moved) % 3])
        ends = _both(runner, names, *PIPELINE, "--resume", num_devices=1)
        assert [code for code, _ in ends] == [0, 0, 0], ends
        assert "step-4 is skipped: no machine has config.json; rank 0 wrote it on machine 0" in ends[0][1]
        fetched, lacking = _fetched(ends[0][1])
        assert least * lacking <= fetched < most * lacking
        assert not list(runner.directory.glob("three-*/checkpoints/*.fetched"))
        assert learnt(runner.metrics(names[0]))[-4:] == learnt(runner.metrics("one of three"))[-4:]
        whole = runner.directory / "one of three" / "checkpoints" / f"step-{STEPS}"
        for name in names:
            part = runner.directory / name / "checkpoints" / f"step-{STEPS}"
            for file in _files(runner.directory / name, STEPS) - {"elsewhere.json"}:
                assert (part / file).read_bytes() == (whole / file).read_bytes(), file


def test_each_machine_notices_that_its_own_directory_is_removed(runner: Runner) -> None:
    site = runner.directory / "site of removed directories"
    site.mkdir()
    PluginSite(site).install("remove", REMOVE)
    path = os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")])
    removed = runner.directory / "removed-1"
    ends = _both(
        runner,
        ("removed-0", "removed-1"),
        "--parallel={}",
        num_devices=1,
        LLMSUITE_PLUGINS="remove",
        PYTHONPATH=path,
        REMOVED=str(removed),
    )
    assert all(code for code, _ in ends), ends
    assert f"{removed}: was removed or replaced while it was written to" in ends[1][1]
    assert "Traceback" not in ends[1][1]
    assert not removed.exists()
