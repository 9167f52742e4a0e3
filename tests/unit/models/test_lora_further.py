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

from llmsuite.checkpoint.model_dir import open_model
from llmsuite.devices.cpu import CpuBackend
from llmsuite.errors import RecipeError
from llmsuite.inference.load import load_model
from llmsuite.models.dropout import token_keys
from llmsuite.models.experts import Experts, Stacked
from llmsuite.models.lora import adapted_modules, add_adapters
from llmsuite.models.lora_experts import ExpertsAdapter
from llmsuite.models.lora_layers import adapter_layer
from llmsuite.models.peft_configs import lora_config
from llmsuite.models.quantised import quantise_matrices
from llmsuite.models.shard_plan import WHOLE
from llmsuite.models.targets import is_factor, with_adapters
from llmsuite.models.token_values import tokens
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.resolve import plan_run
from llmsuite.schema.lora import LoraSection
from llmsuite.train.adapters import adapter_config, with_factors
from tests.paths import ROOT
from tests.unit.families import FAMILIES, tiny
from tests.unit.models.kinds import check_merged, check_read_again, keys_of, written
from tests.unit.models.test_adapters import IDS, adapted, base_of, section, write
from tests.unit.models.test_lora_layers import filled

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
    """Method, family, directory of base and adapter, the live model with random adapters, what is told of them."""
    method, family = request.param
    directory = tmp_path_factory.mktemp("further")
    return method, family, directory, *written(directory, family, section_of(method, family))


def section_of(method: str, family: str) -> LoraSection:
    stable = {"rslora": True} if method not in ("mora", "lora") else {}
    return section(**keys_of(method), target_modules=WHERE[method, family], **stable)


# what they compute


def stack(num_inputs: int = 6, num_outputs: int = 10) -> Stacked:
    made = Stacked(len(COUNTS), num_inputs, num_outputs)
    made.weight.set_value(paddle.randn(made.weight.shape))
    made.weight.stop_gradient = True
    return made


@pytest.mark.parametrize("base_dtype", [None, "nf4"])
@pytest.mark.parametrize("method", ON_EXPERTS)
def test_each_expert_computes_what_a_layer_of_its_own_does(method: str, base_dtype: Any) -> None:
    """Outputs and gradients; an expert without rows has gradients of zero."""
    lora = section(**keys_of(method), base_dtype=base_dtype, **({"base_block": 2} if base_dtype else {}))
    layer = filled(adapter_layer(base := stack(), adapter_config(lora)))
    dense = base.weight.numpy()
    if lora.base_format is not None:
        quantise_matrices(nn.Sequential(layer), ["0"], lora.base_format)
        stored = [lora.base_format.quantise(matrix) for matrix in dense]
        layer.weight.codes.set_value(np.stack([codes for codes, _ in stored]))
        layer.weight.absmax.set_value(np.stack([absmax for _, absmax in stored]))
        dense = np.stack([lora.base_format.dequantise(*pair) for pair in stored])
    x, direction = paddle.randn([sum(COUNTS), 6]), paddle.randn([sum(COUNTS), 10])
    x.stop_gradient = False
    y = layer.product(x, COUNTS)
    (y * direction).sum().backward()
    parts = zip(x.split(COUNTS), y.split(COUNTS), x.grad.split(COUNTS), direction.split(COUNTS), strict=True)
    for number, (rows, found, gradient, along) in enumerate(parts):
        linear = nn.Linear(6, 10, bias_attr=False)
        linear.weight.set_value(dense[number])
        linear.weight.stop_gradient = True
        one = adapter_layer(linear, adapter_config(lora))
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
    layer.is_on = False
    plain = np.concatenate([rows @ matrix for rows, matrix in zip(np.split(x.numpy(), np.cumsum(COUNTS)[:-1]), dense)])
    np.testing.assert_allclose(layer.product(x, COUNTS).numpy(), plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ON_EXPERTS)
def test_experts_without_any_rows(method: str) -> None:
    """As on a rank to whose experts no token went."""
    layer = filled(adapter_layer(stack(), adapter_config(section(**keys_of(method)))))
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
    """As PEFT 0.21's `DoraEmbeddingLayer` has it: a factor for each output, times W[id] + scale A[id] B."""
    embedding = nn.Embedding(7, 5)
    embedding.weight.stop_gradient = True
    layer = filled(adapter_layer(embedding, lora_config("dora", r=3, lora_alpha=6.0)))
    whole = layer.weight + 2.0 * layer.lora_A @ layer.lora_B
    lengths = paddle.sqrt((whole * whole).sum(0))
    ids = paddle.to_tensor([[1, 6, 0], [3, 3, 2]])
    wanted = (whole / lengths * layer.lora_magnitude).numpy()[ids.numpy()]
    np.testing.assert_allclose(layer(ids).numpy(), wanted, rtol=1e-4, atol=1e-5)
    layer.is_on = False
    np.testing.assert_array_equal(layer(ids).numpy(), embedding.weight.numpy()[ids.numpy()])


# dropout


@pytest.fixture
def dropping() -> Callable[..., dict[str, np.ndarray]]:
    """What an adapter of experts drops of rows with these token keys."""

    def run(keys: list[int], counts: list[int], first: int = 0, rate: float = 0.5) -> Any:
        experts = nn.Sequential(Experts(4, 6, 8, CpuBackend().ops("fp32")))
        add_adapters(experts, ["0.gate_proj"], lora_config(r=2, lora_dropout=rate), seed=3)
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
    model, plan = tiny(family), FAMILIES[family].shard_plan or WHOLE
    for parameter in model.parameters():
        parameter.set_value(paddle.randn(parameter.shape) * 0.2 + (parameter.ndim == 1))
    modules = adapted_modules(model, plan, ["experts.*"])
    add_adapters(model, modules, lora_config(r=2, lora_dropout=0.5), seed=1)
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
    """As in PEFT, whose layer of an embedding has no dropout."""
    model = tiny("qwen")
    add_adapters(model, ["model.embed_tokens", "model.layers.0.mlp.up_proj"], lora_config(r=2, lora_dropout=0.5))
    assert not isinstance(model.model.embed_tokens.lora_dropout, nn.Layer)
    assert isinstance(model.model.layers[0].mlp.up_proj.lora_dropout, nn.Layer)


# as models and files


def test_parameters_are_those_that_are_planned_and_cut(made: Any) -> None:
    method, family, _, model, told = made
    plain, plan = tiny(family), FAMILIES[family].shard_plan or WHOLE
    shapes = {name: tuple(p.shape) for name, p in plain.named_parameters()}
    planned = with_adapters(shapes, told.modules, 3, **keys_of(method))
    assert planned == {name: tuple(p.shape) for name, p in model.named_parameters()}
    for name, layer in model.named_sublayers():
        for own, _ in layer.named_parameters() if isinstance(layer, ExpertsAdapter) else ():
            assert plan.dim(f"{name}.{own}") == plan.dim(f"{name}.weight") == 0
    assert plan.dim(f"{plan.embedding}.lora_magnitude") is None
    assert plan.dim(f"{plan.embedding}.lora_A0") == 0


def test_merged_and_unmerged_are_the_same(made: Any) -> None:
    _, _, directory, model, _ = made
    check_merged(directory, model, 5e-6)


def test_what_was_trained_is_read_again(made: Any) -> None:
    _, family, directory, model, told = made
    check_read_again(directory, family, model, told)


def test_names_in_files_are_those_of_peft(made: Any) -> None:
    method, family, directory, model, _ = made
    tensors = safetensors.numpy.load_file(directory / "adapter" / "adapter_model.safetensors")
    if family == "qwen":
        stem = "base_model.model.model.embed_tokens"
        hidden, rank = model.config.hidden_size, 6 if method == "pissa" else 3
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


def test_peft_is_told_of_no_dropout_on_experts(tmp_path: Path) -> None:
    """It refuses to load adapters of stacks with one; without experts it is told, though loading makes no use of it."""
    base_of("deepseek", tmp_path / "base")
    for target, told in (("experts.down_proj", 0.0), ("o_proj", 0.25)):
        lora = section(target_modules=[target], dropout=0.25)
        model, modules = adapted("deepseek", tmp_path / "base", lora)
        write(tmp_path / target, model, modules, lora, tmp_path / "base")
        assert json.loads((tmp_path / target / "adapter_config.json").read_text())["lora_dropout"] == told


@pytest.mark.parametrize("rslora", [False, True])
def test_peft_is_told_a_scale_that_stays_when_it_joins_gate_and_up(tmp_path: Path, rslora: bool) -> None:
    """It doubles rank and alpha then, and takes the root of the rank if it is told `use_rslora`."""
    base_of("qwen_moe", tmp_path / "base")
    lora = section(target_modules=["experts.*", "o_proj"], rslora=rslora)
    model, modules = adapted("qwen_moe", tmp_path / "base", lora)
    write(tmp_path / "adapter", model, modules, lora, tmp_path / "base")
    told = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert not told["use_rslora"]
    assert 2 * told["lora_alpha"] / (2 * told["r"]) == pytest.approx(lora.scale)
    check_merged(tmp_path, model, 5e-6)


def test_training_begins_with_the_base(made: Any) -> None:
    method, family, directory, _, _ = made
    lora, plan = section_of(method, family), FAMILIES[family].shard_plan or WHOLE
    model, _ = adapted(family, directory / "base", lora)
    base = open_model(directory / "base", FAMILIES)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    read = with_factors(lambda name, shape, index: base.read(name, index), 3, shapes, plan.embedding, lora)
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
        ("llama", "method", "mora", "embed_tokens", "an embedding has ids; set lora.method to lora"),
        ("llama", "method", "lokr", "embed_tokens", "an embedding has ids"),
        ("llama", "init", "lora_ga", "embed_tokens", "of the first batches only; set lora.init to default"),
        ("deepseek", "method", "vera", "experts.*", "its own copy of them; set lora.method to lora, or name others"),
        ("deepseek", "init", "lora_ga", "experts.*", "few tokens reach"),
    ],
)
def test_what_is_refused(registry: Registry, family: str, key: str, value: str, target: str, message: str) -> None:
    words = ["--launch.num_devices=1", "--parallel={}", f"--lora.{key}={value}", f'--lora.target_modules=["{target}"]']
    with pytest.raises(RecipeError) as caught:
        plan_run(ROOT / f"recipes/{family}/lora.json", words, registry, smoke=True)
    (problem,) = caught.value.problems
    assert problem.key == "lora.target_modules"
    assert message in problem.message
