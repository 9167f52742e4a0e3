"""Runs of all kinds, and the moments at which a rank of theirs, or their launcher, can be killed.

A plugin in the ranks knows when a moment begins, and sends the signal itself: so a seed says what is killed, and when.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Mapping
from pathlib import Path

STEPS = 6
COMMON = (
    f"--train.max_steps={STEPS}", "--checkpoint.save_steps=2", "--train.eval_steps=4", "--train.global_batch_size=4",
    "--train.micro_batch_size=2",
)  # fmt: skip
ONLINE = ("--data.max_length=64", "--rollout.max_completion_length=8", "--generation.max_samples=4")
STAGES: Mapping[str, tuple[str, ...]] = {
    "pretrain": ("pretrain.json",),
    "sft": ("sft.json",),
    "lora": ("lora.json",),
    "dpo": ("dpo.json",),
    "grpo": ("grpo.json", "--data.max_length=64"),
    "ppo": ("ppo.json", "--data.max_length=64"),
}
"""A recipe of each, and what makes it quick."""
MESHES: Mapping[str, tuple[int, Mapping[str, object]]] = {
    "alone": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tensor_parallel_degree": 2}),
    "pp2": (2, {"pipeline_parallel_degree": 2}),
    "stage3": (2, {"sharding": "stage3"}),
    "tp2 pp2": (4, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}),
}
MOMENTS = ("data", "model", "reference pass", "rollout", "step", "save", "evaluation", "last evaluation", "end")
"""What the plugin knows; commands and what the launcher does are killed from outside."""
PLUGIN = """
import json, os, signal, threading, time
from pathlib import Path
import llmsuite.cli.run as command

PLACE, KILL = Path(os.environ["MOMENTS"]), json.loads(os.environ.get("KILL") or "null")
work, entries = command.run_rank, {}

def begins(moment):
    entries[moment] = entries.get(moment, 0) + 1
    if not KILL or KILL["moment"] != moment or entries[moment] != KILL["entry"] or (PLACE / "done").exists():
        return
    if os.environ.get("PADDLE_TRAINER_ID", "0") == str(KILL["rank"]):
        threading.Timer(KILL["delay"], kill).start()

def kill():
    (PLACE / "done").touch()
    os.kill(os.getppid() if KILL["launcher"] else os.getpid(), signal.SIGKILL)

def mark(owner, name, moment):
    inner = getattr(owner, name)
    def outer(*args, **named):
        found = moment(*args) if callable(moment) else moment
        begins(found)
        begun = time.perf_counter()
        try:
            return inner(*args, **named)
        finally:
            with open(PLACE / "seconds.jsonl", "a") as file:
                file.write(json.dumps([found, time.perf_counter() - begun]) + "\\n")
    setattr(owner, name, outer)

def marked(plan, registry, resume):
    from llmsuite.engine import checkpointer, eager_engine, output, rollouts, trainer
    last = lambda self: "last evaluation" if self.step == self.cadence.total_steps else "evaluation"
    mark(trainer, "read_data", "data")
    mark(trainer, "build_model", "model")
    mark(trainer.Trainer, "_prepare_stage", "reference pass")
    mark(rollouts.RolloutDataLoader, "_roll_out", "rollout")
    mark(eager_engine.EagerEngine, "step", "step")
    mark(checkpointer, "save", "save")
    mark(trainer.Trainer, "evaluate", last)
    mark(output.Output, "ended", "end")
    return work(plan, registry, resume)

command.run_rank = marked
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """A run of some stage on some mesh."""

    stage: str
    mesh: str

    @property
    def name(self) -> str:
        return f"{self.stage} {self.mesh}".replace(" ", "-")

    @property
    def num_ranks(self) -> int:
        return MESHES[self.mesh][0]

    def words(self, output: Path) -> list[str]:
        """The words of the command line."""
        recipe, *more = STAGES[self.stage]
        num_ranks, parallel = MESHES[self.mesh]
        where = [f"--launch.num_devices={num_ranks}", f"--parallel={json.dumps(parallel)}"]
        return ["run", f"recipes/llama/{recipe}", "--smoke", f"--output_dir={output}", *COMMON, *more, *where]


@dataclasses.dataclass(frozen=True)
class Kill:
    """A signal to one process of a run."""

    moment: str
    entry: int
    """The how manieth time that the moment comes, from 1."""
    rank: int
    """The rank whose moment it is."""
    delay: float
    """Seconds from its beginning."""
    launcher: bool
    """Whether the launcher is killed in place of the rank."""

    def __str__(self) -> str:
        who = "launcher" if self.launcher else f"rank {self.rank}"
        return f"{who}, {self.moment} {self.entry} + {1000 * self.delay:.0f} ms"


def draw_kill(case: Case, seconds: Mapping[str, float], chance: random.Random) -> Kill:
    """A kill by chance.

    Args:
        case: the run.
        seconds: how long each moment took on average in a run that was not killed; those of the case.
        chance: decides.
    """
    moment = chance.choice([moment for moment in MOMENTS if moment in seconds])
    many = {"step": STEPS, "save": STEPS // 2, "rollout": STEPS}
    rank = 0 if moment == "end" else chance.randrange(case.num_ranks)
    has_launcher = case.num_ranks > 1
    return Kill(
        moment, chance.randint(1, many.get(moment, 1)), rank, chance.uniform(0, seconds[moment]),
        has_launcher and chance.random() < 0.25,
    )  # fmt: skip
