"""The CPU's kernels against the plain forms: values and gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import ml_dtypes
import numpy as np
import paddle
import pytest
from paddle.base import core

from llmsuite.devices import decoding_ops, expert_ops, masks, ops, optimizer_ops
from llmsuite.devices.cpu import CpuBackend
from llmsuite.models.experts import route_in_program
from llmsuite.plugins.cpu_kernels import kernels
from tests.support import tiny_llama
from tests.support.kernel_inputs import (
    HEADS,
    LIMIT,
    ROWS_OF_DOCUMENTS,
    Tensor,
    check_cached_attention,
    check_equal,
    leaf,
    random,
)


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    kernels.load()


@pytest.mark.parametrize("shape", [[], [7], [300, 700]])
def test_gradients_before_an_update(shape: list[int]) -> None:
    values = random(*shape)
    x = paddle.to_tensor(values)
    expected = np.square(values.astype("float64") * 0.5).sum()
    for square_sum in (kernels.square_sum, optimizer_ops.square_sum):
        for count in (1, 3):
            found = square_sum([x] * count, 0.5)
            assert found.shape == []
            assert abs(float(found) / expected / count - 1) <= LIMIT
    kernels.scale(x, 0.3)
    assert np.array_equal(x.numpy(), values * np.float32(0.3)), "in place"


@pytest.mark.parametrize("size", [1, 7, 210_000])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_updates_by_adamw(size: int, decay: float) -> None:
    """Three of them are as Paddle's; a part of a parameter, in the same call, has the numbers of the whole, to the last
    bit."""
    values, *gradients = (random(size, seed=seed) for seed in range(4))
    theirs = leaf(values)
    mine = paddle.to_tensor(values)
    half = paddle.to_tensor(values[: size // 2 + 1])
    optimizer = paddle.optimizer.AdamW(0.01, 0.8, 0.95, 1e-3, parameters=[theirs], weight_decay=decay)
    both = [mine, half]
    moments = [[paddle.zeros_like(x) for x in both] for _ in range(2)]
    powers = [[paddle.full([1], beta) for _ in both] for beta in (0.8, 0.95)]
    for gradient in gradients:
        theirs.grad = paddle.to_tensor(gradient)
        optimizer.step()
        given = [paddle.to_tensor(gradient[: parameter.shape[0]] * 4) for parameter in both]
        kernels.adamw(both, given, 0.25, [0.01] * 2, [*moments, *powers], (0.8, 0.95), 1e-3, [decay] * 2)
    assert np.abs(mine.numpy() - theirs.numpy()).max() <= LIMIT * np.abs(values).max()
    assert np.array_equal(half.numpy(), mine.numpy()[: half.shape[0]])
    assert [float(power) for of_both in powers for power in of_both] == pytest.approx([0.8**4] * 2 + [0.95**4] * 2)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (64, 64), (131, 131), (1, 70), (70, 133)])
def test_attention_is_causal(heads: tuple[int, int, int], queries: int, keys: int) -> None:
    num_queries, num_keys, size = heads
    q = random(2, queries, num_queries, size, seed=1)
    k, v = (random(2, keys, num_keys, size, seed=seed) for seed in (2, 3))
    mask = masks.causal_mask(queries, keys, paddle.float32)
    check_equal(lambda *x: kernels.attention(*x, None), lambda *x: ops.attention(*x, mask), q, k, v)


@pytest.mark.parametrize("name", ROWS_OF_DOCUMENTS)
@pytest.mark.parametrize("heads", HEADS)
def test_attention_sees_its_document_only(heads: tuple[int, int, int], name: str) -> None:
    num_queries, num_keys, size = heads
    lengths, begins = zip(*(zip(*row) for row in ROWS_OF_DOCUMENTS[name]))
    document_starts = paddle.to_tensor(np.stack([np.repeat(*row) for row in zip(begins, lengths)]))
    length = document_starts.shape[1]
    q = random(2, length, num_queries, size, seed=1)
    k, v = (random(2, length, num_keys, size, seed=seed) for seed in (2, 3))
    mask = masks.document_mask(document_starts, paddle.float32)
    given = kernels.spans(document_starts, paddle.float32)
    check_equal(lambda *x: kernels.attention(*x, given), lambda *x: ops.attention(*x, mask), q, k, v)


@pytest.mark.parametrize("name", ROWS_OF_DOCUMENTS)
@pytest.mark.parametrize("heads", HEADS)
def test_the_newest_tokens_of_a_cache_see_what_they_see_in_one_pass(heads: tuple[int, int, int], name: str) -> None:
    check_cached_attention(kernels.cached_attention, kernels.attention, heads, name, LIMIT)


def test_attention_takes_a_mask_that_is_added() -> None:
    q, k, v = (paddle.to_tensor(random(2, 5, 2, 8, seed=seed)) for seed in (1, 2, 3))
    mask = paddle.to_tensor(random(2, 1, 5, 5, seed=4))
    assert np.array_equal(kernels.attention(q, k, v, mask).numpy(), ops.attention(q, k, v, mask).numpy())


def test_scores_may_be_large() -> None:
    """A score of 3,000 is rounded to 2e-4 in either form, and its exponential by as much."""
    q, k, v = (30 * random(1, 80, 2, 8, seed=seed) for seed in (1, 2, 3))
    mask = masks.causal_mask(80, 80, paddle.float32)
    check_equal(lambda *x: kernels.attention(*x, None), lambda *x: ops.attention(*x, mask), q, k, v, limit=1e-3)


@pytest.mark.parametrize("shape", [(2, 37, 48), (3, 5, 4, 10), (1, 1, 7)])
def test_rms_norm_equals_the_plain_form(shape: tuple[int, ...]) -> None:
    x = random(*shape)
    weight = random(shape[-1], seed=1)
    check_equal(lambda *t: kernels.rms_norm(*t, 1e-5), lambda *t: ops.rms_norm(*t, 1e-5), x, weight)


@pytest.mark.parametrize("rows", [1, 3])
def test_rotary_equals_the_plain_form(rows: int) -> None:
    angles = random(rows, 9, 1, 5, seed=1)
    cos = paddle.to_tensor(np.cos(angles))
    sin = paddle.to_tensor(np.sin(angles))
    check_equal(lambda x: kernels.rotary(x, cos, sin), lambda x: ops.rotary(x, cos, sin), random(3, 9, 4, 10))


def test_swiglu_equals_the_plain_form() -> None:
    gate = 20 * random(3, 7, 33)
    up = random(3, 7, 33, seed=1)
    check_equal(kernels.swiglu, ops.swiglu, gate, up)
    both = paddle.to_tensor(np.concatenate([gate, up], -1))
    apart = kernels.swiglu(paddle.to_tensor(gate), paddle.to_tensor(up)).numpy()
    assert np.abs(kernels.joined_swiglu(both).numpy() - apart).max() <= 1e-6 * np.abs(apart).max()


@pytest.mark.parametrize("rows", [1, 15, 16, 37])
def test_a_narrow_gradient_of_logits_takes_their_memory(rows: int) -> None:
    given = paddle.rand([rows])
    targets = paddle.to_tensor(np.arange(rows) % 301)
    logits = 9 * random(rows, 301)
    wide = paddle.to_tensor(logits, stop_gradient=False)
    nll = kernels.cross_entropy(wide * 1.0, targets)
    (nll * given).sum().backward()

    narrow = paddle.to_tensor(logits)
    memory = narrow.data_ptr()
    found, gradient = kernels.bf16_grad_cross_entropy(narrow, targets)
    del narrow
    of_logits = gradient(given)
    del gradient
    _ = 9 * random(rows, 301)  # which would get memory that nobody holds
    assert np.array_equal(found.numpy(), nll.numpy())
    assert of_logits.dtype == paddle.bfloat16
    assert of_logits.data_ptr() == memory
    expected = wide.grad.astype("bfloat16").astype("float32").numpy()
    assert np.array_equal(of_logits.astype("float32").numpy(), expected)


def test_cross_entropy_equals_the_plain_form() -> None:
    targets = paddle.to_tensor(np.arange(40) * 7 % 301)
    check_equal(
        lambda x: kernels.cross_entropy(x * 1.0, targets), lambda x: ops.cross_entropy(x, targets), 9 * random(40, 301)
    )


def test_the_gradient_of_logits_takes_their_memory() -> None:
    logits = leaf(random(4, 11))
    product = logits * 2.0
    address = product.data_ptr()
    kernels.cross_entropy(product, paddle.to_tensor([1, 2, 3, 4])).sum().backward()
    assert product.data_ptr() == address
    np.testing.assert_allclose(product.sum(-1).numpy(), 0.0, atol=1e-6)  # a gradient's row adds up to nothing


@pytest.mark.parametrize("is_tied", [False, True])
def test_of_logits_there_is_one_tensor_at_a_time(is_tied: bool) -> None:
    """In the passes of the head forward and back, whatever stage asks."""
    config = dataclasses.replace(tiny_llama.CONFIG, vocab_size=20_000, tie_word_embeddings=is_tied)
    model = tiny_llama.FAMILY.factory()(config, CpuBackend().ops("fp32"))
    hidden = leaf(random(300, config.hidden_size))
    targets = paddle.arange(300)
    before = core.host_memory_stat_current_value("Allocated", 0)
    core.host_memory_stat_reset_peak_value("Allocated", 0)
    model.token_nll(hidden, targets).sum().backward()
    logits = 300 * config.vocab_size * 4
    assert logits < core.host_memory_stat_peak_value("Allocated", 0) - before < 1.25 * logits


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(value: float) -> None:
    x = random(1, 4, 2, 6)
    weight = random(6)
    x[0, 1, 0, 2] = value
    tensor = paddle.to_tensor(x)
    results = [
        kernels.attention(tensor, tensor, tensor, None),
        kernels.rms_norm(tensor, paddle.to_tensor(weight), 1e-5),
        kernels.swiglu(tensor, tensor * 0 + tensor),
        kernels.cross_entropy(tensor.reshape([8, 6]), paddle.zeros([8], "int64")),
    ]
    for result in results:
        assert not np.isfinite(result.numpy()).all()


def test_tensors_with_gaps() -> None:
    x = random(2, 4, 9, 8)  # heads first, as a transposed view gives them

    def turned(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *tensors: function(*(t.transpose([0, 2, 1, 3]) for t in tensors))

    mask = masks.causal_mask(9, 9, paddle.float32)
    check_equal(
        turned(lambda *t: kernels.attention(*t, None)), turned(lambda *t: ops.attention(*t, mask)), x, x + 1, x - 1
    )
    check_equal(turned(kernels.swiglu), turned(ops.swiglu), x, x + 1)
    weight = paddle.to_tensor(random(8))
    check_equal(turned(lambda t: kernels.rms_norm(t, weight, 1e-5)), turned(lambda t: ops.rms_norm(t, weight, 1e-5)), x)


def test_kernels_take_no_rows() -> None:
    empty = paddle.zeros([0, 6])
    assert kernels.swiglu(empty, empty).shape == [0, 6]


def test_other_numbers_than_float32() -> None:
    x = paddle.to_tensor(random(2, 6).astype("float64"))
    assert np.array_equal(kernels.swiglu(x, x).numpy(), ops.swiglu(x, x).numpy())
    assert np.array_equal(kernels.joined_swiglu(x).numpy(), decoding_ops.joined_swiglu(x).numpy())


@pytest.mark.parametrize(
    "document_starts", [None, [[0, 0, 0, 3, 3, 3, 3, 7, 7, 7, 7, 7]], [[0, 0, 0, 0, 0, 2, 2, 7, 7, 7, 8, 8]]]
)
def test_a_model_has_the_loss_and_gradients_of_the_plain_forms(document_starts: list[list[int]] | None) -> None:
    """Loss and every gradient of a whole model."""
    config = tiny_llama.CONFIG
    ids = paddle.to_tensor([[5, 1, 2, 7, 3, 3, 9, 4, 8, 2, 6, 1]])
    given = None if document_starts is None else paddle.to_tensor(document_starts)
    found = []
    for forms in (ops.Ops(), CpuBackend().ops("fp32")):
        model = tiny_llama.FAMILY.factory()(config, forms)
        for number, (_, parameter) in enumerate(model.named_parameters()):
            parameter.set_value(random(*parameter.shape, seed=number) * (0.1 if parameter.ndim > 1 else 1))
        model.train()
        hidden, _ = model.hidden_states(ids, document_starts=given)
        loss = model.token_nll(hidden.flatten(0, 1), ids.flatten()).sum()
        loss.backward()
        found.append([loss.numpy(), *(parameter.grad.numpy() for parameter in model.parameters())])
    for mine, expected in zip(*reversed(found), strict=True):
        assert np.abs(mine - expected).max() <= 5 * LIMIT * np.abs(expected).max()


@pytest.mark.parametrize(("counts", "num_rows"), [([30, 0, 41, 1], 72), ([0, 9], 20), ([0, 0, 0], 4), ([5], 5)])
def test_rows_with_a_matrix_each(counts: list[int], num_rows: int) -> None:
    x = random(num_rows, 33)
    weight = random(len(counts), 33, 17, seed=1)
    of = paddle.to_tensor(counts, dtype="int64")
    check_equal(lambda *t: kernels.grouped_matmul(*t, of), lambda *t: expert_ops.grouped_matmul(*t, of), x, weight)
    rounded = [values.astype(ml_dtypes.bfloat16).astype("float32") for values in (x, weight)]
    values = [paddle.to_tensor(value) for value in (x, weight)]
    found = kernels.rounded_grouped_matmul(*values, of).numpy()
    expected = kernels.grouped_matmul(*(paddle.to_tensor(value) for value in rounded), of).numpy()
    np.testing.assert_array_equal(found, expected)


def test_matrices_that_are_not_trained_get_no_gradient() -> None:
    x = leaf(random(6, 4))
    weight = paddle.to_tensor(random(2, 4, 3))
    counts = paddle.to_tensor([2, 3], dtype="int64")
    y = kernels.grouped_matmul(x, weight, counts)
    assert "grouped_rows" in y.grad_fn.name()
    y.sum().backward()
    expected = np.concatenate([weight.numpy().sum(-1)[[0, 0, 1, 1, 1]], np.zeros([1, 4], "float32")])
    np.testing.assert_allclose(x.grad.numpy(), expected, rtol=1e-6)


def test_counts_of_too_many_rows_are_refused() -> None:
    values = paddle.to_tensor(random(3, 4)), paddle.to_tensor(random(2, 4, 3))
    with pytest.raises(OSError, match="counts are of more rows than there are"):
        kernels.grouped_matmul(*values, paddle.to_tensor([2, 2], dtype="int64"))
    with pytest.raises(OSError, match="as many counts are needed as matrices"):
        kernels.grouped_matmul(*values, paddle.to_tensor([1, 1, 1], dtype="int64"))


@pytest.mark.parametrize(("inputs", "outputs"), [(0, 3), (4, 0)])
def test_rows_with_a_matrix_of_no_numbers(inputs: int, outputs: int) -> None:
    x = random(3, inputs)
    weight = random(2, inputs, outputs)
    counts = paddle.to_tensor([2, 1], dtype="int64")
    y = kernels._run("grouped_product", paddle.to_tensor(x), paddle.to_tensor(weight), counts)[0]
    assert y.shape == [3, outputs]
    assert not y.numpy().any()


@pytest.mark.parametrize(("tokens", "chosen", "experts", "elsewhere"), [(40, 3, 5, 0), (40, 3, 5, 2), (7, 1, 2, 1)])
def test_rows_of_tokens(tokens: int, chosen: int, experts: int, elsewhere: int) -> None:
    """Sorted by expert and back; the experts with the highest numbers may be elsewhere."""
    numbers = paddle.to_tensor(np.random.default_rng(0).integers(0, experts, [tokens * chosen]))
    here = experts - elsewhere
    route = route_in_program(numbers.clip(max=here), here)
    where = (route.order, route.inverse_order, route.counts)
    used = int(route.counts.sum())
    x = random(tokens, 33)
    weights = random(tokens, chosen, seed=1)
    is_used = paddle.to_tensor((np.arange(tokens * chosen) < used).astype("float32")[:, None])
    check_equal(
        lambda t: kernels.dispatch_rows(t, *where) * is_used, lambda t: expert_ops.dispatch_rows(t, *where) * is_used, x
    )
    rows = random(tokens * chosen, 33, seed=2) * is_used.numpy()
    zeroed = lambda form: lambda r, w: form(r * is_used, w, *where)  # noqa: E731
    check_equal(zeroed(kernels.combine_rows), zeroed(expert_ops.combine_rows), rows, weights)
    there_and_back = kernels.combine_rows(
        kernels.dispatch_rows(paddle.to_tensor(x), *where), paddle.to_tensor(weights), *where
    )
    of_here = (numbers.numpy() < here).reshape([tokens, chosen])
    expected = x * np.where(of_here, weights, 0).sum(1, keepdims=True)
    np.testing.assert_allclose(there_and_back.numpy(), expected, atol=1e-5)


def test_rows_that_do_not_fit_are_refused() -> None:
    """Else a kernel would read or write past the end of a tensor."""
    x = paddle.to_tensor(random(2, 4))
    two = paddle.to_tensor([1, 2])
    counts = paddle.to_tensor([2])
    with pytest.raises(OSError, match="a row is beyond the last one"):
        kernels.dispatch_rows(x, two, two, paddle.to_tensor([1]))
    for wrong in ([3], [-1], [-1, 2], [2, 1]):
        with pytest.raises(OSError, match="counts are of more rows than there are"):
            kernels.dispatch_rows(x, two - 1, two - 1, paddle.to_tensor(wrong))
    with pytest.raises(OSError, match="each token has to have as many rows"):
        kernels.dispatch_rows(paddle.to_tensor(random(3, 4)), two - 1, two - 1, counts)
    for rows, weights in ((x[:1], random(2, 1)), (x, random(2, 2)), (x, random(1, 1))):
        with pytest.raises(OSError, match="there is not a row and a weight each"):
            kernels.combine_rows(rows, paddle.to_tensor(weights), two - 1, two - 1, counts)
