"""Kinds of adapters beside plain LoRA: what they compute, what they begin with, and that merging changes nothing."""

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

from llmsuite.checkpoint.adapter_dir import Adapters, Base, SavedAdapters, check_layout
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.convert.adapter import add_adapter
from llmsuite.convert.structured import PART, fits, mora_update, update
from llmsuite.devices.cpu import CpuBackend
from llmsuite.errors import UserError
from llmsuite.inference.load import load_model
from llmsuite.models.adapter_sizes import kron_shapes, near_square, square_size
from llmsuite.models.lora import adapted_modules, add_adapters
from llmsuite.models.lora_layers import DoraLinear, LokrLinear, LoraLinear, MoraLinear, PissaLinear, VeraLinear
from llmsuite.models.paddlenlp_peft import import_alone
from llmsuite.models.peft_configs import lora_config
from llmsuite.models.quantised import quantise_matrices
from llmsuite.models.targets import is_factor, quantised_modules, with_adapters
from llmsuite.train.adapters import PrincipalFactors, adapter_config, principal_factors, with_factors
from tests.paths import ROOT
from tests.unit.families import FAMILIES, tiny
from tests.unit.models.test_adapters import IDS, adapted, base_of, factors_of, section, write
from tests.unit.models.test_lora_layers import filled, linear

METHODS = ("mixer", "dora", "pissa", "lora_ga", "mora", "vera", "lokr")
BEGINNINGS = ("pissa", "lora_ga")
"""Those that are values of `lora.init`."""
STRUCTURED = ("mora", "lokr")
"""Those that are no pairs of factors."""


def keys_of(method: str) -> dict[str, str]:
    """The keys of section `lora` of a kind of adapters."""
    if method == "lora":
        return {}
    return {"init": method} if method in BEGINNINGS else {"method": method}


@pytest.fixture(scope="module", params=[(method, family) for method in METHODS for family in ("llama", "gpt")], ids=str)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Method, family, directory of base and adapter, the live model with random adapters, what is told of them."""
    method, family = request.param
    directory = tmp_path_factory.mktemp("methods")
    base_of(family, directory / "base")
    keys: dict[str, Any] = {"rslora": family == "gpt"}
    if method in STRUCTURED and family == "gpt":  # whose q, k and v are one matrix in files
        keys["target_modules"] = ["o_proj", "mlp.*"]
    lora = section(**keys_of(method), **keys)
    model, modules = adapted(family, directory / "base", lora)
    told = write(directory / "adapter", model, modules, lora, directory / "base")
    return method, family, directory, model, told


def test_a_mixer_computes_what_paddlenlp_computes() -> None:
    layer = filled(LoraLinear(linear(6, 10), lora_config("mixer", r=3, lora_alpha=5.0)))
    x = paddle.randn([2, 4, 6])
    theirs = LoraLinear.__mro__[2].forward(layer, x)
    np.testing.assert_allclose(layer(x).numpy(), theirs.numpy(), rtol=1e-5, atol=1e-5)


def test_dora_by_hand() -> None:
    layer = DoraLinear(linear(6, 10), lora_config("dora", r=3, lora_alpha=6.0))
    x = filled(layer) and paddle.randn([2, 4, 6])
    whole = layer.weight + 2.0 * layer.lora_A @ layer.lora_B
    lengths = paddle.sqrt((whole * whole).sum(0))
    expected = F.linear(x, whole / lengths * layer.lora_magnitude, layer.bias)
    np.testing.assert_allclose(layer(x).numpy(), expected.numpy(), rtol=1e-4, atol=1e-5)
    layer.is_on = False
    np.testing.assert_array_equal(layer(x).numpy(), F.linear(x, layer.weight, layer.bias).numpy())


def test_gradients_of_dora_take_the_lengths_as_constants() -> None:
    """Of A along a direction: the finite difference of the output with the lengths held."""
    layer = filled(DoraLinear(linear(6, 10), lora_config("dora", r=3, lora_alpha=6.0)))
    x, weights = paddle.randn([4, 6]), paddle.randn([4, 10])
    (layer(x) * weights).sum().backward()
    direction = paddle.randn([6, 3])
    lengths = (layer.weight + 2.0 * layer.lora_A @ layer.lora_B).square().sum(0).sqrt()
    change = 2.0 * x @ direction @ layer.lora_B * (layer.lora_magnitude / lengths)
    expected = float((change * weights).sum())
    assert float((layer.lora_A.grad * direction).sum()) == pytest.approx(expected, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_that_are_planned_and_cut(method: str, family: str) -> None:
    model, plan = tiny(family), FAMILIES[family].shard_plan
    assert plan is not None
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    modules = adapted_modules(model, plan, None)
    add_adapters(model, modules, adapter_config(section(**keys_of(method))))
    assert with_adapters(shapes, modules, 3, **keys_of(method)) == {
        n: tuple(p.shape) for n, p in model.named_parameters()
    }
    for name in modules:
        dim = plan.dim(f"{name}.weight")
        assert plan.dim(f"{name}.lora_AB") is None
        assert plan.dim(f"{name}.lora_magnitude") == (0 if dim == 1 else None)


def test_merged_and_unmerged_are_the_same(made: Any) -> None:
    method, _, directory, model, _ = made
    base = open_model(directory / "base", FAMILIES)
    source = add_adapter(base, directory / "adapter")
    merged = load_model(source, CpuBackend())(paddle.to_tensor(IDS)).numpy()
    live = model(paddle.to_tensor(IDS)).numpy()
    limit = 5e-6 if method in (*BEGINNINGS, *STRUCTURED) else 2e-6  # updates as large as W
    np.testing.assert_allclose(merged, live, rtol=0, atol=limit * np.abs(live).max())
    assert np.abs(live - load_model(base, CpuBackend())(paddle.to_tensor(IDS)).numpy()).max() > 0.1
    for name in source.names:  # of a slice of its rows, too
        whole, half = source.read(name), source.spec(name).shape[0] // 2
        index = [slice(half, None), *[slice(None)] * (whole.ndim - 1)]
        np.testing.assert_allclose(source.read(name, index), whole[half:], rtol=1e-6, atol=1e-7)


def test_what_was_trained_is_read_again(made: Any) -> None:
    _, family, directory, model, told = made
    saved = SavedAdapters(directory / "adapter", told, FAMILIES[family], model.config)
    for name, value in factors_of(model).items():
        assert saved.spec(name).shape == value.shape
        assert saved.read(name).tobytes() == value.tobytes(), name
        index = [slice(n // 3, n) for n in value.shape]
        np.testing.assert_array_equal(saved.read(name, index), value[tuple(index)])


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
    read = with_factors(lambda name, shape, index: base.read(name, index), 3, shapes, lora=lora)
    for name, parameter in model.named_parameters():
        if is_factor(name):
            parameter.set_value(read(name, parameter.shape, [slice(0, n) for n in parameter.shape]))
    wanted = load_model(base, CpuBackend())(paddle.to_tensor(IDS)).numpy()
    np.testing.assert_allclose(model(paddle.to_tensor(IDS)).numpy(), wanted, rtol=0, atol=1e-5)


def test_dora_on_a_part_of_a_fused_matrix_is_refused() -> None:
    family = FAMILIES["gpt"]
    config = family.config_cls(**family.smoke)
    told = Adapters(["model.layers.0.self_attn.q_proj"], lora_config("dora", r=2), Base(None, ""))
    with pytest.raises(UserError, match=r"lora.target_modules: of .*c_attn.* names only .*q_proj"):
        check_layout(told, family, config)


# MoRA


def paddlenlps(layer: MoraLinear, rank: int) -> Any:
    """paddlenlp's own layer with the values of ours."""
    theirs = MoraLinear.__mro__[3](layer.in_features, layer.out_features, r=rank, use_mora=True)
    for name, value in (("weight", layer.weight), ("bias", layer.bias), ("lora_A", layer.lora_square)):
        getattr(theirs, name).set_value(value)
    return theirs


@pytest.mark.parametrize(("num_inputs", "num_outputs", "rank"), [(6, 10, 1), (10, 6, 2), (48, 80, 4), (8, 30, 2)])
def test_mora_computes_what_paddlenlp_computes_and_merges_it(num_inputs: int, num_outputs: int, rank: int) -> None:
    """Of paddlenlp's own, what it merges is something else: it takes the matrix for its transpose."""
    layer = filled(MoraLinear(linear(num_inputs, num_outputs), lora_config("mora", r=rank)))
    theirs = paddlenlps(layer, rank)
    assert type(theirs).__module__ == "paddlenlp.peft.lora.lora_layers"
    x, weights, found = paddle.randn([2, 4, num_inputs]), paddle.randn([2, 4, num_outputs]), []
    for each, square in ((layer, layer.lora_square), (theirs, theirs.lora_A)):
        own = x.clone()
        own.stop_gradient = False
        y = each(own)
        (y * weights).sum().backward()
        found.append([y.numpy(), own.grad.numpy(), square.grad.numpy()])
    for ours, wanted in zip(*found):
        np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-4)
    update = mora_update(layer.lora_square.numpy(), (num_inputs, num_outputs))
    np.testing.assert_allclose(
        found[0][0], (layer.base(x) + x @ paddle.to_tensor(update)).numpy(), rtol=1e-4, atol=1e-4
    )
    theirs.merge()
    assert np.abs(theirs(x).numpy() - found[1][0]).max() > 1
    layer.is_on = False
    np.testing.assert_array_equal(layer(x).numpy(), layer.base(x).numpy())


@pytest.mark.parametrize("drops", [False, True])
def test_gradients_of_a_layer_that_computes_its_update_again(drops: bool) -> None:
    """Those of the same without computing anything again, with a mask on the inputs of the adapter or without."""
    layer = filled(MoraLinear(linear(7, 9), lora_config("mora", r=2)))
    x, weights, mask = paddle.randn([2, 3, 7]), paddle.randn([2, 3, 9]), 2.0 * (paddle.randn([2, 3, 7]) > 0)
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
    told = Adapters(["model.layers.0.self_attn.q_proj"], lora_config("mora", r=2), Base(None, ""))
    with pytest.raises(UserError, match=r"lora.target_modules: names .*q_proj, a part of .*c_attn.*choose another"):
        check_layout(told, family, config)


def test_more_rank_than_the_inputs_have_room_for_is_refused() -> None:
    assert square_size(4, 48, 80) == 22
    with pytest.raises(UserError, match=r"lora.rank: is 4, .*beside one of 8 x 120 is 22 wide.*lower it to 2"):
        square_size(4, 8, 120)
    assert square_size(2, 8, 120) == 16


# VeRA


def test_vera_by_hand() -> None:
    layer = filled(VeraLinear(linear(6, 10), lora_config("vera", r=3, lora_alpha=6.0)))
    x, weights = paddle.randn([2, 4, 6]), paddle.randn([2, 4, 10])
    y = layer(x)
    update = 2.0 * layer.lora_A0 @ paddle.diag(layer.lora_d) @ layer.lora_B0 @ paddle.diag(layer.lora_b)
    np.testing.assert_allclose(y.numpy(), (layer.base(x) + x @ update).numpy(), rtol=1e-4, atol=1e-5)
    (y * weights).sum().backward()
    behind = (2.0 * (x @ layer.lora_A0 * layer.lora_d) @ layer.lora_B0 * weights).sum([0, 1])
    between = (2.0 * (x @ layer.lora_A0) * ((weights * layer.lora_b) @ layer.lora_B0.T)).sum([0, 1])
    np.testing.assert_allclose(layer.lora_b.grad.numpy(), behind.numpy(), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(layer.lora_d.grad.numpy(), between.numpy(), rtol=1e-3, atol=1e-4)
    assert layer.lora_A0.grad is None
    assert layer.lora_B0.grad is None


def test_vera_learns_where_that_of_paddlenlp_does_not() -> None:
    """With its factors frozen, the vectors of paddlenlp's own get no gradient: its B is zero. The formula is the same,
    and W is not copied."""
    base, x = linear(6, 10), paddle.randn([2, 6])
    layer = filled(VeraLinear(base, lora_config("vera", r=3, lora_alpha=6.0)))
    assert layer.weight is base.weight
    theirs = VeraLinear.__mro__[2](base, 6, 10, r=3, vera_alpha=6)
    assert type(theirs).__module__ == "paddlenlp.peft.vera.vera_layers"
    theirs.bias.set_value(base.bias)
    theirs(x).square().sum().backward()
    assert float(theirs.vera_b.grad.abs().max()) == float(theirs.vera_d.grad.abs().max()) == 0
    for name, own in (("vera_A", "lora_A0"), ("vera_B", "lora_B0"), ("vera_d", "lora_d"), ("vera_b", "lora_b")):
        getattr(theirs, name).set_value(getattr(layer, own))
    np.testing.assert_allclose(layer(x).numpy(), theirs(x).numpy(), rtol=1e-4, atol=1e-4)


def test_layers_of_vera_share_one_pair_and_learn_at_once() -> None:
    shapes = {"k.lora_A0": [6, 3], "q.lora_A0": [9, 3], "k.lora_B0": [3, 6], "q.lora_B0": [3, 9]}
    read = with_factors(lambda *_: np.zeros(0), 3, shapes, lora=section(method="vera"))
    of = {name: read(name, shape, [slice(0, size) for size in shape]) for name, shape in shapes.items()}
    np.testing.assert_allclose(of["k.lora_A0"] * 6**0.5, of["q.lora_A0"][:6] * 9**0.5, rtol=1e-5)
    np.testing.assert_array_equal(of["k.lora_B0"], of["q.lora_B0"][:, :6])
    part = read("q.lora_B0", [3, 9], [slice(0, 3), slice(4, 7)])
    np.testing.assert_array_equal(part, of["q.lora_B0"][:, 4:7])
    assert read("q.lora_d", [3], [slice(0, 3)]).tolist() == [np.float32(0.1)] * 3
    assert read("q.lora_b", [9], [slice(4, 7)]).tolist() == [0.0] * 3
    assert np.abs(of["q.lora_A0"]).min() > 0
    assert np.abs(of["q.lora_B0"]).min() > 0


# LoKr


@pytest.mark.parametrize(("num_inputs", "num_outputs", "rank"), [(12, 20, 1), (12, 20, 4), (7, 30, 2), (64, 48, 3)])
def test_lokr_computes_what_paddlenlp_computes_and_merges_it(num_inputs: int, num_outputs: int, rank: int) -> None:
    """Of paddlenlp's own, which makes the product of the same shapes, merging ends in an error, and being switched off
    changes nothing."""
    layer = filled(LokrLinear(linear(num_inputs, num_outputs), lora_config("lokr", r=rank, lora_alpha=5.0)))
    theirs = LokrLinear.__mro__[3](num_inputs, num_outputs, lokr_dim=rank, lokr_alpha=5.0)
    assert type(theirs).__module__ == "paddlenlp.peft.lokr.lokr_layers"
    names = [name for name, _ in theirs.named_parameters()]
    assert names == [name for name, _ in layer.named_parameters()]
    for name in names:
        getattr(theirs, name).set_value(getattr(layer, name))
    x, weights, found = paddle.randn([2, 4, num_inputs]), paddle.randn([2, 4, num_outputs]), []
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
    assert fits(shapes, (num_inputs, num_outputs))
    assert not fits(shapes, (num_inputs + 1, num_outputs))
    merged = layer.base(x) + x @ paddle.to_tensor(update(values, (num_inputs, num_outputs), 5.0 / rank))
    np.testing.assert_allclose(found[0][0], merged.numpy(), rtol=1e-4, atol=2e-4)
    with pytest.raises(AttributeError, match="get_weight"):
        theirs.merge()
    theirs.disable_lokr = True
    np.testing.assert_array_equal(theirs(x).numpy(), found[1][0])
    layer.is_on = False
    np.testing.assert_array_equal(layer(x).numpy(), layer.base(x).numpy())


def test_factors_of_a_size_are_those_of_paddlenlp() -> None:
    theirs = import_alone("paddlenlp.peft.lokr.lokr_layers")[0].factorization
    for size in (*range(1, 400), 576, 1536, 4096, 11008, 14336, 151936):
        assert near_square(size) == theirs(size), size


@pytest.mark.parametrize("number", range(4))
def test_lokr_of_peft(number: int) -> None:
    """What PEFT 0.21 has made, which may have two factors on either side; `tests/tools/peft_lokr.py` wrote it."""
    case = json.loads((ROOT / "tests/unit/convert/peft_lokr.json").read_text())[number]
    named = {PART.fullmatch(name): np.asarray(value, "float32") for name, value in case["state"].items()}
    values = {match[2]: value for match, value in named.items() if match and match[1] == "base_model.model.0"}
    assert len(values) == len(case["state"])
    shapes, shape = {kind: value.shape for kind, value in values.items()}, tuple(case["shape"])
    assert (shapes == kron_shapes(case["rank"], *shape)) == case["plain"]
    assert fits(shapes, shape)
    np.testing.assert_allclose(update(values, shape, 5 / case["rank"]), case["update"], rtol=1e-5, atol=1e-6)


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
    assert not fits(shapes, (8, 15))


# PiSSA


@pytest.mark.parametrize("shape", [(40, 30), (30, 40), (6, 50)], ids=str)
def test_principal_factors_are_the_best_of_their_rank(shape: tuple[int, int]) -> None:
    matrix = np.random.default_rng(0).normal(size=shape).astype("float32")
    first, second = principal_factors(matrix, 4, 0.5)
    u, s, v = np.linalg.svd(matrix.astype("float64"))
    np.testing.assert_allclose(0.5 * first @ second, (u[:, :4] * s[:4]) @ v[:4], atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(first, axis=0), np.linalg.norm(second, axis=1), rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(first, axis=0) ** 2, s[:4] / 0.5, rtol=1e-5)
    assert (first[np.abs(first).argmax(0), np.arange(4)] > 0).all()


def test_pissa_by_hand() -> None:
    layer = filled(PissaLinear(linear(6, 10), lora_config(init="pissa", r=3, lora_alpha=6.0)))
    x, weights = paddle.randn([2, 4, 6]), paddle.randn([2, 4, 10])
    update = layer.lora_A @ layer.lora_B - layer.lora_A0 @ layer.lora_B0
    y = layer(x)
    np.testing.assert_allclose(y.numpy(), (layer.base(x) + 2.0 * x @ update).numpy(), rtol=1e-4, atol=1e-5)
    (y * weights).sum().backward()
    expected = 2.0 * paddle.einsum("bli,blo,ro->ir", x, weights, layer.lora_B)
    np.testing.assert_allclose(layer.lora_A.grad.numpy(), expected.numpy(), rtol=1e-3, atol=1e-4)
    assert layer.lora_A0.grad is None
    assert layer.lora_B0.grad is None
    layer.is_on = False
    np.testing.assert_array_equal(layer(x).numpy(), layer.base(x).numpy())


def test_more_rank_than_singular_vectors_is_refused() -> None:
    shapes = {"q.weight": [4, 9]}
    principal = PrincipalFactors(lambda *_: np.ones([4, 9], "float32"), shapes, section(rank=5, init="pissa"))
    with pytest.raises(UserError, match=r"lora.rank: is 5, but q is 4 x 9 and has no more than 4"):
        principal.read("q", 0, [slice(0, 4), slice(0, 5)])


@pytest.mark.parametrize("base_dtype", ["nf4", "int8"])
def test_dora_begins_with_a_quantised_base(base_dtype: str) -> None:
    """Its magnitudes are the lengths of what the codes stand for, of any slice; of a matrix that is not quantised its
    own."""
    lora = section(method="dora", base_dtype=base_dtype, base_block=8)
    layer = DoraLinear(linear(16, 10), adapter_config(lora))
    assert lora.base_format is not None
    dense = layer.weight.numpy()
    quantise_matrices(nn.Sequential(layer), ["0"], lora.base_format)
    codes, absmax = lora.base_format.quantise(dense)
    layer.weight.codes.set_value(codes)
    layer.weight.absmax.set_value(absmax)
    shapes = {"q.weight": [16, 10], "q.lora_magnitude": [10]}
    of = {
        stored: with_factors(lambda name, shape, index: dense[tuple(index)], 3, shapes, None, lora, stored)
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
    x, weights = paddle.randn([2, 4, 16]), paddle.randn([2, 4, 10])
    x.stop_gradient = False
    y = layer(x)
    np.testing.assert_allclose(y.numpy(), layer.base(x).numpy(), rtol=1e-5, atol=1e-5)
    (y * weights).sum().backward()
    expected = weights @ layer.weight.dense("float32").T
    np.testing.assert_allclose(x.grad.numpy(), expected.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["lora", *METHODS])
@pytest.mark.parametrize("base_dtype", ["nf4", "int8"])
def test_merged_and_unmerged_are_the_same_on_a_quantised_base(method: str, base_dtype: str, tmp_path: Path) -> None:
    lora = section(**keys_of(method), base_dtype=base_dtype, base_block=8)
    base_of("llama", tmp_path / "base")
    model, modules = adapted("llama", tmp_path / "base", lora)
    assert lora.base_format is not None
    values = {name: p.numpy() for name, p in model.named_parameters() if not is_factor(name)}
    shapes = {name: value.shape for name, value in values.items()}
    stored = quantised_modules(shapes, FAMILIES["llama"].shard_plan)  # type: ignore[arg-type]
    quantise_matrices(model, stored, lora.base_format)
    found = dict(model.named_sublayers())
    for name in stored:
        matrix, (codes, absmax) = found[name].weight, lora.base_format.quantise(values[f"{name}.weight"])
        matrix.codes.set_value(codes)
        matrix.absmax.set_value(absmax)
    told = write(tmp_path / "adapter", model, modules, lora, tmp_path / "base")
    assert told.base.format == lora.base_format
    merged = load_model(add_adapter(open_model(tmp_path / "base", FAMILIES), tmp_path / "adapter"), CpuBackend())
    live = model(paddle.to_tensor(IDS)).numpy()
    np.testing.assert_allclose(merged(paddle.to_tensor(IDS)).numpy(), live, rtol=0, atol=1e-5 * np.abs(live).max())
