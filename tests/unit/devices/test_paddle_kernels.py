"""Kernels of GPUs and XPUs on the CPU, as far as Paddle has them there."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.devices import optimizer_ops, paddle_kernels
from llmsuite.devices.optimizer_ops import add_gradient


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def test_squares_are_summed_in_one_read() -> None:
    arrays = [random(300, 70), random(7, seed=1) * 1e15]
    tensors = [paddle.to_tensor(x) for x in arrays]
    expected = sum(np.square(x.astype("float64") * 1e-15).sum() for x in arrays)
    for square_sum in (paddle_kernels.one_read_square_sum, optimizer_ops.square_sum):
        found = square_sum(tensors, 1e-15)
        assert found.shape == []
        assert abs(float(found) / expected - 1) < 1e-6
    low = [*tensors[1:], *(x.astype("bfloat16") for x in tensors[:1])]
    assert abs(float(paddle_kernels.one_read_square_sum(low, 1e-15)) / expected - 1) < 1e-2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gradients_are_added_in_float32(dtype: str) -> None:
    total = paddle.to_tensor(random(50, 3))
    gradient = paddle.to_tensor(random(50, 3, seed=1)).astype(dtype)
    expected = total.numpy() + gradient.astype("float32").numpy()
    memory = total.data_ptr()
    with paddle.no_grad():
        add_gradient(total, gradient)
    assert np.array_equal(total.numpy(), expected)
    assert total.data_ptr() == memory, "in place"


def test_all_layers_of_a_pass_rotate_by_the_same_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def kernel(x: Any, *others: Any, sin: Any, cos: Any, use_neox_rotary_style: bool) -> tuple[Any, None, None]:
        given.append((cos, sin))
        return x, None, None

    monkeypatch.setattr(paddle.incubate.nn.functional, "fused_rotary_position_embedding", kernel)
    x = paddle.to_tensor(random(2, 5, 3, 8))
    passes = [[paddle.to_tensor(random(1, 5, 1, 4, seed=seed + i)) for i in range(2)] for seed in (1, 3)]
    for cos, sin in passes:
        for _ in range(3):
            paddle_kernels.fused_rotary(x, cos, sin)
    assert len({id(cos) for cos, _ in given}) == len({id(sin) for _, sin in given}) == 2
    for (cos, sin), (own_cos, own_sin) in zip(passes, (given[0], given[-1]), strict=True):
        for half, full in ((cos, own_cos), (sin, own_sin)):
            assert np.array_equal(full.numpy(), np.concatenate([half.numpy()] * 2, -1))
