"""Runs of packed pairs, and how they are compared."""

from __future__ import annotations

import json

from tests.multi.conftest import Runner
from tests.parity.cases import COMMON, GRADIENT_LIMIT, LIMIT, OPTIMIZERS, STEPS, Case, compare, run_cases

ROWS = 48  # of data/preference/eval.jsonl, at 256 tokens
PACKS = 10
STAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "dpo": ("recipes/llama/dpo.json", ()),
    # at 0.2 a head that begins anew overshoots: the gradient grows, and with it what rounding has made different
    "rm": ("recipes/llama/rm.json", ("--rm.margin=0.5", "--train.learning_rate=0.05")),
    "kto_pair": ("recipes/llama/dpo.json", ("--dpo.loss=kto_pair", "--dpo.sft_weight=0.1")),
    "dpo, adapters": ("recipes/llama/dpo.json", ("--lora.rank=4", "--dpo.reference=adapter_off")),
}
"""Recipe and overrides."""
_ALL = {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "sequence_parallel": True}
SPREADS: dict[str, tuple[int, dict[str, object], int, tuple[str, ...]]] = {
    "one process": (1, {}, 5, ()),
    "dp2": (2, {}, 1, ("--data.num_workers=2",)),
    "tp2": (2, {"tensor_parallel_degree": 2, "sequence_parallel": True}, 5, ()),
    "pp2": (2, {"pipeline_parallel_degree": 2}, 2, ()),
    "stage3 by tokens": (2, {"sharding": "stage3"}, 1, ("--train.micro_batch_tokens=1100",)),
    "static": (2, {"tensor_parallel_degree": 2}, 5, ("--engine.mode=to_static",)),
    "tp2-pp2": (4, _ALL, 2, ("--engine.recompute=full",)),
    "pp4": (4, {"pipeline_parallel_degree": 4}, 2, ()),
}
"""Ranks, what is parallel, micro-batch size and more overrides."""


WORDS = (
    *(word for word in COMMON if "max_length" not in word and "global_batch" not in word), *OPTIMIZERS["sgd"],
    "--data.train=data/preference/eval.jsonl", "--data.max_length=256",
)  # fmt: skip


def unpacked(stage: str) -> Case:
    """The run the others are compared with."""
    saved = ["--checkpoint.save_steps=1", f"--checkpoint.keep_last={STEPS}"]
    return _case(stage, stage, 1, {}, 24, ROWS, ["--engine.recompute=none", *saved])


def packed(stage: str, spread: str) -> Case:
    ranks, parallel, micro, more = SPREADS[spread]
    words = ["--data.packing=best_fit", "--checkpoint.save_steps=null", *more]
    return _case(f"{stage} {spread}", stage, ranks, parallel, micro, PACKS, words)


def _case(
    name: str, stage: str, ranks: int, parallel: dict[str, object], micro: int, batch: int, more: list[str]
) -> Case:
    recipe, own = STAGES[stage]
    words = [
        f"--parallel={json.dumps(parallel)}", f"--launch.num_devices={ranks}", f"--train.micro_batch_size={micro}",
        f"--train.global_batch_size={batch}",
    ]  # fmt: skip
    keys = {word.partition("=")[0] for word in own}
    common = [word for word in WORDS if word.partition("=")[0] not in keys]
    return Case(name, ranks, [*common, *own, *words, *more], recipe=recipe)


def run_points(runner: Runner, points: list[tuple[str, str]]) -> dict[str, str]:
    """Run packed stages on meshes, and unpacked in one process; see `run_cases`."""
    return run_cases(runner, [*(unpacked(stage) for stage in dict(points)), *(packed(*point) for point in points)])


def check(runner: Runner, failed: dict[str, str], stage: str, spread: str) -> None:
    """Compare a packed stage on a mesh with the unpacked one in one process."""
    name = packed(stage, spread).name
    assert stage not in failed, failed[stage]
    assert name not in failed, failed[name]
    # a factor that begins at zero is nothing but gradients, whose limit is wider
    stem, limit = ("adapter_model", GRADIENT_LIMIT) if "adapters" in stage else ("model", LIMIT)
    # Of scores behind the same prompt the gradients nearly cancel out: unpacked in one process, cut into micro-batches
    # differently, these 48 pairs give 4e-6.
    gradient_limit = 1e-5 if stage == "rm" else GRADIENT_LIMIT
    found = compare(runner, stage, name, stem, limit, gradient_limit=gradient_limit)
    print(name, f"metrics {found.metrics:.1e}, gradients {found.gradients:.1e}, parameters {found.change:.1e}")
    assert found.problems == []
    for mine, others in zip(runner.metrics(stage), runner.metrics(name), strict=True):
        assert (mine["tokens"], mine["supervised_tokens"]) == (others["tokens"], others["supervised_tokens"])
