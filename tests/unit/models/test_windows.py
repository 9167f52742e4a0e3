"""A window of attention: what each token sees, in the form of every device, and in generation."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.adapters.layers.prefix import add_prefixes
from llmsuite.base.errors import UserError
from llmsuite.devices import masks, ops, paddle_kernels
from llmsuite.models.shape_spec import GatedMLP, GroupedQuery, LayerSpec
from llmsuite.planning.activations import MicroBatch
from llmsuite.planning.cost import layer_flops
from llmsuite.plugins.cpu_kernels import kernels
from llmsuite.recipe.resolve import plan_run
from tests.conftest import registry_with
from tests.standin import gpu_kernels
from tests.support.families import tiny
from tests.support.packed_documents import answers_of, documents_of, prompts, rows_of_documents, visible
from tests.support.paths import ROOT

windows = st.integers(1, 7)


def in_window(seen: np.ndarray, window: int) -> np.ndarray:
    """[..., L, S] by the words: of what a token sees, the last so many."""
    from_end = np.flip(np.cumsum(np.flip(seen, -1), -1), -1)
    return seen & (from_end <= window)


@given(windows, st.integers(1, 6), st.integers(0, 6))
def test_a_query_sees_the_last_keys(window: int, num_queries: int, before: int) -> None:
    num_keys = num_queries + before
    mask = masks.causal_mask(num_queries, num_keys, paddle.float32, window).numpy()[0, 0]
    causal = np.tril(np.ones([num_queries, num_keys], bool), before)
    assert np.array_equal(mask == 0, in_window(causal, window))


@given(windows, rows_of_documents)
def test_a_token_sees_the_last_of_its_document(window: int, rows: list[list[int]]) -> None:
    starts = paddle.to_tensor(documents_of(rows))
    seen = in_window(visible(rows), window)
    mask = masks.document_mask(starts, paddle.float32, window)
    assert np.array_equal(mask.numpy()[:, 0] == 0, seen)
    at = np.arange(seen.shape[1])
    ends = paddle_kernels.document_ends(starts, paddle.bfloat16, window).numpy()[:, 0, :, 0]
    assert np.array_equal((at[:, None] < ends[:, None, :]) & (at <= at[:, None]), seen)


@given(windows, prompts)
def test_an_answer_sees_the_end_of_its_prompt_as_if_it_were_alone(
    window: int, rows: list[tuple[int, list[int]]]
) -> None:
    begins, belongs = answers_of(rows)
    seen = [
        [j <= i and mine[0] == of and answer in (-1, mine[1]) for j, (of, answer) in enumerate(belongs)]
        for i, mine in enumerate(belongs)
    ]
    mask = masks.document_mask(paddle.to_tensor(begins[None]), paddle.float32, window).numpy()[0, 0]
    assert np.array_equal(mask == 0, in_window(np.array(seen), window))


@given(windows, st.lists(st.integers(0, 5), min_size=1, max_size=3), st.integers(1, 4), st.integers(0, 4))
def test_a_pass_of_generation(window: int, padding: list[int], num_queries: int, free: int) -> None:
    """Columns of a cache, some of them padding, and some free ones after the queries."""
    start = 6
    queries = np.arange(start, start + num_queries)
    keys = np.arange(start + num_queries + free)
    mask = masks.step_mask(*map(paddle.to_tensor, (queries, keys, np.array(padding))), paddle.float32, window=window)
    seen = [[[first <= j <= i and j > i - window for j in keys] for i in queries] for first in padding]
    assert np.array_equal(mask.numpy()[:, 0] == 0, seen)


LENGTH = 150
PARTS = {
    "one document": None,
    "documents": [[(70, 0), (50, 70), (30, -1)], [(3, 0), (147, 3)]],  # -1: padding that is marked
    "a prompt of three": [[(80, 0), (40, 60), (30, 100)], [(150, 0)]],
}
"""The parts of each row: how long they are, and where what they belong to begins."""


@pytest.mark.parametrize("window", [1, 5, 64, 100])
@pytest.mark.parametrize("name", PARTS)
def test_the_kernel_of_the_cpu(name: str, window: int) -> None:
    kernels.load()
    draw = np.random.default_rng(0)
    values = [draw.standard_normal([2, LENGTH, heads, 8]).astype("float32") for heads in (4, 2, 2)]
    weights = paddle.to_tensor(draw.standard_normal([2, LENGTH, 4, 8]).astype("float32"))
    parts = PARTS[name]
    if parts is None:
        mask = masks.causal_mask(LENGTH, LENGTH, paddle.float32, window)
        given = kernels.no_mask(LENGTH, LENGTH, paddle.float32, window)
    else:
        starts = paddle.to_tensor(np.stack([np.repeat(*reversed(list(zip(*row)))) for row in parts]))
        mask, given = (form(starts, paddle.float32, window) for form in (masks.document_mask, kernels.spans))
    found = []
    for form, of in ((kernels.attention, given), (ops.attention, mask)):
        q, k, v = (paddle.to_tensor(value, stop_gradient=False) for value in values)
        out = form(q, k, v, of)
        (out * weights).sum().backward()
        found.append([out.numpy(), *(x.grad.numpy() for x in (q, k, v))])
    for mine, expected in zip(*found):
        # whoever sees one key only gives it all weight, whatever the query is: that gradient is zero
        assert np.abs(mine - expected).max() <= 1e-5 * max(np.abs(expected).max(), 0.1)


@pytest.mark.parametrize("documents", [False, True])
def test_flash_attention_is_given_the_window(documents: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a function that refuses what the GPU's kernel refuses."""
    monkeypatch.setattr(F, "flashmask_attention", gpu_kernels._flashmask_attention)
    draw = np.random.default_rng(0)
    rounded = [paddle.to_tensor(draw.standard_normal([2, 9, h, 8])).astype("bfloat16") for h in (4, 2, 2)]
    starts = paddle.to_tensor(documents_of([[4, 1, 3], [9]]))
    given = (
        paddle_kernels.document_ends(starts, "bfloat16", 3)
        if documents
        else paddle_kernels.no_mask(9, 9, "bfloat16", 3)
    )
    mask = masks.document_mask(starts, "float32", 3) if documents else masks.causal_mask(9, 9, "float32", 3)
    found = paddle_kernels.flash_attention(*rounded, given).astype("float32").numpy()
    expected = ops.attention(*(x.astype("float32") for x in rounded), mask).numpy()
    np.testing.assert_allclose(found, expected, rtol=2**-8, atol=1e-6)
    wider = (
        paddle_kernels.flash_attention(*rounded, paddle_kernels.no_mask(9, 9, "bfloat16", 4)).astype("float32").numpy()
    )
    assert np.abs(wider - found).max() > 0.1


def test_a_single_query_of_flash_attention_has_no_window() -> None:
    with pytest.raises(AssertionError, match="a single query has no window"):
        paddle_kernels.no_mask(1, 9, paddle.bfloat16, 3)


def test_a_window_that_is_not_shorter_costs_nothing() -> None:
    model = tiny("llama", model_type="mistral", sliding_window=9)
    (mask,) = model.masks(0, 10, paddle.float32, None)
    assert mask.numpy()[0, 0, -1].tolist() == [-1e9, *[0] * 9]
    asked: list[Any] = []
    model.ops = dataclasses.replace(model.ops, causal_mask=lambda *given: asked.append(given))
    model.masks(0, 9, paddle.float32, None)
    model.masks(0, 10, paddle.float32, None)
    assert asked == [(9, 9, paddle.float32), (10, 10, paddle.float32, 9)]


def test_a_prefix_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"has a window \(sliding_window 9\), which later tokens of a sequence would move past"
    ):
        add_prefixes(tiny("llama", model_type="mistral", sliding_window=9), 4)
    recipe = ROOT / "recipes" / "llama" / "prefix.json"
    with pytest.raises(UserError, match=r"prefix.tokens: is .*has a window \(sliding_window 4096\)"):
        plan_run(recipe, ["--model.preset=mistral-7b-v0.1"], registry_with())


def test_flops_are_those_of_pairs_that_see_each_other() -> None:
    batch = MicroBatch(2, 40, 1)
    attention = GroupedQuery(heads=4, kv_heads=2, head_size=8)
    plain, near, far = (
        layer_flops(LayerSpec(attention=what, mlp=GatedMLP(width=8)), 16, batch)
        for what in (dataclasses.replace(attention, window=window) for window in (None, 10, 40))
    )
    assert far == plain
    # twice the pairs, for queries and for values; the triangle of those further away than 10 is left out
    assert plain - near == 2 * 2 * 4 * 8 * (40 - 10) ** 2


def test_a_small_run_has_a_small_window() -> None:
    recipe = ROOT / "recipes" / "llama" / "mistral-7b-sft.json"
    words = ["--model.preset=mistral-7b-v0.1"]
    whole, small = (plan_run(recipe, words, registry_with(), smoke) for smoke in (False, True))
    assert whole.model.config.sliding_window == 4096
    assert 0 < small.model.config.sliding_window < small.recipe.data.max_length
