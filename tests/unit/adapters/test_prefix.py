"""Prefix tuning: the numbers of HF PEFT, rows of documents, generation after a prefix, files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.adapters.layers.prefix import add_prefixes, move_prefix_after_padding
from llmsuite.adapters.parameters import is_factor, shard_dim
from llmsuite.adapters.prefix_shapes import PREFIX_KEY, PREFIX_VALUE, attentions
from llmsuite.base.errors import UserError
from llmsuite.checkpoint.adapter_base import Base
from llmsuite.checkpoint.convert.adapter import add_adapter
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.checkpoint.prefix_dir import Prefixes, open_prefixes, write_prefixes
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.cli.model import check_refreshable
from llmsuite.contract.registry import Registry
from llmsuite.devices.cpu import CpuBackend
from llmsuite.devices.ops import Ops
from llmsuite.inference.batch import Batch, DecodingSequence
from llmsuite.inference.beam import BeamParams, beam_search
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.evaluate import scorer
from llmsuite.inference.fused import fuse
from llmsuite.inference.load import load_model, open_any
from llmsuite.inference.sampling import Sampling
from llmsuite.inference.uncached import UncachedDecoder
from llmsuite.models.blocks import halves
from llmsuite.models.initial_values import initial_values
from llmsuite.parallel.recompute import recompute_attention, recompute_layers
from llmsuite.planning.layout import Layout
from llmsuite.recipe.resolve import plan_run
from tests.support.adapter_models import IDS, base_of
from tests.support.families import FAMILIES, tiny
from tests.support.paths import REFERENCE, ROOT
from tests.support.prefixes import FULL_ATTENTION, LIMIT, TOKENS, WITH_HEADS, fill, near

PEFT = REFERENCE / "peft" / "prefix"
CASES = sorted(path.name for path in PEFT.iterdir())


def prefixed(family: str, tokens: int = TOKENS) -> Any:
    """A tiny model for training, with random prefixes."""
    model = tiny(family, **FULL_ATTENTION.get(family, {}))
    add_prefixes(model, tokens)
    fill(model)
    model.eval()
    return model


# what they compute


def from_peft(case: str, kernels: bool) -> Any:
    """A model for training with the prefixes that PEFT has saved."""
    family = case.partition("-")[0]
    base = open_model(REFERENCE / family / case.partition("-")[2], FAMILIES)
    ops = CpuBackend().ops("fp32") if kernels else Ops()
    model = FAMILIES[family].factory()(base.config, ops)
    saved = open_prefixes(PEFT / case)
    add_prefixes(model, saved.metadata.tokens)
    for name, parameter in model.named_parameters():
        parameter.set_value((saved.files if is_factor(name) else base).read(name))
    model.train()
    return model


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_peft(case: str, kernels: bool) -> None:
    with np.load(PEFT / case / "reference.npz") as stored:
        wanted = dict(stored)
    with np.load(REFERENCE / case.replace("-", "/", 1) / "reference.npz") as stored:
        ids = paddle.to_tensor(stored["input_ids"])
        plain = stored["logits"]
    model = from_peft(case, kernels)
    logits = model(ids)
    near(logits, wanted["logits"])
    assert np.abs(plain - wanted["logits"]).max() > 100 * LIMIT * np.abs(plain).max(), "a prefix changes something"
    (logits * paddle.to_tensor(wanted["direction"])).sum().backward()
    got = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    assert {name.rpartition(".")[2] for name in got} == {PREFIX_KEY, PREFIX_VALUE}, "nothing else is trained"
    tokens = wanted["gradient"].shape[0]
    near(np.concatenate([value.reshape(tokens, -1) for value in got.values()], 1), wanted["gradient"])


@pytest.mark.parametrize("case", CASES)
def test_generation_begins_with_prefixes_of_peft(case: str, tmp_path: Path) -> None:
    """A directory that PEFT has written, next to its base."""
    shutil.copytree(PEFT / case, tmp_path / "adapter")
    base = REFERENCE / case.replace("-", "/", 1)
    model = load_model(open_any(tmp_path / "adapter", FAMILIES, base=base, runs=True), CpuBackend())
    with np.load(PEFT / case / "reference.npz") as stored, np.load(base / "reference.npz") as own:
        near(model(paddle.to_tensor(own["input_ids"])), stored["logits"])
        decoder = ModelDecoder(model)
        logits, _ = decoder.forward(own["input_ids"], np.zeros(len(own["input_ids"]), "int64"), None)
        near(logits, stored["logits"][:, -1])
    assert decoder.max_length == model.config.max_position_embeddings - 5


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("family", WITH_HEADS)
def test_documents_of_a_row_each_see_the_prefix(family: str, kernels: bool) -> None:
    """And not each other; as rows of their own."""
    model = prefixed(family)
    if kernels:
        other = FAMILIES[family].factory()(model.config, CpuBackend().ops("fp32"))
        add_prefixes(other, TOKENS)
        other.set_state_dict(model.state_dict())
        model = other
    texts = [[1, 7, 11], [4, 9], [5, 2, 8, 3]]
    row = paddle.to_tensor([[1, 7, 11, 4, 9, 5, 2, 8, 3]])
    starts = paddle.to_tensor([[0] * 3 + [3] * 2 + [5] * 4])
    found = model.logits(model.hidden_states(row, document_starts=starts)[0])[0]
    alone = [model(paddle.to_tensor([text]))[0].numpy() for text in texts]
    near(found, np.concatenate(alone))


@pytest.mark.parametrize("again", [recompute_layers, recompute_attention])
def test_recomputed_layers_give_the_same_gradients(again: Any) -> None:
    found = []
    for recomputed in (False, True):
        model = prefixed("llama")
        model.train()
        if recomputed:
            again(model, FAMILIES["llama"].shard_plan, *([1] if again is recompute_layers else []))
        model(paddle.to_tensor(IDS)).square().sum().backward()
        found.append({name: p.grad.numpy() for name, p in model.named_parameters() if is_factor(name)})
    assert len(found[0]) == 2 * len(prefixed("llama").model.layers)
    for name, value in found[0].items():
        assert np.abs(value).max() > 0
        np.testing.assert_allclose(found[1][name], value, rtol=1e-5, atol=1e-7, err_msg=name)


def test_padding_moves_in_front_of_the_prefix() -> None:
    cache = paddle.to_tensor(np.arange(10.0).reshape([2, 1, 5, 1]))
    moved = move_prefix_after_padding(cache, paddle.to_tensor([0, 2]), 2).numpy()[:, 0, :, 0]
    assert moved.tolist() == [[0, 1, 2, 3, 4], [7, 8, 5, 6, 9]]
    half = move_prefix_after_padding(cache.astype("bfloat16"), paddle.to_tensor([0, 2]), 2)
    assert half.dtype == paddle.bfloat16
    assert half.astype("float32").numpy()[:, 0, :, 0].tolist() == moved.tolist()


# files and generation


@pytest.fixture(scope="module", params=["llama", "ernie", "gpt"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A directory with a base and with prefixes of it, and the live model, for training."""
    family = request.param
    directory = tmp_path_factory.mktemp("prefix")
    base_of(family, directory / "base")
    opened = open_model(directory / "base", FAMILIES)
    model = FAMILIES[family].factory()(opened.config, Ops())
    add_prefixes(model, TOKENS)
    for name, parameter in model.named_parameters():
        random = initial_values(3, name, parameter.shape, 1.0)
        parameter.set_value(random if is_factor(name) else opened.read(name))
    values = {name: p.numpy() for name, p in model.named_parameters() if is_factor(name)}
    (directory / "prefix").mkdir()
    metadata = Prefixes(TOKENS, Base(str(directory / "base"), opened.digest()))
    specs = [TensorSpec(name, value.shape, "float32") for name, value in values.items()]
    write_prefixes(directory / "prefix", metadata, values.__getitem__, specs)
    model.eval()
    return directory, model


def test_what_was_written_is_read(saved: tuple[Path, Any]) -> None:
    directory, model = saved
    found = open_prefixes(directory / "prefix")
    assert found.metadata.tokens == TOKENS
    for name, parameter in model.named_parameters():
        if is_factor(name):
            assert found.files.read(name).tobytes() == parameter.numpy().tobytes()
            part = [slice(1, 3), slice(1, 2), slice(0, 5)]
            assert np.array_equal(found.files.read(name, part), parameter.numpy()[1:3, 1:2, :5])


def test_a_prefix_is_no_model_whose_weights_are_replaced(saved: tuple[Path, Any]) -> None:
    place = saved[0] / "prefix"
    with pytest.raises(UserError, match="is a side adapter of a model"):
        check_refreshable(place, open_any(place, FAMILIES, runs=True))


@pytest.mark.parametrize("fused", [False, True])
def test_answers_are_those_of_whole_passes(saved: tuple[Path, Any], fused: bool) -> None:
    """Prompts of several lengths, padded on the left, which join and leave a batch; and beams."""
    directory, model = saved
    loaded = load_model(open_any(directory / "prefix", FAMILIES, runs=True), CpuBackend())
    if fused:
        fuse(loaded, CpuBackend().ops("fp32"))
    decoder = ModelDecoder(loaded)
    batch = Batch(decoder)
    prompts = [[1, 7, 11, 3, 2, 9], [4, 5], [8]]
    sequences = [DecodingSequence(p, Sampling(max_new_tokens=2 + 3 * (i > 0)), set()) for i, p in enumerate(prompts)]
    batch.advance(sequences[:2])
    batch.advance(sequences[2:])
    while batch.sequences:
        batch.advance()
    for line in sequences:
        text = list(line.prompt)
        for token in line.ids:
            assert int(model(paddle.to_tensor([text]))[0, -1].argmax()) == token
            text.append(token)
    base = load_model(open_model(directory / "base", FAMILIES), CpuBackend())
    alone = [int(base(paddle.to_tensor([p]))[0, -1].argmax()) for p in prompts]
    assert alone != [line.ids[0] for line in sequences], "the prefixes decide something"
    found, whole = (
        beam_search(d, [4, 5], set(), BeamParams(3, max_new_tokens=4)) for d in (decoder, UncachedDecoder(decoder))
    )
    assert [of.ids for of in found] == [of.ids for of in whole]


def test_texts_are_scored_after_the_prefix(saved: tuple[Path, Any]) -> None:
    directory, model = saved
    loaded = load_model(open_any(directory / "prefix", FAMILIES, runs=True), CpuBackend())
    fuse(loaded, CpuBackend().ops("fp32"))
    texts = [[4, 7, 11, 2], [1, 5, 9]]
    for text, found in zip(texts, scorer(loaded, 2)(texts)):
        whole = paddle.nn.functional.log_softmax(model(paddle.to_tensor([text])), -1).numpy()[0]
        np.testing.assert_allclose(found, [whole[i, token] for i, token in enumerate(text[1:])], atol=1e-4)


def test_they_are_not_merged(saved: tuple[Path, Any]) -> None:
    directory, _ = saved
    for make in (
        lambda: open_any(directory / "prefix", FAMILIES),
        lambda: add_adapter(open_model(directory / "base", FAMILIES), directory / "prefix"),
    ):
        with pytest.raises(UserError, match=r"nothing to merge or export.*llmsuite generate"):
            make()


def test_those_of_another_model_are_refused(tmp_path: Path) -> None:
    source = open_any(PEFT / "llama-own_head_dim", FAMILIES, base=REFERENCE / "llama/grouped_query", runs=True)
    with pytest.raises(UserError, match=r"heads of size \d+; the model has .* it is of another model"):
        load_model(source, CpuBackend())
    shutil.copytree(PEFT / "gpt-tied", tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_layers": 3}))
    with pytest.raises(UserError, match=r"prompt_embeddings' is .* by adapter_config.json has"):
        open_prefixes(tmp_path / "adapter")


def test_keys_that_lie_side_by_side_are_put_in_halves() -> None:
    """PEFT's keys of an Ernie are in the order of its heads."""
    model = prefixed("ernie")
    attention = model.model.layers[0].self_attn
    keys = getattr(attention, PREFIX_KEY).unsqueeze(0)
    assert attention.interleaved
    assert not np.array_equal(halves(keys).numpy(), keys.numpy())


# recipes


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        ("llama/sft", ["--lora.rank=2"], "prefix.tokens: is 4, and lora.rank is 2"),
        ("llama/sft", ["--reft.rank=2"], "prefix.tokens: is 4, and reft.rank is 2"),
        ("llama/dpo", [], "prefix.tokens: is 4; stage dpo does not support prefix tuning"),
        ("llama/sft", ["--qat.weight_bits=8"], "qat.weight_bits: changes the model"),
        ("deepseek/sft", [], "prefix.tokens: is 4; attention of family deepseek has no k_proj"),
        ("llama/sft", ["--prefix.tokens=0"], "prefix.tokens"),
        (
            "llama/sft",
            ["--prefix.tokens=400"],
            "prefix.tokens: is 400, and data.max_length .* lower data.max_length to",
        ),
        ("llama/sft", ["--prefix.length=4"], "prefix.length"),
    ],
)
def test_what_does_not_go_together(registry: Registry, recipe: str, words: list[str], message: str) -> None:
    given = ["--parallel={}", "--launch.num_devices=1", *words]
    given += [] if "--prefix." in " ".join(words) else ["--prefix.tokens=4"]
    with pytest.raises(UserError, match=message):
        plan_run(ROOT / f"recipes/{recipe}.json", given, registry, smoke=True)


@pytest.mark.parametrize("family", ["llama", "gpt", "ernie_moe"])
def test_a_plan_counts_what_a_model_has(registry: Registry, family: str) -> None:
    words = ["--parallel={}", "--launch.num_devices=1", "--prefix.tokens=4"]
    plan = plan_run(ROOT / f"recipes/{family}/sft.json", words, registry, smoke=True)
    model = FAMILIES[family].factory()(plan.model.config, CpuBackend().ops("fp32"))
    add_prefixes(model, 4)
    layout = Layout(plan.model, plan.parallel)
    found = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert list(layout.shapes.items()) == list(found.items())
    assert layout.trained == {name for name, p in model.named_parameters() if not p.stop_gradient}


@pytest.mark.parametrize("family", FAMILIES)
def test_which_families_have_heads(family: str) -> None:
    shapes = {name: tuple(p.shape) for name, p in tiny(family).named_parameters()}
    found = attentions(shapes, "model.layers")
    assert (len(found) == len(tiny(family).model.layers)) == (family in WITH_HEADS)


@pytest.mark.parametrize("family", WITH_HEADS)
def test_prefixes_are_cut_by_heads(family: str) -> None:
    plan = FAMILIES[family].shard_plan
    assert plan is not None
    assert {shard_dim(plan, f"model.layers.0.self_attn.{kind}") for kind in (PREFIX_KEY, PREFIX_VALUE)} == {1}
