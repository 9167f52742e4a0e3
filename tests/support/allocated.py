"""Bytes that are allocated, and plans to compare them with."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from paddle.base import core

from llmsuite.contract.registry import load_plugins
from llmsuite.recipe.resolve import RunPlan, plan_run


def run_plan(recipe: str, *words: str, smoke: bool = False) -> RunPlan:
    return plan_run(recipe, words, load_plugins(), smoke)


def allocated(call: Callable[[], Any]) -> int:
    """Bytes that are alive when a call is over, its result included."""
    del_first = call()  # what is made once a process
    del del_first
    gc.collect()  # or what another test has left is freed meanwhile
    before = core.host_memory_stat_current_value("Allocated", 0)
    result = call()
    found = core.host_memory_stat_current_value("Allocated", 0) - before
    del result
    return int(found)


RECIPE = "recipes/llama/sft.json"
