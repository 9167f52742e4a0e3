from __future__ import annotations

import pytest

from llmsuite.parallel.program.lengths import padded_length


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
    assert padded_length(length, 1984, 64) == expected


def test_few_programs_for_many_lengths() -> None:
    assert len({padded_length(length, 32768, 64) for length in range(1, 32769)}) == 18
    assert all(length <= padded_length(length, 32768, 64) < 2 * length for length in range(64, 32769))


def test_three_ranks_share_the_sequence_of_every_program() -> None:
    """Sequence parallel needs lengths that its ranks can share: 192 is the least common multiple of 64 and 3."""
    found = {padded_length(length, 1920, 192) for length in range(1, 1921)}
    assert found == {192, 384, 576, 768, 1152, 1536, 1920}
