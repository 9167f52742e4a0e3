"""Prefixes that a network makes: the numbers of the prefixes themselves, their gradients, files, plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.adapters.initial_values import with_prefix_values
from llmsuite.adapters.layers.prefix import add_prefixes
from llmsuite.adapters.parameters import is_factor, shard_dim
from llmsuite.adapters.prefix_shapes import INNER, INNER_BIAS, NETWORK, OUTER, PREFIX_KEY, TABLE, is_shared_by_all_ranks
from llmsuite.base.errors import UserError
from llmsuite.checkpoint.adapter_base import Base
from llmsuite.checkpoint.prefix_dir import Prefixes, compute_prefixes, open_prefixes, write_prefixes
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.devices.cpu import CpuBackend
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.pipeline_split import layer_costs, parts_with
from llmsuite.parallel.recompute import recompute_attention, recompute_layers
from llmsuite.parallel.static import compile_layers
from llmsuite.planning.layout import Layout
from llmsuite.recipe.resolve import plan_run
from tests.support.adapter_models import IDS
from tests.support.families import FAMILIES, tiny
from tests.support.paths import ROOT
from tests.support.prefixes import FULL_ATTENTION, TOKENS, WITH_HEADS, fill, near

WIDTH = 5
GRADIENT_LIMIT = 1e-5
"""Tolerance relative to the largest number: float32 sums in different orders."""


def networked(family: str = "llama") -> Any:
    """A tiny model for training, whose prefixes a random network makes."""
    model = tiny(family, **FULL_ATTENTION.get(family, {}))
    add_prefixes(model, TOKENS, WIDTH)
    fill(model)
    return model


def plain_of(model: Any, family: str) -> Any:
    """A copy of the model whose prefixes are the outputs of the network."""
    other = tiny(family, **FULL_ATTENTION.get(family, {}))
    add_prefixes(other, TOKENS)
    values = {name: p.numpy() for name, p in model.named_parameters()}
    values |= compute_prefixes({name: value for name, value in values.items() if is_factor(name)})
    for name, parameter in other.named_parameters():
        if not parameter._is_initialized():
            parameter.initialize()
        parameter.set_value(values[name])
    return other


def gradients(model: Any) -> dict[str, np.ndarray]:
    return {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", WITH_HEADS)
def test_what_a_network_makes_is_a_prefix(family: str) -> None:
    """Logits are equal, and gradients follow by the chain rule from those of the prefix itself."""
    model = networked(family)
    plain = plain_of(model, family)
    direction = np.random.default_rng(3).standard_normal(model(paddle.to_tensor(IDS)).shape).astype("float32")
    for of in (model, plain):
        logits = of(paddle.to_tensor(IDS))
        (logits * paddle.to_tensor(direction)).sum().backward()
    near(model(paddle.to_tensor(IDS)), plain(paddle.to_tensor(IDS)).numpy())
    found = gradients(model)
    of_prefixes = gradients(plain)
    values = {name: p.numpy().astype("float64") for name, p in model.named_parameters() if is_factor(name)}
    table, inner, bias = (values[f"{NETWORK}.{kind}"] for kind in (TABLE, INNER, INNER_BIAS))
    inside = np.tanh(table @ inner + bias)
    of_inside = np.zeros_like(inside)
    wanted = {}
    for name, gradient in of_prefixes.items():
        flat = gradient.reshape(TOKENS, -1).astype("float64")
        weight = values[f"{name}_weight"].reshape(WIDTH, -1)
        wanted[f"{name}_weight"] = (inside.T @ flat).reshape(values[f"{name}_weight"].shape)
        wanted[f"{name}_bias"] = flat.sum(0)
        of_inside += flat @ weight.T
    before = of_inside * (1 - inside**2)
    wanted[f"{NETWORK}.{TABLE}"] = before @ inner.T
    wanted[f"{NETWORK}.{INNER}"] = table.T @ before
    wanted[f"{NETWORK}.{INNER_BIAS}"] = before.sum(0)
    assert found.keys() == wanted.keys(), "nothing else is trained"
    for name, value in wanted.items():
        near(found[name], value, GRADIENT_LIMIT)


@pytest.mark.parametrize("again", [recompute_layers, recompute_attention])
def test_recomputed_layers_give_the_same_gradients(again: Any) -> None:
    """Each layer goes back to the parameters that all of them share."""
    found = []
    for recomputed in (False, True):
        model = networked()
        if recomputed:
            again(model, FAMILIES["llama"].shard_plan, *([1] if again is recompute_layers else []))
        model.train()
        model(paddle.to_tensor(IDS)).square().sum().backward()
        found.append(gradients(model))
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert np.abs(value).max() > 0, name
        near(found[1][name], value, GRADIENT_LIMIT)


@pytest.mark.parametrize("width", [None, WIDTH])
def test_compiled_layers_compute_the_same(width: int | None) -> None:
    """In one program for all layers, to the bit."""
    found: list[tuple[np.ndarray, dict[str, np.ndarray]]] = []
    for is_compiled in (False, True):
        model = tiny("llama")
        plan = FAMILIES["llama"].shard_plan
        assert plan is not None
        add_prefixes(model, TOKENS, width)
        fill(model)
        if is_compiled:
            assert len(compile_layers(model, plan, Mesh(Degrees(1, 1, 1, 1), 0), [])) == 1
        logits = model.logits(model.hidden_states(paddle.to_tensor(IDS))[0])
        logits.square().sum().backward()
        found.append((logits.numpy(), gradients(model)))
    (plain, of_plain), (compiled, of_compiled) = found
    np.testing.assert_array_equal(compiled, plain)
    assert of_compiled.keys() == of_plain.keys()
    for name, value in of_plain.items():
        assert np.abs(value).max() > 0, name
        np.testing.assert_array_equal(of_compiled[name], value, err_msg=name)


def test_chunks_of_a_model_share_one_network() -> None:
    first = tiny("llama")
    second = tiny("llama")
    network = add_prefixes(first, TOKENS, WIDTH)
    assert network is not None
    assert add_prefixes(second, TOKENS, WIDTH, network) is network
    shared = {name for name, _ in first.named_parameters()} - {name for name, _ in second.named_parameters()}
    assert shared == {f"{NETWORK}.{kind}" for kind in (TABLE, INNER, INNER_BIAS)}


def test_every_stage_has_what_all_layers_share() -> None:
    model = networked()
    plan = FAMILIES["llama"].shard_plan
    assert plan is not None
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for name in shapes:
        parts = parts_with(name, plan, [0, 1, 2, 3, 4], tied=False, num_stages=2)
        assert (parts == [0, 1]) == is_shared_by_all_ranks(name), name
    without = {name: shape for name, shape in shapes.items() if not is_shared_by_all_ranks(name)}
    assert layer_costs(shapes, plan, 4, False) == layer_costs(without, plan, 4, False)
    of_layer = {kind: shard_dim(plan, f"model.layers.0.self_attn.{kind}") for kind in OUTER}
    assert of_layer == dict(zip(OUTER, (1, 0, 1, 0)))
    assert {shard_dim(plan, f"{NETWORK}.{kind}") for kind in (TABLE, INNER, INNER_BIAS)} == {None}


# values and files


def test_they_begin_as_small_as_those_of_paddlenlp() -> None:
    """Xavier's deviations of an embedding and two linear layers, the second one with the outputs of all layers."""
    layers = 3
    heads = 4
    size = 32
    tokens = 64
    width = 96
    outer = {f"model.layers.{n}.self_attn.{kind}": ((width, heads, size) if "weight" in kind else (heads * size,))
             for n in range(layers) for kind in OUTER}  # fmt: skip
    first = {f"{NETWORK}.{TABLE}": (tokens, 128), f"{NETWORK}.{INNER}": (128, width), f"{NETWORK}.{INNER_BIAS}": (96,)}
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (8,), **outer, **first}
    read = with_prefix_values(lambda name, shape, index: np.ones(shape, "float32"), 3, shapes)
    found = {name: read(name, shape, [slice(0, n) for n in shape]) for name, shape in shapes.items()}
    assert (found.pop("model.norm.weight") == 1).all()
    whole = 2 * layers * heads * size
    for name, value in found.items():
        if name.endswith("bias"):
            assert not value.any(), name
            continue
        sizes = (width, whole) if "weight" in name else value.shape
        assert value.std() == pytest.approx((2 / sum(sizes)) ** 0.5, rel=0.05), name


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """A directory of prefixes that a network makes, and its parameters."""
    model = networked()
    values = {name: p.numpy() for name, p in model.named_parameters() if is_factor(name)}
    specs = [TensorSpec(name, value.shape, "float32") for name, value in values.items()]
    write_prefixes(tmp_path, Prefixes(TOKENS, Base("x", ""), WIDTH), values.__getitem__, specs)
    return tmp_path, values


def test_files_have_the_prefixes_and_the_network(saved: tuple[Path, dict[str, np.ndarray]]) -> None:
    directory, values = saved
    found = open_prefixes(directory)
    assert (found.metadata.tokens, found.metadata.network) == (TOKENS, WIDTH)
    network = found.trained(WIDTH)
    for name, value in values.items():
        assert network.read(name).tobytes() == value.tobytes(), name
    made = compute_prefixes(values)
    assert len(made) == 2 * len(tiny("llama").model.layers)
    for name, value in made.items():
        assert found.files.read(name).tobytes() == value.tobytes(), name


def test_a_run_goes_on_from_a_network_of_its_width_only(saved: tuple[Path, dict[str, np.ndarray]]) -> None:
    found = open_prefixes(saved[0])
    with pytest.raises(UserError, match="that a network of width 5 makes; the recipe has prefixes without a network"):
        found.trained(None)
    (saved[0] / "adapter_state.safetensors").unlink()
    with pytest.raises(UserError, match="without a network; the recipe has prefixes that a network of width 5 makes"):
        open_prefixes(saved[0]).trained(WIDTH)


# recipes

ONE = ["--parallel={}", "--launch.num_devices=1", "--prefix.tokens=4"]


@pytest.mark.parametrize("family", ["llama", "gpt", "ernie_moe"])
def test_a_plan_counts_what_a_model_has(registry: Registry, family: str) -> None:
    plan = plan_run(ROOT / f"recipes/{family}/sft.json", [*ONE, "--prefix.projection=true"], registry, smoke=True)
    model = FAMILIES[family].factory()(plan.model.config, CpuBackend().ops("fp32"))
    add_prefixes(model, 4, plan.model.config.hidden_size)
    layout = Layout(plan.model, plan.parallel)
    assert list(layout.shapes.items()) == [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert layout.trained == {name for name, p in model.named_parameters() if not p.stop_gradient}
    assert f"model.layers.0.self_attn.{PREFIX_KEY}" not in layout.shapes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prefix.projection=true"], "prefix.projection: is true, but tokens is null"),
        (
            ["--prefix.tokens=4", "--prefix.projection_hidden_size=8"],
            "prefix.projection_hidden_size: is 8, which needs projection",
        ),
    ],
)
def test_keys_that_need_each_other(registry: Registry, words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_run(ROOT / "recipes/llama/sft.json", [*ONE[:2], *words], registry, smoke=True)


def test_the_width_is_that_of_the_model_unless_given(registry: Registry) -> None:
    def width(*words: str) -> int | None:
        plan = plan_run(ROOT / "recipes/llama/sft.json", [*ONE, *words], registry, smoke=True)
        return (
            plan.model.prefix.network_size(plan.model.config.hidden_size)
            and Layout(plan.model, plan.parallel).shapes[f"{NETWORK}.{INNER_BIAS}"][0]
        )

    assert width() is None
    assert width("--prefix.projection=true") == tiny_hidden(registry)
    assert width("--prefix.projection=true", "--prefix.projection_hidden_size=12") == 12


def tiny_hidden(registry: Registry) -> int:
    plan = plan_run(ROOT / "recipes/llama/sft.json", ONE, registry, smoke=True)
    return int(plan.model.config.hidden_size)
