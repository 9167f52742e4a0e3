"""Numbers of the other ranks that decide which passes a rank makes, and of which shapes.

Tensors of other ranks may have any values in a rehearsal, where a rank runs without the others; these numbers may not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class OtherRanks:
    """The numbers that other ranks send; here those that have arrived."""

    def numbers_of_rank0(self, own: Sequence[float], arrived: list[float]) -> list[float]:
        """The numbers of rank 0, see `collective.broadcast_from_rank0`.

        Args:
            own: those that this rank passed to the call.
            arrived: those that rank 0 passed.
        """
        return arrived

    def sum_of_arrays(self, own: np.ndarray, arrived: np.ndarray) -> np.ndarray:
        """The sum of the arrays of the ranks that load data, see `collective.sum_array_over_loader_ranks`.

        Args:
            own: that of this rank.
            arrived: the sum.
        """
        return arrived

    def header_sent(self, header: Sequence[int], chunk: int) -> None:
        """Activations of a chunk with this header go to the next part, which gets or knows it, see
        `edges.HEADER_LENGTH`."""

    def header(self, arrived: Sequence[int]) -> Sequence[int]:
        """The header of activations that come from the previous part; `arrived` is what this rank got or knows."""
        return arrived
