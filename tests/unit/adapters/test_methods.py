"""Adapters other than plain LoRA: their outputs, their starting values, and merging, which changes no output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
import safetensors.numpy
from paddle import nn

from llmsuite.adapters.add import adapted_modules, add_adapters
from llmsuite.adapters.initial_values import with_adapter_values
from llmsuite.adapters.layers.adapter import Adapter
from llmsuite.adapters.layers.dora import DoraLinear
from llmsuite.adapters.methods import adapter_config, find_method
from llmsuite.adapters.parameters import is_factor, shard_dim, with_adapters
from llmsuite.base.errors import UserError
from llmsuite.checkpoint.adapter_base import Base
from llmsuite.checkpoint.adapter_dir import Adapters, check_layout
from llmsuite.checkpoint.convert.adapter import add_adapter
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.matmul_ops import MatmulOps
from llmsuite.devices.ops import Ops
from llmsuite.inference.load import load_model
from llmsuite.models.linear_ops import LinearOps, use_linear_ops
from llmsuite.models.quantised import quantise_matrices
from llmsuite.models.targets import quantised_modules
from tests.support.adapter_models import IDS, adapted, base_of, section, write
from tests.support.families import FAMILIES, tiny
from tests.support.kinds import BEGINNINGS, METHODS, STRUCTURED, check_merged, check_read_again, keys_of, written
from tests.support.lora_layers import filled, linear


@pytest.fixture(scope="module", params=[(method, family) for method in METHODS for family in ("llama", "gpt")], ids=str)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Method, family, directory of base and adapter, the live model with random adapters, their metadata."""
    method, family = request.param
    directory = tmp_path_factory.mktemp("methods")
    keys: dict[str, Any] = {"rslora": family == "gpt"}
    if method in STRUCTURED and family == "gpt":  # whose q, k and v are one matrix in files
        keys["target_modules"] = ["o_proj", "mlp.*"]
    return method, family, directory, *written(directory, family, section(**keys_of(method), **keys))


def test_dora_by_hand() -> None:
    layer = DoraLinear(linear(6, 10), adapter_config("dora", rank=3, alpha=6.0))
    x = filled(layer) and paddle.randn([2, 4, 6])
    whole = layer.weight + 2.0 * layer.lora_A @ layer.lora_B
    lengths = paddle.sqrt((whole * whole).sum(0))
    expected = F.linear(x, whole / lengths * layer.lora_magnitude, layer.bias)
    np.testing.assert_allclose(layer(x).numpy(), expected.numpy(), rtol=1e-4, atol=1e-5)
    layer.is_enabled = False
    np.testing.assert_array_equal(layer(x).numpy(), F.linear(x, layer.weight, layer.bias).numpy())


def test_gradients_of_dora_take_the_lengths_as_constants() -> None:
    """Gradient of A along a direction: the finite difference of the output with constant lengths."""
    layer = filled(DoraLinear(linear(6, 10), adapter_config("dora", rank=3, alpha=6.0)))
    x = paddle.randn([4, 6])
    weights = paddle.randn([4, 10])
    (layer(x) * weights).sum().backward()
    direction = paddle.randn([6, 3])
    lengths = (layer.weight + 2.0 * layer.lora_A @ layer.lora_B).square().sum(0).sqrt()
    change = 2.0 * x @ direction @ layer.lora_B * (layer.lora_magnitude / lengths)
    expected = float((change * weights).sum())
    assert float((layer.lora_A.grad * direction).sum()) == pytest.approx(expected, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("method", ["lora", *METHODS])
@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_every_layer_takes_the_kernels_of_a_device(method: str, family: str, tmp_path: Path) -> None:
    """Adapters of experts too. Not every processor has kernels of its own, so these are Paddle's, and counted."""
    base_of(family, tmp_path / "base")
    has_experts = section(**keys_of(method)).adapter_config.method.layers().experts is not None
    targets = ["*_proj"] if has_experts else ["self_attn.*"]
    model, _ = adapted(family, tmp_path / "base", section(**keys_of(method), target_modules=targets))
    expected = model(paddle.to_tensor(IDS)).numpy()
    calls = 0

    def counted(x: Any, y: Any, transpose_x: bool, transpose_y: bool) -> Any:
        nonlocal calls
        calls += 1
        return paddle.matmul(x, y, transpose_x, transpose_y)

    use_linear_ops(model, LinearOps(Ops(matmuls=MatmulOps(counted))))
    np.testing.assert_allclose(model(paddle.to_tensor(IDS)).numpy(), expected, rtol=1e-5, atol=1e-5)
    assert calls >= sum(isinstance(layer, (nn.Linear, Adapter)) for layer in model.sublayers())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_that_are_planned_and_cut(method: str, family: str) -> None:
    model = tiny(family)
    plan = FAMILIES[family].shard_plan
    assert plan is not None
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    modules = adapted_modules(model, plan, None)
    add_adapters(model, modules, section(**keys_of(method)).adapter_config)
    assert with_adapters(shapes, modules, 3, find_method(**keys_of(method))) == {
        n: tuple(p.shape) for n, p in model.named_parameters()
    }
    for name in modules:
        dim = plan.dim(f"{name}.weight")
        assert shard_dim(plan, f"{name}.lora_AB") is None
        assert shard_dim(plan, f"{name}.lora_magnitude") == (0 if dim == 1 else None)


def test_merged_and_unmerged_are_the_same(made: Any) -> None:
    method, _, directory, model, _ = made
    check_merged(directory, model, 5e-6 if method in (*BEGINNINGS, *STRUCTURED) else 2e-6)  # updates as large as W


def test_what_was_trained_is_read_again(made: Any) -> None:
    _, family, directory, model, metadata = made
    check_read_again(directory, family, model, metadata)


def test_files_are_those_of_peft(made: Any) -> None:
    """A mixer is in its first factor and PiSSA in a larger rank, so that any reader of LoRA has them; DoRA has PEFT's
    names."""
    method, _, directory, _, _ = made
    names = {name.rpartition(".lora_")[2] for name in safetensors.numpy.load_file(_file(directory))}
    if method == "mora":  # of which PEFT has no form
        assert names == {"square"}
        assert json.loads((directory / "adapter" / "adapter_config.json").read_text())["peft_type"] == "MORA"
        return
    if method == "lokr":
        stored = {name.rpartition(".")[2] for name in safetensors.numpy.load_file(_file(directory))}
        assert stored == {"lokr_w1", "lokr_w2_a", "lokr_w2_b"}
        return
    assert names == {"A.weight", "B.weight"} | ({"magnitude_vector"} if method == "dora" else set())


def _file(directory: Path) -> Path:
    return directory / "adapter" / "adapter_model.safetensors"


@pytest.mark.parametrize("method", METHODS)
def test_training_begins_with_the_base(method: str, tmp_path: Path) -> None:
    base_of("llama", tmp_path / "base")
    lora = section(**keys_of(method))
    model, _ = adapted("llama", tmp_path / "base", lora)
    base = open_model(tmp_path / "base", FAMILIES)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    read = with_adapter_values(lambda name, shape, index: base.read(name, index), 3, shapes, lora.adapter_config)
    for name, parameter in model.named_parameters():
        if is_factor(name):
            parameter.set_value(read(name, parameter.shape, [slice(0, n) for n in parameter.shape]))
    wanted = load_model(base, CpuBackend())(paddle.to_tensor(IDS)).numpy()
    np.testing.assert_allclose(model(paddle.to_tensor(IDS)).numpy(), wanted, rtol=0, atol=1e-5)


def test_dora_on_a_part_of_a_fused_matrix_is_refused() -> None:
    family = FAMILIES["gpt"]
    config = family.config_cls(**family.smoke)
    metadata = Adapters(["model.layers.0.self_attn.q_proj"], adapter_config("dora", rank=2), Base(None, ""))
    with pytest.raises(UserError, match=r"lora.target_modules: of .*c_attn.* names only .*q_proj"):
        check_layout(metadata, family, config)


def test_adapters_on_experts_that_are_one_tensor_in_files_are_refused() -> None:
    family = FAMILIES["granite_moe"]
    config = family.config_cls(**family.smoke)
    check_layout(Adapters(["model.layers.0.self_attn.q_proj"], adapter_config(rank=2), Base(None, "")), family, config)
    metadata = Adapters(["model.layers.0.mlp.experts.up_proj"], adapter_config(rank=2), Base(None, ""))
    with pytest.raises(UserError, match=r"names .*experts.up_proj; .* one tensor in files, .*input_linear"):
        check_layout(metadata, family, config)


# on a quantised base

BASES = [("nf4", False), ("nf4", True), ("int8", False)]
"""`lora.base_dtype` and `lora.base_double_quant`."""


@pytest.mark.parametrize(("base_dtype", "doubled"), BASES)
def test_dora_begins_with_a_quantised_base(base_dtype: str, doubled: bool) -> None:
    """Its magnitudes are the lengths of what the codes stand for, of any slice; of a matrix that is not quantised its
    own."""
    lora = section(method="dora", base_dtype=base_dtype, base_block=8, base_double_quant=doubled)
    layer = DoraLinear(linear(16, 10), lora.adapter_config)
    assert lora.base_format is not None
    dense = layer.weight.numpy()
    quantise_matrices(nn.Sequential(layer), ["0"], lora.base_format)
    for part, stored in lora.base_format.parts(dense).items():
        getattr(layer.weight, part).set_value(stored)
    shapes = {"q.weight": [16, 10], "q.lora_magnitude": [10]}
    of = {
        stored: with_adapter_values(
            lambda name, shape, index: dense[tuple(index)],
            3,
            shapes,
            lora.adapter_config,
            base_format=lora.base_format,
            quantised=stored,
        )
        for stored in (("q",), ())
    }
    whole, part = (of["q",]("q.lora_magnitude", [10], [index]) for index in (slice(0, 10), slice(3, 7)))
    np.testing.assert_array_equal(part, whole[3:7])
    np.testing.assert_array_equal(
        of[()]("q.lora_magnitude", [10], [slice(0, 10)]), np.linalg.norm(dense.astype("float32"), axis=0)
    )
    assert np.abs(whole - np.linalg.norm(dense, axis=0)).max() > 1e-4
    layer.lora_A.set_value(paddle.randn([16, 3]))
    layer.lora_B.set_value(paddle.zeros([3, 10]))
    layer.lora_magnitude.set_value(whole)
    x = paddle.randn([2, 4, 16])
    weights = paddle.randn([2, 4, 10])
    x.stop_gradient = False
    y = layer(x)
    np.testing.assert_allclose(y.numpy(), layer.base(x).numpy(), rtol=1e-5, atol=1e-5)
    (y * weights).sum().backward()
    expected = weights @ layer.weight.dense("float32").T
    np.testing.assert_allclose(x.grad.numpy(), expected.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["lora", *METHODS])
@pytest.mark.parametrize(("base_dtype", "doubled"), BASES)
def test_merged_and_unmerged_are_the_same_on_a_quantised_base(
    method: str, base_dtype: str, doubled: bool, tmp_path: Path
) -> None:
    lora = section(**keys_of(method), base_dtype=base_dtype, base_block=8, base_double_quant=doubled)
    base_of("llama", tmp_path / "base")
    model, modules = adapted("llama", tmp_path / "base", lora)
    assert lora.base_format is not None
    values = {name: p.numpy() for name, p in model.named_parameters() if not is_factor(name)}
    shapes = {name: value.shape for name, value in values.items()}
    stored = quantised_modules(shapes, FAMILIES["llama"].shard_plan)  # type: ignore[arg-type]
    quantise_matrices(model, stored, lora.base_format)
    found = dict(model.named_sublayers())
    for name in stored:
        matrix = found[name].weight
        for part, values_of_part in lora.base_format.parts(values[f"{name}.weight"]).items():
            getattr(matrix, part).set_value(values_of_part)
    metadata = write(tmp_path / "adapter", model, modules, lora, tmp_path / "base")
    assert metadata.base.format == lora.base_format
    merged = load_model(add_adapter(open_model(tmp_path / "base", FAMILIES), tmp_path / "adapter"), CpuBackend())
    live = model(paddle.to_tensor(IDS)).numpy()
    np.testing.assert_allclose(merged(paddle.to_tensor(IDS)).numpy(), live, rtol=0, atol=1e-5 * np.abs(live).max())
