"""Reference log-probabilities are computed once, found again exactly, and never mixed up."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsuite.base.cache import isolated_cache
from llmsuite.base.errors import UserError
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.parallel.mesh import Mesh
from llmsuite.stages.reference import LogpTable
from llmsuite.stages.reference_cache import ReferenceCache, answer_key, complete
from tests.support import dpo_case, many

fork = multiprocessing.get_context("fork")  # the children touch nothing but sqlite

# keys

ids = st.lists(st.integers(0, 2**31 - 1), max_size=5)


@given(ids, ids, ids, ids)
def test_keys_of_different_prompts_and_answers_differ(a: list[int], b: list[int], c: list[int], d: list[int]) -> None:
    assert (answer_key(a, b) == answer_key(c, d)) == ((a, b) == (c, d))


@given(st.lists(st.integers(0, 511), min_size=1, max_size=8))
def test_the_boundary_between_prompt_and_answer_matters(tokens: list[int]) -> None:
    keys = {answer_key(tokens[:at], tokens[at:]) for at in range(len(tokens) + 1)}
    assert len(keys) == len(tokens) + 1


# one store


@settings(max_examples=50)
@given(st.dictionaries(st.text("0123456789abcdef", min_size=1), st.floats(allow_nan=False), max_size=20))
def test_values_come_back_exactly(tmp_path_factory: pytest.TempPathFactory, entries: dict[str, float]) -> None:
    root = tmp_path_factory.mktemp("cache")
    ReferenceCache("model", root).store(entries)
    assert ReferenceCache("model", root).lookup([*entries, "never stored"]) == entries


def test_models_do_not_share_entries(tmp_path: Path) -> None:
    ReferenceCache("one", tmp_path).store({"a": -1.0})
    assert ReferenceCache("two", tmp_path).lookup(["a"]) == {}


class Crash(Exception):
    pass


class Entries(dict[str, float]):
    """Entries that end in a crash after the first hundred have been handed over."""

    def __init__(self, crash: Callable[[], None]):
        super().__init__({f"new {i}": float(i) for i in range(200)} | {"old": 0.0})
        self.crash = crash

    def items(self) -> Iterator[tuple[str, float]]:  # type: ignore[override]
        for number, item in enumerate([("old", 0.0), *super().items()]):
            if number == 100:
                self.crash()
            yield item


def assert_only_the_old_entry(cache: ReferenceCache) -> None:
    assert cache.lookup(["old", *(f"new {i}" for i in range(200))]) == {"old": -1.0}
    cache.store({"next": -2.0})
    assert cache.lookup(["next"]) == {"next": -2.0}


def test_an_error_in_the_middle_of_a_store_leaves_nothing_of_it(tmp_path: Path) -> None:
    def crash() -> None:
        raise Crash

    cache = ReferenceCache("model", tmp_path)
    cache.store({"old": -1.0})
    with pytest.raises(Crash):
        cache.store(Entries(crash))
    assert_only_the_old_entry(cache)


def test_a_kill_in_the_middle_of_a_store_leaves_nothing_of_it(tmp_path: Path) -> None:
    cache = ReferenceCache("model", tmp_path)
    cache.store({"old": -1.0})
    child = fork.Process(target=cache.store, args=(Entries(lambda: os._exit(9)),))
    child.start()
    child.join(60)
    assert child.exitcode == 9
    assert_only_the_old_entry(cache)


def _store_many(root: Path, name: str, count: int, start: Any) -> None:
    start.wait()
    for i in range(count):
        ReferenceCache("model", root).store({f"{name} {i} {j}": i + j / 8 for j in range(8)})


def test_processes_that_store_concurrently_lose_nothing(tmp_path: Path) -> None:
    names = ("a", "b", "c", "d")
    count = 10
    start = fork.Barrier(len(names))  # so that they also create the file at once
    children = [fork.Process(target=_store_many, args=(tmp_path, name, count, start)) for name in names]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * len(names)
    expected = {f"{name} {i} {j}": i + j / 8 for name in names for i in range(count) for j in range(8)}
    assert ReferenceCache("model", tmp_path).lookup(expected) == expected


# filling it

KEYS = [f"{pair} {side}" for pair in range(5) for side in ("chosen", "rejected")]


def value_of(key: str) -> float:
    return -1.0 - KEYS.index(key) / 8


@pytest.mark.parametrize("known", [0, 1, 4, 9, 10])
@pytest.mark.parametrize(
    "degrees",
    [
        *(Degrees(1, dp, 1, 1) for dp in (1, 2, 3, 16)),
        # ranks that share their samples compute the same, which counts once
        *(Degrees(1, 1, 1, 2), Degrees(1, 1, 3, 2), Degrees(1, 2, 2, 2), Degrees(2, 1, 1, 1), Degrees(2, 1, 2, 2)),
    ],
    ids=str,
)
def test_ranks_share_the_work_and_get_the_same_values(degrees: Degrees, known: int, tmp_path: Path) -> None:
    ReferenceCache("model", tmp_path).store({key: value_of(key) for key in KEYS[:known]})
    computed: list[set[int]] = [set() for _ in range(degrees.num_ranks)]

    def work(mesh: Mesh) -> tuple[dict[str, float], int]:
        def compute(parts: list[list[int]], rank: int) -> Mapping[str, float]:
            assert len(parts) == degrees.num_data_ranks
            assert sorted(i for part in parts for i in part) == list(range(known, len(KEYS)))
            computed[mesh.rank] = {i // 2 for i in parts[rank]}
            # as a stage does: both answers of a pair, also where only one of them is missing, and zeros where a
            # pipeline has not come to its end
            last = float(mesh.coordinate["pp"] == degrees.pp - 1)
            return {key: last * value_of(key) for pair in computed[mesh.rank] for key in KEYS[2 * pair : 2 * pair + 2]}

        return complete(ReferenceCache("model", tmp_path), KEYS, compute)

    for values, count in many.run(degrees, work):
        assert values == {key: value_of(key) for key in KEYS}
        assert count == len(KEYS) - known
    assert ReferenceCache("model", tmp_path).lookup(KEYS) == {key: value_of(key) for key in KEYS}
    if degrees.num_data_ranks < 4 and known == 0:
        # no pair is computed more often than a boundary between two data ranks can cut one
        copies = degrees.num_ranks // degrees.num_data_ranks
        assert sum(map(len, computed)) <= copies * (5 + degrees.num_data_ranks - 1)
        by_data_rank: dict[int, set[frozenset[int]]] = {}
        for rank, pairs in enumerate(computed):
            by_data_rank.setdefault(Mesh(degrees, rank).data_rank, set()).add(frozenset(pairs))
        assert all(len(alike) == 1 for alike in by_data_rank.values()), "ranks of one model copy would lose each other"


def test_a_value_that_is_not_finite_is_refused_and_not_stored(tmp_path: Path) -> None:
    cache = ReferenceCache("model", tmp_path)
    with pytest.raises(UserError, match="infinite or not a number"):
        complete(cache, ["a", "b"], lambda parts, rank: {"a": -1.0, "b": float("nan")})
    assert cache.lookup(["a", "b"]) == {}


# the stage


def test_the_stage_computes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMSUITE_CACHE", str(isolated_cache(tmp_path)))
    pairs, _ = dpo_case.pairs(dpo_case.stage(), dpo_case.rows(5))

    def fill(seed: int, some: Sequence[Any], **keys: Any) -> tuple[dict[str, float], str]:
        reported: list[str] = []
        stage = dpo_case.stage(report=reported.append, **keys)
        stage.before_training(dpo_case.model(seed=seed), some)
        keys = sorted({answer.key for pair in some for answer in pair.answers})
        assert len(stage._reference.table) == len(keys)
        found = dict(zip(keys, stage._reference.table.find(keys).tolist()))
        return found, reported[-1].removeprefix("reference log-probabilities: ")

    first, reported = fill(1, pairs[:4])
    assert reported == "0 cached, 8 computed"
    again, reported = fill(2, pairs[:4])  # another model under the same digest would be seen
    assert reported == "8 cached, 0 computed"
    assert again == first

    more, reported = fill(1, pairs)
    assert reported == "8 cached, 2 computed"
    assert first.items() < more.items()
    other, reported = fill(2, pairs[:4], model_digest="another model")
    assert reported == "0 cached, 8 computed"
    assert other.keys() == first.keys()
    assert all(other[key] != first[key] for key in first)
    # the differences that losses take of them keep the digits that float32 has no place for
    assert any(float(np.float32(value)) != value for value in first.values())

    # a new answer to a known prompt, and the known answers to a new one
    known = pairs[0]
    changed = [
        type(known)(known.prompt, known.chosen, pairs[1].rejected),
        type(known)(pairs[1].prompt, known.chosen, known.rejected),
    ]
    assert fill(1, changed)[1] == "1 cached, 3 computed"


def test_a_device_without_values_stores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`llmsuite rehearse` would otherwise leave numbers that a real run of the same model takes for its own."""
    monkeypatch.setenv("LLMSUITE_CACHE", str(isolated_cache(tmp_path)))
    pairs, _ = dpo_case.pairs(dpo_case.stage(), dpo_case.rows(2))
    for _ in range(2):
        reported: list[str] = []
        dpo_case.stage(report=reported.append, caches_logps=False).before_training(dpo_case.model(), pairs)
        assert reported[-1] == "reference log-probabilities: 0 cached, 4 computed"
    assert not (tmp_path / "reference-logps").exists()


hashes = st.text("0123456789abcdef", min_size=64, max_size=64)


@given(st.lists(st.dictionaries(hashes, st.floats(allow_nan=False), max_size=5), max_size=12))
def test_known_entries_are_found_again(parts: list[dict[str, float]]) -> None:
    known = LogpTable()
    merged = dict[str, float]()
    for part in parts:
        new = {key: value for key, value in part.items() if key not in merged}
        known.add(new)
        merged |= new
    assert len(known) == len(merged)
    assert known.find(list(merged)).tolist() == list(merged.values())
    assert np.isnan(known.find(["0" * 64])).tolist() == ["0" * 64 not in merged]
    sizes = [len(keys) for keys, _ in known._runs]
    assert all(2 * b < a for a, b in itertools.pairwise(sizes)), "few runs, however many parts"


def test_many_answers_are_computed_a_window_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs, _ = dpo_case.pairs(dpo_case.stage(), dpo_case.rows(5))
    found = []
    for size in (1 << 13, 3):
        monkeypatch.setattr("llmsuite.stages.reference._CHUNK_SIZE", size)
        monkeypatch.setenv("LLMSUITE_CACHE", str(isolated_cache(tmp_path / str(size))))
        reported: list[str] = []
        stage = dpo_case.stage(report=reported.append)
        stage.before_training(dpo_case.model(), [*pairs, *pairs])
        assert reported[-1] == "reference log-probabilities: 0 cached, 10 computed"
        found.append(stage._reference.logps_of([answer for pair in pairs for answer in pair.answers]))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "kto_pair"])
def test_margins_are_zero_where_the_reference_was_computed_in_the_same_batches(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit: with another cut the same model rounds its log-probabilities in another way."""
    monkeypatch.setenv("LLMSUITE_CACHE", str(isolated_cache(tmp_path)))
    stage = dpo_case.stage(loss=kind, micro_batch_size=1)
    # answers are computed in the order of their lengths, and a batch has the chosen one first
    fitting = [pair for pair in dpo_case.pairs(stage, dpo_case.rows(8))[0] if len(pair.chosen) < len(pair.rejected)]
    model = dpo_case.model(seed=3)
    for pair in fitting:
        stage.before_training(model, [pair])
        batch = stage.collate([pair])
        if kind == "kto_pair":
            kl = stage.prepass("model", model, batch)
            assert [float(total) for total, _ in kl.values()] == [0.0, 0.0]
            batch["prepass_stats"] = dict.fromkeys(kl, 0.0)
        sums = stage.loss(model, batch).sums
        assert [float(sums[f"rewards/{name}"][0]) for name in ("chosen", "rejected", "margin")] == [0.0, 0.0, 0.0]
    assert len(fitting) > 1
