"""Copies between the host and the device: the one place where values become a tensor, and a tensor an array.

On a GPU these copies are enqueued on the stream of the computations, and wait for that stream only. `Tensor.numpy`,
`tolist`, `bool` and `paddle.to_tensor` copy on CUDA's default stream (Paddle 3.3.1), which waits for all other streams
of the device, and so for messages that another rank has not received yet. A rank of an interleaved pipeline sends
before it receives from the same peer: with such a copy in between, two ranks wait for each other for ever.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.base.typing import Tensor

_ALIGNMENT = 256
"""Bytes: where a tensor may begin in memory, as in Paddle's allocators."""
_PARTS = frozenset({"bool", "int32", "int64", "float32", "float64"})
"""Dtypes of arrays that may share a copy with others."""


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


def tensors_of(arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """Tensors with the values of several arrays, on the current device. To an accelerator they go in one copy, and are
    parts of one buffer: nobody may change them in place."""
    place = paddle.framework._current_expected_place()
    joined = [array for array in arrays if array.dtype.name in _PARTS and array.ndim and array.size]
    if len(joined) < 2 or not is_like_gpu(place):
        return [tensor_of(array) for array in arrays]
    begins = []
    size = 0
    for array in joined:
        begins.append(size)
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    buffer = np.zeros(size, "uint8")
    for array, begin in zip(joined, begins):
        buffer[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view("uint8")
    there = _sent(_filled(buffer, paddle.CPUPlace()), place)
    # the whole buffer in each dtype first: of a part of it, Paddle 3.3.1 finds the wrong address in another dtype
    names = {array.dtype.name for array in joined}
    of_dtype = {name: there.view(name) for name in names}
    parts = {id(array): _part(of_dtype[array.dtype.name], array, begin) for array, begin in zip(joined, begins)}
    return [parts[id(array)] if id(array) in parts else tensor_of(array) for array in arrays]


def _part(whole: Tensor, array: np.ndarray, begin: int) -> Tensor:
    """The part of a buffer that has the values of an array and begins at a byte."""
    strides = [math.prod(array.shape[dim + 1 :]) for dim in range(array.ndim)]
    tensor = paddle.as_strided(whole, list(array.shape), strides, begin)
    tensor.stop_gradient = True  # as in `tensor_of`
    return tensor


_in_flight: collections.deque[tuple[Tensor, Any]] = collections.deque()
"""Pinned memory that a copy may still read, and the event after that copy."""


def _sent(values: Tensor, place: Any) -> Tensor:
    """A copy of a tensor of the host on an accelerator, which the host does not wait for."""
    if not place.is_gpu_place():
        return values._copy_to(place, False)
    # pinned: CUDA would copy more than 64 KB of pageable memory when its turn on the stream comes, and the host waits
    pinned = values.pin_memory()
    tensor = pinned._copy_to(place, False)
    # Paddle would give pinned memory to the next tensor as soon as nobody refers to it, while the copy still reads it
    while _in_flight and _in_flight[0][1].query():
        _in_flight.popleft()
    _in_flight.append((pinned, paddle.device.current_stream().record_event()))
    return tensor


class _OneCopy:
    """Arrays whose tensors are made together, when the first one is asked for."""

    def __init__(self, arrays: Iterable[np.ndarray]):
        self._arrays = list(arrays)
        self._numbers = {id(array): number for number, array in enumerate(self._arrays)}
        self._tensors: list[Tensor] = []

    def tensor_of(self, values: Any) -> Tensor | None:
        """The tensor of one of the arrays; None for other values."""
        number = self._numbers.get(id(values))
        if number is None:
            return None
        self._tensors = self._tensors or tensors_of(self._arrays)
        return self._tensors[number]


_together: contextvars.ContextVar[_OneCopy | None] = contextvars.ContextVar("arrays in one copy", default=None)


@contextlib.contextmanager
def in_one_copy(arrays: Iterable[np.ndarray]) -> Iterator[None]:
    """While active, `shared_tensor_of` gives tensors of these arrays that go to an accelerator in one copy. It is made
    when the first of them is asked for. Nobody changes the arrays meanwhile."""
    on_accelerator = is_like_gpu(paddle.framework._current_expected_place())
    token = _together.set(_OneCopy(arrays) if on_accelerator else None)
    try:
        yield
    finally:
        _together.reset(token)


def shared_tensor_of(values: Any) -> Tensor:
    """`tensor_of`, where others may get the same tensor, as under `in_one_copy`: nobody may change it in place."""
    together = _together.get()
    found = None if together is None else together.tensor_of(values)
    return tensor_of(values) if found is None else found


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
