"""What the time of a training step goes to, and how near its matrix products are to their own speed.

    python benchmarks/roofline.py --model models/smollm2-135m-instruct --data DIRECTORY

The steps are those of `step.py`: pretraining of 33.7M parameters, and SFT and DPO of SmolLM2-135M; DIRECTORY has the
same files. Each is run in float32 and in bf16, in a process of its own (`roofline_steps.py`): a step that is timed
alone, then one under Paddle's profiler, then the products of that step by themselves, repeated, in the same process and
with the same shapes; and so on for `--rounds` rounds. Weights and activations of a product that is repeated may stay in
the caches; in a step they seldom do.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks" / "peers"), str(ROOT / "benchmarks")]

import page  # noqa: E402
from roofline_parts import PARTS, PRODUCTS  # noqa: E402
from roofline_steps import MARK  # noqa: E402
from tasks import TASKS, prepare  # noqa: E402

USUAL = ("pretrain", "sft", "dpo")
PRECISIONS = ("fp32", "bf16")


@dataclasses.dataclass(frozen=True)
class Found:
    """A kind of step in one precision."""

    title: str
    precision: str
    alone: Sequence[float]
    """Seconds of the steps that were timed alone."""
    recorded: Sequence[Mapping[str, Any]]
    """What `roofline_steps` tells of each step under the profiler."""

    def part(self, name: str) -> float:
        """Its share of the recorded steps' time."""
        return self._sum("parts", name) / self.seconds

    @property
    def seconds(self) -> float:
        """Of all recorded steps."""
        return sum(sum(step["parts"].values()) for step in self.recorded)

    def products(self, what: str) -> float:
        """A sum over all products of all recorded steps."""
        return sum(step["products"][part][what] for step in self.recorded for part in PRODUCTS)

    @property
    def in_step(self) -> float:
        """Seconds of the products in the steps."""
        return sum(self._sum("parts", part) for part in PRODUCTS)

    @property
    def attention(self) -> float:
        """FLOPs of attention in all recorded steps."""
        return sum(step["attention"] for step in self.recorded)

    def others(self) -> dict[str, float]:
        """Shares of operations that are no part of their own, the largest first."""
        names = dict.fromkeys(name for step in self.recorded for name in step["others"])
        shares = {name: sum(step["others"].get(name, 0.0) for step in self.recorded) / self.seconds for name in names}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def _sum(self, kind: str, name: str) -> float:
        return sum(step[kind][name] for step in self.recorded)


def measure(name: str, precision: str, arguments: argparse.Namespace, place: Path) -> Found:
    """Run one kind of step in one precision."""
    data = arguments.data.resolve()
    steps = 2 + 2 * arguments.rounds
    prepared = prepare(TASKS[name], place, arguments.model.resolve(), data, steps, arguments.threads, precision)
    command = [sys.executable, str(ROOT / "benchmarks" / "roofline_steps.py"), str(prepared.recipe)]
    command.append(f"--rounds={arguments.rounds}")
    environment = _environment(arguments.threads, place.parent)
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    told = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode != 0 or not told:
        raise SystemExit(f"{name} in {precision} ended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    result = json.loads(told[0])
    return Found(TASKS[name].title, precision, result["alone"], result["recorded"])


def _environment(threads: int, place: Path) -> dict[str, str]:
    number = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    # a cache of its own: no reference log-probabilities of an earlier run
    own = {"LLMSUITE_CACHE": str(place / "cache"), "LLMSUITE_PLUGINS": "", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **number, **own, "PYTHONPATH": str(ROOT)}


def table_of_products(found: Sequence[Found]) -> list[str]:
    """Rows of Markdown: how fast the products are, in the step and by themselves."""
    lines = [
        "| step | precision | seconds, timed alone (lowest to highest) | under the profiler | products' share of it "
        "| their GFLOP/s there | by themselves | by themselves, of rounded matrices | their share at their own speed "
        "| with those of attention |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        flops, alone, rounded = (one.products(what) for what in ("flops", "alone", "of_rounded"))
        seconds = one.seconds / len(one.recorded)
        cells = [
            one.title, one.precision,
            f"{statistics.median(one.alone):.2f} ({min(one.alone):.2f} to {max(one.alone):.2f})",
            f"{seconds:.2f}", f"{one.in_step / one.seconds:.1%}", f"{flops / one.in_step / 1e9:.0f}",
            f"{flops / alone / 1e9:.0f}", "" if one.precision == "fp32" else f"{flops / rounded / 1e9:.0f}",
            f"**{rounded / one.seconds:.1%}**", f"{(rounded + one.attention * rounded / flops) / one.seconds:.1%}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def table_of_parts(found: Sequence[Found]) -> list[str]:
    """Rows of Markdown: the share of each part."""
    lines = [
        f"| part | {' | '.join(f'{one.title}, {one.precision}' for one in found)} |",
        "|---" * (1 + len(found)) + "|",
    ]
    for part in PARTS:
        shares = [one.part(part) for one in found]
        lines.append(f"| {part} | {' | '.join(f'{share:.1%}' if share else '' for share in shares)} |")
    return lines


def conditions(arguments: argparse.Namespace) -> str:
    """Processor, settings and versions of the measurement."""
    mine = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("paddlepaddle", "numpy"))
    rounds = f"{arguments.rounds} rounds"
    return f"{page.processor()}, {os.cpu_count()} cores, {arguments.threads} threads, {rounds}; {mine}."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m-instruct", help="HF layout")
    data = os.environ.get("LLMSUITE_TEST_DATA", str(ROOT.parent / "shared" / "data"))
    parser.add_argument("--data", type=Path, default=Path(data), help="default: $LLMSUITE_TEST_DATA")
    parser.add_argument("--tasks", nargs="+", choices=[n for n, t in TASKS.items() if not t.draws], default=USUAL)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write all that was measured")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/notes/results.md")
    arguments = parser.parse_args()
    found: list[Found] = []
    with tempfile.TemporaryDirectory(prefix="llmsuite-roofline-") as place:
        for name in arguments.tasks:
            for precision in arguments.precisions:
                found.append(measure(name, precision, arguments, Path(place) / f"{name}-{precision}"))
                others = ", ".join(f"{what} {share:.1%}" for what, share in [*found[-1].others().items()][:8])
                print(f"{name}, {precision}: other operations: {others}", file=sys.stderr, flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([dataclasses.asdict(one) for one in found], indent=1) + "\n")
    lines = [conditions(arguments), "", *table_of_products(found), "", *table_of_parts(found)]
    print("\n".join(lines))
    if arguments.write:
        page.write("roofline", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
