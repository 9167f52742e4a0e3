"""MoRA: one square matrix instead of two factors, with as many parameters (Jiang et al. 2024, arXiv 2405.12130)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmsuite.base.errors import UserError
from llmsuite.base.typing import ReadSlice
from llmsuite.contract.hookspecs import AdaptedModel, AdapterConfig, AdapterLayers, AdapterParameter
from llmsuite.models.adapter_method import zeros
from llmsuite.plugins.adapters_extra.structured import StructuredMethod

if TYPE_CHECKING:
    import numpy as np

SQUARE = "lora_square"
"""Name of the matrix M [S, S]."""
_NO_EFFECT = "has no effect with lora.method mora, which has neither scaling nor a factor B; remove it"


class Mora(StructuredMethod):
    """W + f with M, which rotates pieces of the input by their index; there is no scale."""

    name = "mora"
    help = "a square matrix instead of A and B, with as many parameters and no scaling"
    parameters: Mapping[str, AdapterParameter] = {SQUARE: AdapterParameter(partial_gradient="shard")}
    refused_keys: Mapping[str, str] = dict.fromkeys(("alpha", "rslora", "lora_plus_ratio"), _NO_EFFECT)
    flag = "use_mora"
    peft_type = "MORA"
    scale_keys = None

    def layers(self) -> AdapterLayers:
        from llmsuite.plugins.adapters_extra.layers.mora import MoraExperts, MoraLinear

        return AdapterLayers(MoraLinear, MoraExperts)

    def shapes(self, rank: int, num_inputs: int, num_outputs: int) -> dict[str, tuple[int, ...]]:
        size = square_size(rank, num_inputs, num_outputs)
        return {SQUARE: (size, size)}

    def initial(self, model: AdaptedModel) -> ReadSlice:
        """M is zero."""

        def initial(name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
            return zeros(index)

        return initial

    def update_of(self, x: Any, parameters: Mapping[str, Any], num_outputs: int, scale: float) -> Any:
        from llmsuite.plugins.adapters_extra.layers.mora import mora_update

        return mora_update(x, parameters[SQUARE], num_outputs)

    def update(self, parameters: Mapping[str, np.ndarray], shape: tuple[int, ...], scale: float) -> np.ndarray:
        return full_update(parameters[SQUARE], shape)

    def peft_keys(self, config: AdapterConfig) -> dict[str, Any]:
        # PEFT does not know the type, and refuses it
        return {"peft_type": self.peft_type, "use_mora": True, "lora_dropout": config.dropout}

    def fits_matrix(self, stored: Mapping[str, tuple[int, ...]], shape: tuple[int, ...]) -> bool:
        height, width = stored[SQUARE]
        return height == width and height % 2 == 0 and height <= 2 * shape[0]


def square_size(rank: int, num_inputs: int, num_outputs: int) -> int:
    """Width of MoRA's square matrix, which has about as many parameters as a pair of factors of this rank: the root of
    (I + O) rank, rounded to the nearest integer and then down to an even one (Jiang et al. 2024, arXiv 2405.12130,
    section 4).

    Raises:
        UserError: the width is more than twice the number of inputs.
    """
    size = int(math.sqrt((num_inputs + num_outputs) * rank) + 0.5) // 2 * 2
    if size > 2 * num_inputs:
        raise UserError(
            f"lora.rank: is {rank}, for which the square matrix of mora for a layer of {num_inputs} x {num_outputs} is "
            f"{size} wide, more than twice its inputs; lower it to {4 * num_inputs**2 // (num_inputs + num_outputs)}"
        )
    return size


def full_update(square: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The update of W [inputs, outputs] by MoRA: `layers.mora.mora_update` as a matrix.

    Piece i of the inputs, rotated by R(i), times M is R(i) M times piece i: blocks on a diagonal. The last block wraps
    around to the first inputs, and the blocks are repeated along the outputs.

    Args:
        square: M [S, S].
        shape: of W.
    """
    import numpy as np

    size = square.shape[0]
    (num_inputs, num_outputs) = shape
    half = size // 2
    num_pieces = -(-num_inputs // size)
    frequencies = 10000.0 ** (-np.arange(0, size, 2) / size)
    update = np.zeros((num_inputs, num_pieces * size), "float64")  # float64: blocks that overlap are summed
    for i in range(num_pieces):
        angles = i * np.concatenate([frequencies, frequencies])[:, None]
        cos = np.cos(angles) * square
        sin = np.sin(angles) * square
        rotated = cos + np.concatenate([sin[half:], -sin[:half]])
        inputs = np.arange(i * size, (i + 1) * size) % num_inputs
        np.add.at(update, (inputs[:, None], np.arange(i * size, (i + 1) * size)[None]), rotated)
    repeats = -(-num_outputs // update.shape[1])
    return np.concatenate([update] * repeats, 1)[:, :num_outputs].astype("float32")
