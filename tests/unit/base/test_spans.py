"""Spans are recorded by what a trace gives, in their order, and cost next to nothing otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from llmsuite.base import spans


@pytest.fixture
def recorded() -> Iterator[list[str]]:
    """The begins and ends of spans while they are recorded."""
    found: list[str] = []

    @contextlib.contextmanager
    def recorder(name: str) -> Iterator[None]:
        found.append(f"{name} begins")
        try:
            yield
        finally:
            found.append(f"{name} ends")

    spans.record(recorder)
    yield found
    spans.record(None)


@spans.spanned("work")
def work(number: int, *, more: int) -> int:
    with spans.span("inner"):
        return number + more


def test_spans_are_recorded_inside_each_other(recorded: list[str]) -> None:
    assert spans.is_recording()
    assert work(1, more=2) == 3
    assert recorded == ["work begins", "inner begins", "inner ends", "work ends"]


def test_a_span_ends_where_its_block_raises(recorded: list[str]) -> None:
    with pytest.raises(ValueError, match="x"), spans.span("work"):
        raise ValueError("x")
    assert recorded == ["work begins", "work ends"]


def test_nothing_is_recorded_without_a_trace() -> None:
    assert not spans.is_recording()
    assert spans.span("a") is spans.span("b")
    assert work(1, more=2) == 3
