"""Biases of routed experts, and their clamped SwiGLU: in eager passes, in programs, on initial values and decay."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from llmsuite.contract.schema.degrees import Degrees
from llmsuite.devices import ops
from llmsuite.devices.ops import Ops
from llmsuite.engine.weights import random_values
from llmsuite.inference.static_experts import StaticDispatcher
from llmsuite.models.experts import Experts, GroupedLinear, grouped_bias
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.sharding import ParameterShard, ShardOptions
from tests.support.families import tiny

COUNTS = [2, 0, 3]


def test_each_row_gets_the_bias_of_its_expert() -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=[5, 4]).astype("float32")
    bias = generator.normal(size=[3, 4]).astype("float32")
    upstream = generator.normal(size=[5, 4]).astype("float32")
    given = [paddle.to_tensor(value, stop_gradient=False) for value in (x, bias)]
    found = grouped_bias(*given, COUNTS)
    np.testing.assert_array_equal(found.numpy(), x + bias[[0, 0, 2, 2, 2]])
    (found * paddle.to_tensor(upstream)).sum().backward()
    np.testing.assert_array_equal(given[0].grad.numpy(), upstream)
    expected = np.stack([upstream[:2].sum(0), np.zeros(4), upstream[2:].sum(0)])
    np.testing.assert_allclose(given[1].grad.numpy(), expected, rtol=1e-6)


def test_rows_without_an_expert_stay_zeros_in_a_program() -> None:
    """Where counts are a tensor, rows of experts on other ranks come last."""
    x = np.concatenate([np.ones([5, 4]), np.zeros([2, 4])]).astype("float32")
    bias = np.arange(12, dtype="float32").reshape(3, 4) + 1
    found = grouped_bias(paddle.to_tensor(x), paddle.to_tensor(bias), paddle.to_tensor(COUNTS)).numpy()
    np.testing.assert_array_equal(found, np.concatenate([1 + bias[[0, 0, 2, 2, 2]], np.zeros([2, 4])]))


def test_the_clamp_cuts_gate_and_up() -> None:
    gate = np.array([-9.0, -1.0, 2.0, 7.5], "float32")
    up = np.array([-8.0, 9.0, 0.5, -7.0], "float32")
    found = ops.clamped_swiglu(1.702, 7.0, paddle.to_tensor(gate), paddle.to_tensor(up)).numpy()
    g = np.array([-9.0, -1.0, 2.0, 7.0])
    u = np.array([-7.0, 7.0, 0.5, -7.0])
    np.testing.assert_allclose(found, g / (1 + np.exp(-1.702 * g)) * (u + 1), rtol=1e-5)


def _experts() -> Experts:
    experts = Experts(3, 6, 4, Ops(), biased=True, clamp=(1.702, 0.5))
    for parameter in experts.parameters():
        parameter.set_value(paddle.randn(parameter.shape))
    return experts


def test_experts_of_an_exported_program_have_biases() -> None:
    experts = _experts()
    x = paddle.randn([2, 5, 6])
    chosen = paddle.randint(0, 3, [2, 5, 2])
    weights = paddle.rand([2, 5, 2])
    expected = experts(x, weights, chosen).numpy()
    experts.dispatcher = StaticDispatcher()
    np.testing.assert_allclose(experts(x, weights, chosen).numpy(), expected, rtol=1e-5, atol=1e-5)
    experts.up_proj.bias.set_value(paddle.zeros([3, 4]))
    assert np.abs(experts(x, weights, chosen).numpy() - expected).max() > 0.01


def test_one_expert_at_a_time_is_the_stack() -> None:
    linear = GroupedLinear(3, 6, 4, biased=True)
    for parameter in linear.parameters():
        parameter.set_value(paddle.randn(parameter.shape))
    x = paddle.randn([5, 6])
    expected = linear.product(x, COUNTS).numpy()
    found = paddle.concat([linear.of_expert(x[:2], 0), linear.of_expert(x[2:], 2)]).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_biases_of_experts_and_sinks_start_at_zero() -> None:
    model = tiny("gpt_oss")
    read = random_values([model], 0, 0.1)
    kinds = ("experts.up_proj.bias", "self_attn.sinks", "gate.bias", "experts.up_proj.weight")
    for kind, is_zero in zip(kinds, (True, True, True, False), strict=True):
        (name, parameter), *_ = [pair for pair in model.named_parameters() if pair[0].endswith(kind)]
        values = read(name, parameter.shape, [slice(0, size) for size in parameter.shape])
        assert (np.abs(values).max() == 0) == is_zero, name


@pytest.mark.parametrize(("kind", "decays"), [("weight", True), ("bias", False)])
def test_weight_decay_leaves_biases_of_experts_out(kind: str, decays: bool) -> None:
    parameter = getattr(_experts().up_proj, kind)
    mesh = Mesh(Degrees(1, 1, 1, 1), 0)
    shard = ParameterShard(f"model.layers.0.mlp.experts.up_proj.{kind}", parameter, mesh, None, 0, ShardOptions())
    assert shard.decays == decays
