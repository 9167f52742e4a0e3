"""Kills a run of four processes at random moments, goes on, and compares it with one that was never killed.

python -m tests.tools.kills [KILLS] [SEED]

Each time one rank or the launcher gets SIGKILL, while it starts, trains, or (half of them) writes a checkpoint; then
the run goes on with --resume. At the end losses and checkpoint have to be those of the other run, bit by bit.
"""

from __future__ import annotations

import collections
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from llmsuite.base.files import broken_file
from llmsuite.checkpoint.directory import list_steps
from tests.multi.conftest import Runner, learnt
from tests.tools.faults import ranks_of

RANKS = 4
STEPS_OF_A_RUN = 48
MOST_SECONDS = 4.0  # of training before a kill
WRITING_SECONDS = 0.03  # from where a checkpoint is begun
WORDS = (
    f"--launch.num_devices={RANKS}",
    '--parallel={"tensor_parallel_degree":2,"sharding":"stage2"}',
    f"--train.max_steps={STEPS_OF_A_RUN}", "--train.global_batch_size=4", "--train.micro_batch_size=2",
    "--data.eval=null", "--checkpoint.save_steps=1", "--checkpoint.keep_last=2", "--checkpoint.async_save=true",
)  # fmt: skip


class Wrong(Exception):
    """What should not be."""


def main(kills: int, seed: int) -> int:
    """Report each kill; returns how many rounds did not end as they should."""
    chance = random.Random(seed)
    bad = 0
    done = 0
    rounds = 0
    where = collections.Counter[str]()
    with tempfile.TemporaryDirectory() as directory:
        runner = Runner(Path(directory))
        runner.run(*runner.smoke("whole", *WORDS))
        while done < kills:
            rounds += 1
            name = f"killed-{rounds}"
            try:
                done += _round(runner, name, kills - done, chance, where)
            except Wrong as error:
                bad += 1
                print(f"seed {seed}, {name}: {error}", flush=True)
                break
            finally:
                shutil.rmtree(Path(directory) / name, ignore_errors=True)
    seen = ", ".join(f"{count} {what}" for what, count in sorted(where.items()))
    print(f"{done} kills (seed {seed}) in {rounds} runs, {bad} runs went wrong; {seen}")
    return bad


def _round(runner: Runner, name: str, most: int, chance: random.Random, where: collections.Counter[str]) -> int:
    """Kill one run until it gets to its end, or `most` times, and compare it; returns how often it was killed."""
    run = runner.directory / name
    kills = 0
    while True:
        words = runner.smoke(name, *WORDS) + (["--resume"] if run.exists() else [])
        process = runner.start(*words)
        victim = _kill(run, process, chance) if kills < most else None
        output, _ = process.communicate(timeout=300)
        if victim is None:
            if process.returncode != 0:
                raise Wrong(f"exit code {process.returncode} when it was not killed\n{output}")
            break
        if process.returncode == 0 and victim == "launcher":  # it was about to end
            break
        kills += 1
        if process.returncode == 0:
            raise Wrong(f"{victim} was killed, and the run ended well\n{output}")
        if victim != "launcher" and f"{victim} was killed by SIGKILL" not in output:
            raise Wrong(f"{victim} was killed and is not named\n{output}")
        _wait_until_gone(run)
        what = _left_behind(run)
        where[f"of a {victim.split()[0]}"] += 1
        where[what] += 1
        print(f"{name}: kill {kills}, {victim}: {what}", flush=True)
    if learnt(runner.metrics(name)) != learnt(runner.metrics("whole")):
        raise Wrong("its metrics are not those of the run that was never killed")
    ours, theirs = (_files(runner.directory / n) for n in (name, "whole"))
    if ours != theirs:
        raise Wrong("its last checkpoint is not that of the run that was never killed")
    print(f"{name}: after {kills} kills all {STEPS_OF_A_RUN} steps and the last checkpoint are bit-equal", flush=True)
    return kills


def _kill(run: Path, process: subprocess.Popen[str], chance: random.Random) -> str | None:
    """Wait for a random moment, then kill a rank or the launcher; returns whom, None if the run was done before."""
    latest = run / "checkpoints" / "latest"
    before = latest.stat().st_mtime_ns if latest.exists() else 0
    early = chance.random() < 0.15
    while_writing = chance.random() < 0.5
    seconds = chance.uniform(0, MOST_SECONDS)
    victim = chance.randrange(-1, RANKS)
    deadline = time.monotonic() + 300
    while not early and process.poll() is None:  # until this process has written a checkpoint
        if time.monotonic() > deadline:
            raise Wrong("no checkpoint came in 300 s")
        if latest.exists() and latest.stat().st_mtime_ns != before:
            break
        time.sleep(0.001)
    time.sleep(seconds)
    while while_writing and not early and process.poll() is None:  # writing takes a small part of the time
        if any(latest.parent.glob("step-*.tmp")):
            time.sleep(chance.uniform(0, WRITING_SECONDS))
            break
        if time.monotonic() > deadline:
            raise Wrong("no checkpoint was begun in 300 s")
    if process.poll() is not None:
        return None
    if victim < 0:
        process.kill()
        return "launcher"
    # in the order in which they were started; as forks they have the environment of the launcher in /proc
    ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    if len(ranks) < RANKS:  # it is still starting them
        process.kill()
        return "launcher"
    os.kill(ranks[victim], signal.SIGKILL)
    return f"rank {victim}"


def _left_behind(run: Path) -> str:
    """What the killed run has left. Every checkpoint that has its name has to be whole."""
    root = run / "checkpoints"
    half = sorted(p.name for p in root.glob("step-*.*"))
    damaged = [fault for _, path in list_steps(root) if (fault := broken_file(path)) is not None]
    if damaged:
        raise Wrong(f"a checkpoint is not whole: {damaged}")
    return "with a half-written checkpoint" if half else "between checkpoints"


def _wait_until_gone(run: Path) -> None:
    deadline = time.monotonic() + 10
    while left := ranks_of(run):
        if time.monotonic() > deadline:
            raise Wrong(f"processes outlive it: {left}")
        time.sleep(0.05)


def _files(run: Path) -> object:
    manifest = run / "checkpoints" / f"step-{STEPS_OF_A_RUN}" / "manifest.json"
    return json.loads(manifest.read_text())["files"]


if __name__ == "__main__":
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    sys.exit(1 if main(kills, int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(10**6)) else 0)
