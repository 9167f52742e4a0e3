"""Tensors made of arrays: their values, and what they leave behind."""

from __future__ import annotations

import gc

import numpy as np
import paddle
import psutil
import pytest

from llmsuite.devices.tensors import tensor_of


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "int64", "float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (2, 0), (2, 3, 5)])
def test_the_tensor_equals_that_of_paddle(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    # the second one is not contiguous
    for given, place in ((array, None), (array.T, None), (array, paddle.CPUPlace())):
        found = tensor_of(given, place)
        expected = paddle.to_tensor(given)
        assert (found.dtype, found.shape, found.place, found.stop_gradient) == (
            expected.dtype,
            expected.shape,
            expected.place,
            True,
        )
        assert np.array_equal(found.numpy(), given)


def test_the_tensor_has_its_own_memory() -> None:
    array = np.zeros([4])
    found = tensor_of(array)
    array[:] = 1
    assert not found.numpy().any()


def test_a_traced_program_has_the_array_as_a_constant() -> None:
    values = np.asarray([1.0, 2.0], "float32")

    def add(x: paddle.Tensor) -> paddle.Tensor:
        return x + tensor_of(values)

    assert paddle.jit.to_static(add, full_graph=True)(paddle.ones([2])).tolist() == [2.0, 3.0]


def test_freed_tensors_leave_no_memory() -> None:
    array = np.ones([1, 1], "int64")

    def grown(count: int) -> int:
        gc.collect()
        before = psutil.Process().memory_info().rss
        for _ in range(count):
            tensor_of(array)
        gc.collect()
        return int(psutil.Process().memory_info().rss - before)

    grown(2000)  # pools of allocators
    assert grown(40_000) < 2**20, "with `paddle.to_tensor` it is 4 MB"
