"""Programs in bf16 on the CPU are as close to the same steps op by op as two roundings can be: see
`tests.parity.condition`. And layers that programs compute again change no number."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from tests.multi.conftest import Runner
from tests.multi.programs import PP2, PROGRAM, SAVES, TP2, WORDS
from tests.parity.cases import OPTIMIZERS, STEPS, Case, compare, few, once, run_cases
from tests.parity.condition import bf16_change_limits, bf16_metric_limits, check_bf16_metrics, nudged
from tests.support.far_changes import far_changes

BF16 = "--engine.precision=bf16"
LAYERS = ("--engine.mode=to_static",)
AGAIN = "--engine.recompute=full"
SP = {"sequence_parallel": True}
RUNS: dict[str, tuple[int, dict[str, Any], tuple[str, ...], str | None]] = few(
    {
        "one": (1, {}, PROGRAM, None),
        "one, by rounding": (1, {}, PROGRAM, "products_by_rounding"),
        "one, again": (1, {}, (*PROGRAM, AGAIN), None),
        "layers": (1, {}, LAYERS, None),
        "layers, by rounding": (1, {}, (*LAYERS, AGAIN), "products_by_rounding"),
        "tp2": (2, {**TP2, **SP}, PROGRAM, None),
        "tp2, again": (2, TP2, (*PROGRAM, AGAIN), None),
        "stage3": (2, {"sharding": "stage3"}, (*PROGRAM, AGAIN), None),
        "dp2": (2, {}, PROGRAM, None),
        "pp2": (2, PP2, PROGRAM, None),
        "layers, stage3": (2, {"sharding": "stage3"}, LAYERS, None),
        "layers, pp2": (2, PP2, LAYERS, None),
        "tp2 pp2": (4, {**TP2, **PP2}, PROGRAM, None),
        "tp2 dp2 stage2": (4, {**TP2, **SP, "sharding": "stage2"}, PROGRAM, None),
    },
    "tp2, again", "dp2", "layers, stage3", "layers, pp2", "tp2 pp2", "tp2 dp2 stage2",
)  # fmt: skip
"""Ranks, mesh, words, and what is changed in the engine."""
IN_FLOAT32: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = few(
    {
        "again, one": (1, {}, ()),
        "again, every second": (1, {}, ("--engine.recompute_every=2",)),
        "again, tp2": (2, {**TP2, **SP}, ()),
        "again, stage3": (2, {"sharding": "stage3"}, ()),
        "again, dp2": (2, {}, ()),
    },
    "again, dp2",
)  # fmt: skip


def _case(name: str, ranks: int, parallel: dict[str, Any], *more: str, mutation: str | None = None) -> Case:
    place = (f"--parallel={json.dumps(parallel)}", f"--launch.num_devices={ranks}", "--train.micro_batch_size=2")
    words = once([*WORDS, *OPTIMIZERS["sgd"], "--data.max_length=256", *SAVES, *place, *more])
    return Case(name, ranks, words, recipe="recipes/llama/sft.json", mutation=mutation)


ONE = _case("dynamic", 1, {})
DYNAMIC = dataclasses.replace(ONE, name="dynamic, bf16", words=[*ONE.words, BF16])


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    cases = [ONE, DYNAMIC, *nudged(ONE)]
    cases += [_case(name, ranks, mesh, BF16, *words, mutation=m) for name, (ranks, mesh, words, m) in RUNS.items()]
    cases += [_case(name, ranks, mesh, *PROGRAM, AGAIN, *words) for name, (ranks, mesh, words) in IN_FLOAT32.items()]
    return run_cases(runner, cases)


@pytest.mark.parametrize("name", RUNS)
def test_a_program_is_as_close_as_rounding_allows(runner: Runner, failed: dict[str, str], name: str) -> None:
    assert not {DYNAMIC.name, name} & failed.keys(), failed
    check_bf16_metrics(runner, DYNAMIC.name, name, bf16_metric_limits(runner, ONE))
    changes = bf16_change_limits(runner, ONE, "model")
    worst = max(_far(runner, DYNAMIC.name, name).items(), key=lambda item: item[1] / changes[item[0]])
    print(f"{name}: change of {worst[0]} {worst[1]:.1e} of at most {changes[worst[0]]:.1e}")
    assert worst[1] <= changes[worst[0]]


@pytest.mark.parametrize("name", ["one", "pp2"])
def test_a_program_in_bf16_is_not_float32(runner: Runner, failed: dict[str, str], name: str) -> None:
    assert not {ONE.name, name} & failed.keys(), failed
    assert max(_far(runner, ONE.name, name).values()) > 1e-3


def _far(runner: Runner, one: str, many: str) -> dict[str, float]:
    """See `far_changes`."""
    return far_changes(*([runner.weights(name, step) for step in (1, STEPS)] for name in (one, many)))


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_what_is_computed_again_is_the_same(runner: Runner, failed: dict[str, str], name: str) -> None:
    assert not {ONE.name, name} & failed.keys(), failed
    assert compare(runner, ONE.name, name, falls=False, has_gradients=False).problems == []
