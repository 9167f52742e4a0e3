"""Programs of a small model, compared with the same steps in NumPy and in eager mode."""

from __future__ import annotations

import contextlib
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

from llmsuite.parallel.program.optimizer import ProgramOptimizer, ZeroGroup
from llmsuite.parallel.program.programs import StepPrograms
from tests.support import alone
from tests.support.step_programs import ADAMW, SGD, Product, _loss, make_batch, make_programs


def _load(optimizer: ProgramOptimizer, values: Mapping[str, np.ndarray]) -> None:
    optimizer.load_state(lambda entry: values[entry.name])


def test_equals_the_formula() -> None:
    """SGD with clipping, over micro-batches of different weight, at a learning rate that falls; in the model's own
    memory."""
    model = Product()
    programs, optimizer = make_programs(model, SGD)
    vector = np.array([1.0, -2.0, 0.5])
    for step, parts in ((1, 2), (2, 1), (3, 2)):
        batch = make_batch(step)
        y = 2 * batch["x"] @ vector
        gradient = (4 * (y * batch["weights"])[..., None] * batch["x"]).sum((0, 1))
        norm = np.linalg.norm(gradient)
        outputs = programs.run(step, batch, parts)
        expected = {"loss": (y**2 * batch["weights"]).sum(), "y": (y * batch["weights"]).sum(), "grad_norm": norm}
        assert outputs.pop("updated") == 1
        assert outputs == pytest.approx(expected, rel=1e-6)
        vector -= optimizer.learning_rate(step) * gradient * min(1.0, 0.3 / norm)
        assert model.vector.numpy() == pytest.approx(vector, rel=1e-6)
    assert model.frozen.numpy() == [2.0]
    assert len(programs) == 2
    assert programs.build_seconds > 0
    with paddle.no_grad():  # eager, with the trained values
        assert model(paddle.to_tensor(batch["x"])).numpy() == pytest.approx(2 * batch["x"] @ vector, rel=1e-5)


def test_programs_share_the_state_of_the_optimizer() -> None:
    """AdamW, with batches of two shapes: as the dynamic optimizer, whose state either can go on with."""
    model = Product()
    other = Product()
    programs, optimizer = make_programs(model, ADAMW)
    dynamic = alone.optimizer({"vector": other.vector}, ADAMW, 4)
    for step, width in ((1, 2), (2, 5), (3, 2), (4, 5)):
        batch = make_batch(step, width)
        outputs = programs.run(step, batch, 1)
        _loss(other, {name: paddle.to_tensor(array) for name, array in batch.items()})["loss"].backward()
        assert outputs["grad_norm"] == pytest.approx(dynamic.finish_gradients(1.0), rel=1e-6)
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
            programs, optimizer = make_programs(model, ADAMW)
            _load(optimizer, expected)


@pytest.mark.further
@pytest.mark.parametrize("parts", [1, 2])
def test_making_a_program_makes_no_state(parts: int) -> None:
    """It permanently allocates only sums of gradients where there are several micro-batches, once; no second state."""
    size = 1 << 20
    core = paddle.base.core
    model = Product(size)
    programs, _ = make_programs(model, ADAMW)
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
    """Such as after a roll-back: they are put into the memory that programs use."""
    model = Product()
    programs, optimizer = make_programs(model, ADAMW)
    first = programs.run(1, make_batch(1), 1)
    saved = {entry.name: np.array(entry.value.numpy()) for entry in optimizer.state()}
    kept = model.vector.numpy().copy()
    second = programs.run(2, make_batch(2), 1)
    after = model.vector.numpy().copy()
    (shard,) = optimizer.shards
    shard.load(kept)
    _load(optimizer, saved)
    assert programs.run(2, make_batch(2), 1) == second != first
    assert model.vector.numpy().tolist() == after.tolist()


def test_no_operation_runs_outside_of_a_program(tmp_path: Path) -> None:
    """Between feeding a batch of two micro-batches and reading what came of it; the same step op by op shows some."""
    model = Product()
    other = Product()
    programs, _ = make_programs(model, ADAMW)
    dynamic = alone.optimizer({"vector": other.vector}, ADAMW, 4)
    programs.run(1, make_batch(1), 2)

    def checked_eager() -> None:
        _loss(other, {name: paddle.to_tensor(array) for name, array in make_batch(2).items()})["loss"].backward()
        dynamic.finish_gradients(1.0)
        dynamic.step(1)

    operations = _operations(lambda: programs.run(2, make_batch(2), 2), tmp_path / "program.json")
    assert [name for name in operations if not name.startswith("empty ")] == [], "empty: the memory of the batch"
    assert len(_operations(checked_eager, tmp_path / "dynamic.json")) > 5


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
    """The attributes of a `ParameterShard` that decide how its state is cut."""

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
    assert ZeroGroup(2, 0).dim(OneDim(shape, parameter)) == expected
    assert ZeroGroup(1, 0).dim(OneDim(shape, parameter)) is None


def test_each_data_rank_has_a_part_of_the_state() -> None:
    class Matrix(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.matrix, self.odd = self.create_parameter([4, 6]), self.create_parameter([3])

    model = Matrix()
    shards = alone.shards({"matrix": model.matrix, "odd": model.odd})
    parts = [ProgramOptimizer(shards, ADAMW, 4, ZeroGroup(2, rank)) for rank in range(2)]
    shapes = {name: list(value.shape) for name, value in parts[0].values.items() if "moment1" in name}
    assert shapes == {"matrix_moment1": [2, 6], "odd_moment1": [3]}
    whole = {"matrix": np.arange(24.0, dtype="float32").reshape([4, 6]), "odd": np.arange(3.0, dtype="float32")}
    for part in parts:
        part.load_state(lambda entry: np.ones([1], "float32") if entry.is_scalar else whole[entry.shard.name])
    found = np.concatenate([part.values["matrix_moment2"].numpy() for part in parts])
    assert np.array_equal(found, whole["matrix"])
    assert np.array_equal(parts[1].values["odd_moment2"].numpy(), whole["odd"])
