"""Factors A that the matrices of one input share are those of an adapter on the fused matrix."""

from __future__ import annotations

import math

import numpy as np
import paddle
import pytest

from llmsuite.adapters.initial_values import with_adapter_values
from llmsuite.adapters.layers.lora import LoraLinear
from llmsuite.adapters.lora import LORA
from llmsuite.adapters.methods import adapter_config
from llmsuite.adapters.shared_first import first_of
from llmsuite.models.adapter_method import AdaptedModel, AdapterConfig
from llmsuite.models.shard_plan import UNSHARDED
from llmsuite.parallel.optimizer import Optimizer
from llmsuite.parallel.sharding import ParameterShard, ShardOptions
from tests.support import alone
from tests.support.families import FAMILIES
from tests.support.lora_layers import filled, linear
from tests.support.optimizer_runs import section

SHARED = "layers.0.self_attn.q_proj.lora_A"


@pytest.mark.parametrize(
    ("module", "first"),
    [
        ("layers.1.self_attn.q_proj", "layers.1.self_attn.q_proj"),
        ("layers.1.self_attn.v_proj", "layers.1.self_attn.q_proj"),
        ("layers.1.self_attn.k_proj", "layers.1.self_attn.q_proj"),
        ("layers.1.self_attn.o_proj", "layers.1.self_attn.o_proj"),
        ("layers.1.mlp.experts.up_proj", "layers.1.mlp.experts.gate_proj"),
        ("layers.1.mlp.down_proj", "layers.1.mlp.down_proj"),
        ("lm_head", "lm_head"),
    ],
)
def test_matrices_of_one_input(module: str, first: str) -> None:
    assert first_of(module) == first


def test_the_copies_start_equal() -> None:
    shape = (8, 2)
    index = [slice(0, 8), slice(0, 2)]

    def start(module: str, share_first: bool) -> np.ndarray:
        config = AdapterConfig(LORA, 2, share_first=share_first)
        initial = LORA.initial(AdaptedModel(lambda *_: np.zeros(shape), 5, {}, config))
        return initial(f"layers.0.self_attn.{module}.lora_A", shape, index)

    assert np.array_equal(start("v_proj", True), start("q_proj", True))
    assert np.array_equal(start("q_proj", True), start("q_proj", False))
    assert not np.array_equal(start("v_proj", False), start("q_proj", False))
    assert not np.array_equal(start("o_proj", True), start("q_proj", True))


def test_a_start_by_parts_has_more_variance() -> None:
    """Of matrices that are cut along their inputs alone."""
    shape = (4, 5)

    def start(module: str, config: AdapterConfig) -> np.ndarray:
        plan = FAMILIES["llama"].shard_plan or UNSHARDED
        shapes = {f"{module}.weight": (4, 6)}
        initial = with_adapter_values(lambda *_: np.zeros(shape), 5, shapes, config, plan)
        return initial(f"{module}.lora_A", shape, [slice(0, 4), slice(0, 5)])

    for name, factor in (("mlp.down_proj", 2.0), ("self_attn.o_proj", 2.0), ("mlp.up_proj", 1.0)):
        module = f"model.layers.0.{name}"
        found = start(module, AdapterConfig(LORA, 5, init_shards=4))
        np.testing.assert_allclose(found, factor * start(module, AdapterConfig(LORA, 5)), rtol=1e-6)
        assert np.any(found)


def _optimizer(parameters: dict[str, paddle.Tensor], max_norm: float | None) -> Optimizer:
    shards = [
        ParameterShard(
            name, parameter, alone.MESH, None, 0, ShardOptions(shared_as=SHARED if name.endswith("lora_A") else "")
        )
        for name, parameter in parameters.items()
    ]
    return Optimizer(shards, section(max_grad_norm=max_norm, weight_decay=0.1), 4)


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_training_equals_that_of_the_fused_matrix(max_norm: float | None) -> None:
    """x W + scale (x A) B of the concatenated W and B, with AdamW, decay and clipping."""
    config = adapter_config(rank=3, alpha=6.0)
    fused = filled(LoraLinear(linear(6, 10), config))
    parts = {"q_proj": (0, 4), "k_proj": (4, 7), "v_proj": (7, 10)}
    layers = {}
    for name, (begin, end) in parts.items():
        layer = layers[name] = LoraLinear(linear(6, end - begin), config)
        layer.weight.set_value(fused.weight[:, begin:end].numpy())
        layer.bias.set_value(fused.bias[begin:end].numpy())
        layer.lora_A.set_value(fused.lora_A)
        layer.lora_B.set_value(fused.lora_B[:, begin:end].numpy())
    for layer in (fused, *layers.values()):
        layer.weight.stop_gradient = layer.bias.stop_gradient = True
    factors = {f"{name}.{kind}": getattr(layers[name], kind) for name in parts for kind in ("lora_A", "lora_B")}
    one = alone.optimizer(
        {kind: getattr(fused, kind) for kind in ("lora_A", "lora_B")},
        section(max_grad_norm=max_norm, weight_decay=0.1),
        4,
    )
    many = _optimizer(factors, max_norm)
    for step in (1, 2, 3):
        x, weights = paddle.randn([2, 5, 6]), paddle.randn([2, 5, 10])
        (fused(x) * weights).sum().backward()
        outputs = paddle.concat([layers[name](x) for name in parts], -1)
        (outputs * weights).sum().backward()
        norm = one.finish_gradients(2.0)
        assert many.finish_gradients(2.0) == pytest.approx(norm, rel=1e-6), "A counts once"
        assert math.isfinite(norm)
        one.step(step)
        many.step(step)
    for name in parts:
        assert np.array_equal(layers[name].lora_A.numpy(), layers["q_proj"].lora_A.numpy())
    np.testing.assert_allclose(layers["q_proj"].lora_A.numpy(), fused.lora_A.numpy(), rtol=1e-5, atol=1e-6)
    second = np.concatenate([layers[name].lora_B.numpy() for name in parts], -1)
    np.testing.assert_allclose(second, fused.lora_B.numpy(), rtol=1e-5, atol=1e-6)
