"""Multi-token prediction against the formulas of DeepSeek-V3 (arXiv 2412.19437, section 2.2), written out plainly: a
document at a time, a token at a time. And its files, against the names of the published ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.adapters.add import adapted_modules, add_adapters
from llmsuite.adapters.parameters import is_factor
from llmsuite.base.errors import UserError
from llmsuite.checkpoint.adapter_base import Base
from llmsuite.checkpoint.adapter_dir import Adapters, SavedAdapters
from llmsuite.checkpoint.directory import find_adapter, find_model
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.checkpoint.model_writer import write_hf, write_model
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.cli.main import main
from llmsuite.contract.schema.recipe import LoraSection
from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.ops import Ops
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.generate import generate
from llmsuite.inference.load import load_model, open_any
from llmsuite.inference.sampling import Sampling
from llmsuite.models.dense_names import MTP_NAMES
from llmsuite.models.families.deepseek import SMOKE, DeepSeekConfig
from llmsuite.models.shard_plan import UNSHARDED
from llmsuite.models.sparse import SparseLM
from llmsuite.parallel.pipeline import PipelineStage
from llmsuite.stages import language_model
from llmsuite.stages.language_model import WeightedTokens
from tests.support import alone
from tests.support.families import FAMILIES
from tests.support.fill import fill_parameters
from tests.support.fp8_model import further_layers
from tests.support.graphs import SLOW_ON_GPUS, gradient_nodes
from tests.support.paths import ROOT

CONFIG = DeepSeekConfig(**{**SMOKE, "num_hidden_layers": 2}, num_nextn_predict_layers=1, mtp=True)
LAYER = "model.layers.2"
EPS = CONFIG.rms_norm_eps
DOCUMENTS = [[5, 17, 300, 8, 44, 2], [7, 9], [100, 3, 61, 2], [11, 12, 2]]
WEIGHTS = [[0, 0, 1, 1, 1, 1], [0, 1], [0, 1, 0, 1], [0, 0, 1]]


def made(config: DeepSeekConfig) -> Any:
    """A model whose values depend on names alone."""
    paddle.seed(0)
    model = SparseLM(config, Ops())
    rng = np.random.default_rng(0)
    for _, parameter in sorted(model.named_parameters()):
        around = 1.0 if parameter.ndim == 1 else 0.0
        parameter.set_value((around + 0.1 * rng.standard_normal(parameter.shape)).astype("float32"))
    return model


def block(model: Any) -> Any:
    """The transformer block of the layer, as the one layer of a model of its own."""
    shape = {**SMOKE, "num_hidden_layers": 1, "first_k_dense_replace": 0}
    found = SparseLM(DeepSeekConfig(**shape), Ops())
    values = dict(model.named_parameters())
    for name, parameter in found.named_parameters():
        if name.startswith("model.layers.0."):
            parameter.set_value(values[name.replace("model.layers.0", LAYER)])
    return found


def rms(x: Any, gain: Any) -> Any:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * gain


def by_hand(model: Any, mtp_weight: float) -> tuple[Any, Any]:
    """The loss summed over all documents, and the part of it that is of further tokens."""
    p = dict(model.named_parameters())
    trm = block(model)
    main = []
    further = []
    for ids, weights in zip(DOCUMENTS, WEIGHTS):
        hidden = model.hidden_states(paddle.to_tensor([ids[:-1]]))[0][0]  # [T, D]
        for i in range(len(ids) - 1):
            logits = paddle.matmul(hidden[i], p["lm_head.weight"])
            main.append(weights[i + 1] * (logits.logsumexp() - logits[ids[i + 1]]))
        pairs = []
        for i in range(len(ids) - 2):
            embedded = p["model.embed_tokens.weight"][ids[i + 1]]
            parts = [rms(embedded, p[f"{LAYER}.enorm.weight"]), rms(hidden[i], p[f"{LAYER}.hnorm.weight"])]
            pairs.append(paddle.matmul(paddle.concat(parts), p[f"{LAYER}.eh_proj.weight"]))
        if not pairs:
            continue
        out = trm.decode(paddle.stack(pairs).unsqueeze(0))[0][0]
        for i, state in enumerate(out):
            logits = paddle.matmul(rms(state, p[f"{LAYER}.shared_head.norm.weight"]), p["lm_head.weight"])
            further.append(weights[i + 2] * (logits.logsumexp() - logits[ids[i + 2]]))
    total = paddle.add_n(further)
    return paddle.add_n(main) + mtp_weight * total, total


def samples() -> list[WeightedTokens]:
    return [
        WeightedTokens(np.array(ids, "int32"), np.array(weights, "float32")) for ids, weights in zip(DOCUMENTS, WEIGHTS)
    ]


@pytest.mark.parametrize("packed", [True, False])
def test_loss_and_gradients_are_those_of_the_formula(packed: bool) -> None:
    model = made(CONFIG)
    expected, further = by_hand(model, 0.3)
    expected.backward()
    names = ("model.embed_tokens.weight", "lm_head.weight", f"{LAYER}.eh_proj.weight", f"{LAYER}.hnorm.weight")
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if name in names}
    model.clear_gradients()

    rows = [language_model.join(samples())] if packed else samples()
    batch = language_model.collate(rows, pad_id=0, length_multiple=8, has_mtp=True)
    part = PipelineStage([model], alone.MESH, CONFIG.hidden_size, [], None)
    part.train()
    terms = language_model.weighted_loss(part, batch, 0.3)
    weight = float(sum(map(sum, WEIGHTS)))
    assert terms.weight == weight
    assert float(terms.total) == pytest.approx(float(expected), rel=1e-6)
    assert not gradient_nodes(terms.total) & SLOW_ON_GPUS
    total, divisor = terms.sums["mtp_loss"]
    assert divisor == weight
    assert float(total) == pytest.approx(float(further), rel=1e-6)
    terms.total.backward()
    for name, parameter in model.named_parameters():
        if name in names:
            difference = np.linalg.norm(parameter.grad.numpy() - gradients[name])
            assert difference <= 1e-5 * np.linalg.norm(gradients[name]), name


def test_evaluation_and_training_agree_and_logits_are_without_the_layer() -> None:
    model = made(CONFIG)
    plain = SparseLM(dataclasses.replace(CONFIG, mtp=False), Ops())
    values = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        parameter.set_value(values[name])
    assert values.keys() - dict(plain.named_parameters()).keys() == {n for n in values if n.startswith(f"{LAYER}.")}
    ids = paddle.to_tensor([DOCUMENTS[0]])
    model.eval()
    plain.eval()
    np.testing.assert_array_equal(model(ids).numpy(), plain(ids).numpy())
    hidden = model.hidden_states(ids)[0]
    evaluated = model.mtp_hidden_states(hidden, ids)
    model.train()
    np.testing.assert_allclose(model.mtp_hidden_states(hidden, ids).numpy(), evaluated.numpy(), rtol=1e-5, atol=1e-6)


@given(
    st.lists(st.lists(st.lists(st.booleans(), min_size=1, max_size=5), min_size=1, max_size=4), min_size=1, max_size=3)
)
def test_every_weighted_token_with_two_before_it_is_predicted_by_them(rows: list[list[list[bool]]]) -> None:
    """Documents of one token more than there are weights, each token with a number of its own."""
    number = 1
    packs = []
    expected = set()
    for row in rows:
        parts = []
        for weights in row:
            ids = np.arange(number, number + len(weights) + 1, dtype="int32")
            number += len(ids)
            parts.append(WeightedTokens(ids, np.array([False, *weights], "float32")))
            expected |= {int(t) for t, w in zip(ids[2:], weights[1:]) if w}
        packs.append(language_model.join(parts))
    batch: Any = language_model.collate(packs, 0, 4, has_mtp=True)
    found = {int(t) for t, w in zip(batch["mtp_targets"], batch["mtp_weights"]) if w}
    assert found == expected
    for at, target, weight in zip(batch["mtp_positions"], batch["mtp_targets"], batch["mtp_weights"]):
        if weight:
            assert batch["input_ids"].flat[at] == target - 2
            assert batch["next_ids"].flat[at] == target - 1


# files


def write(directory: Path, model: Any) -> Path:
    directory.mkdir()
    values = {name: parameter.numpy() for name, parameter in model.named_parameters()}
    specs = [TensorSpec(name, tuple(value.shape), "float32") for name, value in values.items()]
    write_model(directory, FAMILIES["deepseek"], CONFIG, values.__getitem__, specs)
    return directory


def tensors(directory: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for path in directory.glob("model*.safetensors"):
        found |= safetensors.numpy.load_file(path)
    return found


def test_shapes_are_those_of_the_model() -> None:
    found = {name: tuple(parameter.shape) for name, parameter in made(CONFIG).named_parameters()}
    assert list(MTP_NAMES.parameter_shapes(CONFIG).items()) == list(found.items())


def test_files_are_as_published_and_come_back(tmp_path: Path) -> None:
    model = made(CONFIG)
    written = tensors(write(tmp_path / "trained", model))
    published = further_layers(FAMILIES["deepseek"], dataclasses.replace(CONFIG, mtp=False))
    layer = {name: value for name, value in written.items() if name.startswith(f"{LAYER}.")}
    assert layer.keys() == published.keys() | {f"{LAYER}.mlp.gate.e_score_correction_bias"}
    np.testing.assert_array_equal(layer[f"{LAYER}.embed_tokens.weight"], written["model.embed_tokens.weight"])
    np.testing.assert_array_equal(layer[f"{LAYER}.shared_head.head.weight"], written["lm_head.weight"])

    again = made(dataclasses.replace(CONFIG, rms_norm_eps=2e-6))
    source = open_model(tmp_path / "trained", FAMILIES, mtp=True)
    assert source.carried == []
    fill_parameters(again, source)
    for (name, value), (_, expected) in zip(again.named_parameters(), model.named_parameters()):
        np.testing.assert_array_equal(value.numpy(), expected.numpy(), err_msg=name)

    # without the layer in the model, all of it is carried along
    carried = open_model(tmp_path / "trained", FAMILIES)
    assert set(carried.carried) == set(layer)
    (tmp_path / "copied").mkdir()
    write_hf(carried, tmp_path / "copied")
    copied = tensors(tmp_path / "copied")
    assert copied.keys() == written.keys()
    for name, value in written.items():
        np.testing.assert_array_equal(copied[name], value, err_msg=name)


def test_weights_without_the_layer_are_refused(tmp_path: Path) -> None:
    model = made(dataclasses.replace(CONFIG, mtp=False))
    write(tmp_path / "plain", model)
    with pytest.raises(UserError, match=rf"missing .*{LAYER}\.input_layernorm\.weight"):
        open_model(tmp_path / "plain", FAMILIES, mtp=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `run`, a run that has trained the layer."""
    directory = tmp_path_factory.mktemp("mtp")
    recipe = ROOT / "recipes/deepseek/sft.json"
    keys = ("train.mtp_loss_weight=0.3", "train.max_steps=1")
    words = [
        "model.config.num_nextn_predict_layers=1",
        "launch.num_devices=1",
        "parallel={}",
        "data.eval=null",
        "data.max_length=64",
        *keys,
    ]
    given = [f"--{word}" for word in words]
    assert main(["run", str(recipe), "--smoke", *given, f"--output_dir={directory / 'run'}"]) == 0
    # and adapters on that, of the layer and the head too
    keys = ("lora.rank=4", 'lora.target_modules=["*_proj", "lm_head"]', "train.learning_rate=0.05", "train.max_steps=2")
    given = [f"--{word}" for word in (*words[:5], "train.mtp_loss_weight=0.3", *keys)]
    given += [f"--model.weights={directory / 'run'}", f"--output_dir={directory / 'adapters'}"]
    assert main(["run", str(ROOT / "recipes/deepseek/lora.json"), "--smoke", *given]) == 0
    return directory


def test_a_run_is_merged_with_the_layer_it_has_trained(trained: Path) -> None:
    assert main(["merge", str(trained / "run"), "-o", str(trained / "merged")]) == 0
    before = tensors(find_model(trained / "run"))
    after = tensors(trained / "merged")
    further = open_model(trained / "merged", FAMILIES).carried
    assert further
    assert before.keys() == after.keys() >= set(further)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    # and is a model to train further, the layer too
    source = open_model(trained / "merged", FAMILIES, mtp=True)
    assert source.config.num_nextn_predict_layers == 1
    assert source.carried == []


def test_a_run_is_exported_and_generates_without_the_layer(trained: Path) -> None:
    """The program's logits and greedy tokens are those of the live model, and these those of the main layers."""
    assert main(["export", str(trained / "run"), "-o", str(trained / "program")]) == 0
    assert main(["verify", str(trained / "program")]) == 0
    source = open_any(trained / "run", FAMILIES)
    live = load_model(source, CpuBackend())
    ids = [5, 17, 300, 8]
    assert len(live.model.layers) == source.config.num_hidden_layers
    with_layer = SparseLM(dataclasses.replace(source.config, mtp=True), Ops())
    fill_parameters(with_layer, open_model(find_model(trained / "run"), FAMILIES, mtp=True))
    with_layer.eval()
    text = list(ids)
    for token in generate(ModelDecoder(live), ids, set(), Sampling(max_new_tokens=4)):
        assert int(with_layer(paddle.to_tensor([text]))[0, -1].argmax()) == token
        text.append(token)
    assert len(text) == len(ids) + 4


def with_adapters(run: Path, base: Path) -> Any:
    """The base model with the adapters of a run, not merged."""
    source = open_model(find_model(base), FAMILIES, mtp=True)
    checkpoint = find_adapter(run)
    assert checkpoint is not None
    model = SparseLM(source.config, Ops())
    config = LoraSection(rank=4).adapter_config
    modules = adapted_modules(model, FAMILIES["deepseek"].shard_plan or UNSHARDED, ["*_proj", "lm_head"])
    add_adapters(model, modules, config)
    adapters = Adapters(modules, config, Base(None, ""))
    saved = SavedAdapters(checkpoint, adapters, FAMILIES["deepseek"], source.config)
    for name, parameter in model.named_parameters():
        parameter.set_value((saved if is_factor(name) else source).read(name))
    return model


def test_merged_adapters_equal_the_adapters_of_the_model(trained: Path) -> None:
    """Logits of the next token and of the one after it, from the merged files and from base and adapters."""
    assert main(["merge", str(trained / "adapters"), "-o", str(trained / "sum")]) == 0
    unmerged = with_adapters(trained / "adapters", trained / "run")
    source = open_model(trained / "sum", FAMILIES, mtp=True)
    merged = SparseLM(source.config, Ops())
    fill_parameters(merged, source)
    plain = SparseLM(source.config, Ops())
    fill_parameters(plain, open_model(find_model(trained / "run"), FAMILIES, mtp=True))

    def logits(model: Any) -> list[np.ndarray]:
        model.eval()
        ids = paddle.to_tensor([[5, 17, 300, 8]])
        following = paddle.to_tensor([[17, 300, 8, 44]])
        hidden = model.hidden_states(ids)[0]
        states = (hidden, model.mtp_hidden_states(hidden, following))
        return [model.logits(state).numpy() for state in states]

    for found, expected, of_base in zip(logits(merged), logits(unmerged), logits(plain), strict=True):
        assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
        assert np.abs(of_base - expected).max() > 1e-2 * np.abs(expected).max()
    written = tensors(trained / "sum")
    head = f"model.layers.{source.config.num_hidden_layers}.shared_head.head.weight"
    np.testing.assert_array_equal(written[head], written["lm_head.weight"])

    # what answers has no such layer, and says the same
    live = load_model(open_any(trained / "adapters", FAMILIES), CpuBackend())
    text = [5, 17, 300, 8]
    assert len(live.model.layers) == source.config.num_hidden_layers
    for token in generate(ModelDecoder(live), list(text), set(), Sampling(max_new_tokens=3)):
        assert int(unmerged(paddle.to_tensor([text]))[0, -1].argmax()) == token
        text.append(token)
    assert len(text) == 7


def test_adapters_of_the_layer_go_to_paddlenlps_layout_and_back(trained: Path) -> None:
    out = trained / "for-paddlenlp"
    assert main(["convert", str(trained / "adapters"), "-o", str(out), "--layout", "paddlenlp"]) == 0
    names = {name for path in out.glob("*.safetensors") for name in safetensors.numpy.load_file(path)}
    number = open_model(find_model(trained / "run"), FAMILIES).config.num_hidden_layers
    assert f"deepseek_v3.layers.{number}.eh_proj.lora_A" in names
    assert main(["merge", str(out), "--base", str(trained / "run"), "-o", str(trained / "from-paddlenlp")]) == 0
    assert main(["merge", str(trained / "adapters"), "-o", str(trained / "sum-again")]) == 0
    again = tensors(trained / "sum-again")
    for name, value in tensors(trained / "from-paddlenlp").items():
        np.testing.assert_array_equal(value, again[name], err_msg=name)
