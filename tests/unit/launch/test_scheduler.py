"""Schedulers describe the machine of a process by variables, as their manuals say."""

from __future__ import annotations

import contextlib
import socket
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmsuite.base.errors import UserError
from llmsuite.cli import run as run_command
from llmsuite.contract.registry import Registry
from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.start import start_paddle
from llmsuite.launch.scheduler import ScheduledMachine, check_scheduled_machine, find_scheduled_machine
from llmsuite.recipe.resolve import RunPlan, plan_run

WriteRecipe = Callable[..., Path]

MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
SRUN = {
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
PADDLE_JOB = {"PADDLE_JOB_ID": "llama", "PADDLE_NNODES": "2", "PADDLE_MASTER": "llama-worker-0:36543"}
VOLCANO = {"VC_TASK_INDEX": "1", "VK_TASK_INDEX": "1", "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job"}
INDEXED = {"JOB_COMPLETION_INDEX": "1"}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, None),
        (MPIRUN, ScheduledMachine("mpirun", 1, 2)),
        (SRUN, ScheduledMachine("Slurm", 1, 2, master="gpu07:29500")),
        (VOLCANO, ScheduledMachine("Volcano", 1, 2, master="job-worker-0.job:29500")),
        ({"VK_TASK_INDEX": "3"}, ScheduledMachine("Volcano", 3)),
        (INDEXED, ScheduledMachine("Kubernetes", 1)),
        # Open MPI's daemons are started by srun, one on each machine but the first
        ({**SRUN, **MPIRUN, "SLURM_NODEID": "0"}, ScheduledMachine("mpirun", 1, 2)),
        # a batch script, which runs on the first machine alone
        ({"SLURM_NODEID": "0", "SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "8(x2)"}, None),
        # the workers of such a job are not its only machines, and each task counts its own
        ({**VOLCANO, "VC_PS_HOSTS": "job-ps-0.job"}, None),
        ({**INDEXED, "MASTER_ADDR": "job-0.job"}, ScheduledMachine("Kubernetes", 1, master="job-0.job:29500")),
        ({**MPIRUN, "MASTER_ADDR": "a", "MASTER_PORT": "7"}, ScheduledMachine("mpirun", 1, 2, master="a:7")),
        # who names the machine itself is believed, not what a shell may have kept
        ({**SRUN, "MASTER_ADDR": "a"}, ScheduledMachine("Slurm", 1, 2, master="gpu07:29500")),
    ],
)
def test_variables_of_schedulers(variables: dict[str, str], place: ScheduledMachine | None) -> None:
    assert find_scheduled_machine(variables) == place


def test_a_paddle_job_numbers_its_machines_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    first = {**PADDLE_JOB, "POD_IP_DUMMY": "10.0.0.7", "PADDLE_MASTER": "10.0.0.7:36543"}
    assert find_scheduled_machine(first) == ScheduledMachine("PaddleJob", 0, 2, master="10.0.0.7:36543")
    for name, number in (("llama-worker-0", 0), ("llama-worker-12", 12)):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        assert find_scheduled_machine(PADDLE_JOB) == ScheduledMachine(
            "PaddleJob", number, 2, master="llama-worker-0:36543"
        )
    monkeypatch.setattr(socket, "gethostname", lambda: "node-3")  # of a pod in the network of its machine
    assert find_scheduled_machine(PADDLE_JOB) is None


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ("one", "one"),
        ("a,b[1-2]", "a"),
        ("gpu[07-09,12],login", "gpu07"),
        ("rack[2-3]gpu[05,09]", "rack2gpu05"),
        ("gpu[3]-ib,x", "gpu3-ib"),
    ],
)
def test_the_first_of_slurms_names(names: str, first: str) -> None:
    place = find_scheduled_machine({**SRUN, "SLURM_STEP_NODELIST": names})
    assert place is not None
    assert place.master == f"{first}:29500"


@pytest.mark.parametrize(
    ("variables", "processes"),
    [
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, 8),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2,3"}, 3),
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
    ],
)
def test_a_process_for_each_device_is_refused(variables: dict[str, str], processes: int) -> None:
    place = find_scheduled_machine(variables)
    assert place is not None
    with pytest.raises(UserError, match=rf"has started {processes} processes on this machine; start one, .*per-node=1"):
        check_scheduled_machine(place, 2)


def test_another_number_of_machines_is_refused() -> None:
    check_scheduled_machine(ScheduledMachine("Kubernetes", 1), 2)
    check_scheduled_machine(ScheduledMachine("Slurm", 1, 2), 2)
    with pytest.raises(UserError, match=r"launch.nnodes: is 2, and Slurm has started this on 4 machines; set .*=4"):
        check_scheduled_machine(ScheduledMachine("Slurm", 1, 4), 2)
    check_scheduled_machine(ScheduledMachine("Slurm", 1, 4), 3, num_spares=1)
    with pytest.raises(UserError, match=r"is 2 with 1 spares .*, and Slurm has started this on 4 machines; set .*=3"):
        check_scheduled_machine(ScheduledMachine("Slurm", 1, 4), 2, num_spares=1)


# what `llmsuite run` makes of it


@pytest.fixture
def plan(write_recipe: WriteRecipe, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunPlan]:
    for variables in (MPIRUN, SRUN, PADDLE_JOB, VOLCANO, INDEXED, {"PADDLE_TRAINER_ID": "", "MASTER_ADDR": ""}):
        for name in variables:
            monkeypatch.delenv(name, raising=False)
    return lambda *words, nnodes=2: plan_run(write_recipe(), [f"--launch.nnodes={nnodes}", *words], registry)


def _machine(plan: RunPlan) -> tuple[int, str]:
    return run_command._machine(plan.loaded, is_smoke=False)


def _set(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_a_machine_is_numbered_by_its_scheduler(plan: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"launch.node_rank: is required with 2 machines"):
        _machine(plan())
    _set(monkeypatch, SRUN)
    assert _machine(plan()) == (1, "gpu07:29500")
    assert _machine(plan("--launch.master=other:1")) == (1, "other:1")
    assert _machine(plan("--launch.node_rank=0")) == (0, "gpu07:29500")
    with pytest.raises(UserError, match=r"launch.nnodes: is 1, and Slurm has started this on 2 machines"):
        _machine(plan(nnodes=1))
    assert _machine(plan("--launch.node_rank=0", nnodes=1)) == (0, "")
    with pytest.raises(UserError, match=r"launch.nnodes: is 4, and Slurm has started this on 2 machines"):
        _machine(plan(nnodes=4))


def test_a_missing_machine_0_address_is_reported(plan: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, MPIRUN)
    with pytest.raises(UserError, match=r"launch.master: is required with several machines"):
        _machine(plan())
    assert _machine(plan("--launch.master=other:1")) == (1, "other:1")


def test_a_rank_of_another_launcher_needs_no_settings(
    plan: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started by paddle.distributed.launch on each of two machines, or in a PaddleJob."""
    _set(monkeypatch, {"PADDLE_TRAINER_ID": "3", "PADDLE_TRAINERS_NUM": "4", "PADDLE_LOCAL_RANK": "1"})
    assert _machine(plan()) == (0, "")


@pytest.mark.parametrize(
    ("variables", "checks"),
    [
        ({}, True),
        ({"PADDLE_TRAINER_ID": "0"}, True),
        ({"PADDLE_TRAINER_ID": "1"}, False),  # what rank 0 has written meanwhile is in its way
        ({"PADDLE_TRAINER_ID": "0", "LLMSUITE_CALLS": "/nowhere"}, False),  # our launcher has looked
    ],
)
def test_which_launcher_checks_that_the_output_directory_is_free(
    plan: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], checks: bool
) -> None:
    _set(monkeypatch, variables)
    looked: list[str] = []
    monkeypatch.setattr(RunPlan, "check_output", lambda self: looked.append("output"))
    monkeypatch.setattr(RunPlan, "check_files", lambda self: None)
    monkeypatch.setattr("llmsuite.stages.first_rows.check_rows", lambda *given: [])
    nothing: Any = None
    run_command._check(types.SimpleNamespace(resume=False, smoke=False, overrides=[]), plan(), nothing, 0)
    assert looked == ["output"] * checks


@pytest.mark.parametrize("given", ["abc", "", "-1", "1e9", "1" * 5000, "\u0663"])
@pytest.mark.parametrize("variables", [MPIRUN, SRUN, PADDLE_JOB, VOLCANO, INDEXED], ids=lambda v: min(v))
def test_numbers_that_are_none_end_in_no_traceback(variables: dict[str, str], given: str) -> None:
    for name in [name for name, value in variables.items() if value.isdecimal()]:
        with contextlib.suppress(UserError):  # what is not needed may be anything
            find_scheduled_machine({**variables, name: given})


def test_a_number_that_is_none_is_named() -> None:
    with pytest.raises(UserError, match=r"SLURM_NODEID: is 'abc' in the environment; a launcher sets it to a number"):
        find_scheduled_machine({**SRUN, "SLURM_NODEID": "abc"})
    with pytest.raises(UserError, match="OMPI_COMM_WORLD_SIZE: is not set"):
        find_scheduled_machine({"OMPI_COMM_WORLD_RANK": "0"})


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (
            {"PADDLE_TRAINER_ID": "abc"},
            "PADDLE_TRAINER_ID: is 'abc' in the environment; a launcher sets it to a number",
        ),
        ({"PADDLE_TRAINER_ID": ""}, "PADDLE_TRAINER_ID: is '' in the environment"),
        ({"PADDLE_LOCAL_RANK": "-1"}, "PADDLE_LOCAL_RANK: is '-1' in the environment"),
        ({"PADDLE_TRAINERS_NUM": "2.0"}, "PADDLE_TRAINERS_NUM: is '2.0' in the environment"),
        (
            {"PADDLE_TRAINER_ID": "2", "PADDLE_TRAINERS_NUM": "2"},
            "is 2 in the environment, and PADDLE_TRAINERS_NUM is 2",
        ),
    ],
)
def test_a_rank_that_cannot_be_is_refused_before_paddle_fails(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], says: str
) -> None:
    _set(monkeypatch, variables)
    with pytest.raises(UserError) as found:
        start_paddle(CpuBackend(), 1)
    assert says in str(found.value)
