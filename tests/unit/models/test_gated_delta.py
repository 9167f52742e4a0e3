"""Linear attention: the gated delta rule by chunks is its definition by tokens, in documents and from a state."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from llmsuite.base.errors import UserError
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.inference.decoder import ModelDecoder, StateCache, join_caches, select_rows
from llmsuite.inference.stages import keep_stage_layers
from llmsuite.models.delta_rule import causal_convolution, gated_delta_rule, recurrent_delta_rule, unit_norm
from llmsuite.parallel.mesh import Mesh
from tests.support.families import FAMILIES, load, reference, tiny
from tests.support.paths import REFERENCE

ROWS, HEADS, KEY, VALUE = 2, 3, 8, 5


def inputs(length: int) -> list[Any]:
    """Queries, keys, values, decays, steps and a state, with gradients."""
    paddle.seed(1)
    q = unit_norm(paddle.randn([ROWS, length, HEADS, KEY])) * KEY**-0.5
    k = unit_norm(paddle.randn([ROWS, length, HEADS, KEY]))
    v = paddle.randn([ROWS, length, HEADS, VALUE])
    decay = -2.0 * paddle.rand([ROWS, length, HEADS])
    step = paddle.rand([ROWS, length, HEADS])
    made = [part.detach() for part in (q, k, v, decay, step, paddle.randn([ROWS, HEADS, KEY, VALUE]))]
    for part in made:
        part.stop_gradient = False
    return made


def positions_of(starts: list[list[int]], length: int) -> Any:
    """Positions of documents that begin at these indices; the first tokens continue a state at position 7."""
    rows = []
    for begins in starts:
        row = np.arange(length) + 7
        for begin in begins:
            row[begin:] = np.arange(length - begin)
        rows.append(row)
    return paddle.to_tensor(np.stack(rows))


@pytest.mark.parametrize("starts", [None, [[3, 40, 64, 65, 127], [0, 100]], [[], [128]]], ids=str)
@pytest.mark.parametrize("length", [5, 64, 150])
def test_chunks_are_the_definition(length: int, starts: list[list[int]] | None) -> None:
    positions = None if starts is None else positions_of([[i for i in row if i < length] for row in starts], length)
    begins = None if positions is None else (positions == 0).astype("float32")
    results = []
    for rule, marks in ((gated_delta_rule, positions), (recurrent_delta_rule, begins)):
        *parts, state = inputs(length)
        out, last = rule(*parts, marks, state)
        ((out**2).sum() + (last**3).sum()).backward()
        gradients = [part.grad.numpy() for part in (*parts, state)]
        results.append([out.numpy(), last.numpy(), *gradients])
    for found, expected in zip(*results):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * max(1.0, float(np.abs(expected).max())))


def test_a_convolution_reads_no_other_document_and_continues_its_inputs() -> None:
    paddle.seed(0)
    x = paddle.randn([1, 9, 6])
    kernel = paddle.randn([4, 1, 6])
    whole, last = causal_convolution(x, kernel, None, None)
    assert np.array_equal(last.numpy(), x[:, 6:].numpy())
    first, before = causal_convolution(x[:, :2], kernel, None, None)
    second, _ = causal_convolution(x[:, 2:], kernel, None, before)
    np.testing.assert_allclose(paddle.concat([first, second], 1).numpy(), whole.numpy(), atol=1e-6)
    documents, _ = causal_convolution(x, kernel, paddle.to_tensor([[0, 1, 0, 1, 2, 3, 4, 5, 6]]), None)
    alone, _ = causal_convolution(x[:, 2:], kernel, None, None)
    np.testing.assert_allclose(documents[:, 2:].numpy(), alone.numpy(), atol=1e-6)


@pytest.mark.parametrize("case", ["qwen_hybrid/plain", "qwen_hybrid_moe/next"])
def test_texts_of_unequal_length_are_decoded_together_as_alone(case: str) -> None:
    """In chunks of which one is all padding for the shorter text, and after rows were joined and removed."""
    model = load(REFERENCE / case)
    ids, expected = reference(case)
    decoder = ModelDecoder(model)
    assert not decoder.traits.supports_prefix_cache
    short = np.concatenate([np.zeros([1, 5], "int64"), ids[1:, :4]], 1)
    both = np.concatenate([ids[:1, :9], short])
    padding = np.asarray([0, 5])
    _, cache = decoder.forward(both[:, :4], padding, None)
    logits, cache = decoder.forward(both[:, 4:], padding, cache)
    assert isinstance(cache, StateCache)
    assert cache.seq_len == 9
    np.testing.assert_allclose(logits, [expected[0, 8], expected[1, 3]], atol=1e-5)
    alone = select_rows(cache, [1], 5)
    assert isinstance(alone, StateCache)
    assert alone.seq_len == 4
    logits, alone = decoder.forward(ids[1:, 4:5], np.asarray([0]), alone)
    np.testing.assert_allclose(logits[0], expected[1, 4], atol=1e-5)
    joined = join_caches(alone, select_rows(cache, [0]))
    logits, _ = decoder.forward(np.asarray([[ids[1, 5]], [ids[0, 9]]]), np.asarray([4, 0]), joined)
    np.testing.assert_allclose(logits, [expected[1, 5], expected[0, 9]], atol=1e-5)


def test_a_stage_of_linear_attention_only_is_refused() -> None:
    """Its cache would not say how many tokens a text has."""
    family = FAMILIES["qwen_hybrid"]
    model = tiny("qwen_hybrid", layer_types=["linear_attention"] * 3 + ["full_attention"])
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    with pytest.raises(UserError, match="stage 0 has layers 0 to 1, all with linear attention"):
        keep_stage_layers(model, family, Mesh(Degrees(2, 1, 1, 1), 0), shapes)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "none of the 4 layers has full attention"),
        ({"layer_types": ["full_attention"]}, "has 1 layers; num_hidden_layers is 4"),
        ({"linear_num_value_heads": 5}, "is 2, which does not divide linear_num_value_heads = 5"),
        ({"linear_conv_kernel_dim": 1}, "is 1; a convolution of 2 or more is needed"),
    ],
)
def test_impossible_shapes_are_told(shape: dict[str, Any], message: str) -> None:
    family = FAMILIES["qwen_hybrid"]
    problems = [text for _, text in family.config_cls(**{**family.smoke, **shape}).problems()]
    assert any(message in text for text in problems), problems
