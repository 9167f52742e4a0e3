"""The inside of a TP region computes with plain shards where each rank can do so alone, and gets the same numbers.

On one rank; `tests/multi/test_fused_projections.py` and `tests/parity/test_families.py` have several.
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.distributed.auto_parallel.api import dtensor_from_local

from llmsuite.devices.matmul_ops import MatmulOps
from llmsuite.devices.ops import Ops
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.parallel.overlap import _Fused, modules_to_fuse
from llmsuite.parallel.tensor import local_value, placement
from llmsuite.parallel.tp_region import accept_local_shards
from tests.support.families import FAMILIES, tiny

MESH: Any = types.SimpleNamespace(tensor=dist.ProcessMesh([0], dim_names=["tp"]), tensor_group=object())
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "self_attn", {}),
    ("llama", "mlp", {}),
    ("qwen", "self_attn", {"model_type": "qwen2"}),  # biases
    ("qwen", "self_attn", {"model_type": "qwen3"}),  # norms of heads
    ("gemma", "self_attn", {"model_type": "gemma3_text"}),  # the same with gains of 1 + weight
    ("gemma", "mlp", {}),
    ("gpt", "self_attn", {}),
    ("glm", "self_attn", {}),
    ("granite", "mlp", {}),
]


def on_mesh(tensor: Any, dim: int | None) -> Any:
    """A tensor with a gradient, distributed over the mesh."""
    made = dtensor_from_local(tensor.detach(), MESH.tensor, [placement(dim)])
    made.stop_gradient = False
    return made


def plan_of(family: str) -> ShardPlan:
    plan = FAMILIES[family].shard_plan
    assert plan is not None
    return plan


def with_values(family: str, **shape: Any) -> tuple[Any, Any]:
    """A model of a family's smoke shape, with values, and its inputs of layers for 5 tokens."""
    spec = FAMILIES[family]
    paddle.seed(1)
    model = spec.factory()(spec.config_cls(**{**spec.smoke, **shape}), Ops())
    rng = np.random.default_rng(2)
    for parameter in model.parameters():
        parameter.set_value(rng.normal(size=parameter.shape).astype("float32") / 4)
    model.train()
    return model, model.layer_inputs(0, 5, paddle.float32)


def run(module: Any, x: Any, inputs: tuple[Any, ...]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Output of a module, and the gradients of its parameters and of x."""
    output = module(x, *inputs)
    y = output[0] if isinstance(output, tuple) else output
    weights = paddle.linspace(-1, 1, y.size).reshape(y.shape)
    if y.is_dist():  # a partial sum, which on one rank is complete
        weights = dtensor_from_local(weights, MESH.tensor, [dist.Replicate()])
    paddle.autograd.backward([y], [weights])
    gradients = {name: local_value(p.grad).numpy() for name, p in module.named_parameters()}
    return local_value(y).numpy(), {**gradients, "x": local_value(x.grad).numpy()}


@pytest.mark.parametrize("with_hook", [False, True])
@pytest.mark.parametrize(("family", "name", "shape"), CASES)
def test_a_region_makes_what_one_card_makes(family: str, name: str, shape: dict[str, Any], with_hook: bool) -> None:
    plan = plan_of(family)
    model, inputs = with_values(family, **shape)
    layer = model.model.layers[0]
    module = getattr(layer, name)
    assert any(module is found for found in modules_to_fuse(model, plan))
    if name == "mlp":
        inputs = ()
    elif family != "gpt":
        inputs = inputs[slice(*layer.attention_inputs)]
    x = paddle.linspace(-1, 1, 2 * 5 * model.config.hidden_size).reshape([2, 5, -1])
    x.stop_gradient = False
    expected, gradients = run(module, x, inputs)
    module.clear_gradients()
    full_name = f"{plan.layers}.0.{name}"
    for key, parameter in module.named_parameters():
        parameter._set_impl(on_mesh(parameter, plan.dim(f"{full_name}.{key}")))
    assert accept_local_shards(module, full_name, plan, MESH)
    module.apply_linears = _Fused(MESH, "deferred", MatmulOps(), module.sublayers()).apply_linears
    seen = list[bool]()
    row_parallel = module.o_proj if name == "self_attn" else module.down_proj
    if with_hook:
        row_parallel.register_forward_pre_hook(lambda layer, given: seen.append(given[0].is_dist()))
    found, own_gradients = run(module, on_mesh(x, None), inputs)
    assert seen == ([True] if with_hook else []), "hooks get distributed tensors"
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert own_gradients.keys() == gradients.keys()
    for key, gradient in gradients.items():
        np.testing.assert_allclose(own_gradients[key], gradient, rtol=1e-4, atol=1e-5, err_msg=key)


def test_norms_over_all_heads_and_further_parameters_need_full_tensors() -> None:
    norms = tiny("olmo").model.layers[0].self_attn
    assert not accept_local_shards(norms, "model.layers.0.self_attn", plan_of("llama"), MESH)
    attention = tiny("llama").model.layers[0].self_attn
    kernel = attention.o_proj.kernel
    attention.sinks = attention.create_parameter([4])
    assert not accept_local_shards(attention, "model.layers.0.self_attn", plan_of("llama"), MESH)
    assert attention.o_proj.kernel is kernel, "nothing changes"
    del attention.sinks
    assert accept_local_shards(attention, "model.layers.0.self_attn", plan_of("llama"), MESH)
