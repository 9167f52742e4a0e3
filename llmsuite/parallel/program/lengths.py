"""Sequence lengths that programs are compiled for. Plain arithmetic, without Paddle."""

from __future__ import annotations

LENGTH_MULTIPLE = 64
"""Batches of programs are padded to multiples of this length, so that few shapes have to be compiled."""


def longest_row(max_length: int, multiple: int) -> int:
    """Number of tokens of a row of `data.max_length`, padded to a multiple of `multiple`."""
    return -(-max_length // multiple) * multiple


def padded_length(length: int, longest: int, multiple: int) -> int:
    """The length that the rows of a step are padded to: 1, 2, 3, 4, 6, 8, 12, 16 ... times `multiple`, at most
    `longest`; for a multiple of 64 these are 64, 128, 192, 256, 384 ... tokens. So the number of programs grows with
    the logarithm of the length, not with the length.

    Args:
        length: of the longest row of the global batch.
        longest: length of a row in this run, a multiple of `multiple`.
        multiple: `llmsuite.recipe.plans.ParallelPlan.length_multiple` of the run.
    """
    assert 0 < length <= longest
    size = step = multiple
    while size < length:
        step = 2 * step if size == 4 * step else step
        size += step
    return min(size, longest)
