"""Pipelines change no number, with tied embeddings, sequence parallel and sharded optimizer states inside them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.multi.conftest import Runner

STEPS = 4
SGD = ("--train.optimizer=sgd", "--train.learning_rate=0.05", "--train.max_grad_norm=0.5")
ADAMW = ("--train.learning_rate=1e-3", "--train.weight_decay=0.1")
TIED = ("--model.config.tie_word_embeddings=true",)
CASES = {
    "1F1B": (2, '{"pipeline_parallel_degree":2}', SGD),
    "FThenB over four stages": (4, '{"pipeline_parallel_degree":4,"pipeline_schedule":"FThenB"}', SGD),
    "tied, with every other axis": (
        8,
        '{"pipeline_parallel_degree":2,"tensor_parallel_degree":2,"sequence_parallel":true,"sharding":"stage2"}',
        SGD + TIED,
    ),
    "adamw, sharding stage 1": (4, '{"pipeline_parallel_degree":2,"sharding":"stage1"}', ADAMW),
}


def _smoke(runner: Runner, name: str, ranks: int, parallel: str, more: tuple[str, ...]) -> None:
    cut = (f"--launch.num_devices={ranks}", f"--parallel={parallel}", f"--train.max_steps={STEPS}")
    # a cache of its own: what the ranks compute before the first step is compared too
    runner.run(*runner.smoke(name, *cut, *more), LLMSUITE_CACHE=str(runner.directory / f"cache-{name}"))


@pytest.mark.parametrize("case", CASES)
def test_a_pipeline_equals_one_process(runner: Runner, case: str) -> None:
    ranks, parallel, more = CASES[case]
    _smoke(runner, f"{case}, one", 1, "{}", more)
    _smoke(runner, f"{case}, many", ranks, parallel, more)
    one, many = runner.metrics(f"{case}, one"), runner.metrics(f"{case}, many")
    assert len(one) == len(many) == STEPS
    for a, b in zip(one, many):
        assert (a["tokens"], a["supervised_tokens"]) == (b["tokens"], b["supervised_tokens"])
        for key in ("loss", "grad_norm", "logps/chosen", "logps/rejected"):
            assert b[key] == pytest.approx(a[key], rel=1e-6), (a["step"], key)
    assert one[-1]["loss"] < 0.99 * one[0]["loss"], "nothing was learnt, so nothing was compared"
    ours, theirs = runner.weights(f"{case}, one", STEPS), runner.weights(f"{case}, many", STEPS)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        difference = np.linalg.norm(theirs[name] - value) / np.linalg.norm(value)
        assert difference <= (1e-5 if more == ADAMW else 1e-6), name


def test_a_checkpoint_of_a_pipeline_goes_on_in_one_process(runner: Runner) -> None:
    one, many = f"{'1F1B'}, one", f"{'1F1B'}, many"
    again = runner.smoke(many, "--launch.num_devices=1", "--parallel={}", "--train.max_steps=6", *SGD)
    # longer than the run it continues: another schedule of the learning rate, so it is refused as another recipe
    assert "differs" in runner.run(*again, "--resume", expect=2)
    words = runner.smoke(many, "--launch.num_devices=1", "--parallel={}", f"--train.max_steps={STEPS}", *SGD)
    assert f"resuming from {runner.directory / many}" in runner.run(*words, "--resume")
    assert runner.metrics(many)[-1]["loss"] == pytest.approx(runner.metrics(one)[-1]["loss"], rel=1e-6)
