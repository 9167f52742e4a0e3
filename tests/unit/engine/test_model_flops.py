"""Model FLOPs of a step: counted by hand, and the FLOPs of `llmsuite plan` where rows are full."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmsuite.contract.registry import Registry
from llmsuite.engine.batch import Batch
from llmsuite.engine.model_flops import ModelFlops, StepWork, document_lengths
from llmsuite.recipe.resolve import RunPlan, plan_run
from tests.support.paths import ROOT
from tests.support.planned_runs import estimated

CONFIG = {
    "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 32,
}  # fmt: skip


def batch_of(lengths: list[int], width: int, starts: list[list[int]] | None = None) -> Batch:
    batch: Batch = {
        "input_ids": np.zeros([len(lengths), width], "int64"),
        "lengths": np.array(lengths),
        "num_tokens": sum(lengths),
        "num_supervised": 3,
    }
    return batch if starts is None else {**batch, "document_starts": np.array(starts)}


def flops_of(plan: RunPlan) -> ModelFlops:
    found = ModelFlops.from_plans(plan.model, plan.parallel, plan.train)
    assert found is not None
    return found


def test_padding_is_no_document() -> None:
    assert document_lengths(batch_of([3, 5], 8)).tolist() == [3, 5]
    packed = batch_of([5, 8], 8, [[0, 0, 2, 2, 2, 5, 5, 5], [0, 0, 0, 0, 4, 4, 6, 6]])
    assert document_lengths(packed).tolist() == [2, 3, 4, 2, 2]
    # one start in two rows is that of two documents
    assert document_lengths(batch_of([4, 4], 4, [[0] * 4, [0] * 4])).tolist() == [4, 4]


def test_rows_without_lengths_are_as_long_as_their_tokens() -> None:
    batch = batch_of([6, 6], 8)
    del batch["lengths"]
    assert document_lengths(batch).tolist() == [6, 6]


def test_a_batch_without_ids_has_no_tokens() -> None:
    work = StepWork()
    work.add({"rows": [1.0], "num_tokens": 1, "num_supervised": 1})
    assert work == StepWork()


def test_flops_of_a_step_by_hand(registry: Registry) -> None:
    words = [f"--model.config={CONFIG}".replace("'", '"'), "--parallel={}", "--launch.num_devices=1"]
    found = flops_of(plan_run(ROOT / "recipes/llama/sft.json", words, registry, smoke=True))
    work = StepWork()
    work.add(batch_of([3], 4))
    work.add(batch_of([6], 8, [[0, 0, 2, 2, 2, 2, 6, 6]]))
    # queries and output 8 x 8, keys and values 8 x 4, three matrices 8 x 16 in each of two layers
    weights = 2 * (2 * 64 + 2 * 32 + 3 * 128)
    # two products with 8 elements of all heads, of half of the pairs of tokens of one document
    attention = 2 * 2 * 2 * 8 * (3**2 + 2**2 + 4**2) / 2
    logits = 2 * 8 * 32 * 6
    assert found.of(work) == 3 * (2 * weights * 9 + attention + logits)


RECIPES = [
    "llama/sft", "llama/lora", "llama/dpo", "llama/prefix", "llama/rm", "llama/ppo", "llama/gkd", "llama/grpo",
    "llama/mistral-7b-sft", "qwen_moe/pretrain", "deepseek/sft", "gpt/pretrain", "llama/qlora",
]  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_full_rows_have_the_flops_of_the_plan(registry: Registry, recipe: str) -> None:
    words = ["--engine.recompute=none", "--engine.precision=fp32"]
    plan = plan_run(Path(ROOT / f"recipes/{recipe}.json"), words, registry, smoke=True)
    expected = estimated(plan)
    work = StepWork()
    for _ in range(expected.num_micro_batches * plan.parallel.degrees.num_data_ranks):
        work.document_lengths.append(np.full([expected.batch.rows], expected.batch.length))
        work.num_supervised += expected.batch.supervised
    assert flops_of(plan).of(work) == pytest.approx(expected.flops, rel=1e-12)
