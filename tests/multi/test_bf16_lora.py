"""Adapters in bf16 on the CPU: one operation an input where a process has whole tensors, layer by layer on ranks and in
programs. Both are as close as two roundings of the same numbers can be: see `tests.parity.condition`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.multi.conftest import Runner
from tests.multi.programs import PROGRAM, SAVES, SP, STAGE3, TP2
from tests.parity.cases import STEPS, Case, few, once, run_cases
from tests.parity.condition import bf16_change_limits, bf16_metric_limits, check_bf16_metrics, nudged
from tests.parity.lora import case
from tests.support.far_changes import far_changes

STEM = "adapter_model"
BF16 = "--engine.precision=bf16"
LAYERS = ("--engine.mode=to_static",)
AGAIN = "--engine.recompute=full"
SOME = '--lora.target_modules=["q_proj", "up_proj", "layers.2.*"]'


def _case(name: str, ranks: int = 1, parallel: dict[str, object] | None = None, *more: str, **how: str) -> Case:
    found = case(name, ranks, parallel, ("--train.micro_batch_size=2", *more), **how)
    return dataclasses.replace(found, words=once([*found.words, *SAVES]))


RUNS: dict[str, Case] = few(
    {
        "one, by rounding": _case("one, by rounding", 1, {}, BF16, mutation="products_by_rounding"),
        "program": _case("program", 1, {}, BF16, *PROGRAM),
        "layers": _case("layers", 1, {}, BF16, *LAYERS, AGAIN),
        "tp2": _case("tp2", 2, {**TP2, **SP}, BF16, AGAIN),
        "stage3": _case("stage3", 2, dict(STAGE3), BF16),
        "tp2 program": _case("tp2 program", 2, dict(TP2), BF16, *PROGRAM),
    },
    "stage3", "tp2 program",
)  # fmt: skip
SOME_IN_FLOAT32 = _case("some, in float32", 1, {}, SOME)
IN_FLOAT32 = _case("in float32")
ONE = _case("one", 1, {}, BF16)
SOME_RUNS = {
    name: _case(f"some, {name}", ranks, mesh, BF16, SOME) for name, ranks, mesh in (("one", 1, {}), ("tp2", 2, TP2))
}  # type: ignore[arg-type]
FROZEN_IN_FLOAT32 = {
    name: _case(f"{name}, frozen in float32", ranks, mesh, BF16, *words, mutation="frozen_in_float32")
    for name, ranks, mesh, words in (
        ("one", 1, {}, ()), ("layers", 1, {}, (*LAYERS, AGAIN)), ("tp2", 2, {**TP2, **SP}, (AGAIN,)),
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    ones = [case for one in (IN_FLOAT32, SOME_IN_FLOAT32) for case in (one, *nudged(one))]
    return run_cases(runner, [*ones, ONE, *RUNS.values(), *SOME_RUNS.values(), *FROZEN_IN_FLOAT32.values()])


def _check_close(runner: Runner, one: str, many: str, in_float32: Case) -> None:
    check_bf16_metrics(runner, one, many, bf16_metric_limits(runner, in_float32))
    changes = bf16_change_limits(runner, in_float32, STEM)
    pair = ([runner.weights(name, step, STEM) for step in (1, STEPS)] for name in (one, many))
    worst = max(far_changes(*pair).items(), key=lambda item: item[1] / changes[item[0]])
    print(f"{many}: change of {worst[0]} {worst[1]:.1e} of at most {changes[worst[0]]:.1e}")
    assert worst[1] <= changes[worst[0]]


@pytest.mark.parametrize("name", RUNS)
def test_it_is_as_close_as_rounding_allows(runner: Runner, failed: dict[str, str], name: str) -> None:
    assert not {IN_FLOAT32.name, ONE.name, name} & failed.keys(), failed
    _check_close(runner, ONE.name, name, IN_FLOAT32)


def test_beside_matrices_without_adapters(runner: Runner, failed: dict[str, str]) -> None:
    assert not {"some, one", "some, tp2", "some, in float32"} & failed.keys(), failed
    _check_close(runner, "some, one", "some, tp2", SOME_IN_FLOAT32)


@pytest.mark.parametrize("name", FROZEN_IN_FLOAT32)
def test_frozen_matrices_are_rounded_once_for_all(runner: Runner, failed: dict[str, str], name: str) -> None:
    """They are bfloat16 from the beginning, and every number is what it is where each product rounds them."""
    other = FROZEN_IN_FLOAT32[name].name
    assert not {name, other} & failed.keys(), failed
    found = [[(m["loss"], m["grad_norm"]) for m in runner.metrics(n)] for n in (name, other)]
    assert found[0] == found[1]
    for step in (1, STEPS):
        mine, others = (runner.weights(n, step, STEM) for n in (name, other))
        assert mine.keys() == others.keys()
        assert all(np.array_equal(mine[n], others[n]) for n in mine)
