"""Fake quantisation on strategies: the first step equals one process, later ones to what a turned rounding explains."""

from __future__ import annotations

import shutil

import pytest

from tests.multi.conftest import Runner, learnt
from tests.parity.cases import STEPS, Case, run_cases
from tests.parity.qat import BOTH, FLIPPED, WEIGHTS, case, problems, scales
from tests.support.qat_words import ADAMW, PP, RECOMPUTE, SP, STATIC, TP

ONES = {
    "both": case("both"),
    "weights": case("weights", run=WEIGHTS),
    "adamw": case("adamw", **ADAMW),
}
MANY: dict[str, tuple[str, Case]] = {
    "tp2, sequence parallel, recompute": ("both", case("tp-sp", 2, {**TP, **SP}, (RECOMPUTE,))),
    "pp2 interleaved": ("both", case("pp", 2, {**PP, "pipeline_schedule": "interleaved"})),
    "weights, tp2 static": ("weights", case("static", 2, TP, (STATIC,), run=WEIGHTS)),
    "stage3, recompute": ("adamw", case("stage3", 2, {"sharding": "stage3"}, (RECOMPUTE,), **ADAMW)),
}
MUTANTS = {
    "scale_of_own_rank": case("own-rank", 2, TP, mutation="scale_of_own_rank"),
    "weight_scale_of_own_part": case("own-part", 2, TP, run=WEIGHTS, mutation="weight_scale_of_own_part"),
}


@pytest.fixture(scope="module")
def failed(runner: Runner) -> dict[str, str]:
    """Runs everything; what was printed of the cases that did not end well."""
    failed = run_cases(runner, [*ONES.values(), *(many for _, many in MANY.values()), *MUTANTS.values()])
    # what one process has left in the middle, continued there and on another mesh
    cases = []
    for name, num_ranks, parallel in (("again", 1, {}), ("on-two", 2, {**TP, **SP})):
        shutil.copytree(
            runner.directory / "both" / "checkpoints" / "step-2", runner.directory / name / "checkpoints" / "step-2"
        )
        cases.append(case(name, num_ranks, parallel, resume=True))
    return failed | run_cases(runner, cases)


@pytest.mark.parametrize("name", MANY)
def test_a_strategy_equals_one_process(runner: Runner, failed: dict[str, str], name: str) -> None:
    one, many = MANY[name]
    assert one not in failed, failed[one]
    assert many.name not in failed, failed[many.name]
    assert problems(runner, one, many.name) == []


@pytest.mark.parametrize("name", MUTANTS)
def test_a_scale_that_is_not_of_the_whole_is_noticed(runner: Runner, failed: dict[str, str], name: str) -> None:
    many = MUTANTS[name]
    one = "both" if set(BOTH) <= set(many.words) else "weights"
    assert not {one, many.name} & failed.keys(), failed
    assert problems(runner, one, many.name) != []


def test_a_checkpoint_is_continued_bit_by_bit_and_on_another_mesh(runner: Runner, failed: dict[str, str]) -> None:
    assert not {"both", "again", "on-two"} & failed.keys(), failed
    assert learnt(runner.metrics("again")) == learnt(runner.metrics("both"))[-1:]
    assert scales(runner, "again", STEPS) == scales(runner, "both", STEPS)
    whole, again = (runner.weights(name, STEPS) for name in ("both", "again"))
    assert all(value.tobytes() == again[name].tobytes() for name, value in whole.items())
    # of the same weights and scales, with inputs rounded: what is left are the values that were turned
    (one,), (two,) = runner.metrics("again"), runner.metrics("on-two")
    assert two["loss"] == pytest.approx(one["loss"], rel=FLIPPED["loss"])
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=FLIPPED["grad_norm"])
