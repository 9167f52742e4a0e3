"""Sizes of adapters that are no pair of factors. Imports no Paddle."""

from __future__ import annotations

import math

from llmsuite.errors import UserError
from llmsuite.models.shard_plan import KRON_INNER, KRON_INNER_FIRST, KRON_INNER_SECOND, KRON_OUTER


def square_size(rank: int, num_inputs: int, num_outputs: int) -> int:
    """The width of MoRA's square matrix, the even number below: it has as many parameters as a pair of that rank
    (Jiang et al. 2024, arXiv 2405.12130, section 4).

    Raises:
        UserError: it is more than twice as wide as there are inputs.
    """
    size = int(math.sqrt((num_inputs + num_outputs) * rank) + 0.5) // 2 * 2
    if size > 2 * num_inputs:
        raise UserError(
            f"lora.rank: is {rank}, for which the square matrix of mora beside one of {num_inputs} x {num_outputs} is "
            f"{size} wide, more than twice its inputs; lower it to {4 * num_inputs**2 // (num_inputs + num_outputs)}"
        )
    return size


def kron_shapes(rank: int, num_inputs: int, num_outputs: int) -> dict[str, tuple[int, int]]:
    """The factors of LoKr's update (kron(w1, w2))^T: w1 [O1, I1] and w2 [O2, I2], or at a low rank those of a product
    [O2, R] [R, I2] (Yeh et al. 2023, LyCORIS, arXiv 2309.14859); which of the two, as paddlenlp and PEFT choose it."""
    (outer_inputs, inner_inputs), (outer_outputs, inner_outputs) = near_square(num_inputs), near_square(num_outputs)
    found = {KRON_OUTER: (outer_outputs, outer_inputs)}
    if rank >= max(inner_outputs, inner_inputs) / 2:
        return {**found, KRON_INNER: (inner_outputs, inner_inputs)}
    return {**found, KRON_INNER_FIRST: (inner_outputs, rank), KRON_INNER_SECOND: (rank, inner_inputs)}


def near_square(size: int) -> tuple[int, int]:
    """The two factors of a size that are nearest to each other, the smaller one first."""
    smaller = next(divisor for divisor in range(math.isqrt(size), 0, -1) if size % divisor == 0)
    return smaller, size // smaller
