"""Long runs whose memory has to stay flat: SFT, and GRPO for which a server draws.

python -m tests.tools.long_runs [--steps N] [RUN...]

Once a run has settled, its processes (and the server's) hold as much memory, and as many open files and threads, at its
end as in its middle: what grows with the steps would end a run of days. Compared are medians, for what allocators keep
goes up and down.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from tests.multi.conftest import Runner
from tests.support.paths import ROOT
from tests.support.rollout_servers import asking
from tests.support.server import Server
from tests.tools.faults import MARK, marked

WARM = 0.3
"""Of the steps, those in which caches and allocators fill."""
MOST_GROWTH = 6 << 20
"""Bytes: in 2,000 steps it is a leak of 9 kB a step."""
MOST_MORE = 1
"""Open files or threads."""
_SAMPLES = 100
COMMON = (
    "--smoke", "--launch.num_devices=1", "--parallel={}", "--train.global_batch_size=4", "--train.micro_batch_size=2",
    "--data.max_length=64", "--train.warmup_ratio=0", "--train.lr_schedule=constant",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Sample:
    """What the processes of a run hold."""

    step: int
    memory: int
    """Bytes."""
    files: int
    threads: int
    processes: tuple[tuple[int, int], ...] = ()
    """Of each process its id and its part of the memory: who grows."""


class Growing(Exception):
    """Something grows with the steps."""


def check(samples: Sequence[Sample]) -> str:
    """A line on what was seen. Raises Growing where a run holds more of something at its end than in its middle."""
    settled = samples[round(WARM * len(samples)) :]
    middle = settled[: len(settled) // 2]
    end = settled[len(settled) // 2 :]
    said = []
    for name, most, unit in (("memory", MOST_GROWTH, 2**20), ("files", MOST_MORE, 1), ("threads", MOST_MORE, 1)):
        before, after = (statistics.median(getattr(sample, name) for sample in part) for part in (middle, end))
        said.append(f"{before / unit:.0f} to {after / unit:.0f} {'MiB' if name == 'memory' else name}")
        if after > before + most:
            raise Growing(f"grows behind step {middle[0].step}: {said[-1]}; {[*samples]}")
    return ", ".join(said)


def own_memory(pid: int) -> int:
    """Bytes of a process that no file has; of those that processes share, its part. Libraries do not count: what a
    process holds of them depends on who else on the machine has loaded them."""
    rows = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(row[1]) * 1024 for row in rows if row[0] in ("Pss_Anon:", "Pss_Shmem:"))


def sample(mark: str, step: int) -> Sample:
    """What all processes with a mark hold."""
    found = [psutil.Process(pid) for pid in marked(mark)]
    memory = {process.pid: own_memory(process.pid) for process in found}
    files = sum(process.num_fds() for process in found)
    threads = sum(process.num_threads() for process in found)
    return Sample(step, sum(memory.values()), files, threads, tuple(memory.items()))


def follow(runner: Runner, name: str, words: Sequence[str], steps: int) -> str:
    """Let a run go to its end, and look now and then at all that has its mark; returns what was seen.

    Raises:
        Growing: something grows, or the run fails.
    """
    output = runner.directory / name
    path = runner.directory / f"{name}.log"
    samples = list[Sample]()
    due = 1
    every = max(1, steps // _SAMPLES)
    command = [sys.executable, "-m", "llmsuite", *words, f"--train.max_steps={steps}", f"--output_dir={output}"]
    with open(path, "wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=runner.environment, stdout=log, stderr=log)
        while process.poll() is None:
            step = _last_step(output / "metrics.jsonl")
            if step >= due:
                with contextlib.suppress(
                    psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError
                ):  # it has just ended
                    samples.append(sample(runner.environment[MARK], step))
                    due = step + every
                    if len(samples) % 20 == 1:
                        print(f"  {name}: {samples[-1]}", flush=True)
            time.sleep(0.05)
    if process.returncode:
        raise Growing(f"{name}: exit code {process.returncode}\n{path.read_text()}")
    return f"{name}: {steps} steps, {len(samples)} looks: {check(samples)}"


def _last_step(metrics: Path) -> int:
    """The last step that is recorded."""
    if not metrics.exists():
        return 0
    with open(metrics, "rb") as file:
        file.seek(max(0, metrics.stat().st_size - 4096))
        lines = [line for line in file.read().split(b"\n")[:-1] if line.startswith(b"{") and b'"loss"' in line]
    return int(json.loads(lines[-1])["step"]) if lines else 0


def run_sft(runner: Runner, steps: int) -> str:
    """A run of SFT with evaluations and checkpoints."""
    words = ("run", "recipes/llama/sft.json", *COMMON, "--train.eval_steps=100", "--checkpoint.save_steps=100")
    return follow(runner, "sft", words, steps)


def run_grpo(runner: Runner, steps: int) -> str:
    """A run of GRPO, and the server that draws for it and gets its weights."""
    words = (
        "run",
        "recipes/llama/grpo.json",
        *COMMON,
        "--rollout.max_completion_length=8",
        "--checkpoint.save_steps=100",
        # so slowly that rewards still differ at the end: with 0.001 all are right after 200 steps, and the run ends
        "--train.learning_rate=1e-5",
        "--grpo.patience=null",
    )
    runner.run(*words, "--train.max_steps=1", f"--output_dir={runner.directory / 'first'}")
    server = Server(runner, runner.directory / "first", "--rl", "--batch_size", "8")
    try:
        return follow(runner, "grpo", [*words, *asking(server.url, 6)], steps)
    finally:
        server.stop()


RUNS: dict[str, Callable[[Runner, int], str]] = {"sft": run_sft, "grpo": run_grpo}


def main(names: Sequence[str], steps: int) -> int:
    """Report each run; returns how many grow."""
    bad = 0
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            runner = Runner(Path(directory))
            runner.environment[MARK] = uuid.uuid4().hex
            try:
                print(RUNS[name](runner, steps), flush=True)
            except Growing as error:
                bad += 1
                print(error, flush=True)
    return bad


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("runs", nargs="*", default=[*RUNS])
    given = parser.parse_args()
    sys.exit(1 if main(given.runs, given.steps) else 0)
