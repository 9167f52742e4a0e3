"""A few recipes of large meshes against one process; `make matrix` runs all."""

from __future__ import annotations

from typing import Any

import pytest

from llmsuite.contract.registry import Registry
from tests.multi.conftest import Runner
from tests.tools.matrix import Entry, run

CHOSEN = [
    Entry("gpt/gpt-175b-pretrain", "dynamic"),  # MP8-PP16, recompute of attention
    Entry("deepseek/deepseek-v3-sft", "dynamic"),  # MP4-PP8-sharding 2 of 64 devices, moments on the host
    Entry("llama/llama-2-13b-pretrain-xpu", "dynamic"),  # DP2-PP4 of another device
    Entry("qwen/qwen2.5-7b-dpo", "dynamic"),  # the older layers of a family whose tiny shape is the newer ones
]


@pytest.fixture(scope="module")
def records(runner: Runner, registry: Registry) -> dict[str, Any]:
    return {record["recipe"]: record for record in run(runner, CHOSEN, registry)}


@pytest.mark.parametrize("entry", CHOSEN, ids=lambda entry: entry.name)
def test_a_recipe_equals_one_process(records: dict[str, Any], entry: Entry) -> None:
    assert records[entry.recipe]["passed"], records[entry.recipe]
