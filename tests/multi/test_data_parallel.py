"""Equality is the promise: however a batch is cut over ranks and micro-batches, the same numbers come out."""

from __future__ import annotations

import numpy as np
import pytest

from tests.multi.conftest import Runner

STEPS = 6
COMMON = (f"--train.max_steps={STEPS}", "--train.global_batch_size=8", "--checkpoint.save_steps=null")
# SGD without clipping, at a rate that moves: an error of scale in the gradients cannot hide
OPTIMIZERS = {
    "sgd": ("--train.optimizer=sgd", "--train.learning_rate=0.05", "--train.max_grad_norm=null"),
    "clipped_sgd": ("--train.optimizer=sgd", "--train.learning_rate=0.05", "--train.max_grad_norm=0.5"),
    "adamw": ("--train.optimizer=adamw", "--train.learning_rate=1e-3", "--train.weight_decay=0.1"),
}


def _run(runner: Runner, name: str, optimizer: str, ranks: int, micro: int, *more: str) -> None:
    cut = ("--parallel={}", f"--launch.num_devices={ranks}", f"--train.micro_batch_size={micro}")
    # a cache of its own: what the ranks compute before the first step is compared too
    cache = str(runner.directory / f"cache-{name}")
    runner.run(*runner.smoke(name, *COMMON, *OPTIMIZERS[optimizer], *cut, *more), LLMSUITE_CACHE=cache)


@pytest.mark.parametrize(
    ("optimizer", "ranks", "micro", "more"),
    [
        ("sgd", 2, 1, ()),
        ("clipped_sgd", 4, 2, ("--engine.recompute=none",)),
        ("adamw", 2, 4, ()),
    ],
)
def test_ranks_and_accumulation_change_nothing(
    runner: Runner, optimizer: str, ranks: int, micro: int, more: tuple[str, ...]
) -> None:
    _run(runner, f"{optimizer}-one", optimizer, 1, 8)
    _run(runner, f"{optimizer}-many", optimizer, ranks, micro, *more)
    one, many = runner.metrics(f"{optimizer}-one"), runner.metrics(f"{optimizer}-many")
    assert len(one) == len(many) == STEPS
    for a, b in zip(one, many):
        assert a["tokens"] == b["tokens"]
        for key in ("loss", "grad_norm", "logps/chosen", "logps/rejected"):
            assert b[key] == pytest.approx(a[key], rel=1e-6), (a["step"], key)
    assert one[-1]["loss"] < 0.99 * one[0]["loss"], "nothing was learnt, so nothing was compared"
    ours, theirs = runner.weights(f"{optimizer}-one", STEPS), runner.weights(f"{optimizer}-many", STEPS)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        difference = np.linalg.norm(theirs[name] - value) / np.linalg.norm(value)
        # Adam divides by the root of tiny second moments, which magnifies the last bit of a gradient
        assert difference <= (1e-5 if optimizer == "adamw" else 1e-6), name
