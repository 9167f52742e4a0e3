"""Several machines form one run: here two launchers on one, which meet at an address that is not the usual one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.multi.conftest import Process, Runner
from tests.support.ports import free_address

STEPS = 4
COMMON = (
    "--train.optimizer=sgd", "--train.learning_rate=0.2", "--data.eval=null",
    "--train.global_batch_size=8", "--train.micro_batch_size=2",
)  # fmt: skip
TWO = (
    "--launch.nnodes=2", "--launch.num_devices=2",
    '--parallel={"tensor_parallel_degree":2,"pipeline_parallel_degree":2}',
)  # fmt: skip


@pytest.fixture
def master() -> str:
    """A free port of an address that only what the launchers tell each other leads to."""
    return free_address("127.0.0.2")


def _start(
    runner: Runner, name: str, master: str, machine: int, *more: str, steps: int = STEPS, fresh: bool = False
) -> Process:
    steps_word = f"--train.max_steps={steps}"
    where = (f"--launch.master={master}", f"--launch.node_rank={machine}")
    start = runner.start if fresh else runner.start_fork
    return start(*runner.smoke(name, *COMMON, *TWO, *where, steps_word, *more))


def _end(process: Process) -> tuple[int, str]:
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def _ranks(process: Process) -> list[int]:
    return [int(c) for c in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def test_two_machines_equal_one_process(runner: Runner, master: str) -> None:
    runner.run(*runner.smoke("one", *COMMON, f"--train.max_steps={STEPS}", "--launch.num_devices=1", "--parallel={}"))
    second = _start(runner, "two", master, 1)  # which waits for the first
    first = _start(runner, "two", master, 0)
    for process in (first, second):
        code, output = _end(process)
        assert code == 0, output
    logs = sorted(path.name for path in (runner.directory / "two" / "logs").iterdir())
    assert logs == [f"workerlog.{rank}" for rank in range(4)]
    one = runner.metrics("one")
    two = runner.metrics("two")
    assert len(one) == len(two) == STEPS
    for a, b in zip(one, two):
        for key in ("loss", "grad_norm"):
            assert b[key] == pytest.approx(a[key], rel=1e-6), (a["step"], key)
    assert one[-1]["loss"] < 0.95 * one[0]["loss"]


@pytest.mark.parametrize("machine", [0, 1])
@pytest.mark.parametrize("what", ["rank", "launcher"])
def test_a_failure_on_one_machine_ends_the_other(runner: Runner, master: str, machine: int, what: str) -> None:
    name = f"lost {what} of {machine}"
    machines = [_start(runner, name, master, index, steps=20000) for index in (0, 1)]
    runner.wait_for_step(name, 2, machines[0])
    victim = _ranks(machines[machine])[1] if what == "rank" else machines[machine].pid
    os.kill(victim, signal.SIGKILL)
    start = time.monotonic()
    code, output = _end(machines[1 - machine])
    assert time.monotonic() - start < 25  # Gloo itself gives up after 30
    assert code == 1
    rank = 2 * machine + 1
    expected = (
        f"rank {rank} on machine {machine} was killed by SIGKILL" if what == "rank" else f"machine {machine} is lost"
    )
    assert expected in output
    assert _end(machines[machine])[0] == (1 if what == "rank" else -signal.SIGKILL)


def test_ctrl_c_on_one_machine_stops_all_with_a_checkpoint(runner: Runner, master: str) -> None:
    machines = [_start(runner, "stopped", master, index, steps=20000, fresh=True) for index in (0, 1)]
    runner.wait_for_step("stopped", 2, machines[0])
    machines[1].send_signal(signal.SIGINT)
    assert [_end(process)[0] for process in machines] == [130, 130]
    done = runner.metrics("stopped")[-1]["step"]
    assert (runner.directory / "stopped" / "checkpoints" / "latest").read_text() == f"step-{done}\n"


def test_machines_with_different_recipes_do_not_start(
    runner: Runner, master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(runner.environment, "LLMSUITE_LAUNCH_KEY", "so that machine 1 is no stranger")
    machines = [_start(runner, "different", master, index, f"--seed={index}") for index in (0, 1)]
    for process in machines:
        code, output = _end(process)
        assert code == 2
        assert "machine 1 was given another recipe or other overrides than machine 0; these differ: seed" in output


def test_without_its_number_a_machine_says_what_to_type(runner: Runner) -> None:
    output = runner.run(*runner.smoke("fan out", *COMMON, *TWO), expect=2)
    for line in ("  ssh HOST1 'cd ", "  mpirun -np 2 ", "  srun --nodes=2 "):
        assert line in output
    assert "--launch.master=HOST0:29500 --launch.node_rank=1'" in output
    assert "launch.master: is required" in runner.run(
        *runner.smoke("fan out", *COMMON, *TWO, "--launch.node_rank=0"), expect=2
    )
