"""Chunks that take as long as a few decoding passes, of simulated times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.serving.chunk_budget import CHUNK_PASSES, IMPERCEPTIBLE, SMALLEST, ChunkBudget

SECONDS = st.floats(1e-4, 3.0)


@given(of_pass=SECONDS, of_call=SECONDS, of_token=st.floats(1e-7, 0.1), largest=st.integers(1, 4096))
def test_a_chunk_lasts_a_few_passes(of_pass: float, of_call: float, of_token: float, largest: int) -> None:
    budget = ChunkBudget(largest)
    budget.record_pass(of_pass)
    sizes = []
    for _ in range(100):
        tokens = budget.tokens(is_limited=True)
        sizes.append(tokens)
        budget.record_chunk(tokens, of_call + tokens * of_token, is_full=True)
    most = max(CHUNK_PASSES * of_pass, IMPERCEPTIBLE)
    for tokens in sizes:
        assert tokens == min(SMALLEST, largest) or of_call + tokens * of_token <= 2 * most, (
            "one step of growth too long"
        )
    seconds = of_call + sizes[-1] * of_token
    assert seconds <= 1.01 * most or sizes[-1] == min(SMALLEST, largest)
    assert sizes[-1] == largest or seconds + 2 * of_token >= 0.5 * most, "no shorter than it has to be"


def test_where_nobody_decodes_chunks_are_large() -> None:
    budget = ChunkBudget(256)
    assert budget.tokens(is_limited=False) == 256
    assert budget.tokens(is_limited=True) == SMALLEST


@pytest.mark.parametrize(("seconds", "tokens"), [(0.001, SMALLEST), (3.0, SMALLEST), (1.4, 2 * SMALLEST)])
def test_an_end_of_a_text_says_only_that_a_chunk_is_too_long(seconds: float, tokens: int) -> None:
    budget = ChunkBudget(256)
    for _ in range(3):
        budget.record_pass(1.0)
    budget.record_chunk(SMALLEST, seconds, is_full=seconds == 1.4)
    assert budget.tokens(is_limited=True) == tokens


def test_one_slow_pass_changes_nothing() -> None:
    budget = ChunkBudget(256)
    for seconds in (1.0, 1.0, 100.0):
        budget.record_pass(seconds)
    budget.record_chunk(SMALLEST, 3.0, is_full=True)
    assert budget.tokens(is_limited=True) == SMALLEST
