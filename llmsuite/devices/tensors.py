"""Copies between the host and the device: the one place where values become a tensor, and a tensor an array.

On a GPU these copies are enqueued on the stream of the computations, and wait for that stream only. `Tensor.numpy`,
`tolist`, `bool` and `paddle.to_tensor` copy on CUDA's default stream (Paddle 3.3.1), which waits for all other streams
of the device, and so for messages that another rank has not received yet. A rank of an interleaved pipeline sends
before it receives from the same peer: with such a copy in between, two ranks wait for each other for ever.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from llmsuite.base.typing import Tensor


def tensor_of(values: Any, dtype: Any = None, place: Any = None) -> Tensor:
    """A tensor with the values and shape of an array, a number or lists of numbers.

    `paddle.to_tensor` does the same, but Paddle 3.3.1 never frees 112 bytes of each tensor that it makes: 2 kB for a
    request to a server, 4 kB for each time that a server gets the weights of a small model. A tensor that is allocated
    first and filled then keeps none. While a program is traced there is no memory to fill, and the values become a
    constant of the program.

    Args:
        values: numbers or bool. An array of uint16 has the bits of bfloat16, as Paddle takes it.
        dtype: the tensor's, as a name or Paddle's; None for the array's, and float32 for Python's floats.
        place: Paddle's place of the tensor; None for that of the current device.
    """
    array = np.asarray(values)
    if dtype is None and array.dtype == np.float64 and not isinstance(values, (np.ndarray, np.generic)):
        dtype = "float32"
    if dtype is not None:
        name = str(dtype).removeprefix("paddle.")
        if name == "bfloat16":  # numpy has none
            return tensor_of(array, place=place).astype(name)
        array = array.astype(name, copy=False)
    if not paddle.in_dynamic_mode():
        return paddle.to_tensor(array, place=place)
    place = place or paddle.framework._current_expected_place()
    if is_like_gpu(place) and array.size:
        # not blocking: CUDA has read pageable memory of the host when the call returns, and no stream has to wait
        tensor = _filled(array, paddle.CPUPlace())._copy_to(place, False)
    else:
        tensor = _filled(array, place)
    tensor.stop_gradient = True  # it says so by itself, but a PyLayer demands a gradient of one that has not been set
    return tensor


def array_of(tensor: Tensor) -> np.ndarray:
    """The values of a tensor as an array of the host, with the same shape; bfloat16 becomes uint16, as in Paddle.

    Waits until the accelerator has computed all that was enqueued before; so a step makes few such copies. Messages
    that are under way may still be so afterwards.
    """
    if is_like_gpu(tensor.place):
        tensor = tensor._copy_to(paddle.CPUPlace(), False)
        paddle.device.current_stream().synchronize()
    return np.asarray(tensor.numpy())


def is_like_gpu(place: Any) -> bool:
    """True for a place on a GPU, or on a device of Paddle's CustomDevice interface whose type says that it is one."""
    return place.is_gpu_place() or (place.is_custom_place() and place.custom_device_type().endswith("_gpu"))


def _filled(array: np.ndarray, place: Any) -> Tensor:
    """A new tensor on a place with the values of an array; the host waits for the copy."""
    tensor = paddle.empty(array.shape, array.dtype.name, device=place)
    if array.size:
        tensor.get_tensor().set(np.asarray(array, order="C"), place)
    return tensor
