from __future__ import annotations

import pytest

from llmsuite.parallel.program.lengths import bucket


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (1, 64),
        (64, 64),
        (65, 128),
        (129, 192),
        (193, 256),
        (257, 384),
        (385, 512),
        (513, 768),
        (1025, 1536),
        (1984, 1984),
    ],
)
def test_rows_get_the_next_length(length: int, expected: int) -> None:
    assert bucket(length, 1984) == expected


def test_few_programs_for_many_lengths() -> None:
    assert len({bucket(length, 32768) for length in range(1, 32769)}) == 18
    assert all(length <= bucket(length, 32768) < 2 * length for length in range(64, 32769))
