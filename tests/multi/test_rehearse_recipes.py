"""Recipes of every family and of every kind of stage are rehearsed at their true size, with fewer micro-batches. That
all others are planned or refused is in tests/unit/plugins/rehearse/test_recipes.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.multi.conftest import Runner

LOCAL = ("--model.tokenizer=data/tokenizer", "--model.weights=null", "--train.global_batch_size=8")
"""Nothing is downloaded, and a step is short."""
CASES: dict[str, tuple[str, ...]] = {
    "llama/dpo": (),
    "llama/qlora": (),
    "llama/grpo": (),
    "llama/ppo": (),
    "llama/gkd": ("--gkd.teacher=null",),
    "llama/gkd-on-policy": ("--gkd.teacher=null",),
    "qwen/kto": (),
    "qwen_moe/sft": ("--routing=worst",),
    "deepseek/deepseek-v2-lite-lora": (),
    "ernie/pretrain": (),
    "ernie_moe/dpo": (),
    "gpt/rm": ("--engine.offload_optimizer=true",),
}

OF_FILES = {"built", "corpora", "rows", "tokenizers", "tokens"}
"""Directories of the user's cache that are made of files. Nothing that the virtual device has computed may get there,
such as log-probabilities of a reference model: a later run would take them."""


@pytest.mark.parametrize("recipe", CASES)
def test_a_recipe_runs_to_the_end_of_a_step(runner: Runner, recipe: str) -> None:
    process = runner.start("rehearse", f"recipes/{recipe}.json", *LOCAL, *CASES[recipe], "--json")
    printed, _ = process.communicate()
    assert process.returncode == 0, printed
    cache = Path(runner.environment["LLMSUITE_CACHE"])
    assert {path.name for path in cache.iterdir()} <= OF_FILES
    for report in json.loads(printed[printed.index("[\n") :]):
        found = report["peak_bytes"] / 2**30
        print(f"{recipe}, rank {report['rank']}: {found:.2f} GiB, {report['resident_bytes'] >> 20} MiB of this host")
        assert report["steps"] == 3
        assert report["launches"] > 0
        assert report["peak_bytes"] >= report["built_bytes"] > 0
        assert (report["host_bytes"] > 0) is ("--engine.offload_optimizer=true" in CASES[recipe])
        # whatever the model takes: its memory is address space
        assert report["resident_bytes"] < 2 << 30
