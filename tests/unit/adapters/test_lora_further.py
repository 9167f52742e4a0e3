"""Kinds of adapters on routed experts and on the embedding: what they compute, begin with, and are in files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
import safetensors.numpy
from paddle import nn

from llmsuite.adapters.add import adapted_modules, adapter_layer, add_adapters
from llmsuite.adapters.initial_values import with_adapter_values
from llmsuite.adapters.layers.experts import ExpertsAdapter
from llmsuite.adapters.methods import adapter_config, find_method
from llmsuite.adapters.parameters import is_factor, shard_dim, with_adapters
from llmsuite.base.errors import RecipeError
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.lora import LoraSection
from llmsuite.devices.cpu import CpuBackend
from llmsuite.inference.load import load_model
from llmsuite.models.dropout import token_keys
from llmsuite.models.experts import Experts, GroupedLinear
from llmsuite.models.quantised import quantise_matrices
from llmsuite.models.shard_plan import UNSHARDED
from llmsuite.models.token_context import tokens
from llmsuite.recipe.resolve import plan_run
from tests.support.adapter_models import IDS, adapted, base_of, section, write
from tests.support.families import FAMILIES, tiny
from tests.support.kinds import check_merged, check_read_again, keys_of, written
from tests.support.lora_layers import filled
from tests.support.paths import ROOT

ON_EXPERTS = ("lora", "mixer", "dora", "pissa", "mora", "lokr")
ON_EMBEDDINGS = ("mixer", "dora", "pissa")
WHERE = {
    **{(method, "deepseek"): ["*_proj"] for method in ON_EXPERTS[1:]},
    ("dora", "qwen_moe"): ["experts.down_proj"],
    ("lokr", "ernie_moe"): ["mlp.experts.*"],
    **{(method, "qwen"): ["q_proj", "embed_tokens", "lm_head"] for method in ON_EMBEDDINGS},
}
COUNTS = [3, 0, 4, 1]


@pytest.fixture(scope="module", params=WHERE, ids=" ".join)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Method, family, directory of base and adapter, the live model with random adapters, their metadata."""
    method, family = request.param
    directory = tmp_path_factory.mktemp("further")
    return method, family, directory, *written(directory, family, section_of(method, family))


def section_of(method: str, family: str) -> LoraSection:
    stable = {"rslora": True} if method not in ("mora", "lora") else {}
    return section(**keys_of(method), target_modules=WHERE[method, family], **stable)


# what they compute


def stack(num_inputs: int = 6, num_outputs: int = 10) -> GroupedLinear:
    made = GroupedLinear(len(COUNTS), num_inputs, num_outputs)
    made.weight.set_value(paddle.randn(made.weight.shape))
    made.weight.stop_gradient = True
    return made


@pytest.mark.parametrize("base_dtype", [None, "nf4"])
@pytest.mark.parametrize("method", ON_EXPERTS)
def test_each_expert_computes_what_a_layer_of_its_own_does(method: str, base_dtype: Any) -> None:
    """Outputs and gradients; an expert without rows has gradients of zero."""
    lora = section(**keys_of(method), base_dtype=base_dtype, **({"base_block": 2} if base_dtype else {}))
    layer = filled(adapter_layer(base := stack(), lora.adapter_config))
    dense = base.weight.numpy()
    if lora.base_format is not None:
        quantise_matrices(nn.Sequential(layer), ["0"], lora.base_format)
        stored = [lora.base_format.quantise(matrix) for matrix in dense]
        layer.weight.codes.set_value(np.stack([codes for codes, _ in stored]))
        layer.weight.absmax.set_value(np.stack([absmax for _, absmax in stored]))
        dense = np.stack([lora.base_format.dequantise(*pair) for pair in stored])
    x = paddle.randn([sum(COUNTS), 6])
    direction = paddle.randn([sum(COUNTS), 10])
    x.stop_gradient = False
    y = layer.product(x, COUNTS)
    (y * direction).sum().backward()
    parts = zip(x.split(COUNTS), y.split(COUNTS), x.grad.split(COUNTS), direction.split(COUNTS), strict=True)
    for number, (rows, found, gradient, along) in enumerate(parts):
        linear = nn.Linear(6, 10, bias_attr=False)
        linear.weight.set_value(dense[number])
        linear.weight.stop_gradient = True
        one = adapter_layer(linear, lora.adapter_config)
        own = {name: parameter for name, parameter in layer.named_parameters() if is_factor(name)}
        assert set(own) == {name for name, _ in one.named_parameters() if is_factor(name)} != set()
        for name, parameter in own.items():
            getattr(one, name).initialize() if not getattr(one, name)._is_initialized() else None
            getattr(one, name).set_value(parameter[number])
            if not rows.shape[0]:
                assert parameter.stop_gradient or not parameter.grad[number].any()
        if not rows.shape[0]:
            continue
        alone = rows.detach()
        alone.stop_gradient = False
        wanted = one(alone)
        (wanted * along).sum().backward()
        np.testing.assert_allclose(found.numpy(), wanted.numpy(), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(gradient.numpy(), alone.grad.numpy(), rtol=1e-4, atol=1e-4)
        for name, parameter in own.items():
            wanted = getattr(one, name).grad
            assert (wanted is None) == parameter.stop_gradient
            if wanted is not None:
                np.testing.assert_allclose(parameter.grad[number].numpy(), wanted.numpy(), rtol=1e-3, atol=1e-4)
    layer.is_enabled = False
    plain = np.concatenate([rows @ matrix for rows, matrix in zip(np.split(x.numpy(), np.cumsum(COUNTS)[:-1]), dense)])
    np.testing.assert_allclose(layer.product(x, COUNTS).numpy(), plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ON_EXPERTS)
def test_experts_without_any_rows(method: str) -> None:
    """A rank whose experts get no token."""
    layer = filled(adapter_layer(stack(), section(**keys_of(method)).adapter_config))
    x = paddle.zeros([0, 6])
    x.stop_gradient = False
    y = layer.product(x, [0] * len(COUNTS))
    assert y.shape == [0, 10]
    y.sum().backward()
    for name, parameter in layer.named_parameters():
        if is_factor(name) and not parameter.stop_gradient:
            assert parameter.grad.shape == parameter.shape
            assert not parameter.grad.any()


def test_dora_of_an_embedding_by_hand() -> None:
    """The formula of PEFT 0.21's `DoraEmbeddingLayer`: a factor for each output, times W[id] + scale A[id] B."""
    embedding = nn.Embedding(7, 5)
    embedding.weight.stop_gradient = True
    layer = filled(adapter_layer(embedding, adapter_config("dora", rank=3, alpha=6.0)))
    whole = layer.weight + 2.0 * layer.lora_A @ layer.lora_B
    lengths = paddle.sqrt((whole * whole).sum(0))
    ids = paddle.to_tensor([[1, 6, 0], [3, 3, 2]])
    wanted = (whole / lengths * layer.lora_magnitude).numpy()[ids.numpy()]
    np.testing.assert_allclose(layer(ids).numpy(), wanted, rtol=1e-4, atol=1e-5)
    layer.is_enabled = False
    np.testing.assert_array_equal(layer(ids).numpy(), embedding.weight.numpy()[ids.numpy()])


# dropout


@pytest.fixture
def dropping() -> Callable[..., dict[str, np.ndarray]]:
    """Elements that an adapter of experts drops from rows with these token keys."""

    def run(keys: list[int], counts: list[int], first: int = 0, rate: float = 0.5) -> Any:
        experts = nn.Sequential(Experts(4, 6, 8, CpuBackend().ops("fp32")))
        add_adapters(experts, ["0.gate_proj"], adapter_config(rank=2, dropout=rate), seed=3)
        dropout = experts[0].gate_proj.lora_dropout
        dropout.first = first
        with tokens(paddle.to_tensor(keys, dtype="int32")):
            return dropout(paddle.ones([len(keys), 6]), counts).numpy()

    return run


def test_rows_are_dropped_by_token_and_expert(dropping: Callable[..., np.ndarray]) -> None:
    keys = list(range(1, 401))
    found = dropping(keys, [100, 200, 0, 100])
    assert set(np.unique(found)) == {0.0, 2.0}
    assert 0.45 < (found > 0).mean() < 0.55
    # whatever the order of the rows and the rank that has the expert
    order = np.random.default_rng(0).permutation(200)
    again = dropping([keys[100:300][i] for i in order], [200], first=1)
    np.testing.assert_array_equal(again, found[100:300][order])
    same = [dropping(keys, [400], first=number) for number in range(4)]
    for number in range(1, 4):  # each expert has masks of its own
        assert 0.4 < (same[number] == same[0]).mean() < 0.6


@pytest.mark.parametrize("family", ["deepseek", "qwen_moe"])
def test_a_model_drops_the_same_of_a_row_in_any_batch(family: str) -> None:
    paddle.seed(3)
    model = tiny(family)
    plan = FAMILIES[family].shard_plan or UNSHARDED
    for parameter in model.parameters():
        parameter.set_value(paddle.randn(parameter.shape) * 0.2 + (parameter.ndim == 1))
    modules = adapted_modules(model, plan, ["experts.*"])
    add_adapters(model, modules, adapter_config(rank=2, dropout=0.5), seed=1)
    for name, parameter in model.named_parameters():
        if is_factor(name):
            parameter.set_value(paddle.randn(parameter.shape))
    model.train()

    def logits(ids: Any, step: int = 1) -> np.ndarray:
        ids = paddle.to_tensor(ids)
        with tokens(token_keys(ids, None, 5, step)):
            return model(ids).numpy()

    both = logits(IDS)
    alone = logits(IDS[1:])
    # other masks change them by as much as they are; rounding, which gates magnify, by 3e-5 with the worst of 48 seeds
    np.testing.assert_allclose(alone, both[1:], rtol=0, atol=1e-3 * np.abs(both).max())
    assert np.abs(logits(IDS, step=2) - both).max() > 0.01 * np.abs(both).max()
    model.eval()
    assert np.abs(model(paddle.to_tensor(IDS)).numpy() - both).max() > 0.01 * np.abs(both).max()


def test_nothing_is_dropped_of_an_id() -> None:
    """PEFT's layer of an embedding has no dropout either."""
    model = tiny("qwen")
    add_adapters(model, ["model.embed_tokens", "model.layers.0.mlp.up_proj"], adapter_config(rank=2, dropout=0.5))
    assert not isinstance(model.model.embed_tokens.lora_dropout, nn.Layer)
    assert isinstance(model.model.layers[0].mlp.up_proj.lora_dropout, nn.Layer)


# as models and files


def test_parameters_are_those_that_are_planned_and_cut(made: Any) -> None:
    method, family, _, model, metadata = made
    plain = tiny(family)
    plan = FAMILIES[family].shard_plan or UNSHARDED
    shapes = {name: tuple(p.shape) for name, p in plain.named_parameters()}
    planned = with_adapters(shapes, metadata.modules, 3, find_method(**keys_of(method)))
    assert planned == {name: tuple(p.shape) for name, p in model.named_parameters()}
    for name, layer in model.named_sublayers():
        for own, _ in layer.named_parameters() if isinstance(layer, ExpertsAdapter) else ():
            assert shard_dim(plan, f"{name}.{own}") == plan.dim(f"{name}.weight") == 0
    assert shard_dim(plan, f"{plan.embedding}.lora_magnitude") is None
    assert shard_dim(plan, f"{plan.embedding}.lora_A0") == 0


def test_merged_and_unmerged_are_the_same(made: Any) -> None:
    _, _, directory, model, _ = made
    check_merged(directory, model, 5e-6)


def test_what_was_trained_is_read_again(made: Any) -> None:
    _, family, directory, model, metadata = made
    check_read_again(directory, family, model, metadata)


def test_names_in_files_are_those_of_peft(made: Any) -> None:
    method, family, directory, model, _ = made
    tensors = safetensors.numpy.load_file(directory / "adapter" / "adapter_model.safetensors")
    if family == "qwen":
        stem = "base_model.model.model.embed_tokens"
        hidden = model.config.hidden_size
        rank = 6 if method == "pissa" else 3
        assert tensors[f"{stem}.lora_embedding_A"].shape == (rank, model.config.vocab_size)
        assert tensors[f"{stem}.lora_embedding_B"].shape == (hidden, rank)
        if method == "dora":
            assert tensors[f"{stem}.lora_magnitude_vector"].shape == (hidden,)
        return
    of_one = {name.partition(".experts.0.down_proj.")[2] for name in tensors if ".experts.0.down_proj." in name}
    pair = {"lora_A.weight", "lora_B.weight"}
    kinds = {"dora": {*pair, "lora_magnitude_vector"}, "mora": {"lora_square"}}
    if method == "lokr":
        assert of_one in ({"lokr_w1", "lokr_w2"}, {"lokr_w1", "lokr_w2_a", "lokr_w2_b"})
    else:
        assert of_one == kinds.get(method, pair)


def test_files_for_peft_have_no_dropout_on_experts(tmp_path: Path) -> None:
    """PEFT refuses to load adapters of stacks with dropout; without experts it is written, though loading ignores
    it."""
    base_of("deepseek", tmp_path / "base")
    for target, expected in (("experts.down_proj", 0.0), ("o_proj", 0.25)):
        lora = section(target_modules=[target], dropout=0.25)
        model, modules = adapted("deepseek", tmp_path / "base", lora)
        write(tmp_path / target, model, modules, lora, tmp_path / "base")
        assert json.loads((tmp_path / target / "adapter_config.json").read_text())["lora_dropout"] == expected


@pytest.mark.parametrize("rslora", [False, True])
def test_files_for_peft_have_a_scale_that_stays_when_it_joins_gate_and_up(tmp_path: Path, rslora: bool) -> None:
    """PEFT doubles rank and alpha then, and takes the root of the rank if `use_rslora` is set."""
    base_of("qwen_moe", tmp_path / "base")
    lora = section(target_modules=["experts.*", "o_proj"], rslora=rslora)
    model, modules = adapted("qwen_moe", tmp_path / "base", lora)
    write(tmp_path / "adapter", model, modules, lora, tmp_path / "base")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert not written["use_rslora"]
    assert 2 * written["lora_alpha"] / (2 * written["r"]) == pytest.approx(lora.adapter_config.scale)
    check_merged(tmp_path, model, 5e-6)


def test_training_begins_with_the_base(made: Any) -> None:
    method, family, directory, _, _ = made
    lora = section_of(method, family)
    plan = FAMILIES[family].shard_plan or UNSHARDED
    model, _ = adapted(family, directory / "base", lora)
    base = open_model(directory / "base", FAMILIES)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    config = lora.adapter_config
    read = with_adapter_values(lambda name, shape, index: base.read(name, index), 3, shapes, config, plan)
    for name, parameter in model.named_parameters():
        if is_factor(name):
            whole = read(name, parameter.shape, [slice(0, n) for n in parameter.shape])
            part = [slice(n // 2, n) for n in parameter.shape]
            np.testing.assert_array_equal(read(name, parameter.shape, part), whole[tuple(part)], err_msg=name)
            parameter.set_value(whole)
    wanted = load_model(base, CpuBackend())(paddle.to_tensor(IDS)).numpy()
    np.testing.assert_allclose(model(paddle.to_tensor(IDS)).numpy(), wanted, rtol=0, atol=1e-5)


# what is refused


@pytest.mark.parametrize(
    ("family", "key", "value", "target", "message"),
    [
        ("llama", "method", "vera", "embed_tokens", "neither its paper nor PEFT"),
        ("llama", "method", "mora", "embed_tokens", "the input of an embedding is ids; set lora.method to lora"),
        ("llama", "method", "lokr", "embed_tokens", "the input of an embedding is ids"),
        ("llama", "init", "lora_ga", "embed_tokens", "of the first batches; set lora.init to default"),
        ("deepseek", "method", "vera", "experts.*", "would keep a copy; set lora.method to lora, or name other"),
        ("deepseek", "init", "lora_ga", "experts.*", "with few tokens"),
    ],
)
def test_what_is_refused(registry: Registry, family: str, key: str, value: str, target: str, message: str) -> None:
    words = ["--launch.num_devices=1", "--parallel={}", f"--lora.{key}={value}", f'--lora.target_modules=["{target}"]']
    with pytest.raises(RecipeError) as caught:
        plan_run(ROOT / f"recipes/{family}/lora.json", words, registry, smoke=True)
    (problem,) = caught.value.problems
    assert problem.key == "lora.target_modules"
    assert message in problem.message
