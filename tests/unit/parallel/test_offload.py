"""The optimizer's state in host memory: where it lies, what is moved when, and that no number changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.gpu import GpuBackend
from llmsuite.devices.xpu import XpuBackend
from llmsuite.parallel.optimizer import Optimizer
from tests.support import alone
from tests.support.optimizer_runs import NUM_STEPS, SHAPES, Arrays, initial, parameters, run, section


class Recording(CpuBackend):
    """Moves by copying, and spoils what was moved away, so that using it would be noticed."""

    def __init__(self) -> None:
        self.on_host: dict[int, Any] = {}
        self.moves: list[tuple[str, int]] = []
        self.on_device = self.peak = 0

    def to_host(self, tensor: Any) -> Any:
        if id(tensor) in self.on_host:
            return tensor
        self.on_device -= tensor.size
        moved = self._copy("to_host", tensor)
        self.on_host[id(moved)] = moved
        return moved

    def to_device(self, tensor: Any) -> Any:
        self.on_device += tensor.size
        self.peak = max(self.peak, self.on_device)
        self.on_host.pop(id(tensor), None)
        return self._copy("to_device", tensor)

    def _copy(self, way: str, tensor: Any) -> Any:
        self.moves.append((way, tensor.size))
        copy = tensor.clone()
        with paddle.no_grad():
            tensor.fill_(1e30)
        return copy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_numbers_are_the_same(optimizer: str, dtype: str) -> None:
    train = section(optimizer=optimizer, max_grad_norm=1.0)

    def learn(host: Recording | None) -> tuple[Arrays, Arrays]:
        made = Optimizer(alone.shards(parameters(initial(), dtype)), train, NUM_STEPS, host)
        steps = range(1, NUM_STEPS + 1)
        values = {n: paddle.to_tensor(v) for n, v in run(made, steps).items()} if dtype == "float32" else {}
        if dtype != "float32":
            run(made, steps)
            values = {n: p.astype("float32") for n, p in alone.parameters(made).items()}
        return {n: v.numpy() for n, v in values.items()}, alone.state(made)

    host = Recording()
    (values, state), (moved, moved_state) = learn(None), learn(host)
    assert alone.same(values, moved)
    assert alone.same(state, moved_state)
    assert bool(host.moves) == (optimizer == "adamw" or dtype == "bfloat16")


def test_one_parameter_at_a_time_is_on_the_device() -> None:
    host = Recording()
    optimizer = Optimizer(alone.shards(parameters(initial(), "bfloat16")), section(), NUM_STEPS, host)
    assert host.moves == [("to_host", int(np.prod(shape))) for shape in SHAPES.values()], "the masters"
    run(optimizer, [1, 2])
    host.moves.clear()
    host.on_device = host.peak = 0
    run(optimizer, [3])
    expected = []
    for name, shape in SHAPES.items():  # master and two moments; one that never had a gradient has its master only
        size = int(np.prod(shape))
        count = 1 if name == "unused.weight" else 3
        expected += [("to_device", size)] * count + [("to_host", size)] * count
    assert host.moves == expected
    assert host.on_device == 0
    assert host.peak == 3 * max(int(np.prod(shape)) for shape in SHAPES.values())
    moments = [e for e in optimizer.state() if e.slot.startswith("moment") and e.shard.name != "unused.weight"]
    assert moments
    assert all(id(entry.value) in host.on_host for entry in moments)


def test_it_is_taken_up_again() -> None:
    through = Optimizer(alone.shards(parameters(initial())), section(), NUM_STEPS, Recording())
    values = run(through, [1, 2, 3])
    resumed = Optimizer(alone.shards(parameters(values)), section(), NUM_STEPS, Recording())
    alone.load_state(resumed, alone.state(through))
    assert alone.same(run(through, [4, 5]), run(resumed, [4, 5]))
    assert alone.same(alone.state(through), alone.state(resumed))


@pytest.mark.parametrize("backend", [GpuBackend(), XpuBackend()], ids=lambda backend: backend.name)
def test_devices_move_to_pinned_memory_and_to_the_current_device(backend: Any) -> None:
    class Tensor:
        def pin_memory(self) -> str:
            return "pinned"

        def cuda(self) -> str:  # what Paddle calls it on an XPU too
            return "current device"

    assert (backend.to_host(Tensor()), backend.to_device(Tensor())) == ("pinned", "current device")


def test_on_cpu_nothing_moves() -> None:
    tensor = paddle.ones([2])
    assert CpuBackend().to_host(tensor) is tensor
    assert CpuBackend().to_device(tensor) is tensor
