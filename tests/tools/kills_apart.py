"""As `kills`, with two machines that share no directory: one rank or launcher of either is killed, both go on.

python -m tests.tools.kills_apart [KILLS] [SEED]

Each machine has two of the four ranks and an output_dir of its own. What is left of a checkpoint after a kill has to be
as it was written, the run has to go on from the newest one of machine 0, which commits last, and at the end losses and
the parts of the last checkpoint have to be those of a run on one machine, bit by bit.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from llmsuite.base.files import ELSEWHERE, MANIFEST, broken_file
from llmsuite.checkpoint.directory import list_steps
from tests.multi.conftest import Runner, learnt
from tests.support.ports import free_address
from tests.tools.faults import ranks_of
from tests.tools.kills import Wrong

STEPS_OF_A_RUN = 24
MOST_SECONDS = 3.0  # of training before a kill
WRITING_SECONDS = 0.06  # from where a checkpoint is begun
MACHINES = (0, 1)
WORDS = (
    '--parallel={"tensor_parallel_degree":2,"sharding":"stage2"}', f"--train.max_steps={STEPS_OF_A_RUN}",
    "--train.global_batch_size=4", "--train.micro_batch_size=2", "--data.eval=null", "--checkpoint.save_steps=1",
)  # fmt: skip


def main(kills: int, seed: int) -> int:
    """Report each kill; returns how many runs did not end as they should."""
    chance = random.Random(seed)
    done = 0
    rounds = 0
    with tempfile.TemporaryDirectory() as directory:
        runner = Runner(Path(directory))
        runner.run(*runner.smoke("whole", *WORDS, "--launch.num_devices=4"))
        while done < kills:
            rounds += 1
            try:
                done += _round(runner, f"killed-{rounds}", min(kills - done, 10), chance)
            except Wrong as error:
                print(f"seed {seed}, killed-{rounds}: {error}", flush=True)
                return 1
    print(f"{done} kills (seed {seed}) in {rounds} runs: all of them went on bit-equal")
    return 0


def _round(runner: Runner, name: str, most: int, chance: random.Random) -> int:
    """Kill one run `most` times, let it get to its end, and compare it; returns how often it was killed."""
    runs = [runner.directory / f"{name}-{k}" for k in MACHINES]
    kills = 0
    expected = ""
    while True:
        machines = _start(runner, runs)
        victim = _kill(runs, machines, chance) if kills < most else None
        outputs = [machine.communicate(timeout=300)[0] for machine in machines]
        codes = [machine.returncode for machine in machines]
        if expected and "\nstep " in outputs[0] and expected not in outputs[0]:
            raise Wrong(f"it did not say {expected!r}\n{outputs[0]}")
        if codes == [0, 0]:
            break
        if victim is None:
            raise Wrong(f"exit codes {codes} when it was not killed\n{outputs[0]}\n{outputs[1]}")
        kills += 1
        _wait_until_gone(runs)
        newest = [[step for step, _ in list_steps(run / "checkpoints")] for run in runs]
        parts = [path for run in runs for _, path in list_steps(run / "checkpoints")]
        if damaged := [fault for path in parts if (fault := broken_file(path, here_only=True)) is not None]:
            raise Wrong(f"a part is not as it was written: {damaged}")
        expected = f"resuming from {runs[0] / 'checkpoints' / f'step-{newest[0][-1]}'}" if newest[0] else ""
        half = [len(list((run / "checkpoints").glob("step-*.tmp"))) for run in runs]
        print(f"{name}: kill {kills}, {victim}: steps {newest}, half written {half}", flush=True)
    _compare(runner, runs)
    print(f"{name}: after {kills} kills all {STEPS_OF_A_RUN} steps and the last checkpoint are bit-equal", flush=True)
    for run in runs:
        shutil.rmtree(run)
    return kills


def _start(runner: Runner, runs: list[Path]) -> list[subprocess.Popen[str]]:
    master = free_address("127.0.0.1")
    two = (f"--launch.master={master}", "--launch.nnodes=2", "--launch.num_devices=2")
    goes_on = ["--resume"] if any(run.exists() for run in runs) else []
    return [
        runner.start(*runner.smoke(run.name, *WORDS, *two, f"--launch.node_rank={k}"), *goes_on)
        for k, run in enumerate(runs)
    ]


def _kill(runs: list[Path], machines: list[subprocess.Popen[str]], chance: random.Random) -> str | None:
    """Wait for a random moment, then kill a rank or a launcher; returns whom, None if the run was done before."""
    roots = [run / "checkpoints" for run in runs]
    deadline = time.monotonic() + 300
    before = _latest(roots[0])
    early = chance.random() < 0.3  # early: while parts are fetched
    while_writing = chance.random() < 0.8
    seconds = chance.uniform(0, MOST_SECONDS)
    machine = chance.choice(MACHINES)
    victim = chance.randrange(-1, 2)

    def is_running() -> bool:
        if time.monotonic() > deadline:
            raise Wrong("no checkpoint came in 300 s")
        return all(process.poll() is None for process in machines)

    while is_running() and any(len(_children(process)) < len(MACHINES) for process in machines):  # they have not met
        time.sleep(0.01)
    while not early and is_running() and _latest(roots[0]) == before:  # until these processes have written one
        time.sleep(0.001)
    time.sleep(seconds)
    while while_writing and not early and is_running():  # writing takes a small part of the time
        if any(any(root.glob("step-*.tmp")) for root in roots):
            time.sleep(chance.uniform(0, WRITING_SECONDS))
            break
    if not is_running():
        return None
    process = machines[machine]
    children = _children(process)
    if victim < 0 or len(children) < len(MACHINES):  # or they are gone
        process.kill()
        return f"launcher of machine {machine}"
    os.kill(int(children[victim]), signal.SIGKILL)
    return f"a rank of machine {machine}"


def _children(process: subprocess.Popen[str]) -> list[str]:
    try:
        return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    except OSError:  # it has just ended
        return []


def _latest(root: Path) -> int:
    latest = root / "latest"
    return latest.stat().st_mtime_ns if latest.exists() else 0


def _wait_until_gone(runs: list[Path]) -> None:
    deadline = time.monotonic() + 40
    while left := [pid for run in runs for pid in ranks_of(run)]:
        if time.monotonic() > deadline:
            raise Wrong(f"processes outlive it: {left}")
        time.sleep(0.05)


def _compare(runner: Runner, runs: list[Path]) -> None:
    if learnt(runner.metrics(runs[0].name)) != learnt(runner.metrics("whole")):
        raise Wrong("its metrics are not those of the run that was never killed")
    last = Path("checkpoints") / f"step-{STEPS_OF_A_RUN}"
    whole = {path.name: path.read_bytes() for path in (runner.directory / "whole" / last).iterdir()}
    parts = [{p.name: p.read_bytes() for p in (run / last).iterdir() if p.name != ELSEWHERE} for run in runs]
    if parts[0].keys() & parts[1].keys() != {MANIFEST} or any(part[MANIFEST] != whole[MANIFEST] for part in parts):
        raise Wrong("its parts are not those of one checkpoint")
    if {**parts[0], **parts[1]} != whole:
        raise Wrong("its last checkpoint is not that of the run that was never killed")


if __name__ == "__main__":
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    sys.exit(main(kills, int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(10**6)))
