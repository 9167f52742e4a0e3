"""Initial factors of LoRA-GA: the formula of the paper, the gradient of autograd, and the difference from paddlenlp."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from llmsuite.adapters.layers.lora import LoraLinear
from llmsuite.adapters.layers.pissa import LoraGaLinear
from llmsuite.adapters.methods import adapter_config
from llmsuite.base.errors import UserError
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.contract.schema.lora import LoraSection
from llmsuite.devices.cpu import CpuBackend
from llmsuite.engine.lora_ga import GradientInit, _check_ranks, gradient_factors
from llmsuite.inference.load import load_model
from llmsuite.models.quantised import quantise_matrices
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.recompute import recompute_layers
from llmsuite.parallel.weight_gradients import CapturedWeightGradient
from tests.support.adapter_models import base_of
from tests.support.families import FAMILIES
from tests.support.lora_layers import filled, linear

ALONE = Mesh(Degrees(1, 1, 1, 1), 0)


def start(**keys: Any) -> GradientInit:
    found = GradientInit.from_section(LoraSection(**{"rank": 3, "init": "lora_ga", **keys}))
    assert found is not None
    return found


def gradient_of(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


# the formula


@pytest.mark.parametrize("shape", [(40, 30), (30, 40), (6, 50)], ids=str)
def test_factors_are_those_of_the_paper(shape: tuple[int, int]) -> None:
    """Algorithm 1 with its own orientation: W [outputs, inputs], A from the first right singular vectors of its
    gradient, B from the left ones after the first."""
    gradient = gradient_of(shape)
    (_, num_outputs) = shape
    left, _, right = np.linalg.svd(gradient.T.astype("float64"), full_matrices=False)
    first, second = gradient_factors("q", gradient, start(init_gamma=16.0))
    assert (first.dtype, second.dtype) == (np.float32, np.float32)
    scale = num_outputs**0.25 / 16**0.5
    for found, expected in ((first.T, right[:3] * scale), (second, left[:, 3:6].T * scale)):
        signs = np.sign((found * expected).sum(1, keepdims=True))
        np.testing.assert_allclose(found, signs * expected, atol=1e-6)


@pytest.mark.parametrize("shape", [(40, 30), (30, 40)], ids=str)
def test_the_first_step_is_the_best_of_its_rank(shape: tuple[int, int]) -> None:
    """Theorem 3.1: to first order a step of SGD moves W along the best matrix of rank 2 R for its gradient."""
    gradient = gradient_of(shape)
    first, second = (factor.astype("float64") for factor in gradient_factors("q", gradient, start()))
    step = first @ (first.T @ gradient) + (gradient @ second.T) @ second
    u, s, v = np.linalg.svd(gradient.astype("float64"), full_matrices=False)
    best = (u[:, :6] * s[:6]) @ v[:6]
    np.testing.assert_allclose(step, best * (shape[1] ** 0.5 / 64), atol=1e-6)


def test_factors_do_not_depend_on_the_scale_of_the_loss() -> None:
    """Nor a bit more of the same gradient: signs are fixed."""
    for factor, again in zip(*(gradient_factors("q", gradient_of((9, 7)) * by, start()) for by in (1.0, 2.0**-20))):
        np.testing.assert_allclose(factor, again, atol=1e-7)


@pytest.mark.parametrize(
    ("gradient", "message"),
    [
        (np.full([9, 7], np.nan, "float32"), r"lora.init: the gradient of q .* is not finite"),
        (np.zeros([9, 7], "float32"), r"lora.init: the gradient of q .* is zero; leave it out of lora.target_modules"),
        (
            gradient_of((9, 4)) @ gradient_of((4, 7)),
            r"gradient of q in 2 global batches has 4 singular values above rounding, and lora_ga takes 6, .*raise",
        ),
    ],
    ids=["nan", "zero", "rank 4"],
)
def test_a_gradient_with_too_few_singular_values_is_refused(gradient: np.ndarray, message: str) -> None:
    with pytest.raises(UserError, match=message):
        gradient_factors("q", gradient, start(init_batches=2))


def test_a_rank_that_is_too_high_is_refused_before_any_pass() -> None:
    _check_ranks(4, {"q": [8, 9]})
    with pytest.raises(UserError, match=r"lora.rank: is 5, .* twice as many singular vectors, but q is 8 x 12 and"):
        _check_ranks(5, {"k": [10, 10], "q": [8, 12]})


# paddlenlp's own


def paddlenlps() -> Any:
    """`loraga_svd_module` of paddlenlp, without its module, which takes the whole package."""
    spec = importlib.util.find_spec("paddlenlp")
    assert spec is not None
    assert spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / "peft/lora/loraga_utils.py"
    names: dict[str, Any] = {"paddle": paddle}
    found = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == "loraga_svd_module"]
    exec(compile(ast.Module(found, []), str(path), "exec"), names)
    return names["loraga_svd_module"]


def test_the_difference_from_the_lora_ga_of_paddlenlp() -> None:
    """It has the vectors the other way round, the fourth root of the inputs in place of the outputs, and another base
    from then on."""
    gradient = gradient_of((40, 20))
    gamma = 16
    layer = LoraLinear.__mro__[2](40, 20, r=3, lora_alpha=6, bias_attr=False)
    assert type(layer).__module__ == "paddlenlp.peft.lora.lora_layers"
    before = layer.weight.numpy()
    paddlenlps()("model.q", layer, paddle.to_tensor(gradient), gamma, {})
    u, _, v = np.linalg.svd(gradient.astype("float64"))
    theirs = layer.lora_A.numpy() / (40**0.25 / 4), layer.lora_B.numpy() / (40**0.25 / 4)
    ours = [factor / (20**0.25 / 4) for factor in gradient_factors("q", gradient, start(init_gamma=gamma))]
    # sines of the largest angles: theirs are found in four iterations from random numbers
    for found, (columns, rows) in ((theirs, (u[:, 3:6], v[:3])), (ours, (u[:, :3], v[3:6]))):
        for vectors, expected in ((found[0].T, columns.T), (found[1], rows)):
            np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-4)
            assert np.linalg.svd(vectors @ expected.T)[1].min() > 0.9
    assert np.abs(layer.weight.numpy() - before).max() > 0.01
    np.testing.assert_allclose(layer.weight.numpy(), before - 2.0 * (layer.lora_A @ layer.lora_B).numpy(), atol=1e-5)


# the gradient


def test_the_layer_equals_its_base_at_first_and_then_that_of_paddlenlp() -> None:
    layer = LoraGaLinear(linear(40, 20), adapter_config(init="lora_ga", rank=3, alpha=6.0))
    assert layer.__class__.__mro__[4].__module__ == "paddlenlp.peft.lora.lora_layers"
    first, second = gradient_factors("q", gradient_of((40, 20)), start())
    for name, value in (("A", first), ("A0", first), ("B", second), ("B0", second)):
        getattr(layer, f"lora_{name}").set_value(value)
    x = paddle.randn([2, 4, 40])
    np.testing.assert_array_equal(layer(x).numpy(), layer.base(x).numpy())
    theirs = LoraLinear.__mro__[2](40, 20, r=3, lora_alpha=6.0)
    filled(theirs)
    moved = layer.weight - 2.0 * layer.lora_A0 @ layer.lora_B0  # what their W has become
    for own, value in ((theirs.weight, moved), (theirs.bias, layer.bias)):
        own.set_value(value)
    layer.lora_A.set_value(theirs.lora_A)
    layer.lora_B.set_value(theirs.lora_B)
    np.testing.assert_allclose(layer(x).numpy(), theirs(x).numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("keeps", ["float32", "nf4"])
def test_a_watched_gradient_is_that_of_autograd(keeps: str) -> None:
    """Also of a matrix that is stored quantised, and of a layer whose input has no gradient: over two passes."""
    plain = linear(16, 6)
    layer = LoraGaLinear(linear(16, 6), adapter_config(init="lora_ga", rank=2))
    for name, parameter in layer.named_parameters():
        parameter.stop_gradient = not name.startswith("lora")
        if name.startswith("lora"):
            parameter.set_value(paddle.zeros(parameter.shape))
    dense = layer.weight.numpy()
    lora = LoraSection(rank=2, base_dtype=None if keeps == "float32" else keeps, base_block=8)
    if lora.base_format is not None:
        quantise_matrices(nn.Sequential(layer), ["0"], lora.base_format)
        codes, absmax = lora.base_format.quantise(dense)
        dense = lora.base_format.dequantise(codes, absmax)
        layer.weight.codes.set_value(codes)
        layer.weight.absmax.set_value(absmax)
    plain.weight.set_value(dense)
    plain.bias.set_value(layer.bias)
    watched = CapturedWeightGradient(layer, [16, 6], [16, 6], None, ALONE)
    for _ in range(2):
        x = paddle.randn([2, 5, 16])
        weights = paddle.randn([2, 5, 6])
        for each in (layer, plain):
            (each(x).square() * weights).sum().backward()
    found = watched.finish().numpy()
    np.testing.assert_allclose(found, plain.weight.grad.numpy(), rtol=1e-5, atol=1e-5)
    layer(paddle.randn([1, 1, 16])).sum().backward()
    assert not watched.finish().numpy().any(), "watched on"


def test_the_gradient_of_recomputed_layers_counts_once(tmp_path: Path) -> None:
    base_of("llama", tmp_path / "base")
    model = load_model(open_model(tmp_path / "base", FAMILIES), CpuBackend())
    recompute_layers(model, FAMILIES["llama"].shard_plan, 1)  # type: ignore[arg-type]
    model.train()
    name = "model.layers.1.mlp.down_proj"
    layer = dict(model.named_sublayers())[name]
    watched = CapturedWeightGradient(layer, layer.weight.shape, layer.weight.shape, None, ALONE)
    hidden, _ = model.hidden_states(paddle.to_tensor([[1, 7, 11, 3], [4, 4, 9, 0]]))
    (hidden * paddle.randn(hidden.shape)).sum().backward()
    np.testing.assert_allclose(watched.finish().numpy(), layer.weight.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_a_gradient_without_passes_is_zero() -> None:
    layer = SimpleNamespace(register_forward_post_hook=lambda hook: SimpleNamespace(remove=lambda: None))
    assert CapturedWeightGradient(layer, [4, 3], [4, 3], None, ALONE).finish().numpy().tolist() == [[0.0] * 3] * 4
