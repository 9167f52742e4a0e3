"""Updates of bfloat16 parameters without masters: the bits of PyTorch's fused AdamW, and a state that is saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import paddle
import pytest

from llmsuite.contract.schema.recipe import TrainSection
from llmsuite.devices import optimizer_ops
from llmsuite.parallel import direct_update
from llmsuite.parallel.direct_update import _MANY, DirectUpdate, _num_updates
from llmsuite.parallel.optimizer import Optimizer
from llmsuite.parallel.sharding import ParameterShard, ShardOptions
from tests.support import alone

STEPS = 12
RATE = 0.01
DECAY = 0.1
SHAPES = {"matrix": [9, 7], "vector": [11], "slow": [4, 5], "unused": [2, 2]}
RATES = {"slow": 0.25}
Arrays = dict[str, np.ndarray]


def section(**keys: Any) -> TrainSection:
    common = {"max_steps": STEPS, "global_batch_size": 1, "micro_batch_size": 1, "max_grad_norm": None}
    common |= {"learning_rate": RATE, "lr_schedule": "constant", "master_weights": False}
    return TrainSection(**{**common, **({} if keys.get("optimizer") == "sgd" else {"weight_decay": DECAY}), **keys})


def rounded(values: np.ndarray) -> np.ndarray:
    """Values rounded to bfloat16, as float32."""
    return values.astype(ml_dtypes.bfloat16).astype("float32")


def wide(tensor: Any) -> np.ndarray:
    return np.asarray(tensor.astype("float32").numpy())


def initial() -> Arrays:
    rng = np.random.default_rng(0)
    return {name: rounded(rng.standard_normal(shape).astype("float32")) for name, shape in SHAPES.items()}


def gradients(step: int) -> Arrays:
    """Of sizes that differ from step to step, so that rounding to the middle of two numbers occurs."""
    rng = np.random.default_rng(step)
    size = np.float32(10.0 ** rng.integers(-4, 1))
    return {
        name: rounded(rng.standard_normal(shape).astype("float32") * size)
        for name, shape in SHAPES.items()
        if name != "unused"
    }


def optimizer(values: Arrays, **keys: Any) -> Optimizer:
    shards = []
    for name, value in values.items():
        zeros = paddle.nn.initializer.Constant(0.0)
        parameter = paddle.create_parameter(list(value.shape), "bfloat16", default_initializer=zeros)
        parameter.set_value(paddle.to_tensor(value).astype("bfloat16"))
        parameter.optimize_attr["learning_rate"] = RATES.get(name, 1.0)
        shards.append(ParameterShard(name, parameter, alone.MESH, None, 0, ShardOptions(keeps_master=False)))
    return Optimizer(shards, section(**keys), STEPS)


def run(made: Optimizer, steps: Sequence[int], weight: float = 1.0) -> Arrays:
    for step in steps:
        parameters = alone.parameters(made)
        terms = [(parameters[n].astype("float32") * paddle.to_tensor(g)).sum() for n, g in gradients(step).items()]
        paddle.add_n(terms).backward()
        made.finish_gradients(weight)
        made.step(step)
    return {name: wide(parameter) for name, parameter in alone.parameters(made).items()}


def state(made: Optimizer) -> Arrays:
    return {entry.name: wide(entry.value) for entry in made.state()}


def fused_adamw(
    p: np.ndarray, m: np.ndarray, v: np.ndarray, g: np.ndarray, step: int, rate: float, decay: float
) -> Any:
    """`adam_math` of PyTorch's ATen/native/cuda/fused_adam_utils.cuh, with the types that C++ gives its operations."""
    beta1, beta2, epsilon = 0.9, 0.999, 1e-8
    d = np.float64
    f = np.float32
    correction1 = f(1 - beta1**step)
    root = f(np.sqrt(1 - beta2**step))
    if decay:
        p = (p.astype(d) - rate * decay * p.astype(d)).astype(f)
    m = (beta1 * m.astype(d) + (1 - beta1) * g.astype(d)).astype(f)
    v = (beta2 * v.astype(d) + (1 - beta2) * g.astype(d) * g.astype(d)).astype(f)
    size = (np.sqrt(v) / root).astype(d) + epsilon
    p = p - f(rate / d(correction1)) * m / size.astype(f)
    return rounded(p), rounded(m), rounded(v)


def test_adamw_has_the_bits_of_the_fused_kernel_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    made = optimizer(initial())
    found = run(made, range(1, STEPS + 1))
    kept = state(made)
    for name, value in initial().items():
        m = v = np.zeros_like(value)
        for step in range(1, STEPS + 1) if name != "unused" else ():
            decay = DECAY if len(SHAPES[name]) > 1 else 0.0
            value, m, v = fused_adamw(value, m, v, gradients(step)[name], step, RATE * RATES.get(name, 1.0), decay)
        np.testing.assert_array_equal(found[name], value)
        np.testing.assert_array_equal(kept[f"{name}/moment1"], m)
        np.testing.assert_array_equal(kept[f"{name}/moment2"], v)
    monkeypatch.setattr(direct_update, "UPDATE_CHUNK", 8)
    monkeypatch.setattr(optimizer_ops, "CHUNK", 8)
    again = optimizer(initial())
    assert alone.same(run(again, range(1, STEPS + 1)), found)
    assert alone.same(state(again), kept)


def test_moments_are_bfloat16_and_there_are_no_masters() -> None:
    made = optimizer(initial())
    found = {entry.name: entry.value for entry in made.state()}
    assert {name.partition("/")[2] for name in found} == {"beta1_pow_acc", "beta2_pow_acc", "moment1", "moment2"}
    for name, value in found.items():
        assert value.dtype == (paddle.float32 if name.endswith("pow_acc") else paddle.bfloat16), name


def test_sgd_rounds_once() -> None:
    found = run(optimizer(initial(), optimizer="sgd"), [1])
    for name, gradient in gradients(1).items():
        rate = np.float32(RATE * RATES.get(name, 1.0))
        np.testing.assert_array_equal(found[name], rounded(initial()[name] - gradient * rate))


def test_small_parameters_of_adamw_8bit_have_float32_moments_and_decay_last() -> None:
    """As `kOptimizer32bit2State` of bitsandbytes, which rounds a parameter twice."""
    made = optimizer(initial(), optimizer="adamw_8bit")
    found = run(made, [1, 2])
    kept = {entry.name: entry.value for entry in made.state()}
    f = np.float32
    beta1, beta2 = f(0.9), f(0.999)
    for name in gradients(1):
        p = initial()[name]
        m = v = np.zeros_like(p)
        rate = RATE * RATES.get(name, 1.0)
        for step in (1, 2):
            g = gradients(step)[name]
            m = m * beta1 + (f(1) - beta1) * g
            v = v * beta2 + (f(1) - beta2) * g * g
            root = np.sqrt(f(1) - beta2**step)
            p = rounded(p - f(rate) * root / (f(1) - beta1**step) * (m / (np.sqrt(v) + f(1e-8) * root)))
            if len(SHAPES[name]) > 1:
                p = rounded(p * f(1 - rate * DECAY))
        assert kept[f"{name}/moment1"].dtype == paddle.float32
        np.testing.assert_allclose(kept[f"{name}/moment2"].numpy(), v, rtol=1e-5)
        np.testing.assert_allclose(found[name], p, rtol=2.0**-7, atol=1e-6)
        assert (found[name] == p).mean() > 0.9  # float32 in another order, then rounded


def test_gradients_are_divided_clipped_and_rounded_whether_they_are_read_or_not() -> None:
    weight = 3.0
    results = []
    for reads in (False, True):
        made = optimizer(initial(), max_grad_norm=1e-3)
        parameters = alone.parameters(made)
        terms = [(parameters[n].astype("float32") * paddle.to_tensor(g)).sum() for n, g in gradients(3).items()]
        paddle.add_n(terms).backward()
        norm = made.finish_gradients(weight)
        squares = sum(np.square(g.astype("float64")).sum() for g in gradients(3).values())
        assert norm == pytest.approx(np.sqrt(squares) / weight, rel=1e-6)
        if reads:
            for shard, gradient in made.final_gradients():
                assert gradient.dtype == paddle.bfloat16
                expected = rounded(gradients(3)[shard.name] * np.float32(1e-3 / norm / weight))
                np.testing.assert_array_equal(wide(gradient), expected)
        made.step(1)
        results.append(state(made))
    assert alone.same(*results)


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_a_state_is_continued_bit_by_bit(kind: str) -> None:
    whole = optimizer(initial(), optimizer=kind)
    expected = run(whole, range(1, STEPS + 1))
    first = optimizer(initial(), optimizer=kind)
    values = run(first, range(1, 6))
    saved = {entry.name: entry.value.numpy() for entry in first.state()}
    again = optimizer(values, optimizer=kind)
    alone.load_state(again, saved)
    assert alone.same(run(again, range(6, STEPS + 1)), expected)
    assert alone.same(state(again), state(whole))


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.0, 0.5)])
@pytest.mark.parametrize("number", [0, 1, 30, 1000, 12345, 500_000])
def test_the_number_of_updates_is_read_from_a_power(betas: tuple[float, float], number: int) -> None:
    made = DirectUpdate([], section(adam_beta1=betas[0], adam_beta2=betas[1]))
    of = direct_update.DirectState({slot: paddle.zeros([1]) for slot in direct_update.MOMENTS}, number)
    slots = made.slots(of)
    loaded = direct_update.DirectState({}, 0)
    for slot in ("beta1_pow_acc", "beta2_pow_acc"):
        made.load(loaded, slot, slots[slot])
    for beta in betas:  # the corrections are the same
        assert 1 - beta**loaded.num_updates == 1 - beta**number
    assert _num_updates(0.0, 0.999) == _num_updates(0.5, 0.0) == _MANY
