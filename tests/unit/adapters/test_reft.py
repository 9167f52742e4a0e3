"""Interventions on hidden states: what they compute, on which tokens, that R stays orthonormal, and their files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsuite.adapters.initial_values import with_intervention_values
from llmsuite.adapters.layers.reft import add_interventions, chosen_tokens, intervene, orthonormal
from llmsuite.adapters.paddlenlp_peft import import_alone
from llmsuite.adapters.parameters import is_factor
from llmsuite.adapters.reft_shapes import BIAS, ROTATION, SOURCE
from llmsuite.adapters.reft_shapes import orthonormal as orthonormal_factor
from llmsuite.base.errors import UserError
from llmsuite.checkpoint.adapter_base import Base
from llmsuite.checkpoint.convert.adapter import add_adapter
from llmsuite.checkpoint.model_dir import open_model
from llmsuite.checkpoint.reft_dir import Interventions, open_interventions, write_interventions
from llmsuite.checkpoint.tensors import TensorSpec
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.reft import ReftSection
from llmsuite.devices.cpu import CpuBackend
from llmsuite.inference.batch import Batch, DecodingSequence
from llmsuite.inference.decoder import ModelDecoder
from llmsuite.inference.fused import fuse
from llmsuite.inference.load import load_model, open_any
from llmsuite.inference.sampling import Sampling
from llmsuite.inference.uncached import UncachedDecoder
from llmsuite.models.initial_values import initial_values
from llmsuite.models.token_context import tokens
from llmsuite.parallel.recompute import recompute_layers
from llmsuite.planning.layout import Layout
from llmsuite.recipe.resolve import plan_run
from llmsuite.stages.language_model import WeightedTokens, collate, join
from tests.support.adapter_models import IDS, base_of
from tests.support.families import FAMILIES, tiny
from tests.support.paths import ROOT

RANK = 3
ENDS = (1, 2)
PROMPTS = np.array([5, 4])[:, None].repeat(5, 1)


def plain(family: str) -> Any:
    """A tiny model with memory."""
    model = tiny(family)
    fill(model, lambda name: True, 0.2)
    model.eval()
    return model


def edited(family: str) -> Any:
    """The base model with random interventions."""
    model = plain(family)
    add_interventions(model, (0, 1), RANK, ENDS)
    fill(model, is_factor, 0.3)
    model.eval()
    return model


def fill(model: Any, chosen: Callable[[str], bool], std: float) -> None:
    for name, parameter in model.named_parameters():
        if chosen(name):
            if not parameter._is_initialized():
                parameter.initialize()
            parameter.set_value(initial_values(3, name, parameter.shape, std) + (name.endswith("norm.weight")))


def logits_of(model: Any, prompts: np.ndarray = PROMPTS) -> Any:
    with tokens(chosen_tokens(paddle.to_tensor(prompts), None, ENDS)):
        return model(paddle.to_tensor(IDS))


# what they compute


def test_one_by_hand() -> None:
    """R is the first axis: the first element of a chosen token becomes W h + b."""
    x = paddle.to_tensor([[[1.0, 2.0], [3.0, 4.0]]])
    rotation = paddle.to_tensor([[5.0], [0.0]])
    source = paddle.to_tensor([[1.0], [10.0]])
    y = intervene(x, paddle.to_tensor([[1, 0]]), rotation, source, paddle.to_tensor([0.5]))
    np.testing.assert_allclose(y.numpy(), [[[1 + 20 + 0.5, 2], [3, 4]]], rtol=1e-6)


def test_the_formula_is_that_of_paddlenlp() -> None:
    (theirs,) = import_alone("paddlenlp.peft.reft.interventions")
    made = theirs.LoreftIntervention(embed_dim=8, low_rank_dimension=3, dtype="float32")
    x = paddle.to_tensor(initial_values(0, "x", [2, 4, 8], 1.0))
    ours = intervene(
        x, paddle.ones([2, 4], "int32"), made.rotate_layer.weight, made.learned_source.weight, made.learned_source.bias
    )
    # theirs begins with an orthonormal R, but for the sign of its columns; the sign of W goes with it
    basis = orthonormal(made.rotate_layer.weight).numpy()
    assert np.abs(np.abs(basis) - np.abs(made.rotate_layer.weight.numpy())).max() < 1e-6
    signs = np.sign((basis * made.rotate_layer.weight.numpy()).sum(0))
    assert (signs == 1).all(), "a matrix that is orthonormal is its own Q"
    np.testing.assert_allclose(ours.numpy(), made(x).numpy(), rtol=0, atol=2e-6)


@settings(deadline=None, max_examples=40)
@given(rank=st.integers(1, 6), extra=st.integers(0, 9), seed=st.integers(0, 99), spread=st.floats(1, 300))
def test_the_basis_is_orthonormal_and_that_of_numpy(rank: int, extra: int, seed: int, spread: float) -> None:
    matrix = initial_values(seed, "m", [rank + extra, rank], 1.0).astype("float64")
    u, _, v = np.linalg.svd(matrix, full_matrices=False)
    matrix = ((u * np.geomspace(1, spread, rank)) @ v).astype("float32")  # of that condition number
    found = orthonormal(paddle.to_tensor(matrix)).numpy()
    assert np.abs(found.T @ found - np.eye(rank)).max() < 1e-5
    np.testing.assert_allclose(found, orthonormal_factor(matrix), rtol=0, atol=3e-6 * spread)


def test_gradients_are_those_of_differences() -> None:
    x = paddle.to_tensor(initial_values(0, "x", [2, 3, 6], 1.0))
    weight = paddle.to_tensor(initial_values(0, "w", [2, 3, 6], 1.0))
    parts = [paddle.to_tensor(initial_values(1, str(i), s, 1.0)) for i, s in enumerate(([6, 2], [6, 2], [2]))]
    chosen = paddle.to_tensor([[1, 0, 1], [0, 1, 1]])

    def loss(values: list[Any]) -> Any:
        return (intervene(x, chosen, *values) * weight).sum()

    for part in parts:
        part.stop_gradient = False
    loss(parts).backward()
    for i, part in enumerate(parts):
        step = initial_values(2, str(i), part.shape, 1e-2)
        moved = [[p + (sign * step if j == i else 0) for j, p in enumerate(parts)] for sign in (1, -1)]
        difference = float(loss(moved[0]) - loss(moved[1])) / 2
        assert difference == pytest.approx(float((part.grad.numpy() * step).sum()), rel=2e-2, abs=1e-4), i


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_edited_and_nothing_else_is_trained(family: str) -> None:
    model = edited(family)
    before = plain(family)(paddle.to_tensor(IDS)).numpy()
    after = logits_of(model)
    assert np.abs(after.numpy() - before).max() > 1e-3
    none = logits_of(model, np.zeros_like(PROMPTS)).numpy()
    assert none.tobytes() == before.tobytes(), "tokens that are no prompt are not edited"
    after.square().sum().backward()
    got = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert got == {f"model.layers.{n}.reft.{kind}" for n in (0, 1) for kind in (ROTATION, SOURCE, BIAS)}


def test_recomputed_layers_give_the_same_gradients() -> None:
    """paddlenlp's hook counts its calls, and edits nothing when a layer is computed again."""
    found = []
    for again in (False, True):
        model = edited("llama")
        model.train()
        if again:
            recompute_layers(model, FAMILIES["llama"].shard_plan, 1)  # type: ignore[arg-type]
        loss = logits_of(model).square().sum()
        with tokens(paddle.zeros([2, 5], "int32")):  # as of another pass that is made before the backward pass
            loss.backward()
        found.append({name: p.grad.numpy() for name, p in model.named_parameters() if is_factor(name)})
    for name, value in found[0].items():
        assert np.abs(value).max() > 0
        np.testing.assert_allclose(found[1][name], value, rtol=1e-5, atol=1e-7, err_msg=name)


def test_at_first_nothing_changes() -> None:
    model = edited("llama")
    read = with_intervention_values(lambda name, shape, index: np.zeros(0), seed=7)
    for name, parameter in model.named_parameters():
        if is_factor(name):
            whole = [slice(0, size) for size in parameter.shape]
            parameter.set_value(read(name, parameter.shape, whole))
            rows = [slice(1, 2), *whole[1:]]
            np.testing.assert_array_equal(read(name, parameter.shape, rows), parameter.numpy()[1:2])
    wanted = plain("llama")(paddle.to_tensor(IDS)).numpy()
    np.testing.assert_allclose(logits_of(model).numpy(), wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


# on which tokens


@settings(deadline=None)
@given(length=st.integers(0, 12), first=st.integers(0, 5), last=st.integers(0, 5))
def test_positions_are_those_of_pyreft(length: int, first: int, last: int) -> None:
    at_begin = min(length // 2, first)  # get_intervention_locations
    at_end = min(length // 2, last)
    wanted = {*range(at_begin), *range(length - at_end, length)}
    found = chosen_tokens(paddle.full([1, 14], length, "int64"), None, (first, last)).numpy()[0]
    assert set(np.nonzero(found)[0]) == wanted


@pytest.mark.parametrize(("text", "ends"), [("f7+l7", (7, 7)), ("f3", (3, 0)), ("l1", (0, 1))])
def test_positions_as_text(text: str, ends: tuple[int, int]) -> None:
    assert ReftSection(rank=1, positions=text).ends == ends


@pytest.mark.parametrize("text", ["", "f0", "f7+l", "l2+f3", "7", "all", "f1 + l1"])
def test_other_text_is_refused(text: str) -> None:
    ((key, message),) = ReftSection(rank=1, positions=text).problems()
    assert (key, repr(text) in message) == ("positions", True)


def test_prompts_of_packed_rows() -> None:
    """Each document has a prompt of its own: what comes before its first supervised token."""
    first = WeightedTokens(np.arange(5, dtype="int32"), np.array([0, 0, 1, 0, 1], "float32"))
    second = WeightedTokens(np.arange(4, dtype="int32"), np.array([0, 0, 0, 1], "float32"))
    batch = collate([join([first, second]), second], 0, 1, has_prompt_lengths=True)
    assert batch["prompt_lengths"].tolist() == [[2, 2, 2, 2, 3, 3, 3], [3, 3, 3, 0, 0, 0, 0]]
    starts = paddle.to_tensor(batch["document_starts"])
    found = chosen_tokens(paddle.to_tensor(batch["prompt_lengths"]), starts, (1, 1))
    assert found.tolist() == [[1, 1, 0, 0, 1, 0, 1], [1, 0, 1, 0, 0, 0, 0]]


def test_a_text_without_a_prompt_is_refused() -> None:
    with pytest.raises(UserError, match="reft: interventions edit tokens of a prompt"):
        edited("llama")(paddle.to_tensor(IDS))


# files and generation


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A directory with a base and with interventions on it, and the live model."""
    directory = tmp_path_factory.mktemp("reft")
    base_of("llama", directory / "base")
    opened = open_model(directory / "base", FAMILIES)
    model = load_model(opened, CpuBackend())
    add_interventions(model, (0, 2), RANK, ENDS)
    fill(model, is_factor, 0.5)
    values = {name: p.numpy() for name, p in model.named_parameters() if is_factor(name)}
    (directory / "reft").mkdir()
    metadata = Interventions(RANK, (0, 2), ENDS, Base(str(directory / "base"), opened.digest()))
    specs = [TensorSpec(name, value.shape, "float32") for name, value in values.items()]
    write_interventions(directory / "reft", metadata, values.__getitem__, specs)
    model.eval()
    return directory, model


def test_what_was_written_is_read(saved: tuple[Path, Any]) -> None:
    directory, model = saved
    found = open_interventions(directory / "reft")
    assert (found.metadata.rank, found.metadata.layers, found.metadata.ends) == (RANK, (0, 2), ENDS)
    for name, parameter in model.named_parameters():
        if is_factor(name):
            assert found.files.read(name).tobytes() == parameter.numpy().tobytes()


@pytest.mark.parametrize("fused", [False, True])
def test_answers_are_those_of_whole_passes(saved: tuple[Path, Any], fused: bool) -> None:
    """Prompts of several lengths, padded on the left, whose answers are not edited."""
    directory, model = saved
    source = open_any(directory / "reft", FAMILIES, runs=True)
    loaded = load_model(source, CpuBackend())
    if fused:
        fuse(loaded, CpuBackend().ops("fp32"))
    decoder = ModelDecoder(loaded)
    batch = Batch(decoder)
    prompts = [[1, 7, 11, 3, 2, 9], [4, 5], [8]]
    sequences = [DecodingSequence(prompt, Sampling(max_new_tokens=4), set()) for prompt in prompts]
    batch.advance(sequences[:2])
    batch.advance(sequences[2:])
    while batch.sequences:
        batch.advance()
    base = load_model(open_model(directory / "base", FAMILIES), CpuBackend())
    for line in sequences:
        text = list(line.prompt)
        for token in line.ids:
            lengths = paddle.full([1, len(text)], len(line.prompt), "int64")
            with tokens(chosen_tokens(lengths, None, ENDS)):
                assert int(model(paddle.to_tensor([text]))[0, -1].argmax()) == token
            text.append(token)
    alone = [int(base(paddle.to_tensor([p]))[0, -1].argmax()) for p in prompts]
    assert alone[:2] != [line.ids[0] for line in sequences][:2], "the interventions decide something"
    with pytest.raises(UserError, match="--no_cache"):
        UncachedDecoder(decoder)


def test_they_are_not_merged(saved: tuple[Path, Any]) -> None:
    directory, _ = saved
    for make in (
        lambda: open_any(directory / "reft", FAMILIES),
        lambda: add_adapter(open_model(directory / "base", FAMILIES), directory / "reft"),
    ):
        with pytest.raises(UserError, match=r"nothing to merge or export.*llmsuite generate"):
            make()


# recipes


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        ("llama/sft", ["--lora.rank=2"], "reft.rank: is 4, and lora.rank is 2"),
        ("llama/dpo", [], "reft.rank: is 4; batches of stage dpo have no prompt lengths"),
        ("llama/sft", ["--engine.mode=to_static"], "reft.rank: is 4; compiled layers"),
        ("llama/sft", ["--qat.weight_bits=8"], "qat.weight_bits: changes the model"),
        ("llama/sft", ["--reft.layers=[1,4]"], "reft.layers: has 4; the layers of the model are 0 to 3"),
        ("llama/sft", ["--reft.layers=[1,1]"], "reft.layers: is"),
        ("llama/sft", ["--reft.rank=65"], "reft.rank: is 65, more than hidden_size = 64"),
    ],
)
def test_what_does_not_go_together(registry: Registry, recipe: str, words: list[str], message: str) -> None:
    given = ["--parallel={}", "--launch.num_devices=1", *words]
    given += [] if "--reft.rank" in " ".join(words) else ["--reft.rank=4"]
    with pytest.raises(UserError, match=message):
        plan_run(ROOT / f"recipes/{recipe}.json", given, registry, smoke=True)


@pytest.mark.parametrize("family", ["llama", "gpt", "deepseek"])
def test_a_plan_counts_what_a_model_has(registry: Registry, family: str) -> None:
    words = ["--parallel={}", "--launch.num_devices=1", "--reft.rank=4", "--reft.layers=[1]"]
    plan = plan_run(ROOT / f"recipes/{family}/sft.json", words, registry, smoke=True)
    model = FAMILIES[family].factory()(plan.model.config, CpuBackend().ops("fp32"))
    add_interventions(model, (1,), 4, ENDS)
    layout = Layout(plan.model, plan.parallel)
    found = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert list(layout.shapes.items()) == list(found.items())
    assert layout.trained == {name for name, p in model.named_parameters() if not p.stop_gradient}
