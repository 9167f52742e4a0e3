"""The lengths that programs are made for. Plain arithmetic, without Paddle."""

from __future__ import annotations

LENGTH_MULTIPLE = 64
"""Batches that programs run are padded to multiples of this length, so that few shapes have to be compiled."""


def bucket(length: int, longest: int) -> int:
    """The length that the rows of a step are padded to: 64, 128, 192, 256, 384, 512, 768, 1024 ... tokens, at most the
    longest one. So the number of programs grows with the logarithm of the length, not with the length.

    Args:
        length: of the longest row of the global batch.
        longest: that rows have in this run, as a multiple of `LENGTH_MULTIPLE`.
    """
    assert 0 < length <= longest
    size = step = LENGTH_MULTIPLE
    while size < length:
        step = 2 * step if size == 4 * step else step
        size += step
    return min(size, longest)
