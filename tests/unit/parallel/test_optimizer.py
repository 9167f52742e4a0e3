"""SGD and AdamW against NumPy, clipping, and a state that can be taken up again."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.contract.schema.recipe import TrainSection
from llmsuite.contract.schema.section import violations
from llmsuite.devices.cpu import CpuBackend
from llmsuite.parallel.optimizer import Optimizer
from llmsuite.parallel.program.optimizer import ProgramOptimizer
from llmsuite.plugins.cpu_kernels.libraries import can_be_built
from tests.support import alone
from tests.support.optimizer_runs import (
    NUM_STEPS,
    RATES,
    SHAPES,
    Arrays,
    backward,
    gradients,
    initial,
    parameters,
    run,
    section,
)
from tests.support.recorded_keys import recorded


def assert_close(found: Arrays, expected: Arrays) -> None:
    """Within 1e-6 of the distance the parameters have gone; what float32 rounds off of 1 is let pass as well."""
    for name, start in initial().items():
        gone = np.abs(expected[name] - start).max()
        assert np.abs(found[name] - expected[name]).max() <= 1e-6 * gone + 6e-7, name


def numpy_sgd(train: TrainSection, optimizer: Optimizer, weight: float) -> Arrays:
    values = {name: value.astype("float64") for name, value in initial().items()}
    for step in range(1, NUM_STEPS + 1):
        for name, gradient in gradients(step).items():
            rate = optimizer.learning_rate(step) * RATES.get(name, 1.0)
            values[name] -= rate * gradient.astype("float64") / weight
    return values


def numpy_adamw(train: TrainSection, optimizer: Optimizer, weight: float) -> Arrays:
    """Loshchilov and Hutter 2019 (arXiv 1711.05101), algorithm 2; gains are not decayed."""
    values = {name: value.astype("float64") for name, value in initial().items()}
    first = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    second = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(1, NUM_STEPS + 1):
        for name, raw in gradients(step).items():
            rate = optimizer.learning_rate(step) * RATES.get(name, 1.0)
            gradient = raw.astype("float64") / weight
            first[name] = train.adam_beta1 * first[name] + (1 - train.adam_beta1) * gradient
            second[name] = train.adam_beta2 * second[name] + (1 - train.adam_beta2) * gradient**2
            mean = first[name] / (1 - train.adam_beta1**step)
            square = second[name] / (1 - train.adam_beta2**step)
            if values[name].ndim > 1:
                values[name] -= rate * train.weight_decay * values[name]
            values[name] -= rate * mean / (np.sqrt(square) + train.adam_epsilon)
    return values


@pytest.mark.parametrize("weight", [1.0, 7.0])
def test_sgd_equals_numpy(weight: float) -> None:
    train = section(optimizer="sgd")
    optimizer = alone.optimizer(parameters(initial()), train, NUM_STEPS)
    found = run(optimizer, range(1, NUM_STEPS + 1), weight)
    assert_close(found, numpy_sgd(train, optimizer, weight))
    assert list(optimizer.state()) == []


@pytest.mark.parametrize("weight", [1.0, 7.0])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"weight_decay": 0.3},
        # so large an epsilon that it shows whether it is added inside or outside the root
        {"weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 0.1},
        {"adam_beta1": 0.0, "adam_beta2": 0.0},
    ],
)
def test_adamw_equals_numpy(keys: dict[str, Any], weight: float) -> None:
    train = section(**keys)
    optimizer = alone.optimizer(parameters(initial()), train, NUM_STEPS)
    found = run(optimizer, range(1, NUM_STEPS + 1), weight)
    assert_close(found, numpy_adamw(train, optimizer, weight))
    assert np.array_equal(found["unused.weight"], initial()["unused.weight"])


def test_decay_leaves_gains_alone() -> None:
    decayed = run(alone.optimizer(parameters(initial()), section(weight_decay=0.3), NUM_STEPS), [1, 2, 3])
    plain = run(alone.optimizer(parameters(initial()), section(), NUM_STEPS), [1, 2, 3])
    for name in ("norm.weight", "scale"):
        assert np.array_equal(decayed[name], plain[name])
    for name in ("layer.weight", "scale_up"):
        assert np.abs(decayed[name] - plain[name]).max() > 1e-3


def test_both_optimizers_begin_with_the_same_state() -> None:
    """So a checkpoint of one is taken up by the other."""
    train = section(weight_decay=0.1, adam_beta1=0.8)
    states = []
    for make in (Optimizer, ProgramOptimizer):
        optimizer = make(alone.shards(parameters(initial())), train, NUM_STEPS)
        states.append({entry.name: entry.value.numpy() for entry in optimizer.state()})
    assert alone.same(*states)
    assert float(states[0]["norm.weight/beta1_pow_acc"][0]) == pytest.approx(0.8)


@pytest.mark.parametrize("make", [Optimizer, ProgramOptimizer])
def test_sgd_reads_no_key_of_adamw(make: Any) -> None:
    """In every mode: `TrainSection.unused` declares them."""
    train = section(optimizer="sgd")
    with recorded() as reads:
        make([], train, NUM_STEPS)
    read = {key for _, key in reads}
    assert "learning_rate" in read
    assert not read & {"adam_beta1", "adam_beta2", "adam_epsilon"}


def test_sgd_refuses_keys_of_adamw() -> None:
    """Before anything is read, and not where they have the values that are there without them."""
    outputs = dict(violations(section(optimizer="sgd", weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95)))
    assert list(outputs) == ["weight_decay", "adam_beta2"]
    assert outputs["adam_beta2"] == "is not used by the optimizer sgd; set it to its default 0.999, or choose adamw"
    assert not [*violations(section(optimizer="adamw", weight_decay=0.1, adam_beta2=0.95))]


@pytest.mark.parametrize("max_norm", [None, 0.5, 1e6])
def test_gradients_are_divided_once_and_clipped(max_norm: float | None) -> None:
    optimizer = alone.optimizer(parameters(initial()), section(max_grad_norm=max_norm), NUM_STEPS)
    backward(optimizer, gradients(1))
    backward(optimizer, gradients(2))  # a second micro-batch: nothing is divided before both are there
    mean = {name: (gradients(1)[name] + gradients(2)[name]).astype("float64") / 5 for name in gradients(1)}
    norm = math.sqrt(sum(float((g**2).sum()) for g in mean.values()))
    assert norm > 0.5
    assert optimizer.finish_gradients(5.0) == pytest.approx(norm, rel=1e-6), "the norm is that before clipping"
    factor = 0.5 / norm if max_norm == 0.5 else 1.0
    for _ in range(2):  # and once only
        found = {shard.name: gradient.numpy() for shard, gradient in optimizer.final_gradients()}
        assert found.keys() == mean.keys(), "unused.weight has none"
        for name, expected in mean.items():
            np.testing.assert_allclose(found[name], factor * expected, rtol=1e-6, atol=1e-7)


@pytest.mark.skipif(not can_be_built(), reason="there is no compiler")
@pytest.mark.parametrize("are_read", [False, True])
def test_updates_by_a_kernel_take_gradients_that_are_not_clipped_yet(are_read: bool) -> None:
    train = section(max_grad_norm=0.5, weight_decay=0.3)
    expected = run(alone.optimizer(parameters(initial()), train, NUM_STEPS), [1, 2, 3], weight=5.0)
    optimizer = Optimizer(alone.shards(parameters(initial())), train, NUM_STEPS, ops=CpuBackend().optimizer_ops("fp32"))
    for step in (1, 2, 3):
        backward(optimizer, gradients(step))
        optimizer.finish_gradients(5.0)
        if are_read and step == 2:
            assert len(optimizer.final_gradients()) == len(SHAPES) - 1
        optimizer.step(step)
    assert_close({name: parameter.numpy() for name, parameter in alone.parameters(optimizer).items()}, expected)


def test_a_step_drops_the_gradients() -> None:
    optimizer = alone.optimizer(parameters(initial()), section(), NUM_STEPS)
    run(optimizer, [1])
    assert all(parameter.grad is None for parameter in alone.parameters(optimizer).values())


def test_state_round_trip_is_bit_exact() -> None:
    train = section(weight_decay=0.1)
    through = alone.optimizer(parameters(initial()), train, NUM_STEPS)
    values = run(through, [1, 2, 3])
    state = alone.state(through)
    slots = ("moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc")
    assert set(state) == {f"{name}/{slot}" for name in SHAPES for slot in slots}
    assert all(state[f"{name}/moment1"].shape == tuple(SHAPES[name]) for name in SHAPES)
    assert all(state[f"{name}/moment1"].any() for name in gradients(1))
    # what has had no gradient is where everything begins: Paddle keeps nothing of it, a checkpoint has to
    assert [state[f"unused.weight/{slot}"].tolist() for slot in slots[:2]] == [[[0.0, 0.0], [0.0, 0.0]]] * 2
    powers = [state[f"unused.weight/{slot}"] for slot in slots[2:]]
    assert np.array_equal(np.concatenate(powers), np.float32([train.adam_beta1, train.adam_beta2]))

    # twice in one process, and the second time from a state that was saved before any step
    for _ in range(2):
        resumed = alone.optimizer(parameters(values), train, NUM_STEPS)
        alone.load_state(resumed, state)
        state = alone.state(resumed)
    run(through, [4, 5, 6])
    run(resumed, [4, 5, 6])
    for name, parameter in alone.parameters(through).items():
        assert np.array_equal(alone.parameters(resumed)[name].numpy(), parameter.numpy()), name
    ends = alone.state(through)
    again = alone.state(resumed)
    assert ends.keys() == state.keys()
    assert alone.same(ends, again)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_parameters_follow_their_masters(dtype: str) -> None:
    """Masters learn as float32 parameters do that are read in 16 bits; what is too small for 16 bits is not lost."""
    rounded = {n: p.astype("float32").numpy() for n, p in parameters(initial(), dtype).items()}
    train = section(learning_rate=1e-4, lr_schedule="constant", warmup_ratio=0.0, weight_decay=0.1)
    low = alone.optimizer(parameters(initial(), dtype), train, NUM_STEPS)
    full = alone.optimizer(parameters(rounded), train, NUM_STEPS)
    for step in range(1, NUM_STEPS + 1):
        as_read = {n: paddle.to_tensor(g).astype(dtype).astype("float32").numpy() for n, g in gradients(step).items()}
        for optimizer, cast in ((low, "float32"), (full, dtype)):
            mine = alone.parameters(optimizer)
            for name, gradient in as_read.items():
                (mine[name].astype(cast).astype("float32") * paddle.to_tensor(gradient)).sum().backward()
            optimizer.finish_gradients(3.0)
            optimizer.step(step)
    state = alone.state(low)
    masters = {name: state[f"{name}/master"] for name in SHAPES}
    values = {name: p.numpy() for name, p in alone.parameters(full).items()}
    assert alone.same(masters, values)
    assert all(not np.array_equal(masters[name], rounded[name]) for name in gradients(1))
    for name, parameter in alone.parameters(low).items():
        assert parameter.dtype == getattr(paddle, dtype)
        expected = paddle.to_tensor(masters[name]).astype(dtype).astype("float32").numpy()
        assert np.array_equal(parameter.astype("float32").numpy(), expected)


def test_masters_of_16_bit_parameters_round_trip() -> None:
    made = alone.optimizer(parameters(initial(), "bfloat16"), section(), NUM_STEPS)
    run(made, [1])
    state = alone.state(made)
    slots = ("beta1_pow_acc", "beta2_pow_acc", "moment1", "moment2", "master")
    assert list(state) == [f"{name}/{slot}" for name in SHAPES for slot in slots]
    rng = np.random.default_rng(1)
    state = {key: rng.standard_normal(value.shape).astype("float32") for key, value in state.items()}
    resumed = alone.optimizer(parameters(initial(), "bfloat16"), section(), NUM_STEPS)
    alone.load_state(resumed, state)
    assert alone.same(alone.state(resumed), state)


def test_a_first_gradient_may_come_after_loading() -> None:
    train = section(weight_decay=0.1)
    through = alone.optimizer(parameters(initial()), train, NUM_STEPS)
    values = run(through, [1, 2])
    resumed = alone.optimizer(parameters(values), train, NUM_STEPS)
    alone.load_state(resumed, alone.state(through))
    for optimizer in (through, resumed):
        backward(optimizer, {"unused.weight": np.float32([[1, -2], [3, 4]])})
        optimizer.finish_gradients(1.0)
        optimizer.step(3)
    found, expected = (alone.parameters(o)["unused.weight"].numpy() for o in (resumed, through))
    assert not np.array_equal(expected, initial()["unused.weight"])
    assert np.array_equal(found, expected)
    # and what gets none after loading is not forgotten
    assert alone.same(alone.state(resumed), alone.state(through))


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_reserved_state_is_the_same(is_loaded: bool) -> None:
    train = section(weight_decay=0.1)
    found = []
    for reserves in (False, True):
        optimizer = alone.optimizer(parameters(initial()), train, NUM_STEPS)
        if is_loaded:
            before = alone.optimizer(parameters(initial()), train, NUM_STEPS)
            run(before, [1])
            alone.load_state(optimizer, alone.state(before))
        if reserves:
            optimizer.reserve()
            assert {len(values) for values in optimizer._paddle._accumulators.values()} == {len(SHAPES)}
            assert not optimizer._paddle._accumulators_holder
            optimizer.reserve()  # which keeps what is there
        values = run(optimizer, [2, 3])
        found.append({**values, **alone.state(optimizer)})
    assert alone.same(*found)
