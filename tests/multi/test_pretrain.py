"""Pretraining comes out the same however it is spread, and goes on where it stopped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from tests.multi.conftest import Runner, learnt
from tests.parity.cases import COMMON, OPTIMIZERS, STEPS, Case, compare, run_cases

RECIPE = "recipes/llama/pretrain.json"
# 63 tokens: of sequences that are cut over ranks the stage has to pad the last one
LENGTH = "--data.max_length=63"
SPREAD = {
    "dp2": (2, {"sharding": "stage1"}, 1),
    "tp2": (2, {"tensor_parallel_degree": 2, "sequence_parallel": True}, 2),
    "pp2": (2, {"pipeline_parallel_degree": 2}, 2),
}


def case(name: str, num_ranks: int, parallel: dict[str, object], micro: int, *more: str) -> Case:
    common = [word for word in COMMON if "max_length" not in word]
    words = [
        *common, *OPTIMIZERS["sgd"], LENGTH, "--train.min_lr_ratio=0", "--train.weight_decay=0",
        "--engine.recompute=none", f"--launch.num_devices={num_ranks}", f"--parallel={json.dumps(parallel)}",
        f"--train.micro_batch_size={micro}", *more,
    ]  # fmt: skip
    return Case(name, num_ranks, words, recipe=RECIPE)


def test_any_spread_is_the_run_in_one_process(runner: Runner) -> None:
    one = case("one", 1, {}, 4, "--checkpoint.save_steps=1", f"--checkpoint.keep_last={STEPS}")
    failed = run_cases(runner, [one, *(case(name, *spread) for name, spread in SPREAD.items())])
    assert not failed, "\n".join(f"{name}\n{printed}" for name, printed in failed.items())
    found = {name: compare(runner, "one", name) for name in SPREAD}
    assert {name: comparison.problems for name, comparison in found.items() if comparison.problems} == {}
    (first, *_) = runner.metrics("one")
    assert first["tokens"] == first["supervised_tokens"] == 8 * 63


def test_resuming_is_going_on(runner: Runner) -> None:
    index = [str(runner.directory / name) for name in ("mine", "other")]
    for prefix, text in zip(index, ("train", "eval")):
        words = ["-o", prefix, "--tokenizer", "data/tokenizer"]
        runner.run("data", "index", f"data/pretrain/{text}.txt", *words)
    words = (
        f"--data.train={index[0]}", "--data.eval=null", "--pretrain.split=9,1", "--pretrain.max_eval_samples=4",
        f"--pretrain.mix={json.dumps({index[1]: 0.5})}", "--train.max_steps=6", "--train.eval_steps=2", LENGTH,
        "--launch.num_devices=2", "--parallel={}", "--checkpoint.save_steps=3",
    )  # fmt: skip

    def run(name: str, *more: str) -> str:
        return runner.run("run", RECIPE, "--smoke", f"--output_dir={runner.directory / name}", *words, *more)

    whole = "whole"
    again = "again"
    run(whole)
    root = runner.directory / again / "checkpoints"
    shutil.copytree(runner.directory / whole, runner.directory / again)
    shutil.rmtree(root / "step-6")
    (root / "latest").write_text("step-3\n")
    assert "step 4/6" in run(again, "--resume")
    assert learnt(runner.metrics(again)) == learnt(runner.metrics(whole))
    assert any("eval/loss" in line for line in (runner.directory / whole / "metrics.jsonl").read_text().splitlines())
    for stem in ("model", "optimizer"):
        first, second = (runner.weights(name, 6, stem) for name in (whole, again))
        assert first.keys() == second.keys()
        for name, value in first.items():
            np.testing.assert_array_equal(second[name], value, err_msg=name)
    # another corpus of the same name is another run
    shutil.rmtree(root / "step-6")
    (root / "latest").write_text("step-3\n")
    tokens = Path(f"{index[1]}.bin")
    content = bytearray(tokens.read_bytes())
    content[0] ^= 1
    tokens.write_bytes(content)
    output = runner.run(
        "run", RECIPE, "--smoke", f"--output_dir={runner.directory / again}", *words, "--resume", expect=2
    )
    assert "differs in the content of pretrain.mix" in output
