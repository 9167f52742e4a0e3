"""Tensors made of arrays and numbers: their values, and what they leave behind."""

from __future__ import annotations

import ast
import collections
import gc
import re
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import psutil
import pytest

from llmsuite.devices import tensors
from llmsuite.devices.tensors import array_of, in_one_copy, shared_tensor_of, tensor_of, tensors_of
from tests.support.host_copies import host_copies
from tests.support.house import house
from tests.support.paths import ROOT


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "int64", "float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (2, 0), (2, 3, 5)])
def test_the_tensor_equals_that_of_paddle(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    # the second one is not contiguous
    for given, place in ((array, None), (array.T, None), (array, paddle.CPUPlace())):
        found = tensor_of(given, place=place)
        expected = paddle.to_tensor(given)
        assert (found.dtype, found.shape, found.place, found.stop_gradient) == (
            expected.dtype,
            expected.shape,
            expected.place,
            True,
        )
        assert np.array_equal(found.numpy(), given)


@pytest.mark.parametrize(
    "values", [2, 0.5, True, [1, 2], [0.1, 2.0], [[True], [False]], (1, 0.5), [], np.float64(0.1), 3_000_000_000]
)
@pytest.mark.parametrize("dtype", [None, "float32", "float64", "int64", "bfloat16", paddle.float32, paddle.bfloat16])
def test_numbers_become_the_tensor_that_paddle_makes_of_them(values: object, dtype: object) -> None:
    found = tensor_of(values, dtype)
    expected = paddle.to_tensor(values, dtype)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.astype("float64").tolist() == expected.astype("float64").tolist()


def test_arrays_of_uint16_are_bits_of_bfloat16() -> None:
    found = tensor_of(np.asarray([0x3F80, 0x4000], "uint16"))
    assert found.dtype == paddle.bfloat16
    assert found.astype("float32").tolist() == [1.0, 2.0]


def test_the_tensor_has_its_own_memory() -> None:
    array = np.zeros([4])
    found = tensor_of(array)
    array[:] = 1
    assert not found.numpy().any()


def test_a_layer_in_python_asks_for_no_gradient_of_it() -> None:
    class Rows(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx: Any, x: paddle.Tensor, index: paddle.Tensor) -> paddle.Tensor:
            return x.index_select(index)

        @staticmethod
        def backward(ctx: Any, gradient: paddle.Tensor) -> tuple[paddle.Tensor, None]:
            return gradient, None

    x = paddle.ones([2])
    x.stop_gradient = False
    Rows.apply(x, tensor_of([1, 0])).sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]


def test_a_traced_program_has_the_array_as_a_constant() -> None:
    values = np.asarray([1.0, 2.0], "float32")

    def add(x: paddle.Tensor) -> paddle.Tensor:
        return x + tensor_of(values)

    assert paddle.jit.to_static(add, full_graph=True)(paddle.ones([2])).tolist() == [2.0, 3.0]


@pytest.mark.parametrize("values", [np.ones([1, 1], "int64"), [0.5, 1.0], 1])
def test_freed_tensors_leave_no_memory(values: object) -> None:
    def grown(count: int) -> int:
        gc.collect()
        before = psutil.Process().memory_info().rss
        for _ in range(count):
            tensor_of(values)
        gc.collect()
        return int(psutil.Process().memory_info().rss - before)

    grown(2000)  # pools of allocators
    assert grown(40_000) < 2**20, "with `paddle.to_tensor` it is 4 MB"


KEPT = re.compile(r"\bto_tensor\(|paddle\.where\([^()\n]*, -?[\d.]+\)")
"""`to_tensor`, and `where` with a number, of which Paddle makes a tensor by it."""


def test_the_package_makes_no_tensor_that_paddle_keeps() -> None:
    """In any loop it would be memory that grows; all values of the host go through one function."""
    found = [
        f"{path}:{number}"
        for path in sorted((ROOT / "llmsuite").rglob("*.py"))
        if path.name not in ("tensors.py", "exported_readme.py")  # the function, and a text for users
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if KEPT.search(line)
    ]
    assert not found


class OnGpu:
    """A tensor that says that it is on a GPU, and notes how it is copied."""

    def __init__(self, values: list[float], log: list[object]):
        self.place = SimpleNamespace(is_gpu_place=lambda: True)
        self._values = values
        self._log = log

    def _copy_to(self, place: Any, blocking: bool) -> Any:
        self._log.append((str(place), blocking))
        return paddle.to_tensor(self._values)


def test_a_copy_from_a_gpu_waits_for_the_stream_of_computations(monkeypatch: pytest.MonkeyPatch) -> None:
    """And for no other: not blocking, then a wait for the current stream."""
    log: list[object] = []
    stream = SimpleNamespace(synchronize=lambda: log.append("waited"))
    monkeypatch.setattr(paddle.device, "current_stream", lambda: stream)
    tensor: Any = OnGpu([1.0, 2.5], log)
    assert array_of(tensor).tolist() == [1.0, 2.5]
    assert log == [(str(paddle.CPUPlace()), False), "waited"]


class OnHost:
    """A tensor of the host that notes what becomes of it."""

    def __init__(self, log: list[object]):
        self._log = log

    def pin_memory(self) -> Any:
        pinned: Any = OnHost(self._log)
        weakref.finalize(pinned, self._log.append, "freed")
        return pinned

    def _copy_to(self, place: Any, blocking: bool) -> Any:
        self._log.append(("copy", blocking))
        return paddle.ones([1])


def test_pinned_memory_is_kept_until_it_was_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[object] = []
    is_over = [False]
    event = SimpleNamespace(query=lambda: is_over[0])
    monkeypatch.setattr(paddle.device, "current_stream", lambda: SimpleNamespace(record_event=lambda: event))
    monkeypatch.setattr(tensors, "_in_flight", collections.deque())
    place = SimpleNamespace(is_gpu_place=lambda: True)
    given: Any = OnHost(log)
    for _ in range(2):
        tensors._sent(given, place)
    assert log == [("copy", False), ("copy", False)]
    is_over[0] = True
    tensors._sent(given, place)
    assert log == [("copy", False), ("copy", False), ("copy", False), "freed", "freed"]


def test_arrays_on_the_cpu_have_tensors_of_their_own() -> None:
    array = np.arange(3)
    with in_one_copy([array]):
        first, second = shared_tensor_of(array), shared_tensor_of(array)
    assert first.data_ptr() != second.data_ptr()
    assert [tensor.tolist() for tensor in tensors_of([array, array + 1])] == [[0, 1, 2], [1, 2, 3]]


ROOMS = tuple(f"llmsuite.{room}." for room in ("adapters", "engine", "models", "observe", "parallel", "rl", "stages"))


def test_training_copies_between_host_and_device_here_only() -> None:
    """Other copies wait for messages that other ranks have not received yet."""
    found = [
        f"{module}:{line}" for module, tree in house().items() if module.startswith(ROOMS) for line in host_copies(tree)
    ]
    assert found == []


def test_copies_are_seen_however_they_are_written() -> None:
    code = """
def run(x: Tensor, other: Tensor | None, count: int) -> None:
    y: Tensor = made()
    int(x[0]), float(-y), bool((x > 0).all()), x.tolist()
    unknown.item(), other.numpy()
    if x.max() > 0: pass
    assert (y == 1).all()
    if other: pass
    if x is None or x.shape[0] > 1 or x.is_dist() or count > 0: int(count), float(x.shape[0]), count.tolist()
"""
    assert host_copies(ast.parse(code)) == [4, 5, 6, 7]
