"""Tensors made of arrays, in loops that a server runs for weeks."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from llmsuite.base.typing import Tensor


def tensor_of(array: np.ndarray, place: Any = None) -> Tensor:
    """A tensor with the values, shape and dtype of an array.

    `paddle.to_tensor` does the same, but Paddle 3.3.1 never frees 112 bytes of each tensor that it makes of an array:
    2 kB for a request to a server. A tensor that is allocated first and filled then keeps none. While a program is
    traced there is no memory to fill, and the array becomes a constant of the program.

    Args:
        array: of numbers or bool.
        place: Paddle's place of the tensor; None for that of the current device.
    """
    if not paddle.in_dynamic_mode():
        return paddle.to_tensor(array, place=place)
    place = place or paddle.framework._current_expected_place()
    tensor = paddle.empty(array.shape, array.dtype.name, device=place)
    if array.size:
        tensor.get_tensor().set(np.asarray(array, order="C"), place)
    return tensor
