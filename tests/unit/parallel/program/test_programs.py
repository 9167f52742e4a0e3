"""Programs of a small model, beside the same steps in NumPy and op by op."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle import nn

from llmsuite.parallel.program.optimizer import Owners, ProgramOptimizer
from llmsuite.parallel.program.programs import StepPrograms
from llmsuite.schema.recipe import TrainSection
from tests.unit import alone

SGD = TrainSection(
    max_steps=4,
    global_batch_size=4,
    micro_batch_size=2,
    learning_rate=0.5,
    optimizer="sgd",
    lr_schedule="linear",
    max_grad_norm=0.3,
)
ADAMW = dataclasses.replace(SGD, optimizer="adamw", weight_decay=0.1, adam_epsilon=1e-3)


class Product(nn.Layer):
    """Rows times a vector, which has no bias; and a number that is not trained."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        first = np.resize(np.array([1.0, -2.0, 0.5], "float32"), size)
        self.vector = self.create_parameter([size], default_initializer=nn.initializer.Assign(first))
        self.frozen = self.create_parameter([1], default_initializer=nn.initializer.Assign([2.0]))
        self.frozen.stop_gradient = True

    def forward(self, x: Any) -> Any:
        return (x * self.vector).sum(-1) * self.frozen


def _loss(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    y = model(inputs["x"])
    return {"loss": (y.square() * inputs["weights"]).sum(), "y": (y * inputs["weights"]).sum()}


def _programs(model: Any, train: TrainSection) -> tuple[StepPrograms, ProgramOptimizer]:
    optimizer = ProgramOptimizer(alone.shards({"vector": model.vector}), train, 4)
    return StepPrograms(model, optimizer, _loss), optimizer


def _load(optimizer: ProgramOptimizer, values: Mapping[str, np.ndarray]) -> None:
    optimizer.load_state(lambda entry: values[entry.name])


def _batch(step: int, width: int = 2) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(step)
    weights = draw.random([4, width], "float32")
    return {"x": draw.normal(size=[4, width, 3]).astype("float32"), "weights": weights / weights.sum()}


def test_equals_the_formula() -> None:
    """SGD with clipping, over micro-batches of different weight, at a learning rate that falls; in the model's own
    memory."""
    model = Product()
    programs, optimizer = _programs(model, SGD)
    vector = np.array([1.0, -2.0, 0.5])
    for step, parts in ((1, 2), (2, 1), (3, 2)):
        batch = _batch(step)
        y = 2 * batch["x"] @ vector
        gradient = (4 * (y * batch["weights"])[..., None] * batch["x"]).sum((0, 1))
        norm = np.linalg.norm(gradient)
        told = programs.run(step, batch, parts)
        expected = {"loss": (y**2 * batch["weights"]).sum(), "y": (y * batch["weights"]).sum(), "grad_norm": norm}
        assert told.pop("updated") == 1
        assert told == pytest.approx(expected, rel=1e-6)
        vector -= optimizer.learning_rate(step) * gradient * min(1.0, 0.3 / norm)
        assert model.vector.numpy() == pytest.approx(vector, rel=1e-6)
    assert model.frozen.numpy() == [2.0]
    assert len(programs) == 2
    assert programs.build_seconds > 0
    with paddle.no_grad():  # op by op, with what was learnt
        assert model(paddle.to_tensor(batch["x"])).numpy() == pytest.approx(2 * batch["x"] @ vector, rel=1e-5)


def test_programs_share_the_state_of_the_optimizer() -> None:
    """AdamW, with batches of two shapes: as the dynamic optimizer, whose state either can go on with."""
    model, other = Product(), Product()
    programs, optimizer = _programs(model, ADAMW)
    dynamic = alone.optimizer({"vector": other.vector}, ADAMW, 4)
    for step, width in ((1, 2), (2, 5), (3, 2), (4, 5)):
        batch = _batch(step, width)
        told = programs.run(step, batch, 1)
        _loss(other, {name: paddle.to_tensor(array) for name, array in batch.items()})["loss"].backward()
        assert told["grad_norm"] == pytest.approx(dynamic.finish_gradients(1.0), rel=1e-6)
        dynamic.step(step)
        assert model.vector.numpy() == pytest.approx(other.vector.numpy(), rel=1e-6)
        found = {entry.name: entry.value.numpy() for entry in optimizer.state()}
        expected = alone.state(dynamic)
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=2e-6), name
        if step == 2:  # another run goes on from here
            model = Product()
            model.vector.set_value(other.vector.numpy())
            programs, optimizer = _programs(model, ADAMW)
            _load(optimizer, expected)


@pytest.mark.parametrize("parts", [1, 2])
def test_making_a_program_makes_no_state(parts: int) -> None:
    """What it allocates for long: sums of gradients where there are several micro-batches, once; no second state."""
    size, core = 1 << 20, paddle.base.core
    model = Product(size)
    programs, _ = _programs(model, ADAMW)
    grown: list[int] = []
    build = StepPrograms._build

    def measured(*arguments: Any) -> Any:
        gc.collect()  # programs of other tests, which would be freed meanwhile
        before = core.host_memory_stat_current_value("Allocated", 0)
        core.host_memory_stat_reset_peak_value("Allocated", 0)
        made = build(*arguments)
        grown.append(core.host_memory_stat_peak_value("Allocated", 0) - before)
        return made

    batch = {"x": np.zeros([2, 1, size], "float32"), "weights": np.ones([2, 1], "float32")}
    with mock.patch.object(StepPrograms, "_build", measured):
        programs.run(1, batch, parts)
        programs.run(2, {name: array.repeat(2, 0) for name, array in batch.items()}, parts)  # of another shape
    sums = 4 * size if parts > 1 else 0
    assert grown == pytest.approx([sums, 0], abs=1 << 20)  # programs share these sums


def test_values_that_are_loaded_later_count() -> None:
    """As after a roll-back: in the memory that programs have taken over."""
    model = Product()
    programs, optimizer = _programs(model, ADAMW)
    first = programs.run(1, _batch(1), 1)
    saved = {entry.name: np.array(entry.value.numpy()) for entry in optimizer.state()}
    kept = model.vector.numpy().copy()
    second = programs.run(2, _batch(2), 1)
    after = model.vector.numpy().copy()
    (shard,) = optimizer.shards
    shard.load(kept)
    _load(optimizer, saved)
    assert programs.run(2, _batch(2), 1) == second != first
    assert model.vector.numpy().tolist() == after.tolist()


def test_no_operation_runs_outside_of_a_program(tmp_path: Path) -> None:
    """Between feeding a batch of two micro-batches and reading what came of it; the same step op by op shows some."""
    model, other = Product(), Product()
    programs, _ = _programs(model, ADAMW)
    dynamic = alone.optimizer({"vector": other.vector}, ADAMW, 4)
    programs.run(1, _batch(1), 2)

    def op_by_op() -> None:
        _loss(other, {name: paddle.to_tensor(array) for name, array in _batch(2).items()})["loss"].backward()
        dynamic.finish_gradients(1.0)
        dynamic.step(1)

    assert _operations(lambda: programs.run(2, _batch(2), 2), tmp_path / "program.json") == []
    assert len(_operations(op_by_op, tmp_path / "dynamic.json")) > 5


def _operations(work: Callable[[], object], file: Path) -> list[str]:
    """The operations that Python calls meanwhile, by Paddle's own profile."""
    profiler = paddle.profiler.Profiler(targets=[paddle.profiler.ProfilerTarget.CPU], on_trace_ready=lambda made: None)
    with contextlib.redirect_stdout(io.StringIO()):
        profiler.start()
        work()
        profiler.stop()
        profiler.export(str(file), "json")
    names = [event["name"] for event in json.loads(file.read_text())["traceEvents"] if "name" in event]
    return [name for name in names if "pybind_imperative_func" in name or "pybind_patch_func" in name]


class OneDim(NamedTuple):
    """What of a `ParameterShard` decides how its state is cut."""

    local_shape: list[int]
    parameter: Any


@pytest.mark.parametrize(
    ("shape", "placements", "expected"),
    [
        ([6, 4], [], 0),
        ([5, 4], [], 1),
        ([5, 3], [], None),
        ([6, 4], [dist.Shard(0)], 1),  # that dim is cut over tp already
        ([6, 4], [dist.Replicate()], 0),
        ([6], [dist.Shard(0)], None),
    ],
)
def test_the_dim_that_a_state_is_cut_along(shape: list[int], placements: list[Any], expected: int | None) -> None:
    parameter = mock.Mock(placements=placements, is_dist=lambda: bool(placements))
    assert Owners(2, 0).dim(OneDim(shape, parameter)) == expected
    assert Owners(1, 0).dim(OneDim(shape, parameter)) is None


def test_each_data_rank_has_a_part_of_the_state() -> None:
    class Matrix(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.matrix, self.odd = self.create_parameter([4, 6]), self.create_parameter([3])

    model = Matrix()
    shards = alone.shards({"matrix": model.matrix, "odd": model.odd})
    parts = [ProgramOptimizer(shards, ADAMW, 4, Owners(2, rank)) for rank in range(2)]
    shapes = {name: list(value.shape) for name, value in parts[0].values.items() if "moment1" in name}
    assert shapes == {"matrix_moment1": [2, 6], "odd_moment1": [3]}
    whole = {"matrix": np.arange(24.0, dtype="float32").reshape([4, 6]), "odd": np.arange(3.0, dtype="float32")}
    for part in parts:
        part.load_state(lambda entry: np.ones([1], "float32") if entry.is_scalar else whole[entry.shard.name])
    found = np.concatenate([part.values["matrix_moment2"].numpy() for part in parts])
    assert np.array_equal(found, whole["matrix"])
    assert np.array_equal(parts[1].values["odd_moment2"].numpy(), whole["odd"])
