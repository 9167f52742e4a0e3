"""Time, traffic and memory of a training step as more ranks share it.

    python benchmarks/scaling.py             # 1, 2, 4 and 8 CPU ranks, some minutes
    python benchmarks/scaling.py --write     # the tables into docs/notes/results.md

One small Llama and one global batch, the same for every number of ranks, run by each strategy alone and by some
combinations. Bytes are counted where messages pass through the communication library and must equal `llmsuite plan`,
message by message; parameters, owned pieces and moments between steps must equal the plan too, and what sharding cuts
must be one N-th of what one rank has. Otherwise the command fails.

More ranks than cores cannot make a step shorter. Look at the CPU time of all ranks together against that of one rank
then: how much more work the same step has become.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib.metadata
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import page  # noqa: E402
from scaling_ranks import RECIPE, WARM_UP  # noqa: E402

from llmsuite.planning.estimate import estimate_of, memory_of, shape_spec_of  # noqa: E402
from llmsuite.planning.layout import Layout  # noqa: E402
from llmsuite.recipe.resolve import RunPlan, plan_run  # noqa: E402

ALONE = "one rank"
MODEL = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 8, "max_position_embeddings": 128, "vocab_size": 2048,
}  # fmt: skip
BATCH = 16
MICRO_BATCH = 2
LENGTH = 64
CUT = {"stage 1": ("moments",), "stage 2": ("moments", "gradients"), "stage 3": ("moments", "gradients", "parameters")}
"""What each sharding stage divides by the number of ranks."""
CLOSE = 0.05
"""Largest relative difference between the allocator's count and the plan; the tests use the same."""
MEGA = 1e6


def strategies(num_ranks: int) -> dict[str, dict[str, Any]]:
    """The recipe's section "parallel" of each strategy."""
    if num_ranks == 1:
        return {ALONE: {}}
    found: dict[str, dict[str, Any]] = {
        "data parallel": {},
        "tensor parallel": {"tensor_parallel_degree": num_ranks},
        "pipeline": {"pipeline_parallel_degree": num_ranks},
        **{name: {"sharding": name.replace(" ", "")} for name in CUT},
    }
    both = {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}
    if num_ranks == 4:
        found["tensor 2, pipeline 2"] = both
    if num_ranks == 8:
        found["tensor 2, pipeline 2, stage 1 over 2"] = {**both, "sharding": "stage1"}
    return found


def words(num_ranks: int, parallel: Mapping[str, Any], steps: int) -> list[str]:
    """Words of the command line, besides `--smoke`."""
    return [
        f"--launch.num_devices={num_ranks}", f"--parallel={json.dumps(parallel)}",
        f"--train.max_steps={WARM_UP + steps + 1}", f"--train.global_batch_size={BATCH}",
        f"--train.micro_batch_size={MICRO_BATCH}", f"--data.max_length={LENGTH}", "--data.eval=null",
        "--pretrain.split=null", "--checkpoint.save_steps=null",
        *(f"--model.config.{key}={value}" for key, value in MODEL.items()),
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Held:
    """Bytes in the memory of a rank."""

    parameters: int
    pieces: int
    """Copies of the part of the parameters that the rank updates, under sharding stages 1 and 2."""
    moments: int
    gradients: int
    """Counted after the last micro-batch."""


Sent = collections.Counter[tuple[str, tuple[int, ...], int]]
"""Number of messages by (operation, shape, bytes per element)."""


@dataclasses.dataclass
class Measured:
    """Measurements of one strategy on one number of ranks."""

    seconds: float
    """Wall-clock time of a step, the median."""
    cpu_seconds: float
    """CPU time of a step, all ranks together, the median."""
    sent: list[int]
    """Bytes per step that each rank was counted to send."""
    planned_sent: list[int]
    held: list[Held]
    """Memory that was counted in each rank."""
    planned: list[Held]
    problems: list[str]
    """Differences between what was counted and what was planned, as text."""


def measured(records: Sequence[Mapping[str, Any]], planned: Sequence[tuple[Sent, Held]]) -> Measured:
    """Combine what the ranks of a run counted, and compare it with the plan.

    Args:
        records: one per rank, as `scaling_ranks` writes it.
        planned: messages and memory, one pair per rank.
    """
    clocks = zip(*(record["seconds"] for record in records))
    result = Measured(
        seconds=statistics.median(map(max, clocks)),
        cpu_seconds=statistics.median(map(sum, zip(*(record["cpu_seconds"] for record in records)))),
        sent=[], planned_sent=[num_bytes(sent) for sent, _ in planned],
        held=[], planned=[held for _, held in planned], problems=[],
    )  # fmt: skip
    for rank, (record, (expected, plan)) in enumerate(zip(records, planned, strict=True)):
        sent: Sent = collections.Counter()
        for operation, shape, width, count in record["sent"]:
            sent[operation, tuple(shape), width] += count
        for key in sorted({*sent, *expected}):
            if sent[key] != expected[key]:
                result.problems.append(f"rank {rank} has sent {sent[key]}, not {expected[key]}, times {key}")
        result.sent.append(num_bytes(sent))
        found = Held(**{field.name: record["held"][field.name] for field in dataclasses.fields(Held)})
        result.held.append(found)
        for what in ("parameters", "pieces", "moments"):
            if (ours := getattr(found, what)) != (theirs := getattr(plan, what)):
                result.problems.append(f"rank {rank} has {ours} bytes of {what}, not {theirs}")
        between = plan.parameters + plan.pieces + plan.moments
        for what, ours, theirs in (
            ("between steps", record["held"]["between_steps"], between),
            ("of gradients", found.gradients, plan.gradients),
        ):
            if abs(ours - theirs) > CLOSE * theirs:
                result.problems.append(f"rank {rank}: the allocator has {ours} bytes {what}, not {theirs}")
    return result


def num_bytes(sent: Sent) -> int:
    """Size of all messages together."""
    return sum(math.prod(shape) * width * count for (_, shape, width), count in sent.items())


def planned_ranks(plan: RunPlan) -> list[tuple[Sent, Held]]:
    """What `llmsuite plan` says of each rank: messages of a step, and memory."""
    from llmsuite.parallel.mesh import Mesh

    layout = Layout(plan.model, plan.parallel)
    shape_spec = shape_spec_of(plan.model)
    meshes = [Mesh(plan.parallel.degrees, rank) for rank in range(plan.parallel.degrees.num_ranks)]
    stages = memory_of(layout, plan.data, plan.train, shape_spec, meshes)
    found = estimate_of(layout, plan.data, plan.train, shape_spec, meshes, stages)
    result = []
    for counts, memory in zip(found.traffic, found.stages, strict=True):
        sent: Sent = collections.Counter()
        for message, count in counts.items():
            sent[message.operation, message.shape, message.num_bytes] += count
        parts = (memory.parameters, memory.masters, memory.moments, memory.gradients)
        result.append((sent, Held(*map(int, parts))))
    return result


def not_divided(found: Mapping[tuple[int, str], Measured]) -> list[str]:
    """Problems, as text: what sharding cuts must be one N-th of what one rank has, everything else the same. Owned
    pieces have no such rule: one rank has none."""
    problems = []
    for (num_ranks, name), run in found.items():
        if name not in CUT:
            continue
        for what in ("parameters", "gradients", "moments"):
            parts = num_ranks if what in CUT[name] else 1
            whole = getattr(found[1, ALONE].planned[0], what)
            for held in (run.held, run.planned):
                most = max(getattr(one, what) for one in held)
                if abs(most - whole / parts) > CLOSE * whole / parts:
                    problems.append(f"{name} on {num_ranks} ranks: {most} bytes of {what}, not {whole / parts:.0f}")
    return problems


def table_of_steps(found: Mapping[tuple[int, str], Measured]) -> list[str]:
    """Rows of Markdown: time and bytes of a step, of the rank that sends most."""
    lines = [
        "| ranks | strategy | seconds a step | against one rank | CPU seconds, all ranks | against one rank "
        "| MB sent a step, counted | planned |",
        "|---|---|---|---|---|---|---|---|",
    ]
    one = found[1, ALONE]
    for (num_ranks, name), run in found.items():
        cells = [
            str(num_ranks), name, f"{run.seconds:.2f}", f"{run.seconds / one.seconds:.2f}", f"{run.cpu_seconds:.2f}",
            f"{run.cpu_seconds / one.cpu_seconds:.2f}", f"{max(run.sent) / MEGA:.3f}",
            f"{max(run.planned_sent) / MEGA:.3f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def table_of_memory(found: Mapping[tuple[int, str], Measured]) -> list[str]:
    """Rows of Markdown: bytes of the rank that has most of each."""
    lines = [
        "| ranks | strategy | parameters, MB | moments, MB | pieces, MB | gradients, MB: counted, planned "
        "| all, of what one rank has |",
        "|---|---|---|---|---|---|---|",
    ]
    whole = sum(dataclasses.astuple(found[1, ALONE].held[0]))
    for (num_ranks, name), run in found.items():
        most = {field.name: max(getattr(held, field.name) for held in run.held) for field in dataclasses.fields(Held)}
        planned = max(held.gradients for held in run.planned)
        total = max(sum(dataclasses.astuple(held)) for held in run.held)
        cells = [
            str(num_ranks), name, *(f"{most[what] / MEGA:.2f}" for what in ("parameters", "moments", "pieces")),
            f"{most['gradients'] / MEGA:.2f}, {planned / MEGA:.2f}", f"{total / whole:.3f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


@dataclasses.dataclass(frozen=True)
class Start:
    """Start-up time of `llmsuite run`, from the command to the end of its first step."""

    num_ranks: int
    strategy: str
    seconds: list[float]
    """Wall-clock time, one per run."""
    cpu_seconds: list[float]
    """CPU time of all processes until the run, of one step, has ended; one per run."""


def table_of_starts(starts: Sequence[Start]) -> list[str]:
    """Rows of Markdown."""
    lines = ["| ranks | strategy | seconds to the end of the first step | CPU seconds |", "|---|---|---|---|"]
    for start in starts:
        low = min(start.seconds)
        high = max(start.seconds)
        seconds = f"{statistics.median(start.seconds):.1f} ({low:.1f} to {high:.1f})"
        lines.append(
            f"| {start.num_ranks} | {start.strategy} | {seconds} | {statistics.median(start.cpu_seconds):.1f} |"
        )
    return lines


def measure_start(num_ranks: int, times: int, place: Path) -> Start:
    """Start the smoke run of the recipe some times, its kernels built before, with the last of the strategies."""
    from llmsuite.contract.registry import load_plugins

    load_plugins().devices["cpu"].factory().prepare_ranks()
    name, chosen = list(strategies(num_ranks).items())[-1]
    parallel = [f"--launch.num_devices={num_ranks}", f"--parallel={json.dumps(chosen)}"]
    command = [sys.executable, "-m", "llmsuite", "run", str(RECIPE), "--smoke", "--train.max_steps=1", *parallel]
    command += ["--checkpoint.save_steps=null", "--data.eval=null", "--pretrain.split=null"]
    search = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "LLMSUITE_PLUGINS": "", "PYTHONPATH": search}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # what a user starts was compiled before
    seconds = []
    cpu_seconds = []
    for number in range(times):
        began = time.perf_counter()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with subprocess.Popen(
            [*command, f"--output_dir={place / f'start-{num_ranks}-{number}'}"], env=environment, cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            said = []
            for line in process.stdout:
                said.append(line)
                if line.startswith("step 1/"):
                    seconds.append(time.perf_counter() - began)
        if process.returncode != 0 or len(seconds) != number + 1:
            raise SystemExit(f"{' '.join(command)} has ended with {process.returncode}:\n{''.join(said)}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return Start(num_ranks, name, seconds, cpu_seconds)


def measure(num_ranks: int, steps: int, directory: Path) -> dict[str, Measured]:
    """Run every strategy on so many ranks, one after the other in the same processes."""
    from llmsuite.contract.registry import load_plugins

    directory.mkdir()
    cases = {name: words(num_ranks, parallel, steps) for name, parallel in strategies(num_ranks).items()}
    file = directory / "cases.json"
    file.write_text(json.dumps({"ranks": num_ranks, "steps": steps, "cases": cases}))
    command = [sys.executable, str(ROOT / "benchmarks" / "scaling_ranks.py"), str(file), str(directory)]
    if (code := subprocess.run(command, cwd=ROOT, check=False).returncode) != 0:
        logs = sorted((directory / "logs").glob("workerlog.*"))
        tails = "".join(f"== {log.name}\n{log.read_text(errors='replace')[-2000:]}\n" for log in logs)
        raise SystemExit(f"{num_ranks} ranks have ended with {code}:\n{tails}")
    records = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    registry = load_plugins()
    found = {}
    for name, case in cases.items():
        plan = plan_run(RECIPE, [*case, f"--output_dir={directory / name}"], registry, smoke=True)
        found[name] = measured([record[name] for record in records], planned_ranks(plan))
        run = found[name]
        say(f"{num_ranks} ranks, {name}: {run.seconds:.2f} s a step, {run.cpu_seconds:.2f} s of CPU")
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def conditions(steps: int, load: float) -> str:
    """Processor, versions and load of the measurement; `load` is the load average before it began."""
    return (
        f"{page.processor()}, {os.cpu_count()} cores; paddlepaddle {importlib.metadata.version('paddlepaddle')}. "
        f"Medians of {steps} steps, all in one run of the benchmark; load average {load:.0f} when it began."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks", type=int, nargs="+", choices=(2, 4, 8), default=(2, 4, 8), help="numbers of ranks, besides one"
    )
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    parser.add_argument("--starts", type=int, default=3, help="launches per number of ranks, to time the first step")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/notes/results.md")
    arguments = parser.parse_args()
    os.environ["LLMSUITE_PLUGINS"] = ""
    found: dict[tuple[int, str], Measured] = {}
    load = os.getloadavg()[0]
    counts = (1, *sorted(arguments.ranks))
    with tempfile.TemporaryDirectory(prefix="llmsuite-scaling-") as place:
        starts = [measure_start(count, arguments.starts, Path(place)) for count in counts if arguments.starts]
        for count in counts:
            runs = measure(count, arguments.steps, Path(place) / str(count))
            found |= {(count, name): run for name, run in runs.items()}
    lines = [conditions(arguments.steps, load), "", *table_of_steps(found), "", *table_of_memory(found)]
    lines += ["", *table_of_starts(starts)] if starts else []
    print("\n".join(lines))
    problems = [f"{name} on {n} ranks: {text}" for (n, name), run in found.items() for text in run.problems]
    if problems := problems + not_divided(found):
        raise SystemExit("not as planned:\n" + "\n".join(problems[:40]))
    if arguments.write:
        page.write("scaling", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
