"""In a backward pass of a matrix that is cut by its outputs, the sum is under way while the other product is made; and
projections of one input that share an operation make what they make one by one."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle import nn
from paddle.distributed.auto_parallel.api import dtensor_from_local

from llmsuite.devices.matmul_ops import MatmulOps
from llmsuite.models import blocks
from llmsuite.models.dense_plan import PLAN
from llmsuite.models.linear import has_own_kernel, is_matrix, is_plain_linear
from llmsuite.parallel import overlap
from tests.support.families import FAMILIES, tiny

MESH: Any = types.SimpleNamespace(tensor=dist.ProcessMesh([0], dim_names=["tp"]), tensor_group=object())


class Model(nn.Layer):
    """Two linear layers under names that the plan knows."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(4, 6, bias_attr=False)
        self.other = nn.Linear(4, 6)


def on_mesh(values: np.ndarray, placements: list[Any]) -> Any:
    tensor = dtensor_from_local(paddle.to_tensor(values), MESH.tensor, placements)
    tensor.stop_gradient = False
    return tensor


@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_sum_is_under_way_while_the_gradient_of_the_weight_is_made(
    is_frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    events = list[str]()
    matmul = paddle.matmul
    values = np.arange(24, dtype="float32").reshape(4, 6) / 10
    model.lm_head.weight._set_impl(on_mesh(values, [dist.Shard(1)]))
    model.lm_head.weight.stop_gradient = is_frozen
    overlap.overlap_sums(model, PLAN, MESH)
    assert is_plain_linear(model.other), "it is not cut"
    x = on_mesh(np.ones([2, 3, 4], "float32"), [dist.Replicate()])
    y = model.lm_head(x)
    assert y.placements == [dist.Shard(2)]

    def product(*args: Any, **options: Any) -> Any:
        events.append("product")
        return matmul(*args, **options)

    def start_all_reduce(tensor: Any, group: Any) -> Any:
        assert group is MESH.tensor_group
        events.append("the sum starts")
        return types.SimpleNamespace(wait=lambda: events.append("the sum is waited for"))

    monkeypatch.setattr(paddle, "matmul", product)
    monkeypatch.setattr(overlap.collective, "start_all_reduce", start_all_reduce)
    paddle.autograd.backward([y], [on_mesh(np.ones([2, 3, 6], "float32"), [dist.Shard(2)])])
    overlapped = [] if is_frozen else ["product"]
    assert events == ["product", "the sum starts", *overlapped, "the sum is waited for"]
    np.testing.assert_allclose(x.grad._local_value().numpy(), np.tile(values.sum(1), [2, 3, 1]), rtol=1e-6)
    if is_frozen:
        assert model.lm_head.weight.grad is None
    else:
        assert np.array_equal(model.lm_head.weight.grad._local_value().numpy(), np.full([4, 6], 6.0, "float32"))


ALONE = {"gpt": {"mlp.up_proj"}, "starcoder": {"mlp.up_proj"}}
"""By family, the matrices of a layer that alone read an input that is gathered before them."""


@pytest.mark.parametrize("takes_all", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_alone_reads_a_gathered_sequence(family: str, takes_all: bool) -> None:
    model = tiny(family)
    plan = FAMILIES[family].shard_plan
    assert plan is not None
    found = overlap.layers_to_scatter(model, plan, takes_all)
    wanted = {f"model.layers.{i}.{name}" for i in range(len(model.model.layers)) for name in ALONE.get(family, ())}
    assert set(found) == wanted | ({"lm_head"} if takes_all and model.lm_head is not None else set())
    overlap.overlap_sums(model, plan, MESH, scattered=found)
    modules = dict(model.named_sublayers())
    cut = {name for name in modules if plan.dim(f"{name}.weight") == 1 and is_matrix(modules[name])}
    assert {name for name in modules if has_own_kernel(modules[name])} == cut - set(found)


class Projections(nn.Layer):
    """Three column-parallel matrices of one input, of which the last has a bias."""

    def __init__(self, widths: Sequence[int]):
        super().__init__()
        self.all = nn.LayerList([nn.Linear(4, width, bias_attr=None if width == 3 else False) for width in widths])
        for layer in self.all:
            layer.weight._set_impl(on_mesh(layer.weight.numpy(), [dist.Shard(1)]))
            if layer.bias is not None:
                layer.bias._set_impl(on_mesh(np.ones(layer.bias.shape, "float32"), [dist.Shard(0)]))

    def run(self, products: Any, x: np.ndarray) -> tuple[list[np.ndarray], Any]:
        """Outputs, and the input with its gradient; parameters have theirs then. The n-th output counts n-fold."""
        given = on_mesh(x, [dist.Replicate()])
        outputs = products(list(self.all), given)
        ones = [on_mesh(np.full(y.shape, n + 1.0, "float32"), [dist.Shard(2)]) for n, y in enumerate(outputs)]
        paddle.autograd.backward(outputs, ones)
        return [y._local_value().numpy() for y in outputs], given

    def gradients(self) -> list[np.ndarray | None]:
        """Gradients of the parameters, which are cleared."""
        found = []
        for parameter in self.parameters():
            found.append(None if parameter.grad is None else parameter.grad._local_value().numpy())
            parameter.clear_gradient(False)
        return found


@pytest.mark.parametrize("mode", ["overlapped", "blocking", "deferred"])
@pytest.mark.parametrize(("widths", "frozen"), [((6, 2, 3), None), ((5, 5), None), ((6, 2, 3), 1)])
def test_fused_projections_make_what_each_makes(
    mode: overlap.SumMode, widths: Sequence[int], frozen: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank; sums over several are made by the engine's collectives, of which there is one."""
    sums = list[str]()

    def start_all_reduce(tensor: Any, group: Any) -> Any:
        sums.append("overlapped")
        return types.SimpleNamespace(wait=lambda: None)

    def reshard(tensor: Any, mesh: Any, placements: list[Any]) -> Any:
        assert tensor.placements == [dist.Partial()]
        sums.append("blocking")
        return dtensor_from_local(tensor._local_value(), mesh.tensor, placements)

    monkeypatch.setattr(overlap.collective, "start_all_reduce", start_all_reduce)
    monkeypatch.setattr(overlap, "reshard", reshard)
    paddle.seed(3)
    model = Projections(widths)
    if frozen is not None:
        model.all[frozen].weight.stop_gradient = True
    x = np.linspace(-1, 1, 2 * 3 * 4, dtype="float32").reshape(2, 3, 4)
    apart, given = model.run(blocks.apply_linears, x)
    of_parameters = model.gradients()
    assert sums == []
    seen = list[tuple[int, ...]]()
    model.all[0].register_forward_post_hook(lambda layer, inputs, y: seen.append(tuple(y.shape)))
    together, fused = model.run(overlap._Fused(MESH, mode, MatmulOps()).apply_linears, x)
    assert seen == [(2, 3, widths[0])]
    assert sums == [] if mode == "deferred" else sums == [mode]
    assert fused.grad.placements == [dist.Partial() if mode == "deferred" else dist.Replicate()]
    for a, b in zip(apart, together, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-6)
    np.testing.assert_allclose(fused.grad._local_value().numpy(), given.grad._local_value().numpy(), rtol=1e-5)
    for expected, found in zip(of_parameters, model.gradients(), strict=True):
        assert (expected is None) is (found is None)
        if expected is not None:
            np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_fused(family: str) -> None:
    """Attention, but for DeepSeek's, whose projections have inputs of their own, and gated MLPs without experts."""
    model = tiny(family)
    plan = FAMILIES[family].shard_plan
    assert plan is not None
    names = {id(module): name for name, module in model.named_sublayers()}
    found = {names[id(module)].rpartition(".")[2] for module in overlap.modules_to_fuse(model, plan)}
    gated = any(isinstance(layer.mlp, blocks.GatedMLP) for layer in model.model.layers)
    expected = {"self_attn"} if family != "deepseek" else set()
    assert found == expected | ({"mlp"} if gated else set())
    assert found, "there would be nothing to fuse"
