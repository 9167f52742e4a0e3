"""The dynamic data type of 8 bits, by whose values blocks are quantised (Dettmers et al. 2022, arXiv 2110.02861, 1.3).

A value of a block is divided by the block's largest magnitude, and stored as the number of the nearest of 256 values
between -1 and 1, or of those between 0 and 1. They are those of bitsandbytes (`create_dynamic_map`): a decimal exponent
from 0 to -6 in unary code, and the bits that it leaves as a linear fraction. Halves round down. Imports no Paddle.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported where it computes: a recipe is read without NumPy
    import numpy as np

BLOCK = 256
"""Values of a block; the last one of a tensor may have fewer."""
_EXPONENTS = 7


@functools.cache
def dynamic_map(signed: bool) -> np.ndarray:
    """The values of the codes, [256] in float32, in ascending order; 0 and 1 are among them."""
    import numpy as np

    found = [np.zeros(1, "float32"), np.ones(1, "float32")]
    for exponent in range(_EXPONENTS):
        bounds = _even_steps(2**exponent if signed else 2 ** (exponent + 1))
        middles = (bounds[:-1] + bounds[1:]) / np.float32(2)
        values = np.float32(10.0 ** (exponent - _EXPONENTS + 1)) * middles
        found.append(values)
        if signed:
            found.append(-values)
    return np.sort(np.concatenate(found))


def _even_steps(num_steps: int) -> np.ndarray:
    """The bounds of even steps from 0.1 to 1 in float32, as `torch.linspace` computes them: each from the nearer end,
    by a fused multiplication and addition."""
    import numpy as np

    first = np.float32(0.1)
    last = np.float32(1)
    step = np.float64((last - first) / np.float32(num_steps))
    numbers = np.arange(num_steps + 1)
    # a product of two float32 numbers is exact in float64, so that only the sum is rounded
    from_first = first + step * numbers
    from_last = last - step * (num_steps - numbers)
    return np.where(numbers < (num_steps + 1) // 2, from_first, from_last).astype("float32")


@functools.cache
def thresholds(signed: bool) -> np.ndarray:
    """The middles between neighbours, [255]: the code of a value is the number of those that it is above."""
    import numpy as np

    values = dynamic_map(signed)
    return (values[:-1] + values[1:]) / np.float32(2)


def quantise_blocks(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes [N] of flat values [N] in float32, by the signed map, and the largest magnitude of each block."""
    import numpy as np

    num_blocks = -(-len(values) // BLOCK)
    padded = np.zeros(num_blocks * BLOCK, "float32")
    padded[: len(values)] = values
    blocks = padded.reshape(num_blocks, BLOCK)
    absmax = np.abs(blocks).max(1)
    scaled = blocks * (np.float32(1) / np.where(absmax != 0, absmax, np.float32(1)))[:, None]
    codes = np.searchsorted(thresholds(True), scaled.reshape(-1)[: len(values)]).astype("uint8")
    return codes, absmax
