"""The lengths that programs are made for. Plain arithmetic, without Paddle."""

from __future__ import annotations

import math

from llmsuite.recipe.resolve import RunPlan

LENGTH_MULTIPLE = 64
"""Batches that programs run are padded to multiples of this length, so that few shapes have to be compiled."""


def length_multiple(plan: RunPlan) -> int:
    """Batches of a run are padded to a multiple of this many tokens: for programs, and for equal parts of a sequence
    under sequence parallel."""
    multiple = LENGTH_MULTIPLE if plan.recipe.engine.mode == "to_static" else 1
    return math.lcm(multiple, plan.degrees.tp) if plan.recipe.parallel.sequence_parallel else multiple


def longest_row(plan: RunPlan) -> int:
    """Tokens of a row of `data.max_length`, padded."""
    multiple = length_multiple(plan)
    return -(-plan.recipe.data.max_length // multiple) * multiple


def bucket(length: int, longest: int, multiple: int) -> int:
    """The length that the rows of a step are padded to: 1, 2, 3, 4, 6, 8, 12, 16 ... times a multiple, so with 64 64,
    128, 192, 256, 384 ... tokens, at most the longest one. So the number of programs grows with the logarithm of the
    length, not with the length.

    Args:
        length: of the longest row of the global batch.
        longest: that rows have in this run, a multiple of `multiple`.
        multiple: `length_multiple` of the run.
    """
    assert 0 < length <= longest
    size = step = multiple
    while size < length:
        step = 2 * step if size == 4 * step else step
        size += step
    return min(size, longest)
