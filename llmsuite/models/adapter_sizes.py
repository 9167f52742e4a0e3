"""Sizes of adapters that are no pair of factors. Imports no Paddle."""

from __future__ import annotations

import math

from llmsuite.errors import UserError


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
