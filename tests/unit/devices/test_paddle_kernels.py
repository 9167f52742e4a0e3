"""Kernels of GPUs and XPUs on the CPU, as far as Paddle has them there."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.devices import optimizer_ops, paddle_kernels
from llmsuite.devices.optimizer_ops import OptimizerOps, add_gradient
from llmsuite.parallel.optimizer import Optimizer
from tests.support import alone, dpo_case


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


SHAPES = ([5, 7], [100, 33], [64], [3, 4], [9], [8, 8])
UPDATES = 3
"""Number of updates of each so far."""
RATES = (1e-3, 1e-3, 1e-3, 1e-3, 2e-3, 1e-3)
DECAYS = (0.1, 0.1, 0.0, 0.1, 0.0, 0.1)


def state_of_adamw(betas: tuple[float, float]) -> list[list[Any]]:
    """Parameters, gradients, both moments, and the powers of both betas."""
    found: list[list[Any]] = [[paddle.to_tensor(random(*shape, seed=seed)) for shape in SHAPES] for seed in range(4)]
    found[3] = [x.square() for x in found[3]]
    return [*found, *([paddle.to_tensor([beta**UPDATES], dtype="float32") for _ in SHAPES] for beta in betas)]


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.99, 0.9)])
def test_parameters_updated_together_are_those_of_one_after_the_other(
    betas: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, also with other learning rates and decays."""
    sizes = list[int]()
    fused = paddle._C_ops.fused_adam_

    def counted(parameters: list[Any], *others: Any) -> Any:
        sizes.append(len(parameters))
        return fused(parameters, *others)

    monkeypatch.setattr(paddle._C_ops, "fused_adam_", counted)
    together = state_of_adamw(betas)
    single = state_of_adamw(betas)
    with paddle.no_grad():
        paddle_kernels.merged_adamw(*together[:2], 0.25, RATES, together[2:], betas, 1e-8, DECAYS)
        for number in range(len(SHAPES)):
            parameter, gradient, *slots = (each[number] for each in single)
            gradient.scale_(0.25)
            rate = paddle.full([1], RATES[number])
            paddle_kernels._update_one(parameter, gradient, rate, slots, betas, 1e-8, DECAYS[number])
    assert sizes == [4]
    for own, expected in zip(together, single, strict=True):
        assert all(np.array_equal(a.numpy(), b.numpy()) for a, b in zip(own, expected, strict=True))


def test_an_optimizer_with_merged_updates_learns_the_same() -> None:
    """Bit by bit as with Paddle's own updates; one layer has no gradient in the second step, and has had fewer updates
    since. The others go on from a checkpoint after it."""
    train = dpo_case.train_section(optimizer="adamw", weight_decay=0.1, max_grad_norm=1.0)
    learnt = []
    for ops in (OptimizerOps(), OptimizerOps(adamw=paddle_kernels.merged_adamw)):
        paddle.seed(1)
        layers = {name: paddle.nn.Linear(4, 3) for name in "ab"}
        parameters = {f"{name}.{part}": p for name, x in layers.items() for part, p in x.named_parameters()}
        optimizer = Optimizer(alone.shards(parameters), train, 3, ops=ops)
        for step in range(1, 4):
            x = paddle.to_tensor(random(2, 4, seed=step))
            used = layers.values() if step != 2 else [layers["a"]]
            sum(layer(x).square().sum() for layer in used).backward()
            optimizer.finish_gradients(1.0)
            optimizer.step(step)
            if step == 2:
                alone.load_state(optimizer, alone.state(optimizer))
        learnt.append([p.numpy() for p in parameters.values()])
    assert all(np.array_equal(own, other) for own, other in zip(*learnt, strict=True))


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
