"""Adapters are layers of `paddlenlp.peft`, imported without the packages around them, and compute what those do."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from llmsuite.adapters.add import adapted_modules, add_adapters
from llmsuite.adapters.layers.lora import LoraLinear
from llmsuite.adapters.methods import adapter_config
from llmsuite.adapters.paddlenlp_peft import import_alone
from llmsuite.base.errors import UserError
from llmsuite.models.linear import is_plain_linear
from llmsuite.models.shard_plan import UNSHARDED
from tests.support import alone
from tests.support.families import tiny
from tests.support.lora_layers import filled, linear
from tests.support.paths import ROOT

BUILD = """
import sys, paddle, paddle.nn.functional as F
before = F.linear, paddle.to_tensor, paddle.Tensor.numpy, paddle.Tensor.set_value
from llmsuite.parallel.mesh import Mesh
from llmsuite.contract.registry import load_plugins
from llmsuite.recipe.resolve import plan_run
from llmsuite.engine.build import build_model
registry = load_plugins()
plan = plan_run("recipes/llama/lora.json", ["--launch.num_devices=1", "--parallel={}"], registry, smoke=True)
backend = registry.devices["cpu"].factory()
mesh = Mesh(plan.parallel.degrees, 0)
built = build_model(plan.model, plan.parallel, plan.train, registry, backend, mesh)
(chunk,) = built.part.chunks
adapted = [module for module in chunk.sublayers() if hasattr(module, "lora_A")]
assert len(adapted) == len(built.adapters.modules) > 0
for module in adapted:
    bases = [f"{base.__module__}.{base.__name__}" for base in type(module).__mro__]
    assert "paddlenlp.peft.lora.lora_layers.LoRALinear" in bases, bases
assert before == (F.linear, paddle.to_tensor, paddle.Tensor.numpy, paddle.Tensor.set_value), "patched"
packages = [name for name in sys.modules if name.startswith("paddlenlp") and hasattr(sys.modules[name], "__path__")]
assert packages == [], packages
"""


def test_stage_lora_trains_layers_of_paddlenlp_and_patches_nothing() -> None:
    ended = subprocess.run([sys.executable, "-c", BUILD], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.parametrize("rslora", [False, True])
def test_it_computes_what_paddlenlp_computes(rslora: bool) -> None:
    paddle.seed(1)
    layer = filled(LoraLinear(linear(6, 10), adapter_config(rank=3, alpha=5.0, rslora=rslora)))
    theirs = LoraLinear.__mro__[2]
    assert theirs is import_alone("paddlenlp.peft.lora.lora_layers")[0].LoRALinear
    outputs = []
    gradients = []
    x = paddle.randn([2, 4, 6])
    for forward in (LoraLinear.forward, theirs.forward):
        layer.clear_gradients()
        y = forward(layer, x)
        y.square().sum().backward()
        outputs.append(y.numpy())
        gradients.append([layer.lora_A.grad.numpy(), layer.lora_B.grad.numpy()])
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)
    for ours, wanted in zip(*gradients):
        np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-4)
    layer.merge()  # theirs too
    np.testing.assert_allclose(layer(x).numpy(), outputs[0], rtol=1e-5, atol=1e-5)


def test_no_second_matrix_is_made() -> None:
    base = linear(6, 10)
    weight = base.weight
    bias = base.bias
    paddle.seed(3)
    first = paddle.randn([2]).tolist()
    paddle.seed(3)
    layer = LoraLinear(base, adapter_config(rank=3))
    assert paddle.randn([2]).tolist() == first, "random numbers were used"
    assert layer.weight is weight
    assert layer.bias is bias
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias", "lora_A", "lora_B"]


def test_a_layer_with_an_adapter_is_no_plain_linear_layer() -> None:
    """Though it is an `nn.Linear`: neither adapted again, nor quantised without its adapter."""
    model: Any = tiny("llama")
    modules = adapted_modules(model, UNSHARDED, ["q_proj"])
    add_adapters(model, modules, adapter_config(rank=2))
    found = dict(model.named_sublayers())
    assert all(isinstance(found[name], nn.Linear) for name in modules)
    assert not any(is_plain_linear(found[name]) for name in modules)
    with pytest.raises(UserError, match="'q_proj' matches no matrix"):
        adapted_modules(model, UNSHARDED, ["q_proj"])


def test_without_paddlenlp_its_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"lora.rank: .*install it with: pip install .*paddlenlp=="):
        import_alone("paddlenlp.peft.lora.lora_layers")


def test_the_optimizer_takes_the_learning_rate_of_lora_plus_from_the_layer() -> None:
    layer = LoraLinear(linear(4, 4), adapter_config(rank=2, lora_plus_ratio=8.0))
    shards = {shard.name: shard for shard in alone.shards({"lora_A": layer.lora_A, "lora_B": filled(layer).lora_B})}
    rates = {name: shard.main_param.optimize_attr["learning_rate"] for name, shard in shards.items()}
    assert rates == {"lora_A": 1.0, "lora_B": 8.0}
