"""Dropout by a hash: inputs on which a mask depends, inputs on which it does not, and its uniform distribution."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmsuite.adapters.add import add_adapters
from llmsuite.adapters.methods import adapter_config
from llmsuite.base.errors import UserError
from llmsuite.contract.registry import Registry
from llmsuite.devices.ops import identity
from llmsuite.models.dropout import TokenDropout, token_keys
from llmsuite.models.initial_values import initial_values
from llmsuite.models.token_context import tokens
from llmsuite.parallel.pipeline import mark_padding, pack_token_values, unpack_token_values
from llmsuite.parallel.recompute import recompute_layers
from llmsuite.recipe.resolve import plan_run
from tests.support.families import FAMILIES, tiny
from tests.support.paths import ROOT

WHOLE = [slice(None)] * 3
DOCUMENT = st.lists(st.integers(0, 99), min_size=1, max_size=6)


def keys_of(ids: Sequence[Sequence[int]], starts: Sequence[Sequence[int]] | None = None, step: int = 1) -> np.ndarray:
    given = None if starts is None else paddle.to_tensor(np.array(starts, "int64"))
    return token_keys(paddle.to_tensor(np.array(ids, "int64")), given, 7, step).numpy()


def test_keys_by_hand() -> None:
    """In Python's numbers, which do not overflow."""
    prime = 2**31 - 1
    salt = int.from_bytes(hashlib.sha256(b"dropout:7:3").digest()[:8], "little")
    base = salt % (prime - 2) + 2
    expected = []
    sum_ = 0
    for i, token in enumerate([5, 120_000, 5, 0]):
        sum_ += (token + 1) * pow(base, i + 1, prime)
        value = sum_ % prime
        for multiplier in (0x45D9F3B, 0x2C1B3C6D):
            value = (value * multiplier + 2**31) % 2**32 - 2**31
            value ^= value >> 15
        expected.append(value)
    assert keys_of([[5, 120_000, 5, 0]], step=3).tolist() == [expected]


@settings(deadline=None, max_examples=30)
@given(documents=st.lists(DOCUMENT, min_size=1, max_size=4), padding=st.integers(0, 3), is_marked=st.booleans())
def test_a_token_has_the_same_key_wherever_its_document_lies(
    documents: list[list[int]], padding: int, is_marked: bool
) -> None:
    ids = [token for document in documents for token in document]
    starts = [sum(map(len, documents[:i])) for i, document in enumerate(documents) for _ in document]
    end = [-1 if is_marked else len(ids)] * padding
    packed = keys_of([ids + [0] * padding], [starts + end])[0, : len(ids)]
    alone = [key for document in documents for key in keys_of([[*document, 3]])[0, :-1]]
    assert packed.tolist() == alone


@settings(deadline=None, max_examples=30)
@given(prompt=DOCUMENT, answers=st.lists(DOCUMENT, min_size=1, max_size=3), before=DOCUMENT)
def test_answers_that_share_a_prompt_have_the_keys_of_two_rows(
    prompt: list[int], answers: list[list[int]], before: list[int]
) -> None:
    ids = before + prompt
    starts = [0] * len(before) + [len(before)] * len(prompt)
    for answer in answers:
        starts += [len(ids) - len(prompt)] * len(answer)
        ids = ids + answer
    found = keys_of([ids], [starts])[0].tolist()[len(before) + len(prompt) :]
    apart = [key for answer in answers for key in keys_of([prompt + answer])[0, len(prompt) :]]
    assert found == apart


@pytest.mark.parametrize("change", ["seed", "step", "name", "earlier token"])
def test_everything_that_counts_changes_the_mask(change: str) -> None:
    ids = np.random.default_rng(0).integers(0, 1000, [2, 64])
    other = ids.copy()
    other[:, 0] += change == "earlier token"
    masks = []
    for changed, row in ((False, ids), (change != "earlier token", other)):
        seed = 2 if changed and change == "seed" else 1
        layer = TokenDropout(0.3, "q" if changed and change == "name" else "k", seed, 96)
        with tokens(token_keys(paddle.to_tensor(row), None, seed, 2 if changed and change == "step" else 1)):
            masks.append(layer.mask(WHOLE).numpy().astype("float64").ravel())
    assert abs(np.corrcoef(masks)[0, 1]) < 0.05


def test_a_mask_is_as_even_as_a_draw() -> None:
    ids = np.random.default_rng(0).integers(0, 50_000, [4, 256])
    layer = TokenDropout(0.1, "model.layers.0.mlp.up_proj", 1, 512)
    with tokens(token_keys(paddle.to_tensor(ids), None, 1, 1)):
        kept = layer.mask(WHOLE).numpy().reshape(1024, 512).astype("float64")
    assert kept.mean() == pytest.approx(0.9, abs=0.002)
    for dim, count in ((0, 1024), (1, 512)):  # means of columns and rows spread as those of independent draws
        assert kept.mean(dim).std() == pytest.approx((0.09 / count) ** 0.5, rel=0.15)
        pairs = np.corrcoef(kept.T if dim == 0 else kept)
        np.fill_diagonal(pairs, 0)
        assert pairs.std() == pytest.approx(count**-0.5, rel=0.1)


def test_a_part_of_a_mask_is_that_part_of_the_whole() -> None:
    layer = TokenDropout(0.5, "down_proj", 1, 12)
    with tokens(token_keys(paddle.arange(10).reshape([2, 5]), None, 1, 1)):
        whole = layer.mask(WHOLE).numpy()
        part = layer.mask([slice(None), slice(2, 4), slice(6, 12)]).numpy()
    np.testing.assert_array_equal(part, whole[:, 2:4, 6:12])


def test_what_is_kept_is_divided_by_its_probability_and_gradients_too() -> None:
    layer = TokenDropout(0.25, "up_proj", 1, 8)
    x = paddle.ones([2, 3, 8])
    x.stop_gradient = False
    with tokens(token_keys(paddle.arange(6).reshape([2, 3]), None, 1, 1)):
        y = layer(x)
        mask = layer.mask(WHOLE).numpy()
    (y * 3).sum().backward()
    np.testing.assert_allclose(y.numpy(), mask / 0.75)
    np.testing.assert_allclose(x.grad.numpy(), 3 * mask / 0.75)
    layer.eval()
    assert layer(x) is x


@settings(deadline=None, max_examples=30)
@given(
    starts=st.none() | st.lists(st.integers(-1, 1 << 20), min_size=4, max_size=4).filter(lambda s: max(s) >= 0),
    keys=st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=4, max_size=4),
)
def test_keys_travel_with_document_starts(starts: list[int] | None, keys: list[int]) -> None:
    given = None if starts is None else paddle.to_tensor([starts], dtype="int64")
    found, found_keys = unpack_token_values(pack_token_values(given, paddle.to_tensor([keys], dtype="int32")))
    assert (found if found is None else found.tolist()) == (None if starts is None else [starts])
    assert found_keys.tolist() == [keys]
    assert found_keys.dtype == paddle.int32


def test_padding_is_marked_after_the_length_of_each_row() -> None:
    assert mark_padding(None, [3, 1], [2, 3]).tolist() == [[0, 0, 0], [0, -1, -1]]


def test_a_layer_that_is_computed_again_has_the_mask_of_its_own_tokens() -> None:
    """Two micro-batches forward, then both backward, as in a pipeline."""
    gradients = []
    for recomputed in (False, True):
        model = tiny("llama")
        for name, parameter in model.named_parameters():
            parameter.set_value(initial_values(0, name, parameter.shape, 0.15) + (parameter.ndim == 1))
        add_adapters(model, ["model.layers.0.mlp.up_proj"], adapter_config(rank=2, dropout=0.5), seed=1)
        adapter = model.model.layers[0].mlp.up_proj
        assert adapter.lora_dropout is not identity
        adapter.lora_A.set_value(paddle.full(adapter.lora_A.shape, 0.1))
        adapter.lora_B.set_value(paddle.full(adapter.lora_B.shape, 0.1))
        model.train()
        if recomputed:
            plan = FAMILIES["llama"].shard_plan
            assert plan is not None
            recompute_layers(model, plan, 1)
        losses = []
        for ids in (paddle.to_tensor([[1, 2, 3]]), paddle.to_tensor([[4, 5, 6]])):
            with tokens(token_keys(ids, None, 1, 1)):
                losses.append(model.hidden_states(ids)[0].square().sum())
        for loss in losses:
            loss.backward()
        gradients.append(adapter.lora_A.grad.numpy())
    np.testing.assert_allclose(gradients[0], gradients[1], rtol=1e-5, atol=1e-6 * np.abs(gradients[0]).max())


@pytest.mark.parametrize("pattern", ["lm_head", "*"])
def test_validate_refuses_dropout_of_the_head(registry: Registry, pattern: str) -> None:
    """The head gets no token keys; without dropout it may have an adapter."""
    words = ["--parallel={}", "--launch.num_devices=1", f'--lora.target_modules=["q_proj", "{pattern}"]']
    words += ["--model.config.tie_word_embeddings=false"]
    if pattern == "lm_head":
        plan_run(ROOT / "recipes/llama/lora.json", words, registry, smoke=True)
    with pytest.raises(UserError, match=r"lora\.dropout: is 0\.1, and '.*' of lora\.target_modules matches lm_head"):
        plan_run(ROOT / "recipes/llama/lora.json", [*words, "--lora.dropout=0.1"], registry, smoke=True)


def test_a_pattern_for_all_may_drop_where_the_embedding_is_the_head(registry: Registry) -> None:
    words = ["--parallel={}", "--launch.num_devices=1", '--lora.target_modules=["layers.*"]', "--lora.dropout=0.1"]
    plan_run(ROOT / "recipes/llama/lora.json", words, registry, smoke=True)
    tied = [*words[:2], '--lora.target_modules=["*"]', "--lora.dropout=0.1", "--model.config.tie_word_embeddings=true"]
    plan_run(ROOT / "recipes/llama/lora.json", tied, registry, smoke=True)
