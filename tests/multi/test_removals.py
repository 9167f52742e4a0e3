"""Waits, casts and copies that a GPU needs are needed here: without any one of them a check on the stand-in fails.

`tests.standin.table` has them all; `make test-further` takes a few away, `make parity` each.
"""

from __future__ import annotations

import json

import pytest

from tests.multi.conftest import Runner
from tests.parity.cases import few
from tests.standin import alone as in_one
from tests.standin import ranks as in_two
from tests.standin.removals import Removal
from tests.standin.table import ALONE, OF_RANKS

Found = dict[str, str | None]


def _some(removals: tuple[Removal, ...], *texts: str) -> dict[str, int]:
    """Name and number of each; without `make parity`, of those that take these texts away."""
    every = {str(removal): number for number, removal in enumerate(removals)}
    assert len(every) == len(removals)
    kept = [name for text in texts for name in every if text in name]
    assert len(kept) == len(texts)
    return few(every, *(every.keys() - kept))


_ALONE = _some(ALONE, "weights.astype(rows.dtype)", "return ends.astype", "nll_and_entropy(self.logits")
_OF_RANKS = _some(OF_RANKS, "recv(value", "_pending.wait()")


@pytest.fixture(scope="module")
def alone(runner: Runner) -> Found:
    file = runner.directory / "alone"
    code, printed = runner.launch(1, "tests.standin.alone", str(file), *map(str, _ALONE.values()))
    assert code == 0, printed
    found: Found = json.loads(file.read_text())
    return found


@pytest.fixture(scope="module")
def of_ranks(runner: Runner) -> list[Found]:
    file = runner.directory / "ranks"
    code, printed = runner.launch(in_two.NUM_RANKS, "tests.standin.ranks", str(file), *map(str, _OF_RANKS.values()))
    assert code == 0, printed
    return [json.loads(file.with_suffix(f".{rank}").read_text()) for rank in range(in_two.NUM_RANKS)]


def test_checks_pass_with_all_of_them(alone: Found, of_ranks: list[Found]) -> None:
    for found in (alone, *of_ranks):
        named = {name: wrong for name, wrong in found.items() if name in {**in_one.CHECKS, **in_two.CHECKS}}
        assert named
        assert set(named.values()) == {None}, named


@pytest.mark.parametrize("name", _ALONE)
def test_it_is_missed_by_one_process(alone: Found, name: str) -> None:
    check = ALONE[_ALONE[name]].check
    assert alone[check] is None, "it fails without the removal"
    assert alone[name] is not None, f"{check} does not notice it"


@pytest.mark.parametrize("name", _OF_RANKS)
def test_it_is_missed_by_two(of_ranks: list[Found], name: str) -> None:
    check = OF_RANKS[_OF_RANKS[name]].check
    for found in of_ranks:
        assert found[check] is None, "it fails without the removal"
        assert found[name] is not None, f"{check} does not notice it"
