"""MoRA and LoKr, which are no pairs of factors: what they compute, and merged."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.adapters.methods import adapter_config
from llmsuite.adapters.paddlenlp_peft import import_alone
from llmsuite.base.errors import UserError
from llmsuite.checkpoint.adapter_base import Base
from llmsuite.checkpoint.adapter_dir import Adapters, check_layout
from llmsuite.checkpoint.convert.adapter import own_part_pattern
from llmsuite.plugins.adapters_extra.layers.lokr import LokrLinear
from llmsuite.plugins.adapters_extra.layers.mora import MoraLinear
from llmsuite.plugins.adapters_extra.lokr import Lokr, kron_shapes, near_square
from llmsuite.plugins.adapters_extra.mora import Mora, full_update, square_size
from tests.support.families import FAMILIES
from tests.support.lora_layers import filled, linear
from tests.support.paths import ROOT

# MoRA


def paddlenlps(layer: MoraLinear, rank: int) -> Any:
    """paddlenlp's own layer with the values of ours."""
    theirs = MoraLinear.__mro__[3](layer.in_features, layer.out_features, r=rank, use_mora=True)
    for name, value in (("weight", layer.weight), ("bias", layer.bias), ("lora_A", layer.lora_square)):
        getattr(theirs, name).set_value(value)
    return theirs


@pytest.mark.parametrize(("num_inputs", "num_outputs", "rank"), [(6, 10, 1), (10, 6, 2), (48, 80, 4), (8, 30, 2)])
def test_mora_computes_what_paddlenlp_computes_and_merges_it(num_inputs: int, num_outputs: int, rank: int) -> None:
    """The merge of paddlenlp's own layer is wrong: it uses the transpose of the matrix."""
    layer = filled(MoraLinear(linear(num_inputs, num_outputs), adapter_config("mora", rank=rank)))
    theirs = paddlenlps(layer, rank)
    assert type(theirs).__module__ == "paddlenlp.peft.lora.lora_layers"
    x = paddle.randn([2, 4, num_inputs])
    weights = paddle.randn([2, 4, num_outputs])
    found = []
    for each, square in ((layer, layer.lora_square), (theirs, theirs.lora_A)):
        own = x.clone()
        own.stop_gradient = False
        y = each(own)
        (y * weights).sum().backward()
        found.append([y.numpy(), own.grad.numpy(), square.grad.numpy()])
    for ours, wanted in zip(*found):
        np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-4)
    update = full_update(layer.lora_square.numpy(), (num_inputs, num_outputs))
    np.testing.assert_allclose(
        found[0][0], (layer.base(x) + x @ paddle.to_tensor(update)).numpy(), rtol=1e-4, atol=1e-4
    )
    theirs.merge()
    assert np.abs(theirs(x).numpy() - found[1][0]).max() > 1
    layer.is_enabled = False
    np.testing.assert_array_equal(layer(x).numpy(), layer.base(x).numpy())


@pytest.mark.parametrize("drops", [False, True])
def test_gradients_of_a_layer_that_computes_its_update_again(drops: bool) -> None:
    """Gradients equal those without recomputation, with a mask on the inputs of the adapter or without."""
    layer = filled(MoraLinear(linear(7, 9), adapter_config("mora", rank=2)))
    x = paddle.randn([2, 3, 7])
    weights = paddle.randn([2, 3, 9])
    mask = 2.0 * (paddle.randn([2, 3, 7]) > 0)
    x.stop_gradient = False
    if drops:
        layer.lora_dropout = lambda x: x * mask
    (layer(x) * weights).sum().backward()
    found = [x.grad.numpy(), layer.lora_square.grad.numpy()]
    x.clear_gradient()
    layer.clear_gradients()
    y = layer.base(x) + layer.update(x * mask if drops else x, layer.lora_square)
    (y * weights).sum().backward()
    np.testing.assert_allclose(found[0], x.grad.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[1], layer.lora_square.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_mora_on_a_part_of_a_matrix_in_files_is_refused() -> None:
    family = FAMILIES["gpt"]
    config = family.config_cls(**family.smoke)
    metadata = Adapters(["model.layers.0.self_attn.q_proj"], adapter_config("mora", rank=2), Base(None, ""))
    with pytest.raises(UserError, match=r"lora.target_modules: names .*q_proj, a part of .*c_attn.*choose another"):
        check_layout(metadata, family, config)


def test_more_rank_than_the_inputs_have_room_for_is_refused() -> None:
    assert square_size(4, 48, 80) == 22
    with pytest.raises(UserError, match=r"lora.rank: is 4, .*for a layer of 8 x 120 is 22 wide.*lower it to 2"):
        square_size(4, 8, 120)
    assert square_size(2, 8, 120) == 16


# LoKr


@pytest.mark.parametrize(("num_inputs", "num_outputs", "rank"), [(12, 20, 1), (12, 20, 4), (7, 30, 2), (64, 48, 3)])
def test_lokr_computes_what_paddlenlp_computes_and_merges_it(num_inputs: int, num_outputs: int, rank: int) -> None:
    """In paddlenlp's own layer, which computes the product of the same shapes, merging fails, and being switched off
    changes nothing."""
    layer = filled(LokrLinear(linear(num_inputs, num_outputs), adapter_config("lokr", rank=rank, alpha=5.0)))
    theirs = LokrLinear.__mro__[3](num_inputs, num_outputs, lokr_dim=rank, lokr_alpha=5.0)
    assert type(theirs).__module__ == "paddlenlp.peft.lokr.lokr_layers"
    names = [name for name, _ in theirs.named_parameters()]
    assert names == [name for name, _ in layer.named_parameters()]
    for name in names:
        getattr(theirs, name).set_value(getattr(layer, name))
    x = paddle.randn([2, 4, num_inputs])
    weights = paddle.randn([2, 4, num_outputs])
    found = []
    for each in (layer, theirs):
        own = x.clone()
        own.stop_gradient = False
        y = each(own)
        (y * weights).sum().backward()
        trained = [p.grad.numpy() for name, p in each.named_parameters() if name.startswith("lokr")]
        found.append([y.numpy(), own.grad.numpy(), *trained])
    for ours, wanted in zip(*found, strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=2e-4)
    values = {name: p.numpy() for name, p in layer.named_parameters() if name.startswith("lokr")}
    shapes = {name: value.shape for name, value in values.items()}
    assert Lokr().fits(shapes, (num_inputs, num_outputs), rank)
    assert not Lokr().fits(shapes, (num_inputs + 1, num_outputs), rank)
    merged = layer.base(x) + x @ paddle.to_tensor(Lokr().update(values, (num_inputs, num_outputs), 5.0 / rank))
    np.testing.assert_allclose(found[0][0], merged.numpy(), rtol=1e-4, atol=2e-4)
    with pytest.raises(AttributeError, match="get_weight"):
        theirs.merge()
    theirs.disable_lokr = True
    np.testing.assert_array_equal(theirs(x).numpy(), found[1][0])
    layer.is_enabled = False
    np.testing.assert_array_equal(layer(x).numpy(), layer.base(x).numpy())


def test_factors_of_a_size_are_those_of_paddlenlp() -> None:
    theirs = import_alone("paddlenlp.peft.lokr.lokr_layers")[0].factorization
    for size in (*range(1, 400), 576, 1536, 4096, 11008, 14336, 151936):
        assert near_square(size) == theirs(size), size


@pytest.mark.parametrize("number", range(4))
def test_lokr_of_peft(number: int) -> None:
    """Adapters of PEFT 0.21, which may have two factors on either side; `tests/tools/peft_lokr.py` wrote them."""
    case = json.loads((ROOT / "tests/unit/checkpoint/convert/peft_lokr.json").read_text())[number]
    named = {own_part_pattern().fullmatch(name): np.asarray(value, "float32") for name, value in case["state"].items()}
    values = {match[2]: value for match, value in named.items() if match and match[1] == "base_model.model.0"}
    assert len(values) == len(case["state"])
    shapes = {kind: value.shape for kind, value in values.items()}
    shape = tuple(case["shape"])
    assert (shapes == kron_shapes(case["rank"], *shape)) == case["plain"]
    assert Lokr().fits(shapes, shape, None)
    np.testing.assert_allclose(Lokr().update(values, shape, 5 / case["rank"]), case["update"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "shapes",
    [
        {"lokr_w1_a": (3, 1), "lokr_w1_b": (2, 2), "lokr_w2": (5, 4)},
        {"lokr_w1": (3, 2), "lokr_w2": (5, 4), "lokr_w2_a": (5, 4)},
        {"lokr_w1": (3, 2)},
        {"lokr_w1": (3, 2), "lokr_w2": (5, 4, 1)},
        {"lora_square": (4, 5)},
        {"lora_square": (18, 18)},
    ],
    ids=str,
)
def test_parameters_that_are_no_adapter_of_a_matrix(shapes: dict[str, tuple[int, ...]]) -> None:
    method = Mora() if "lora_square" in shapes else Lokr()
    assert not method.fits(shapes, (8, 15), None)


def test_adapters_of_misshapen_matrices_are_refused() -> None:
    assert not Lokr().fits({"lokr_w1": (2, 2), "lokr_w2": (2, 2)}, (4,), None)
    assert not Lokr().fits({"lokr_w1": (0, 2), "lokr_w2": (2, 2)}, (4, 0), None)
