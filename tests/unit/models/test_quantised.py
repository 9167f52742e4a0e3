"""A linear layer on a quantised matrix computes what one on the dequantised matrix does, and keeps no copy of that."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.base import core

from llmsuite.adapters.add import adapted_modules, add_adapters
from llmsuite.adapters.methods import adapter_config
from llmsuite.models.block_quant import ABSMAX, CODES, BlockFormat
from llmsuite.models.experts import GroupedLinear
from llmsuite.models.quantised import dequantise, dequantise_on_device, quantise_matrices
from llmsuite.models.targets import quantised_modules
from tests.support.families import FAMILIES, tiny

INPUTS = 64
OUTPUTS = 24
FORMATS = [
    BlockFormat("nf4", 16),
    BlockFormat("fp4", 64),
    BlockFormat("int8", 32),
    BlockFormat("nf4", 4, double_quant=True),  # more than one block of scales
]
IDS = ["nf4", "fp4", "int8", "nf4 doubled"]


def stored(format: BlockFormat, adapted: bool) -> tuple[Any, np.ndarray]:
    """A layer with a quantised matrix, and the matrix that it stands for."""
    rng = np.random.default_rng(1)
    with paddle.LazyGuard():
        model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS))
    if adapted:
        with paddle.LazyGuard():
            add_adapters(model, ["0"], adapter_config(rank=2))
    with paddle.LazyGuard():
        quantise_matrices(model, ["0"], format)
    matrix = rng.normal(size=[INPUTS, OUTPUTS]).astype("float32")
    values = format.parts(matrix)
    for name, parameter in model.named_parameters():
        part = name.rpartition(".")[2]
        parameter._set_impl(paddle.to_tensor(values.get(part, rng.normal(size=parameter.shape).astype("float32"))))
    return model[0], format.rounded(matrix)


@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "adapter"])
@pytest.mark.parametrize("format", FORMATS, ids=IDS)
def test_forward_and_backward_are_those_of_the_dequantised_matrix(format: BlockFormat, adapted: bool) -> None:
    layer, matrix = stored(format, adapted)
    assert layer.weight.codes.stop_gradient
    assert layer.weight.absmax.stop_gradient
    plain = nn.Linear(INPUTS, OUTPUTS)
    plain.weight.set_value(paddle.to_tensor(matrix))
    plain.bias.set_value(layer.bias)
    x = [paddle.to_tensor(np.random.default_rng(2).normal(size=[2, 5, INPUTS]).astype("float32"), stop_gradient=False)]
    x.append(x[0].detach())
    x[1].stop_gradient = False
    y = layer(x[0])
    wanted = plain(x[1])
    if adapted:
        wanted = wanted + paddle.matmul(paddle.matmul(x[1], layer.lora_A), layer.lora_B) * layer.scaling
    for of_y in (y, wanted):
        (of_y * of_y).sum().backward()
    np.testing.assert_allclose(y.numpy(), wanted.numpy(), rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(
        x[0].grad.numpy(), x[1].grad.numpy(), rtol=1e-6, atol=1e-6 * float(x[1].grad.abs().max())
    )


@pytest.mark.parametrize("format", FORMATS, ids=IDS)
def test_paddles_operations_dequantise_as_numpy_does(format: BlockFormat) -> None:
    """The ones for devices run here too."""
    layer, matrix = stored(format, adapted=False)
    for function in (dequantise, dequantise_on_device):
        np.testing.assert_array_equal(function(layer.weight.codes, layer.weight._scales(), format).numpy(), matrix)


@pytest.mark.parametrize("format", FORMATS, ids=IDS)
def test_a_pass_keeps_no_matrix_for_its_backward_pass(format: BlockFormat) -> None:
    layer, _ = stored(format, adapted=False)
    x = paddle.randn([3, INPUTS])
    x.stop_gradient = False

    def kept() -> int:
        gc.collect()
        return int(core.host_memory_stat_current_value("Allocated", 0))

    layer(x)
    before = kept()
    y = layer(x)
    assert kept() - before <= 2 * y.numel().item() * 4 + 512


@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "adapter"])
@pytest.mark.parametrize("format", FORMATS, ids=IDS)
def test_a_stack_computes_as_its_dequantised_matrices(format: BlockFormat, adapted: bool) -> None:
    rng = np.random.default_rng(3)
    counts = [3, 0, 2]
    with paddle.LazyGuard():
        model = nn.Sequential(GroupedLinear(3, INPUTS, OUTPUTS))
        if adapted:
            add_adapters(model, ["0"], adapter_config(rank=2))
        quantise_matrices(model, ["0"], format)
    dense = [rng.normal(size=[INPUTS, OUTPUTS]).astype("float32") for _ in counts]
    values = {part: np.stack([format.parts(matrix)[part] for matrix in dense]) for part in format.dtypes}
    for name, parameter in model.named_parameters():
        part = name.rpartition(".")[2]
        assert part not in values or list(values[part].shape) == parameter.shape
        parameter._set_impl(paddle.to_tensor(values.get(part, rng.normal(size=parameter.shape).astype("float32"))))
    layer = model[0]
    matrices = [paddle.to_tensor(format.rounded(matrix)) for matrix in dense]
    if adapted:
        matrices = [
            w + layer.scaling * a @ b for w, a, b in zip(matrices, layer.lora_A.detach(), layer.lora_B.detach())
        ]
    x = paddle.to_tensor(rng.normal(size=[5, INPUTS]).astype("float32"), stop_gradient=False)
    y = layer.product(x, counts)
    y.square().sum().backward()
    wanted = [rows @ matrices[number] for number, rows in zip((0, 2), x.detach().split([3, 2]))]
    found = [2 * of_y @ matrices[number].t() for number, of_y in zip((0, 2), wanted)]
    np.testing.assert_allclose(y.numpy(), paddle.concat(wanted).numpy(), rtol=1e-5, atol=1e-4)
    scale = float(paddle.concat(found).abs().max())
    np.testing.assert_allclose(x.grad.numpy(), paddle.concat(found).numpy(), rtol=1e-5, atol=1e-5 * scale)
    assert layer.product(paddle.zeros([0, INPUTS]), [0, 0, 0]).shape == [0, OUTPUTS]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_matrices_of_the_layers_are_quantised_and_nothing_else(family: str) -> None:
    model = tiny(family)
    plan = FAMILIES[family].shard_plan
    assert plan is not None
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    modules = quantised_modules(shapes, plan)
    experts = {name.removesuffix(".weight") for name in shapes if plan.is_expert(name)}
    assert modules == [
        name for name, _ in model.named_sublayers() if name in {*adapted_modules(model, plan, None), *experts}
    ]
    with paddle.LazyGuard():
        add_adapters(model, modules[::2], adapter_config(rank=2))
        quantise_matrices(model, modules, BlockFormat("nf4", 8))
    left = {name for name, _ in model.named_parameters()}
    assert all({f"{m}.weight.codes", f"{m}.weight.absmax"} <= left and f"{m}.weight" not in left for m in modules)
    assert {name for name in shapes if name.removesuffix(".weight") not in modules} <= left
    for module in modules:
        for part in (CODES, ABSMAX):
            assert plan.dim(f"{module}.weight.{part}") == plan.dim(f"{module}.weight")
