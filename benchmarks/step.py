"""Time and memory of a training step: `llmsuite run` beside the trainers of others, on the same weights and rows.

    python benchmarks/step.py --model models/smollm2-135m-instruct --data DIRECTORY

DIRECTORY has alpaca_en_demo.json and dpo_en_demo.json of LLaMA-Factory's data/. The peers are transformers and TRL on
torch, and paddlenlp on Paddle; each gets a virtual environment of its own, made once in llmsuite's cache directory.

Every engine is a process that runs steps on request: ours is the command `llmsuite run` itself, paused between two
steps by a plugin; theirs are their trainers, paused by a callback. So a step is everything from one step to the next:
rows to batches, forward, backward, clipping, AdamW, metrics. All have two threads, the same rows in the same order,
no packing, and but for `trl-as-is` the same `--precision` and no gradient checkpointing: TRL's defaults are bf16 and
gradient checkpointing. A task whose name ends in `-recompute` has `engine.recompute: full`, beside `trl-as-is` alone.
After an untimed first step they take turns for `--rounds` rounds while the others wait. Reported are the median over
the rounds of the ratio of times, and the ratio of the peaks of resident memory since the process started. The losses
are compared too: with the same weights, rows and optimizer they must agree, or the benchmark fails. A step of GRPO
draws completions, and no two engines draw the same: their lengths are told in place of a difference of losses.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / "benchmarks" / "peers"
sys.path[:0] = [str(ROOT), str(PEERS), str(ROOT / "benchmarks")]

import page  # noqa: E402
from tasks import ENVIRONMENTS, TASKS, Prepared, Task, prepare  # noqa: E402
from turns import MARK  # noqa: E402
from venvs import python_of, versions  # noqa: E402

OURS = "llmsuite"
TOLERANCE = 1e-3
TOLERANCE_BF16 = 2e-2
TOLERANCE_BF16_PAIRS = 1.5e-1
"""Between losses of a step, in nats; the second where one of them is of products in bfloat16, as bitsandbytes makes
them on a CPU of a matrix in 4 bits. The third is for pairs then: a margin is `beta` 0.1 times a sum over about a
thousand tokens, whose errors of 2e-2 add up to 0.06 where they are independent, and both engines have some."""


@dataclasses.dataclass
class Measured:
    """Time, memory and losses of one engine in one task."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    """Wall-clock time of a step, per round."""
    cpu_seconds: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    """Loss of each step, the untimed first one included."""
    lengths: list[float] = dataclasses.field(default_factory=list)
    """Mean number of tokens of its completions, where a step draws some."""
    start_bytes: int = 0
    """Peak of memory before the first step."""
    peak_bytes: int = 0


class Engine:
    """A process that runs steps on request."""

    def __init__(self, name: str, prepared: Prepared, threads: int, log: Path):
        self.name = name
        self.measured = Measured()
        self._log = log
        self._process = subprocess.Popen(
            _command(name, prepared), env=_environment(name, threads, log.parent), cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True,
        )  # fmt: skip

    def start(self) -> None:
        """Wait until the process is ready, then run the untimed first step."""
        self.measured.start_bytes = int(self._answer()["peak_bytes"])
        self._turn(1)

    def take_turn(self, steps: int) -> None:
        result = self._turn(steps)
        self.measured.seconds.append(result["seconds"] / steps)
        self.measured.cpu_seconds.append(result["cpu_seconds"] / steps)

    def _turn(self, steps: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(steps, file=self._process.stdin, flush=True)
        result = self._answer()
        assert len(result["losses"]) == steps, f"{self.name} reported {len(result['losses'])} losses for {steps} steps"
        self.measured.losses += result["losses"]
        self.measured.lengths += result["lengths"]
        self.measured.peak_bytes = int(result["peak_bytes"])
        return result

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                result: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return result
        tail = "".join(self._log.open().readlines()[-30:])
        raise SystemExit(f"{self.name} ended with exit code {self._process.wait()}:\n{tail}")

    def stop(self) -> None:
        """Kill the process; nothing it made is kept."""
        self._process.kill()
        self._process.communicate()


def _command(name: str, prepared: Prepared) -> list[str]:
    if name == OURS:
        return [sys.executable, "-m", "llmsuite", "run", str(prepared.recipe)]
    environment = ENVIRONMENTS[name]
    return [str(python_of(environment)), str(PEERS / f"{environment}_steps.py"), str(prepared.asked), name]


def _environment(name: str, threads: int, place: Path) -> dict[str, str]:
    """Environment of an engine's process. llmsuite sets its own; paddlenlp gets the same variables, unless it is to run
    as a user has it who sets nothing."""
    from llmsuite.devices.cpu import CpuBackend

    ours = {**CpuBackend().environment(1), "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    number = {key: ours[key] for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    variables = {key: value for key, value in os.environ.items() if key not in ours and key != "PYTHONPATH"}
    if name == OURS:
        search = os.pathsep.join([str(_plugin(place)), str(PEERS), str(ROOT)])
        # a cache of its own: no reference log-probabilities of an earlier run
        cache = place.parent / "cache"
        variables |= {"PYTHONPATH": search, "LLMSUITE_CACHE": str(cache), "LLMSUITE_PLUGINS": "turns"}
    elif name == "paddlenlp":
        variables |= ours
    return {**variables, **number, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _plugin(place: Path) -> Path:
    """A directory that, on PYTHONPATH, makes `llmsuite_turns.py` an installed plugin."""
    told = place / "plugin" / "llmsuite_turns-1.dist-info"
    told.mkdir(parents=True, exist_ok=True)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: llmsuite-turns\nVersion: 1\n")
    (told / "entry_points.txt").write_text("[llmsuite]\nturns = llmsuite_turns\n")
    return told.parent


def measure(task: Task, arguments: argparse.Namespace, place: Path) -> dict[str, Measured]:
    """Time and memory of each engine, by its name."""
    # one more than is run: a trainer exits after its last step without reporting it
    steps = 2 + arguments.rounds * arguments.steps
    model = arguments.digits if task.name == "grpo-digits" else arguments.model
    data = arguments.data.resolve()
    precision = arguments.precision
    prepared = prepare(task, place, model.resolve(), data, steps, arguments.threads, precision)
    # exit through the code that stops workers and removes files; set here, as importing Paddle sets a handler too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    names = [OURS, *(peer for peer in task.peers if arguments.peers is None or peer in arguments.peers)]
    for name in names[1:]:
        _command(name, prepared)  # makes the environment
    engines: list[Engine] = []
    try:
        for name in names:  # one at a time: they would slow each other down
            engines.append(Engine(name, prepared, arguments.threads, place / f"{name}.log"))
            engines[-1].start()
            _say(f"{task.name}: {name} is ready")
        for number in range(arguments.rounds):
            first = number % len(engines)
            for engine in engines[first:] + engines[:first]:
                engine.take_turn(arguments.steps)
            times = "  ".join(f"{e.name} {e.measured.seconds[-1]:.2f}" for e in engines)
            _say(f"{task.name}: round {number + 1}: seconds a step: {times}")
    finally:
        for engine in engines:
            engine.stop()
    return {engine.name: engine.measured for engine in engines}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def loss_difference(task: Task, ours: Measured, theirs: Measured) -> float:
    """Largest difference of a step's losses. For LoRA the first step only: each engine draws its own adapters."""
    count = 1 if task.has_adapter else len(ours.losses)
    return max(abs(a - b) for a, b in zip(ours.losses[:count], theirs.losses[:count]))


def check_losses(found: Mapping[str, Mapping[str, Measured]], precision: str) -> None:
    """Raises SystemExit when the losses of an engine differ from ours."""
    for name, engines in found.items():
        for peer, theirs in engines.items() if not TASKS[name].draws else ():
            ours = engines[OURS]
            is_exact = precision == "fp32" and peer != "trl-as-is" and not TASKS[name].base_dtype
            rounded = TOLERANCE_BF16_PAIRS if TASKS[name].stage == "dpo" else TOLERANCE_BF16
            tolerance = TOLERANCE if is_exact else rounded
            if (difference := loss_difference(TASKS[name], ours, theirs)) > tolerance:
                raise SystemExit(
                    f"{name}: losses of {OURS} and {peer} differ by {difference:.1e}, more than {tolerance}: "
                    f"{ours.losses} and {theirs.losses}"
                )


def table(found: Mapping[str, Mapping[str, Measured]]) -> list[str]:
    """Rows of Markdown: for each task and peer, the peer's time and memory over ours."""
    lines = [
        "| step | beside | times as fast (lowest to highest) | peak memory, ours / theirs | seconds, ours and theirs "
        "| GB, ours and theirs | losses differ by |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, engines in found.items():
        ours = engines[OURS]
        for peer, theirs in itertools.islice(engines.items(), 1, None):
            ratios = sorted(b / a for a, b in zip(ours.seconds, theirs.seconds))
            speed = f"**{statistics.median(ratios):.2f}** ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            memory = f"**{ours.peak_bytes / theirs.peak_bytes:.2f}**"
            seconds = f"{statistics.median(ours.seconds):.2f}, {statistics.median(theirs.seconds):.2f}"
            size = f"{ours.peak_bytes / 1e9:.2f}, {theirs.peak_bytes / 1e9:.2f}"
            if TASKS[name].draws:
                difference = (
                    f"drawn: {statistics.mean(ours.lengths):.1f} and {statistics.mean(theirs.lengths):.1f} tokens"
                )
            else:
                difference = f"{loss_difference(TASKS[name], ours, theirs):.1e}"
            cells = [TASKS[name].title, peer, speed, memory, seconds, size, difference]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def conditions(arguments: argparse.Namespace, peers: Sequence[str]) -> str:
    """Processor, settings and versions of the measurement."""
    mine = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("paddlepaddle", "numpy"))
    theirs = [f"{name} {version}" for peer in peers for name, version in versions(peer).items()]
    return (
        f"{page.processor()}, {os.cpu_count()} cores, {arguments.threads} threads each, {arguments.precision}, "
        f"{arguments.rounds} rounds of {arguments.steps} step{'s' if arguments.steps > 1 else ''}. "
        f"Python {platform.python_version()}; llmsuite on {mine}; peers: {', '.join(theirs)}."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m-instruct", help="HF layout")
    parser.add_argument("--digits", type=Path, help="weights for the task grpo-digits: the run digits-rl-start, merged")
    data = os.environ.get("LLMSUITE_TEST_DATA", str(ROOT.parent / "shared" / "data"))
    parser.add_argument("--data", type=Path, default=Path(data), help="default: $LLMSUITE_TEST_DATA")
    usual = [name for name in TASKS if not TASKS[name].base_dtype]  # of 4 bits, a step of a peer's takes two minutes
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=usual, help="default: all but qlora")
    parser.add_argument("--peers", nargs="+", choices=list(ENVIRONMENTS), help="default: all that have the task")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1, help="steps per round")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="of all but trl-as-is")
    parser.add_argument("--threads", type=int, default=2, help="threads per engine")
    parser.add_argument("--json", type=Path, help="write all that was measured")
    parser.add_argument("--write", action="store_true", help="write the table into docs/notes/results.md")
    arguments = parser.parse_args()
    if arguments.digits is None:
        if arguments.tasks != usual and "grpo-digits" in arguments.tasks:
            parser.error("the task grpo-digits needs --digits")
        arguments.tasks = [name for name in arguments.tasks if name != "grpo-digits"]
    found: dict[str, dict[str, Measured]] = {}
    with tempfile.TemporaryDirectory(prefix="llmsuite-step-") as place:
        for name in arguments.tasks:
            found[name] = measure(TASKS[name], arguments, Path(place) / name)
    if arguments.json:
        plain = {task: {name: dataclasses.asdict(m) for name, m in engines.items()} for task, engines in found.items()}
        arguments.json.write_text(json.dumps(plain, indent=1) + "\n")
    used = sorted({ENVIRONMENTS[name] for engines in found.values() for name in engines if name != OURS})
    lines = [conditions(arguments, used), "", *table(found)]
    print("\n".join(lines))
    check_losses(found, arguments.precision)
    if arguments.write:
        page.write("steps", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
