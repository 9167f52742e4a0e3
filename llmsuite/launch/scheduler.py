"""Environment variables of cluster schedulers: the number of this machine, and the address of machine 0.

With them the same command line works on all machines. The variables are documented by Open MPI (mpirun), Slurm (srun),
Kubeflow's training operator (PaddleJob), Volcano (the plugins env and svc) and Kubernetes (a Job with completionMode
Indexed). A recipe or a command line overrides all of them.
"""

from __future__ import annotations

import dataclasses
import re
import socket
from collections.abc import Mapping

from llmsuite.base.errors import UserError
from llmsuite.devices.variables import number_in

DEFAULT_PORT = 29500
"""Port of machine 0 where a scheduler names the machine and no port."""


@dataclasses.dataclass(frozen=True)
class ScheduledMachine:
    """One machine among those that a scheduler has started a command on."""

    by: str
    """The scheduler."""
    number: int
    """Number of this machine, from 0."""
    count: int | None = None
    """Machines; None where the scheduler does not set it."""
    processes: int = 1
    """Processes that the scheduler has started on this machine."""
    master: str | None = None
    """host:port of machine 0; None where the scheduler does not set it."""


def find_scheduled_machine(variables: Mapping[str, str]) -> ScheduledMachine | None:
    """This machine as the variables of a process describe it; None where no scheduler has set them."""
    # Open MPI is first: it starts its daemons through the other schedulers, whose variables then describe the daemon
    for read in (_open_mpi, _slurm, _paddle_job, _volcano, _indexed_job):
        place = read(variables)
        if place is None:
            continue
        host = variables.get("MASTER_ADDR")
        if place.master is None and host:
            return dataclasses.replace(place, master=f"{host}:{variables.get('MASTER_PORT', DEFAULT_PORT)}")
        return place
    return None


def check_scheduled_machine(place: ScheduledMachine, num_machines: int, num_spares: int = 0) -> None:
    """Raise UserError unless a scheduler has started one process on each machine of the run, spares included."""
    own = "--launch.node_rank=0 if each is a run of its own"
    if place.processes > 1:
        raise UserError(
            f"launch.nnodes: {place.by} has started {place.processes} processes on this machine; start one, which "
            f"starts the ranks of the machine: mpirun --map-by ppr:1:node, srun --ntasks-per-node=1; or set {own}"
        )
    if place.count is not None and place.count != num_machines + num_spares:
        spares = ""
        if num_spares:
            spares = f" with {num_spares} spares (launch.spares)"
        otherwise = "number the machines yourself with --launch.node_rank"
        if num_machines == 1:
            otherwise = f"set {own}"
        raise UserError(
            f"launch.nnodes: is {num_machines}{spares}, and {place.by} has started this on {place.count} machines; set "
            f"--launch.nnodes={place.count - num_spares}, or {otherwise}"
        )


def _open_mpi(variables: Mapping[str, str]) -> ScheduledMachine | None:
    if "OMPI_COMM_WORLD_RANK" not in variables:
        return None
    processes = number_in(variables, "OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    # with one process on each machine ranks are machines
    return ScheduledMachine(
        "mpirun", number_in(variables, "OMPI_COMM_WORLD_RANK"), number_in(variables, "OMPI_COMM_WORLD_SIZE"), processes
    )


def _slurm(variables: Mapping[str, str]) -> ScheduledMachine | None:
    # SLURM_STEP_… are set by srun; a batch script has a SLURM_NODEID too, and runs on the first machine only
    if "SLURM_STEP_NUM_NODES" not in variables or "SLURM_NODEID" not in variables:
        return None
    machine = number_in(variables, "SLURM_NODEID")
    of_machines = _repeated(variables.get("SLURM_STEP_TASKS_PER_NODE", ""))
    processes = 1
    if machine < len(of_machines):
        processes = of_machines[machine]
    names = variables.get("SLURM_STEP_NODELIST")
    master = None
    if names:
        master = f"{_first_name(names)}:{DEFAULT_PORT}"
    return ScheduledMachine("Slurm", machine, number_in(variables, "SLURM_STEP_NUM_NODES"), processes, master)


def _repeated(counts: str) -> list[int]:
    """Slurm's counts of machines, such as "2(x3),1" for 2, 2, 2, 1."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def _first_name(names: str) -> str:
    """The first name in Slurm's list of machines: gpu07 in "gpu[07-09,12],login"."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", names)
    assert first is not None
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group())


def _paddle_job(variables: Mapping[str, str]) -> ScheduledMachine | None:
    if not {"PADDLE_JOB_ID", "PADDLE_NNODES", "PADDLE_MASTER"} <= variables.keys():
        return None
    if "POD_IP_DUMMY" in variables:  # the operator sets it on the first worker, where PADDLE_MASTER is its own address
        number = 0
    else:
        # the others have a number only in their name, which is the name of their machine
        name = re.fullmatch(rf"{re.escape(variables['PADDLE_JOB_ID'])}-worker-(\d+)", socket.gethostname())
        if name is None:
            return None
        number = int(name.group(1))
    return ScheduledMachine(
        "PaddleJob", number, number_in(variables, "PADDLE_NNODES"), master=variables["PADDLE_MASTER"]
    )


def _volcano(variables: Mapping[str, str]) -> ScheduledMachine | None:
    name = next((name for name in ("VC_TASK_INDEX", "VK_TASK_INDEX") if name in variables), None)
    hosts = [value for name, value in variables.items() if re.fullmatch(r"VC_\w+_HOSTS", name)]
    if name is None or len(hosts) > 1:  # each task of a job counts its own machines
        return None
    names = hosts[0].split(",") if hosts else []
    master = f"{names[0]}:{DEFAULT_PORT}" if names else None
    return ScheduledMachine("Volcano", number_in(variables, name), len(names) or None, master=master)


def _indexed_job(variables: Mapping[str, str]) -> ScheduledMachine | None:
    name = "JOB_COMPLETION_INDEX"
    if name in variables:
        return ScheduledMachine("Kubernetes", number_in(variables, name))
    return None
