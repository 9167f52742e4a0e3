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

from llmsuite.errors import UserError
from llmsuite.models.adapter import is_plain_linear
from llmsuite.models.exact import is_plain
from llmsuite.models.lora import adapted_modules, add_adapters
from llmsuite.models.lora_layers import LoraLinear
from llmsuite.models.paddlenlp_peft import import_alone
from llmsuite.models.peft_configs import lora_config
from llmsuite.models.shard_plan import WHOLE
from tests.paths import ROOT
from tests.unit import alone
from tests.unit.families import tiny

BUILD = """
import sys, paddle, paddle.nn.functional as F
before = F.linear, paddle.to_tensor, paddle.Tensor.numpy, paddle.Tensor.set_value
from llmsuite import builtin
from llmsuite.cli import commands
from llmsuite.parallel.mesh import Mesh
from llmsuite.plugins.manager import load_plugins
from llmsuite.recipe.resolve import plan_run
from llmsuite.train.build import build_model
registry = load_plugins(builtin, commands)
plan = plan_run("recipes/llama/lora.json", ["--launch.num_devices=1", "--parallel={}"], registry, smoke=True)
built = build_model(plan, registry, registry.devices["cpu"].factory(), Mesh(plan.degrees, 0))
(chunk,) = built.part.chunks
adapted = [module for module in chunk.sublayers() if hasattr(module, "lora_A")]
assert len(adapted) == len(built.adapters.modules) > 0
for module in adapted:
    bases = [f"{base.__module__}.{base.__name__}" for base in type(module).__mro__]
    assert "paddlenlp.peft.lora.lora_layers.LoRALinear" in bases, bases
assert type(built.adapters.config).__module__ == "paddlenlp.peft.lora.lora_config"
assert before == (F.linear, paddle.to_tensor, paddle.Tensor.numpy, paddle.Tensor.set_value), "patched"
packages = [name for name in sys.modules if name.startswith("paddlenlp") and hasattr(sys.modules[name], "__path__")]
assert packages == [], packages
"""


def linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    """A linear layer with random values."""
    made = nn.Linear(num_inputs, num_outputs)
    made.bias.set_value(paddle.randn([num_outputs]))
    return made


def filled(layer: Any) -> Any:
    """The layer with random factors."""
    for name, parameter in layer.named_parameters():
        if name not in ("weight", "bias"):
            parameter.set_value(paddle.randn(parameter.shape))
    return layer


def test_stage_lora_trains_layers_of_paddlenlp_and_patches_nothing() -> None:
    ended = subprocess.run([sys.executable, "-c", BUILD], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.parametrize("rslora", [False, True])
def test_it_computes_what_paddlenlp_computes(rslora: bool) -> None:
    paddle.seed(1)
    layer = filled(LoraLinear(linear(6, 10), lora_config(r=3, lora_alpha=5.0, rslora=rslora)))
    theirs = LoraLinear.__mro__[2]
    assert theirs is import_alone("paddlenlp.peft.lora.lora_layers")[0].LoRALinear
    outputs, gradients = [], []
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
    weight, bias = base.weight, base.bias
    paddle.seed(3)
    first = paddle.randn([2]).tolist()
    paddle.seed(3)
    layer = LoraLinear(base, lora_config(r=3))
    assert paddle.randn([2]).tolist() == first, "random numbers were drawn"
    assert layer.weight is weight
    assert layer.bias is bias
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias", "lora_A", "lora_B"]


def test_a_layer_with_an_adapter_is_no_plain_linear_layer() -> None:
    """Though it is an `nn.Linear`: neither adapted again, nor quantised without its adapter."""
    model: Any = tiny("llama")
    modules = adapted_modules(model, WHOLE, ["q_proj"])
    add_adapters(model, modules, lora_config(r=2))
    found = dict(model.named_sublayers())
    assert all(isinstance(found[name], nn.Linear) for name in modules)
    assert not any(is_plain_linear(found[name]) or is_plain(found[name]) for name in modules)
    with pytest.raises(UserError, match="'q_proj' matches no matrix"):
        adapted_modules(model, WHOLE, ["q_proj"])


def test_without_paddlenlp_its_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"lora.rank: .*install it with: pip install .*paddlenlp=="):
        import_alone("paddlenlp.peft.lora.lora_layers")


def test_the_optimizer_takes_the_learning_rate_of_lora_plus_from_the_layer() -> None:
    layer = LoraLinear(linear(4, 4), lora_config(r=2, lora_plus_scale=8.0))
    shards = {shard.name: shard for shard in alone.shards({"lora_A": layer.lora_A, "lora_B": filled(layer).lora_B})}
    rates = {name: shard.master_or_shard.optimize_attr["learning_rate"] for name, shard in shards.items()}
    assert rates == {"lora_A": 1.0, "lora_B": 8.0}
