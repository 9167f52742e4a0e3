"""PPO on strategies: what is run, on how many ranks, and compared with one process."""

from __future__ import annotations

import json
import math

from tests.multi.conftest import Runner
from tests.parity.cases import LIMIT, OPTIMIZERS, Case

_EXACT = ("tokens", "supervised_tokens", "reward", "completions/length")
_CLOSE = ("grad_norm", "ratio", "critic/loss", "critic/grad_norm", "critic/error")
STEPS = 4
SAVED = 2
WORDS = (
    f"--train.max_steps={STEPS}", "--train.global_batch_size=8", "--train.lr_schedule=constant",
    "--train.warmup_ratio=0", "--data.max_length=64", "--train.optimizer=sgd", "--train.learning_rate=0.2",
    "--model.config.num_hidden_layers=4", "--engine.recompute=none", "--data.eval=null",
    "--ppo.updates=2", "--ppo.kl_target=0.01", "--ppo.critic.learning_rate=0.05", "--rollout.temperature=0.8",
)  # fmt: skip
SAVING = (f"--checkpoint.save_steps={SAVED}", "--checkpoint.keep_last=2")
TP = {"tensor_parallel_degree": 2, "sequence_parallel": True}
PP = {"pipeline_parallel_degree": 2}
RUNS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "adapters": ("--lora.rank=4", "--ppo.reference=adapter_off"),
    "episodes": (
        "--environment.name=calculator", "--environment.calculator.pattern=(.)", "--environment.max_turns=3",
        "--environment.max_turn_length=4", "--environment.workers=1", "--rollout.max_completion_length=64",
        "--data.max_length=112", '--reward.functions={"format": 1.0, "environment": 0.5}', "--ppo.gamma=0.99",
        "--ppo.entropy_coef=0.01",
        # gradients are large here: at the rate of the others the step after an update shows its rounding above 1e-6
        "--train.learning_rate=0.05",
    ),
    "experts": ("--train.expert_balance_loss=0.01",),
    "adamw": (*OPTIMIZERS["adamw"], "--ppo.critic.learning_rate=3e-3"),
}  # fmt: skip
"""What is computed, and the overrides that say so."""


def case(name: str, run: str, ranks: int, parallel: dict[str, object], more: tuple[str, ...]) -> Case:
    """A run of a kind in `RUNS`; `more` are overrides that win over its own."""
    recipe = "recipes/qwen_moe/ppo.json" if run == "experts" else "recipes/llama/ppo.json"
    words = [*WORDS, *RUNS[run], f"--launch.num_devices={ranks}", f"--parallel={json.dumps(parallel)}", *more]
    sized = any(word.startswith("--train.micro_batch_size") for word in more)
    words += [] if sized else [f"--train.micro_batch_size={8 if ranks == 1 else 2}"]
    if not any("save_steps" in word for word in more):
        words.append("--checkpoint.save_steps=null")
    return Case(name, ranks, list({word.partition("=")[0]: word for word in words}.values()), recipe=recipe)


def compare(runner: Runner, run: str, name: str) -> None:
    """Assert that both models learnt the same in a case as in a run of one process."""
    alone = runner.metrics(run)
    found = runner.metrics(name)
    assert len(alone) == len(found) == STEPS
    for a, b in zip(alone, found, strict=True):
        assert {key: a[key] for key in _EXACT} == {key: b[key] for key in _EXACT}  # the same completions
        assert abs(a["loss"] - b["loss"]) <= LIMIT
        for key in _CLOSE:
            assert math.isclose(a[key], b[key], rel_tol=LIMIT, abs_tol=1e-7), key
        assert ("entropy/exact" in b) == (run == "episodes")
        assert math.isclose(a.get("entropy/exact", 0), b.get("entropy/exact", 0), rel_tol=LIMIT)
        for key in ("critic/values", "returns"):  # means of numbers of either sign, about 1 each
            assert math.isclose(a[key], b[key], rel_tol=LIMIT, abs_tol=LIMIT), key
        for key in ("kl", "kl/completion"):  # differences of log-probabilities, and at first 0
            assert math.isclose(a[key], b[key], rel_tol=1e-4, abs_tol=1e-5), key
