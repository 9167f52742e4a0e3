"""A model with a window of attention: packed or not, as programs or not, on any mesh, the same run as in one process.

A step takes all rows of the file, so that it learns from the same ones however many samples they are packed into.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import COMMON, OPTIMIZERS, STEPS, Case, compare, few, once, run_cases

ROWS = {"sft": 28, "dpo": 48}
PACKS = {"sft": 8, "dpo": 10}
"""Samples of the file, as they are and packed, at 256 tokens."""
FILES = {"sft": "data/sft/eval.jsonl", "dpo": "data/preference/eval.jsonl"}
WINDOW = ("--model.config.model_type=mistral", "--model.config.sliding_window=24")
TP = {"tensor_parallel_degree": 2}
SP = {"tensor_parallel_degree": 2, "sequence_parallel": True}
PP = {"pipeline_parallel_degree": 2}
PACKED = "--data.packing=best_fit"
KEPT = "--engine.recompute=none"
AGAIN = "--engine.recompute=full"
STATIC = "--engine.mode=to_static"
# stage, ranks, what is parallel, micro-batch size, further words
MESHES: dict[str, tuple[str, int, dict[str, Any], int, tuple[str, ...]]] = {
    "packed": ("sft", 1, {}, 2, (PACKED, KEPT)),
    "pairs that share a prompt": ("dpo", 1, {}, 5, (PACKED, KEPT)),
    "again, compiled": ("sft", 1, {}, 7, (AGAIN, STATIC)),
    "tp2 in sequences": ("sft", 2, SP, 7, (KEPT,)),
    "tp2 packed, again": ("sft", 2, TP, 2, (PACKED, AGAIN)),
    "pp2 packed": ("sft", 2, PP, 2, (PACKED, "--engine.recompute=selective")),
    "pp2 in chunks": ("sft", 2, {**PP, "pipeline_schedule": "interleaved"}, 7, (KEPT,)),
    "stage3": ("sft", 2, {"sharding": "stage3"}, 7, (AGAIN,)),
    "programs of steps, dp2": ("sft", 2, {}, 7, (KEPT, STATIC, "--engine.program=step")),
    "programs of steps, tp2": ("sft", 2, SP, 2, (PACKED, KEPT, STATIC, "--engine.program=step")),
    "tp2 pp2": ("sft", 4, {**SP, **PP}, 7, (AGAIN,)),
}
MESHES = few(MESHES, "pp2 in chunks", "programs of steps, tp2", "tp2 pp2")


def case(name: str) -> Case:
    """The run of a mesh, or of "one STAGE" in one process, without a window if that is "all"."""
    alone, _, kind = name.removeprefix("one ").partition(" ")
    whole = (KEPT, "--checkpoint.save_steps=1", f"--checkpoint.keep_last={STEPS}")
    stage, ranks, parallel, micro, more = MESHES.get(name, (alone, 1, {}, ROWS.get(alone, 0), whole))
    words = [
        *COMMON, *OPTIMIZERS["sgd"], f"--data.train={FILES[stage]}", "--data.max_length=256",
        f"--launch.num_devices={ranks}", f"--parallel={json.dumps(parallel)}", f"--train.micro_batch_size={micro}",
        f"--train.global_batch_size={(PACKS if PACKED in more else ROWS)[stage]}", "--checkpoint.save_steps=null",
        *(() if kind == "all" else WINDOW), *more,
    ]  # fmt: skip
    return Case(name, ranks, once(words), recipe=f"recipes/llama/{stage}.json")


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs all cases; what was printed of those that did not end well."""
    return run_cases(runner, map(case, ("one sft", "one sft all", "one dpo", *MESHES)))


@pytest.mark.parametrize("name", MESHES)
def test_equals_one_process(runner: Runner, failed: dict[str, str], name: str) -> None:
    one = f"one {MESHES[name][0]}"
    assert not failed.keys() & {one, name}, failed
    found = compare(runner, one, name, has_gradients="programs" not in name)
    print(name, f"metrics {found.metrics:.1e}, gradients {found.gradients:.1e}, parameters {found.change:.1e}")
    assert found.problems == []


def test_the_window_is_one_that_shows(runner: Runner, failed: dict[str, str]) -> None:
    assert not failed.keys() & {"one sft", "one sft all"}, failed
    first, all_tokens = (runner.metrics(name)[0]["loss"] for name in ("one sft", "one sft all"))
    assert abs(first / all_tokens - 1) > 1e-3
