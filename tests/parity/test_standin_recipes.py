"""Recipes of every family and stage in bf16, on a process that stands in for a GPU (`tests.standin`): each operation of
theirs has a 16-bit form, and gets what the GPU's kernels take."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import Case, run_cases
from tests.parity.condition import BF16
from tests.parity.curve import CURVE, check_curve

RECIPES = (
    "llama/pretrain", "llama/sft", "llama/mistral-7b-sft", "llama/mistral-7b-v0.1-pretrain",
    "llama/llama-biases-pretrain", "llama/lora", "llama/qlora",
    "llama/dpo", "llama/simpo", "llama/orpo", "llama/kto", "llama/rm", "llama/prefix", "llama/reft",
    "qwen/sft", "qwen_moe/sft", "ernie/sft", "ernie_moe/lora", "gpt/sft", "gpt/gpt-345m-pretrain-qat",
    "deepseek/sft", "deepseek/lora", "deepseek/deepseek-v3-pretrain-mtp",
)  # fmt: skip
ONLINE = ("llama/grpo", "llama/dapo", "llama/ppo", "llama/online_dpo", "qwen_moe/grpo", "deepseek/grpo", "gpt/ppo")
"""Their completions are drawn with probabilities in 16 bits, and so are others."""
IN_CHUNKS = ("llama/orpo", "ernie/sft", "deepseek/lora", "llama/dapo")
"""Recipes whose losses in 16 bits are computed for some tokens at a time."""
ON = {"float32": (), "bf16": ("--device=standin", "--engine.precision=bf16"),
      "fp16": ("--device=standin", "--engine.precision=fp16")}  # fmt: skip


def _case(recipe: str, precision: str) -> Case:
    words = ["--launch.num_devices=1", "--parallel={}", "--train.max_steps=2", *ON[precision]]
    words += ["--engine.loss_chunk_tokens=7"] if recipe in IN_CHUNKS and precision != "float32" else []
    return Case(f"{recipe.replace('/', ' ')}, {precision}", 1, words, recipe=f"recipes/{recipe}.json")


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    offline = [_case(recipe, precision) for recipe in RECIPES for precision in ON]
    return run_cases(runner, [*offline, *(_case(recipe, precision) for recipe in ONLINE for precision in ("bf16",))])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_are_those_of_float32(runner: Runner, failed: dict[str, str], recipe: str, precision: str) -> None:
    names = [_case(recipe, each).name for each in ("float32", precision)]
    assert not {*names} & failed.keys(), [failed.get(name) for name in names]
    exact, found = (runner.metrics(name) for name in names)
    assert len(exact) == len(found) == 2
    for a, b in zip(exact, found):
        print(f"{names[1]}, step {a['step']}: {a['loss']:.4f}, {b['loss']:.4f}")
        assert b["loss"] == pytest.approx(a["loss"], rel=4 * BF16)
        if b.get("skipped"):  # the loss scale is still too large, so the next loss is of the same weights
            assert precision == "fp16"
            assert found[1]["loss_scale"] == b["loss_scale"] / 2
            break


@pytest.mark.parametrize("recipe", ONLINE)
def test_rollouts_are_drawn_and_learnt_from(runner: Runner, failed: dict[str, str], recipe: str) -> None:
    name = _case(recipe, "bf16").name
    assert name not in failed, failed[name]
    steps = runner.metrics(name)
    assert len(steps) == 2
    assert all(math.isfinite(step["loss"]) and step["grad_norm"] > 0 for step in steps)


def test_the_loss_falls_as_in_float32(runner: Runner) -> None:
    case = dataclasses.replace(CURVE, name="curve, bf16", words=[*CURVE.words, *ON["bf16"]])
    assert run_cases(runner, [CURVE, case]) == {}
    check_curve(runner, case.name)
