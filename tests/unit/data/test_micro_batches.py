"""How a global batch becomes micro-batches, and the threads that make them: the same tokens whatever does it."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.base.errors import UserError
from llmsuite.data.loader import BatchSampler, Prefetcher, SampleOrder
from llmsuite.data.packing import pack_samples as joined
from llmsuite.data.rows import Unpaired
from llmsuite.engine.stage import DropCounts
from llmsuite.stages.kto import KtoStage
from llmsuite.stages.language_model import WeightedTokens, collate, join
from llmsuite.stages.rm import RmStage
from llmsuite.stages.sections import KtoSection, RmSection
from tests.support import dpo_case

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=40)


def padded(batch: Sequence[int], lengths: np.ndarray, multiple: int) -> int:
    """Tokens of a micro-batch with its padding, by the words."""
    longest = int(lengths[list(batch)].max())
    return len(batch) * lengths.shape[1] * (longest + -longest % multiple)


@given(
    one=LENGTHS,
    other=st.lists(st.integers(1, 30), min_size=40, max_size=40),
    num_ranks=st.sampled_from([1, 2, 3, 4]),
    times=st.integers(1, 8),
    room=st.integers(0, 200),
    multiple=st.sampled_from([1, 2, 8]),
    position=st.integers(0, 100),
    rows=st.sampled_from([1, 2]),
)
def test_micro_batches_by_tokens(
    one: list[int],
    other: list[int],
    num_ranks: int,
    times: int,
    room: int,
    multiple: int,
    position: int,
    rows: int,
) -> None:
    lengths = np.array(list(zip(one, other)))[:, :rows]
    order = SampleOrder(len(lengths), 3)
    size = num_ranks * times
    limit = max(padded([i], lengths, multiple) for i in range(len(lengths))) + room
    dealer = BatchSampler(order, size, 99, num_ranks, lengths, limit, multiple)
    parts = [dealer.micro_batches(position, rank) for rank in range(num_ranks)]
    assert len({len(part) for part in parts}) == 1, "a rank would wait for the others"
    dealt = [batch for turn in zip(*parts) for batch in turn]
    assert all(dealt)
    assert all(padded(batch, lengths, multiple) <= limit for batch in dealt)
    assert sorted(i for b in dealt for i in b) == sorted(order.at(position + i) for i in range(size))
    # fewer would not do: each but the last was filled as long as the next sample fitted
    fewest = 0
    at = 0
    longest_first = [i for batch in dealt for i in batch]
    while at < size:
        fewest += 1
        at += limit // padded([longest_first[at]], lengths, multiple)
    assert len(parts[0]) == -(-fewest // num_ranks)


@given(lengths=LENGTHS, position=st.integers(0, 100), times=st.integers(1, 6))
def test_the_order_of_a_global_batch_does_not_depend_on_ranks(lengths: list[int], position: int, times: int) -> None:
    order = SampleOrder(len(lengths), 3)
    of_rows = np.array(lengths)[:, None]
    dealt = set()
    for num_ranks, micro, limit in itertools.product((1, 2, 4), (1, 2), (None, 30, 120)):
        dealer = BatchSampler(order, 8 * times, micro, num_ranks, of_rows, limit)
        parts = [dealer.micro_batches(position, rank) for rank in range(num_ranks)]
        dealt.add(tuple(i for turn in zip(*parts) for batch in turn for i in batch))
        if limit is None:
            assert all(len(batch) == micro for part in parts for batch in part)
    (only,) = dealt
    stream = [order.at(position + i) for i in range(8 * times)]
    assert list(only) == sorted(stream, key=lambda i: -lengths[i])


def test_micro_batches_are_of_like_size() -> None:
    lengths = np.array([[100], [90], [10], [10], [10], [10], [10], [10]])
    dealer = BatchSampler(SampleOrder(8, 0), 8, 1, 2, lengths, 200)
    sizes = [[padded(b, lengths, 1) for b in dealer.micro_batches(0, rank)] for rank in range(2)]
    assert sizes == [[200], [60]]  # what is longest fits together: two micro-batches, one a rank


def test_a_sample_larger_than_a_micro_batch_is_refused() -> None:
    lengths = np.array([[7, 9], [3, 3]])
    BatchSampler(SampleOrder(2, 0), 2, 1, 1, lengths, 20, 10)
    with pytest.raises(UserError, match=r"train\.micro_batch_tokens: is 19, and the longest sample takes 20 with its"):
        BatchSampler(SampleOrder(2, 0), 2, 1, 1, lengths, 19, 10)


# the ledger of tokens


def sample(number: int, length: int) -> WeightedTokens:
    ids = np.random.default_rng(number).integers(1, 99, length + 1).astype("int32")
    weights = np.ones(length + 1, "float32")
    weights[0] = 0
    return WeightedTokens(ids, weights)


def consumed(
    samples: Sequence[WeightedTokens], steps: range, size: int, num_ranks: int, num_workers: int, **dealt: Any
) -> list[list[str]]:
    """By step, sha256 of what each row of the batches says, in the order of the micro-batches and ranks."""
    order = SampleOrder(len(samples), 5)
    lengths = np.array([[s.num_inputs] for s in samples]) if dealt.pop("by_length") else None
    dealer = BatchSampler(order, size, dealt["micro"], num_ranks, lengths, dealt.get("limit"))
    ledger: list[list[str]] = [[] for _ in steps]
    by_rank = []
    for rank in range(num_ranks):
        picked = (dealer.micro_batches(step * size, rank) for step in steps)
        with Prefetcher(samples, picked, lambda s: collate(s, 0, 1), num_workers) as reader:
            by_rank.append([[b.result() if num_workers else collate(b, 0, 1) for b in made] for made in reader])
    for at in range(len(steps)):
        for turn in zip(*(batches[at] for batches in by_rank), strict=True):
            for batch in turn:
                ledger[at] += rows_of(batch)
    return ledger


def rows_of(batch: dict[str, Any]) -> list[str]:
    """Inputs, targets and weights of each row, and where documents begin, without the padding."""
    found = []
    length = batch["input_ids"].shape[1]
    for row, ids in enumerate(batch["input_ids"]):
        supervised = batch["positions"] // length == row
        reports = [ids[ids != 0], batch["targets"][supervised], batch["weights"][supervised]]
        reports += [
            np.unique(batch["document_starts"][row][ids != 0]) if "document_starts" in batch else np.zeros(1, "int64")
        ]
        found.append(hashlib.sha256(b"|".join(part.tobytes() for part in reports)).hexdigest())
    return found


@pytest.mark.further
@given(
    lengths=st.lists(st.integers(1, 30), min_size=3, max_size=25),
    packed=st.booleans(),
    by_length=st.booleans(),
    stop=st.integers(0, 4),
    limit=st.sampled_from([None, 64, 150]),
)
def test_the_ledger_is_the_same_however_it_is_read(
    lengths: list[int], packed: bool, by_length: bool, stop: int, limit: int | None
) -> None:
    samples = [sample(i, length) for i, length in enumerate(lengths)]
    if packed:
        samples = list(joined(samples, lambda some: np.array([[s.num_inputs] for s in some]), 40, join)[0])
    if not by_length:
        limit = None
    expected = consumed(samples, range(4), 8, 1, 0, micro=2, by_length=by_length)
    assert [len(step) for step in expected] == [8] * 4
    for num_ranks, num_workers, micro in ((1, 1, 4), (1, 4, 1), (2, 0, 2), (2, 3, 1), (4, 2, 2)):
        how = {"micro": micro, "by_length": by_length, "limit": limit}
        whole = consumed(samples, range(4), 8, num_ranks, num_workers, **how)
        assert whole == expected
        # stopped anywhere, and gone on with elsewhere
        assert consumed(samples, range(stop, 4), 8, num_ranks, num_workers, **how) == expected[stop:]


# threads


def alive() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("reader")}


def singles(count: int) -> Iterator[list[list[int]]]:
    return iter([[[i]] for i in range(count)])


@pytest.mark.parametrize("num_workers", [1, 4])
def test_a_bounded_number_is_prefetched(num_workers: int) -> None:
    made: list[int] = []
    with Prefetcher(range(100), singles(100), lambda s: made.append(s[0]) or s[0], num_workers) as reader:
        for step in range(20):
            (future,) = next(reader)
            assert future.result() == step
            reader._in_flight[-1][-1].result()  # the last one that was submitted
            assert len(made) <= step + 1 + 2 * num_workers
    assert not alive()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_is_raised_for_its_batch(num_workers: int) -> None:
    def make(samples: Sequence[int]) -> int:
        if samples[0] == 3:
            raise UserError("row 3 is bad")
        return samples[0]

    done: list[int] = []

    def read() -> None:
        with Prefetcher(range(9), singles(9), make, num_workers) as reader:
            for (got,) in reader:
                done.append(got.result() if num_workers else make(got))

    with pytest.raises(UserError, match="row 3 is bad"):
        read()
    assert done == [0, 1, 2]
    assert not alive()


def test_leaving_early_ends_the_threads_and_makes_no_more() -> None:
    made: list[int] = []

    def slow(samples: Sequence[int]) -> int:
        time.sleep(0.02)
        made.append(samples[0])
        return samples[0]

    def interrupted() -> None:
        with Prefetcher(range(99), singles(99), slow, 2) as reader:
            next(reader)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not alive()
    count = len(made)
    assert count <= 5
    time.sleep(0.1)
    assert len(made) == count


def test_the_prefetcher_ends_with_its_steps() -> None:
    for num_workers in (0, 3):
        with Prefetcher(range(9), singles(4), sum, num_workers) as reader:
            assert len(list(reader)) == 4


# the stages tell what their batches hold


def test_row_lengths_of_a_stage_match_its_batches() -> None:
    made = dpo_case.stage()
    pairs, _ = dpo_case.pairs(made, dpo_case.rows(12))
    cases: list[tuple[Any, Any, list[str]]] = [(made, pairs, ["input_ids"])]
    cases += [(RmStage(RmSection(), made.context), pairs, ["input_ids"])]
    judged = [Unpaired(row.prompt, row.chosen, True) for row in dpo_case.rows(12)]
    for loss in ("kto", "apo_zero"):
        kto = KtoStage(KtoSection(loss=loss), made.context)
        found = kto.make_samples(judged, DropCounts(Path("rows"), read=12))
        cases.append((kto, found, ["input_ids", "unrelated"] if loss == "kto" else ["input_ids"]))
    for stage, samples, parts in cases:
        lengths = stage.row_lengths(samples)
        for one, rows in zip(samples, lengths.tolist()):
            batch = stage.collate([one])
            arrays = [batch[part]["input_ids"] if part == "unrelated" else batch[part] for part in parts]
            assert sum(map(len, arrays)) == len(rows)
            assert max(array.shape[1] for array in arrays) == max(rows)
