"""Runs of stages that compare with another model or another answer, and how they are compared."""

from __future__ import annotations

import json

from tests.multi.conftest import Runner
from tests.parity.cases import COMMON, GRADIENT_LIMIT, LIMIT, OPTIMIZERS, STEPS, Case, compare, once, run_cases
from tests.parity.condition import change_limits, nudged

STAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    # at the rate of the others a head that begins anew magnifies rounding in three steps, to 1.3e-6 of a norm
    "rm": ("recipes/llama/rm.json", ("--rm.margin=0.5", "--train.learning_rate=0.05")),
    "kto": ("recipes/llama/kto.json", ("--kto.undesirable_weight=1.5",)),
    "orpo": ("recipes/llama/orpo.json", ()),
    # the reference is the initial model, which the model without its adapter stays
    "dpo, adapters": ("recipes/llama/dpo.json", ("--lora.rank=4", "--dpo.reference=adapter_off")),
    "rm, adapters": ("recipes/llama/rm.json", ("--lora.rank=4",)),
    "gkd": ("recipes/llama/gkd.json", ()),
    "gkd, sft": ("recipes/llama/gkd.json", ("--gkd.sft_weight=0.3", "--gkd.beta=0", "--gkd.temperature=2")),
    # a smaller teacher, and a vocabulary that is padded; the loss in chunks has one gradient by token
    "gkd, adapters": (
        "recipes/llama/gkd.json",
        (
            "--lora.rank=4",
            "--engine.loss_chunk_tokens=8",
            "--model.config.vocab_size=513",
            "--gkd.teacher_config.vocab_size=513",
            "--gkd.teacher_config.hidden_size=48",
        ),
    ),
    "kto_pair": ("recipes/llama/dpo.json", ("--dpo.loss=kto_pair", "--dpo.sft_weight=0.1")),
}
"""Recipe and overrides."""
SENSITIVE = ("rm, adapters",)
"""Stages whose head begins anew and is trained beside factors that begin at zero: how far these may be off comes from
how they change with weights that are moved."""
SPREADS: dict[str, tuple[int, dict[str, object], int, str]] = {
    "dp2": (2, {}, 1, "dynamic"),
    "tp2": (2, {"tensor_parallel_degree": 2, "sequence_parallel": True}, 4, "dynamic"),
    "pp2": (2, {"pipeline_parallel_degree": 2}, 2, "dynamic"),
    "stage3": (2, {"sharding": "stage3"}, 2, "dynamic"),
    "static": (2, {"tensor_parallel_degree": 2}, 4, "to_static"),
    "pp4": (4, {"pipeline_parallel_degree": 4}, 4, "dynamic"),
    "tp2-pp2-dp2": (8, {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}, 2, "dynamic"),
}
"""Ranks, what is parallel, micro-batch size and mode."""


def one_process(stage: str) -> Case:
    """The run the others are compared with."""
    words = ["--parallel={}", "--launch.num_devices=1", "--train.micro_batch_size=8", "--engine.recompute=none"]
    saved = ["--checkpoint.save_steps=1", f"--checkpoint.keep_last={STEPS}"]
    return _case(stage, stage, 1, [*words, *saved])


def many_processes(stage: str, spread: str) -> Case:
    ranks, parallel, micro, mode = SPREADS[spread]
    words = [
        f"--parallel={json.dumps(parallel)}", f"--launch.num_devices={ranks}", f"--train.micro_batch_size={micro}",
        f"--engine.mode={mode}", "--checkpoint.save_steps=null",
    ]  # fmt: skip
    return _case(f"{stage} {spread}", stage, ranks, words)


def _case(name: str, stage: str, ranks: int, words: list[str]) -> Case:
    recipe, more = STAGES[stage]
    return Case(name, ranks, once([*COMMON, *OPTIMIZERS["sgd"], *more, *words]), recipe=recipe)


def run_points(runner: Runner, points: list[tuple[str, str]]) -> dict[str, str]:
    """Run stages on meshes, and in one process; see `run_cases`."""
    ones = [one_process(stage) for stage in dict(points)]
    moved = [run for stage in dict(points) if stage in SENSITIVE for run in nudged(one_process(stage))]
    return run_cases(runner, [*ones, *moved, *(many_processes(*point) for point in points)])


def check(runner: Runner, failed: dict[str, str], stage: str, spread: str) -> None:
    """Compare a stage on a mesh with one process."""
    many = many_processes(stage, spread).name
    for name in (stage, many):
        assert name not in failed, failed[name]
    # a factor that begins at zero is nothing but gradients, whose limit is wider
    stem, limit = ("adapter_model", GRADIENT_LIMIT) if "adapters" in stage else ("model", LIMIT)
    limits = change_limits(runner, one_process(stage), stem, limit) if stage in SENSITIVE else limit
    found = compare(runner, stage, many, stem, limits, falls=stage != "kto")
    print(f"{many}: metrics {found.metrics:.1e}, gradients {found.gradients:.1e}, change {found.change:.1e}")
    assert found.problems == []
    if stage == "kto":  # whose estimate of how far the model is from where it began has to be tried
        assert runner.metrics(stage)[-1]["kl"] > 0.1
