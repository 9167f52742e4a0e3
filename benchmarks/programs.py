"""A training step op by op, by programs of layers, and as one program: time and peak memory, in turns.

    python benchmarks/programs.py                     # some ten minutes
    python benchmarks/programs.py --write             # the table into docs/notes/results.md
    python benchmarks/programs.py --model experts     # of a model with routed experts

Each run is `llmsuite run` in processes of its own, so its peak is its own; the modes of a mesh follow on each other, as
often as `--rounds` says. A step is the median over all rounds, without the first steps of a run, in which programs are
made. Memory is the peak resident size of the rank that has most, Paddle's own included.
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

import page

ROOT = Path(__file__).resolve().parents[1]
SIZES = {
    "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8,
    "max_position_embeddings": 256, "vocab_size": 2048,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Model:
    """What is trained."""

    title: str
    recipe: str
    config: Mapping[str, object]
    place: str
    """Section of docs/notes/results.md."""


MODELS = {
    "dense": Model("Llama", "recipes/llama/pretrain.json", {**SIZES, "intermediate_size": 1024}, "programs"),
    "experts": Model(
        "Qwen3-MoE with 16 experts of width 256, of which a token has 4,",
        "recipes/qwen_moe/pretrain.json",
        {**SIZES, "head_dim": 32, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256},
        "programs of experts",
    ),
}
BATCH = 8
MICRO_BATCH = 2
LENGTH = 128
WARM_UP = 3
MODES = {
    "dynamic": ("--engine.mode=dynamic",),
    "to_static, layers": ("--engine.mode=to_static", "--engine.program=layers"),
    "to_static, step": ("--engine.mode=to_static", "--engine.program=step"),
}
MESHES = {
    "one process": (1, {}),
    "data 2, stage 2": (2, {"sharding": "stage2"}),
    "tensor 2": (2, {"tensor_parallel_degree": 2}),
    "pipeline 2": (2, {"pipeline_parallel_degree": 2}),
    "experts 2": (2, {"expert_parallel_degree": 2}),
}
RECOMPUTE = ("none", "full")


@dataclasses.dataclass
class Found:
    """Measurements of one mode on one mesh."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    """Of each step, of all rounds."""
    peaks: list[float] = dataclasses.field(default_factory=list)
    """Bytes, of each round."""
    built: list[float] = dataclasses.field(default_factory=list)
    """Seconds in which programs of steps were made, of each round; 0 where there are none."""

    @property
    def step(self) -> float:
        return statistics.median(self.seconds)

    @property
    def peak(self) -> float:
        return statistics.median(self.peaks)


Key = tuple[str, str, str]
"""Mesh, `engine.recompute`, mode."""


def measure(model: Model, key: Key, steps: int, directory: Path) -> list[dict[str, float]]:
    """The metrics of one run, a record a step."""
    mesh, recompute, mode = key
    num_ranks, parallel = MESHES[mesh]
    words = [
        sys.executable, "-m", "llmsuite", "run", model.recipe, "--smoke", f"--launch.num_devices={num_ranks}",
        f"--parallel={json.dumps(parallel)}", f"--engine.recompute={recompute}", *MODES[mode],
        f"--train.max_steps={WARM_UP + steps}", f"--train.global_batch_size={BATCH}",
        f"--train.micro_batch_size={MICRO_BATCH}", f"--data.max_length={LENGTH}", "--data.eval=null",
        "--pretrain.split=null", "--checkpoint.save_steps=null", "--train.log_steps=1",
        *(f"--model.config.{name}={value}" for name, value in model.config.items()), f"--output_dir={directory}",
    ]  # fmt: skip
    search = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "LLMSUITE_PLUGINS": "", "PYTHONPATH": search}
    process = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(words)} has ended with {process.returncode}:\n{process.stdout}{process.stderr}")
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def add(found: Found, records: Sequence[Mapping[str, float]]) -> None:
    """Put a run to what was found of its mode."""
    found.seconds += [record["avg_batch_cost"] for record in records[WARM_UP:]]
    found.peaks.append(records[-1]["peak_memory_bytes"])
    found.built.append(records[-1].get("program_seconds", 0.0))


def table(found: Mapping[Key, Found]) -> list[str]:
    """Rows of Markdown; ratios are against the dynamic mode of the same mesh and recompute."""
    lines = [
        "| mesh | `recompute` | mode | seconds a step | against dynamic | peak memory, MB | against dynamic "
        "| making the program, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (mesh, recompute, mode), one in found.items():
        plain = found[mesh, recompute, "dynamic"]
        cells = [
            mesh, recompute, mode, f"{one.step:.3f}", f"{one.step / plain.step:.2f}", f"{one.peak / 1e6:.0f}",
            f"{one.peak / plain.peak:.2f}", f"{statistics.median(one.built):.1f}" if any(one.built) else "-",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each mode, in turns")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a run")
    parser.add_argument("--model", choices=MODELS, default="dense")
    parser.add_argument(
        "--meshes", nargs="+", choices=MESHES, metavar="MESH", help="all that the model has if not given"
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    parser.add_argument("--recompute", nargs="+", choices=RECOMPUTE, default=list(RECOMPUTE))
    parser.add_argument("--write", action="store_true", help="write the table into docs/notes/results.md")
    arguments = parser.parse_args()
    model = MODELS[arguments.model]
    modes = ["dynamic", *(mode for mode in arguments.modes if mode != "dynamic")]
    meshes = arguments.meshes or [mesh for mesh in MESHES if mesh != "experts 2" or arguments.model == "experts"]
    load = os.getloadavg()[0]
    found = dict[Key, Found]()
    with tempfile.TemporaryDirectory(prefix="llmsuite-programs-") as place:
        for mesh in meshes:
            for recompute in arguments.recompute:
                for turn in range(arguments.rounds):
                    for mode in modes:
                        key = (mesh, recompute, mode)
                        directory = Path(place) / f"{mesh}-{recompute}-{mode}-{turn}"
                        add(found.setdefault(key, Found()), measure(model, key, arguments.steps, directory))
                for mode in modes:
                    one = found[mesh, recompute, mode]
                    print(f"{mesh}, {recompute}, {mode}: {one.step:.3f} s, {one.peak / 1e6:.0f} MB", file=sys.stderr)
    lines = [
        f"{page.processor()}, {os.cpu_count()} cores; paddlepaddle {importlib.metadata.version('paddlepaddle')}. "
        f"{model.title} with {SIZES['num_hidden_layers']} layers of width {SIZES['hidden_size']}, {BATCH} rows of "
        f"{LENGTH} tokens in micro-batches of {MICRO_BATCH}, float32. Medians of {arguments.rounds} runs in turns, "
        f"{arguments.steps} steps each; load average {load:.0f} when it began.",
        "", *table(found),
    ]  # fmt: skip
    print("\n".join(lines))
    if arguments.write:
        page.write(model.place, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
