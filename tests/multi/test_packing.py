"""Packed or not, dealt out by samples or by tokens, read by threads or not, spread over ranks or not: the same run.

A step takes all rows of the file, so that it learns from the same ones however many samples they are packed into.
"""

from __future__ import annotations

import json

import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import COMMON, OPTIMIZERS, STEPS, Case, compare, run_cases

RECIPE = "recipes/llama/sft.json"
ROWS = 28  # of data/sft/eval.jsonl, at 256 tokens
PACKS = 8
WORDS = (
    *(word for word in COMMON if "max_length" not in word and "global_batch" not in word), *OPTIMIZERS["sgd"],
    "--data.train=data/sft/eval.jsonl", "--data.max_length=256",
)  # fmt: skip


def case(name: str, num_ranks: int, parallel: dict[str, object], micro: int, *more: str, packed: bool = True) -> Case:
    words = [
        *WORDS, f"--launch.num_devices={num_ranks}", f"--parallel={json.dumps(parallel)}",
        f"--train.micro_batch_size={micro}", f"--train.global_batch_size={PACKS if packed else ROWS}",
        *(["--data.packing=best_fit"] if packed else []), *more,
    ]  # fmt: skip
    return Case(name, num_ranks, words, recipe=RECIPE)


PLAIN = "--engine.recompute=none"
ONE = case(
    "one", 1, {}, 14, PLAIN, "--data.group_by_length=false", "--checkpoint.save_steps=1",
    f"--checkpoint.keep_last={STEPS}", packed=False,
)  # fmt: skip
TP = {"tensor_parallel_degree": 2}
PP = {"pipeline_parallel_degree": 2}
NEVER = "--checkpoint.save_steps=null"
MANY = [
    case("packed", 1, {}, 2, PLAIN, NEVER),
    case("packed, compiled", 1, {}, 2, PLAIN, NEVER, "--engine.mode=to_static"),
    case("packed, attention again", 1, {}, 4, "--engine.recompute=selective", NEVER, "--data.num_workers=3"),
    case("by length and tokens", 1, {}, 1, PLAIN, NEVER, "--train.micro_batch_tokens=700", packed=False),
    case("packed, dp2", 2, {}, 2, PLAIN, NEVER, "--data.num_workers=1"),
    case("packed, tp2 in sequences", 2, {**TP, "sequence_parallel": True}, 4, PLAIN, NEVER),
    case("packed, tp2 compiled", 2, TP, 4, NEVER, "--engine.recompute=full", "--engine.mode=to_static"),
    case("packed, pp2 in chunks", 2, {**PP, "pipeline_schedule": "interleaved"}, 2, PLAIN, NEVER),
    case(
        "stage 3 by tokens", 2, {"sharding": "stage3"}, 1, PLAIN, NEVER, "--train.micro_batch_tokens=700", packed=False
    ),
    case("packed, tp2 pp2", 4, {**TP, **PP, "sequence_parallel": True}, 2, NEVER, "--engine.recompute=full"),
    case(
        "packed, pp4 by tokens", 4, {"pipeline_parallel_degree": 4}, 1, PLAIN, NEVER,
        "--train.micro_batch_tokens=512", "--data.num_workers=2",
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs all cases; what was printed of those that did not end well."""
    return run_cases(runner, [ONE, *MANY])


@pytest.mark.parametrize("name", [case.name for case in MANY])
def test_equals_the_rows_one_by_one_in_one_process(runner: Runner, failed: dict[str, str], name: str) -> None:
    assert ONE.name not in failed, failed[ONE.name]
    assert name not in failed, failed[name]
    found = compare(runner, ONE.name, name)
    print(name, f"metrics {found.metrics:.1e}, gradients {found.gradients:.1e}, parameters {found.change:.1e}")
    assert found.problems == []
    for mine, others in zip(runner.metrics(ONE.name), runner.metrics(name), strict=True):
        assert (mine["tokens"], mine["supervised_tokens"]) == (others["tokens"], others["supervised_tokens"])
