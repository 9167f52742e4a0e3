"""Matrices with low-rank adapters in one operation: the numbers of layer by layer, with fewer roundings."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from llmsuite.adapters.layers.dora import DoraLinear
from llmsuite.adapters.layers.lora import LoraLinear
from llmsuite.adapters.methods import adapter_config
from llmsuite.devices.ops import Ops
from llmsuite.models.blocks import GatedMLP
from llmsuite.models.dropout import TokenDropout
from llmsuite.models.linear import Linear
from llmsuite.models.linear_ops import LinearOps, is_low_rank, use_linear_ops
from tests.support.allocated import allocated
from tests.support.compiled_layers import compiled
from tests.support.devices import cpu_backend
from tests.support.linear_forms import FORMS, LIMIT, leaf, random, rounded

I = 48  # noqa: E741
O = 80  # noqa: E741
R = 4


@pytest.fixture(params=FORMS.values(), ids=FORMS.keys())
def ops(request: pytest.FixtureRequest) -> Ops:
    return cpu_backend(multiplies_bf16=request.param).ops("bf16")


def layer_of(seed: int, inputs: int = I, outputs: int = O, bias: bool = False, kind: Any = LoraLinear) -> Any:
    """Its own W is frozen."""
    linear = nn.Linear(inputs, outputs, bias_attr=None if bias else False)
    layer = kind(linear, adapter_config("dora" if kind is DoraLinear else "lora", rank=R, alpha=3 * R))
    for i, parameter in enumerate(layer.parameters()):
        parameter.set_value(random(*parameter.shape, seed=seed + i) / parameter.shape[0] ** 0.5)
    for parameter in (layer.weight, layer.bias):
        if parameter is not None:
            parameter.stop_gradient = True
    return layer


class _Layers(nn.Layer):
    def __init__(self, *layers: Any):
        super().__init__()
        self.layers = nn.LayerList(layers)


def trained(*layers: Any) -> list[Any]:
    return [parameter for layer in layers for parameter in layer.parameters() if not parameter.stop_gradient]


def gradients(x: Any, ys: Sequence[Any], layers: Sequence[Any]) -> list[np.ndarray]:
    """Outputs, and gradients of the input and of all that is trained."""
    sum(
        (y.astype("float32") * paddle.to_tensor(random(*y.shape, seed=60 + i))).sum() for i, y in enumerate(ys)
    ).backward()
    found = [t.astype("float32").numpy() for t in (*ys, x.grad, *(p.grad for p in trained(*layers)))]
    for parameter in trained(*layers):
        parameter.clear_gradient(set_to_zero=False)
    return found


def check(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray], limit: float = LIMIT) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert np.abs(one - other).max() <= limit * np.abs(other).max()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("matrix_is_trained", [False, True])
def test_the_numbers_of_layer_by_layer(ops: Ops, bias: bool, matrix_is_trained: bool) -> None:
    """But for the order of float32 sums, as nearly nothing falls to another side: the same numbers are rounded."""
    layers = [layer_of(0, bias=bias), Linear(I, 24, bias_attr=False), layer_of(20, outputs=24)]
    layers[2].weight.stop_gradient = not matrix_is_trained
    use_linear_ops(_Layers(*layers), products := LinearOps(ops))
    given = random(2, 37, I, seed=50)
    found = []
    for together in (False, True):
        x = leaf(given)
        apart = [
            layer if isinstance(layer, Linear) else functools.partial(LoraLinear.multiply, layer) for layer in layers
        ]
        ys = products.apply_layers(layers, x) if together else [form(x) for form in apart]
        found.append(gradients(x, ys, layers))
    check(*found)
    with paddle.no_grad():
        check([y.numpy() for y in products.apply_layers(layers, x)], found[0][:3])
    check([layers[0](x).numpy()], found[0][:1])


def test_what_is_rounded(ops: Ops) -> None:
    layer = layer_of(0)
    given = random(37, I, seed=50)
    gradient = random(37, O, seed=51)
    use_linear_ops(_Layers(layer), LinearOps(ops))
    x = leaf(given)
    y = layer(x)
    y.backward(paddle.to_tensor(gradient))
    w, a, b = (rounded(parameter.numpy()) for parameter in (layer.weight, layer.lora_A, layer.lora_B))
    narrow = rounded(3 * (rounded(given) @ a))
    d_y = rounded(gradient)
    of_narrow = rounded(3 * (d_y @ b.T))
    check([y.numpy()], [rounded(given) @ w + narrow @ b], 1e-4)
    check([x.grad.numpy()], [d_y @ w.T + of_narrow @ a.T], 1e-4)
    check([layer.lora_A.grad.numpy()], [rounded(given).T @ of_narrow], 1e-4)
    check([layer.lora_B.grad.numpy()], [narrow.T @ d_y], 1e-4)


def test_the_input_is_rounded_once_and_kept_once(ops: Ops) -> None:
    layers = [layer_of(seed) for seed in (0, 10, 20)]
    asked = list[list[int]]()

    def noted(x: Any) -> Any:
        asked.append(x.shape)
        return ops.matmuls.round_activation(x)

    matmuls = dataclasses.replace(ops.matmuls, round_activation=noted)
    products = LinearOps(dataclasses.replace(ops, matmuls=matmuls))
    use_linear_ops(_Layers(*layers), products)
    x = leaf(random(2, 37, I))
    ys = products.apply_layers(layers, x)
    assert asked == [[2, 37, I], *[[2, 37, R]] * 3]
    del ys
    rows = 2 * 37
    assert allocated(lambda: products.apply_layers(layers, x)) == rows * (2 * I + 3 * (4 * O + 2 * R))


def mlp_of(ops: Ops, **kinds: Any) -> GatedMLP:
    mlp = GatedMLP(I, O, ops)
    for seed, parameter in enumerate(mlp.parameters()):
        parameter.set_value(random(*parameter.shape, seed=seed) / parameter.shape[0] ** 0.5)
        parameter.stop_gradient = True
    for at, (name, kind) in enumerate(kinds.items()):
        setattr(mlp, name, layer_of(10 * at, *getattr(mlp, name).weight.shape, kind=kind))
    use_linear_ops(mlp, LinearOps(ops))
    return mlp


ALL = {"gate_proj": LoraLinear, "up_proj": LoraLinear, "down_proj": LoraLinear}


def taken(mlp: GatedMLP, x: Any) -> set[Any]:
    """Dtypes of what SwiGLU takes."""
    found = set[Any]()
    swiglu = mlp.swiglu
    mlp.swiglu = lambda gate, up: (found.update([gate.dtype, up.dtype]), swiglu(gate, up))[1]
    mlp(x)
    mlp.swiglu = swiglu
    return found


def test_between_products_of_an_mlp_is_bfloat16(ops: Ops) -> None:
    x = leaf(random(2, 37, I))
    for kinds in (ALL, {"up_proj": LoraLinear}, {"down_proj": LoraLinear}):
        mlp = mlp_of(ops, **kinds)
        assert taken(mlp, x) == {paddle.bfloat16}, kinds
        for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            layer.is_enabled = layer.disable_lora = False
        assert taken(mlp, x) == {paddle.bfloat16}, "switched on or off"
    for name in ALL:
        assert taken(mlp_of(ops, **{**ALL, name: DoraLinear}), x) == {paddle.float32}, name
    mlp = mlp_of(ops, **ALL)
    mlp.down_proj.lora_dropout = TokenDropout(0.5, "down", 0, O)
    assert not is_low_rank(mlp.down_proj)
    mlp.eval()
    assert taken(mlp, x) == {paddle.bfloat16}, "no dropout in evaluation"


@pytest.mark.parametrize("compiles", [False, True])
def test_an_mlp_rounds_alike_together_and_layer_by_layer(ops: Ops, compiles: bool) -> None:
    """In programs and on ranks each layer multiplies alone."""
    found = []
    given = random(2, 37, I, seed=50)
    for together in (True, False):
        mlp = mlp_of(ops, **ALL)
        x = leaf(given)
        products = mlp.apply_linears.__self__
        if compiles and not together:
            y = compiled(mlp)(x)
        else:
            if not together:
                products.__dict__["apply_layers"] = functools.partial(_apply_alone, products)
                mlp.apply_linears = products.apply_layers
            y = mlp(x)
        found.append(gradients(x, [y], [mlp]))
    for one, other in zip(*found):
        far = np.abs(one - other) / np.abs(one).max()
        assert np.median(far) <= LIMIT
        assert far.max() <= 2.0**-6


def _apply_alone(products: LinearOps, layers: Sequence[Any], x: Any, then: Any = None) -> list[Any]:
    return [products._apply_alone(layer, x, then is not None) for layer in layers]
