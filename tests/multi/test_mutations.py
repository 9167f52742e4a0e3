"""The comparison with one process is worth something: it goes red for each error that such suites have had."""

from __future__ import annotations

import dataclasses

import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import Case, compare, many_processes, one_process, run_cases
from tests.parity.mutations import MUTATIONS
from tests.parity.points import Point, point

# pairs that are far enough apart have a loss of 0; the others' is a difference of sums of some hundred, at whose
# rounding the limit is, so they come as they lie in the stream
HINGE = ("--dpo.loss=hinge", "--dpo.beta=0.08", "--data.group_by_length=false")
POINTS: dict[str, tuple[Point, tuple[str, ...]]] = {
    "tied": (point(tp=2, pp=2, tied=True), ()),
    "tokens": (point(data_ranks=2, stage="tokens"), ()),
    "hinge": (point(data_ranks=2), HINGE),
}
SEEN_IN = {
    "mean_of_means": "tokens",
    "pipeline_gradients_not_averaged": "tied",
    "positive_losses_counted": "hinge",
    "tied_reduce_forgotten": "tied",
    "data_reduce_forgotten": "tokens",
    "replicated_counted_twice": "tied",
}


def _cases() -> list[Case]:
    cases = []
    for name, (strategy, more) in POINTS.items():
        one = one_process(strategy)
        many = many_processes(strategy)
        cases.append(dataclasses.replace(one, name=f"{name}-one", words=[*one.words, *more]))
        for mutation in (None, *(m for m, seen in SEEN_IN.items() if seen == name)):
            words = [*many.words, *more]
            cases.append(dataclasses.replace(many, name=f"{name}-{mutation}", words=words, mutation=mutation))
    return cases


@pytest.fixture(scope="module")
def runs(runner: Runner) -> Runner:
    assert run_cases(runner, _cases()) == {}
    return runner


def test_every_mutation_is_tried() -> None:
    assert SEEN_IN.keys() == MUTATIONS.keys()


@pytest.mark.parametrize("name", POINTS)
def test_without_an_error_it_is_green(runs: Runner, name: str) -> None:
    assert compare(runs, f"{name}-one", f"{name}-None").problems == []


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_it_goes_red(runs: Runner, mutation: str) -> None:
    name = SEEN_IN[mutation]
    found = compare(runs, f"{name}-one", f"{name}-{mutation}")
    print(f"{mutation}: metrics {found.metrics:.1e}, parameters {found.change:.1e}; {found.problems[:2]}")
    assert found.problems != []
    assert max(found.metrics, found.change) > 1e-3, "not by the error alone"
