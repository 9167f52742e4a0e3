"""Jobs whose whole steps are programs, and how they are compared with the same steps op by op."""

from __future__ import annotations

from collections.abc import Sequence

from tests.multi.conftest import Runner
from tests.parity.cases import (
    GRADIENT_LIMIT,
    KL_LIMIT,
    OPTIMIZERS,
    WORKER,
    Case,
    Comparison,
    compare,
    few,
    plan_of,
    run_cases,
)
from tests.parity.lora import LORA

ADAPTER_OFF = ("--dpo.reference=adapter_off",)
KTO = ("--kto.undesirable_weight=1.5", "--model.config.num_hidden_layers=4")
FULL = '--lora.modules_to_save=["embed_tokens", "lm_head"]'
_JOBS: dict[str, tuple[str, tuple[str, ...]]] = {
    # rows of two buckets, micro-batches that differ in weight
    "sft adamw": ("llama/sft", (*OPTIMIZERS["adamw"], "--data.max_length=512")),
    "sft sgd": ("llama/sft", (*OPTIMIZERS["sgd"], "--data.max_length=512", "--train.micro_batch_size=2")),
    "packed": ("llama/sft", (*OPTIMIZERS["adamw"], "--data.packing=best_fit", "--train.max_grad_norm=null")),
    "pretrain": ("llama/pretrain", (*OPTIMIZERS["adamw"], "--pretrain.split=null")),
    "tied": ("qwen/sft", (*OPTIMIZERS["adamw"], "--model.config.tie_word_embeddings=true")),
    "masked documents": (
        "llama/pretrain",
        (*OPTIMIZERS["sgd"], "--pretrain.split=null", "--pretrain.document_mask=true", "--train.weight_decay=0"),
    ),
    "gpt": ("gpt/sft", (*OPTIMIZERS["sgd"], "--model.config.vocab_size=513")),
    "ernie": ("ernie/sft", OPTIMIZERS["adamw"]),
    "lora": ("llama/lora", (*OPTIMIZERS["sgd"], *LORA)),
    "lora adamw": ("llama/lora", (*OPTIMIZERS["adamw"], *LORA)),
    "mixer": ("llama/lora", (*OPTIMIZERS["sgd"], *LORA, "--lora.method=mixer")),
    "dora": ("llama/lora", (*OPTIMIZERS["adamw"], "--lora.rank=4", "--lora.method=dora")),
    "vera": (
        "llama/lora",
        (*OPTIMIZERS["sgd"], "--lora.rank=4", "--lora.method=vera", "--train.learning_rate=2"),
    ),
    "lora, tied": ("qwen/lora", (*OPTIMIZERS["sgd"], *LORA, "--model.config.tie_word_embeddings=true")),
    "full ends": ("llama/lora", (*OPTIMIZERS["adamw"], "--lora.rank=4", FULL)),
    "full ends, tied": (
        "qwen/lora",
        (*OPTIMIZERS["sgd"], *LORA, FULL, "--lora.ensure_weight_tying=true", "--model.config.tie_word_embeddings=true"),
    ),
    "pissa": ("llama/lora", (*OPTIMIZERS["sgd"], *LORA, "--lora.init=pissa")),
    "dpo": ("llama/dpo", OPTIMIZERS["adamw"]),
    "dpo sgd": ("llama/dpo", OPTIMIZERS["sgd"]),
    # its reference, its mean log-ratios and its number of tokens come from passes over the global batch
    "kto_pair": ("llama/dpo", (*OPTIMIZERS["sgd"], *LORA, *ADAPTER_OFF, "--dpo.loss=kto_pair", "--dpo.sft_weight=0.1")),
    "orpo": ("llama/orpo", OPTIMIZERS["sgd"]),
    "rm": ("llama/rm", (*OPTIMIZERS["sgd"], "--rm.margin=0.5", "--train.learning_rate=0.05")),
    "rm adamw": ("llama/rm", (*OPTIMIZERS["adamw"], "--rm.margin=0.5")),
    # deep enough that the model moves from where it began
    "kto": ("llama/kto", (*OPTIMIZERS["sgd"], *KTO)),
    "kto adamw": ("llama/kto", (*OPTIMIZERS["adamw"], *KTO)),
    "kto of adapters": ("llama/kto", (*OPTIMIZERS["adamw"], *KTO, *LORA, "--kto.reference=adapter_off")),
    "rm of adapters": ("llama/rm", (*OPTIMIZERS["sgd"], "--lora.rank=4", "--train.learning_rate=0.05")),
}
JOBS = few(
    _JOBS,
    "mixer",
    "dora",
    "vera",
    "lora, tied",
    "full ends",
    "full ends, tied",
    "pissa",
    "dpo sgd",
    "rm adamw",
    "kto adamw",
    "kto of adapters",
    "rm of adapters",
)
ADAPTERS = (
    *("lora", "lora adamw", "mixer", "dora", "vera", "lora, tied", "full ends", "full ends, tied", "pissa"),
    *("kto_pair", "kto of adapters", "rm of adapters"),
)
"""Jobs that train adapters, and the base not, or only its embedding and head."""


STAGES = ("dpo", "dpo sgd", "orpo", "rm", "rm adamw", "kto", "kto adamw")
"""Jobs of preference and reward stages that train all parameters."""
FURTHER = ("dpo", "kto_pair", "rm", "kto", "lora adamw")
"""Jobs that are run on four ranks too."""


NO_FALL = ("sft sgd", "kto", "kto adamw", "kto of adapters")


def compare_job(runner: Runner, job: str, one: str, many: str) -> Comparison:
    """A run beside another of its job, which is dynamic and in one process."""
    # a second factor begins at zero: it is nothing but a sum of gradients, and has no more digits than those
    more = {"stem": "adapter_model", "limit": GRADIENT_LIMIT} if job in ADAPTERS else {}
    found = compare(runner, one, many, falls=job not in NO_FALL, has_gradients=False, **more)
    for ours, theirs in zip(runner.metrics(one), runner.metrics(many)):
        for name in ours.keys() & theirs.keys():
            if "/" not in name or name.startswith("straggler"):
                continue
            if name == "rewards/accuracy" and abs(ours["rewards/margin"]) < 1e-3:
                continue  # the model is its reference, and rounding decides which answer it prefers
            # of differences of log-probabilities, each about -100 and known to 1e-5 by float32
            limit = KL_LIMIT if name.startswith("rewards") else 1e-5 * abs(ours[name])
            found.check(f"step {ours['step']}: {name}", abs(ours[name] - theirs[name]), limit)
    return found


def run_apart(runner: Runner, cases: Sequence[Case], module: str = WORKER) -> dict[str, str]:
    """As `run_cases`, each mesh in processes of its own: a group that is made behind a program may get a number that
    the program has given to one of its rings (Paddle 3.3.1)."""
    by_mesh: dict[tuple[int, ...], list[Case]] = {}
    for case in cases:
        degrees = plan_of(case).parallel.degrees
        by_mesh.setdefault((degrees.pp, degrees.tp, degrees.sharding, degrees.dp), []).append(case)
    return {name: printed for alike in by_mesh.values() for name, printed in run_cases(runner, alike, module).items()}
