"""The plain forms against their formulas, written out; and how the fused ones are called."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from llmsuite.devices import decoding_ops, expert_ops, masks, ops, paddle_kernels
from llmsuite.devices.decoding_ops import DecodingOps, PackedOps
from llmsuite.devices.expert_ops import ExpertOps
from llmsuite.devices.kernel_table import ops_of, optimizer_ops_of
from llmsuite.devices.matmul_ops import MatmulOps
from llmsuite.devices.ops import Ops
from llmsuite.devices.optimizer_ops import OptimizerOps


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.Generator(np.random.Philox(seed)).standard_normal(shape).astype("float32")


def attention_by_loops(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """One query, one head, one key at a time. mask is [L, S]."""
    batch, length, heads, size = q.shape
    result = np.zeros(q.shape, "float64")
    for b in range(batch):
        for i in range(length):
            for h in range(heads):
                group = h * k.shape[2] // heads
                scores = [float(q[b, i, h] @ k[b, j, group]) / math.sqrt(size) for j in range(k.shape[1])]
                if mask is not None:
                    scores = [s + float(mask[i, j]) for j, s in enumerate(scores)]
                weights = np.exp(np.asarray(scores) - max(scores))
                for j, weight in enumerate(weights / weights.sum()):
                    result[b, i, h] += weight * v[b, j, group]
    return result


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (6, 2)])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (1, 5), (2, 5)])
@pytest.mark.parametrize("masked", [True, False])
def test_attention_equals_the_formula(heads: tuple[int, int], queries: int, keys: int, masked: bool) -> None:
    q = random(2, queries, heads[0], 8, seed=1)
    k = random(2, keys, heads[1], 8, seed=2)
    v = random(2, keys, heads[1], 8, seed=3)
    # the last query sees every key
    visible = np.asarray([[j <= i + keys - queries for j in range(keys)] for i in range(queries)])
    expected = attention_by_loops(q, k, v, np.where(visible, 0.0, -np.inf) if masked else None)
    mask = masks.causal_mask(queries, keys, paddle.float32) if masked else None
    found = ops.attention(*(paddle.to_tensor(x) for x in (q, k, v)), mask)
    assert found.shape == list(q.shape)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)


@pytest.mark.parametrize(("dtype", "lowest"), [("float32", -1e9), ("bfloat16", -1e9), ("float16", -1e4)])
def test_the_mask_is_low_and_finite_in_every_dtype(dtype: str, lowest: float) -> None:
    mask = masks.causal_mask(3, 5, getattr(paddle, dtype))
    assert (mask.shape, str(mask.dtype)) == ([1, 1, 3, 5], f"paddle.{dtype}")
    values = mask.astype("float32").numpy()[0, 0]
    assert np.array_equal(values == 0, np.tril(np.ones((3, 5)), 2) == 1)
    assert np.isfinite(values).all()
    np.testing.assert_allclose(values[values != 0], lowest, rtol=0.01)
    assert np.exp(np.float32(lowest)) == 0, "what is masked weighs nothing"


def test_rms_norm_equals_the_formula() -> None:
    x = random(2, 3, 8)
    weight = random(8, seed=1)
    expected = np.zeros_like(x)
    for b in range(2):
        for i in range(3):
            expected[b, i] = x[b, i] / math.sqrt(sum(float(n) ** 2 for n in x[b, i]) / 8 + 0.01) * weight
    np.testing.assert_allclose(ops.rms_norm(*map(paddle.to_tensor, (x, weight)), 0.01).numpy(), expected, rtol=1e-5)


def test_rms_norm_takes_its_mean_in_float32() -> None:
    x = paddle.full([1, 4], 300.0, dtype="float16")  # 300 squared is beyond float16
    weight = paddle.full([4], 2.0)  # float32: a CPU multiplies no float16 by itself
    np.testing.assert_allclose(ops.rms_norm(x, weight, 1e-6).numpy(), 2.0, rtol=1e-3)
    low = ops.rms_norm(paddle.ones([1, 4], dtype="bfloat16"), paddle.ones([4], dtype="bfloat16"), 1e-6)
    assert str(low.dtype) == "paddle.bfloat16"


def rotation(positions: list[int], size: int) -> tuple[Any, Any]:
    frequencies = 10000.0 ** (-np.arange(size // 2) / (size // 2))
    angles = np.outer(positions, frequencies)[None, :, None, :]
    return tuple(paddle.to_tensor(f(angles).astype("float32")) for f in (np.cos, np.sin))


def rotate(x: np.ndarray, positions: list[int]) -> np.ndarray:
    return ops.rotary(paddle.to_tensor(x), *rotation(positions, x.shape[-1])).numpy()


def test_rotary_turns_each_pair_of_the_halves() -> None:
    x = random(2, 3, 2, 8)
    positions = [0, 5, 9]
    expected = np.zeros_like(x)
    for i, position in enumerate(positions):
        for pair in range(4):
            turned = np.exp(1j * position * 10000.0 ** (-pair / 4))
            z = (x[:, i, :, pair] + 1j * x[:, i, :, pair + 4]) * turned
            expected[:, i, :, pair] = z.real
            expected[:, i, :, pair + 4] = z.imag
    np.testing.assert_allclose(rotate(x, positions), expected, atol=1e-5)
    assert np.array_equal(rotate(x, [0, 0, 0]), x)


def test_rotary_keeps_lengths_and_knows_relative_positions_only() -> None:
    q = random(1, 1, 1, 8, seed=1)
    k = random(1, 1, 1, 8, seed=2)
    for position in (1, 7, 500):
        np.testing.assert_allclose(np.linalg.norm(rotate(q, [position])), np.linalg.norm(q), rtol=1e-5)

    def score(i: int, j: int) -> float:
        return float((rotate(q, [i]) * rotate(k, [j])).sum())

    for distance in (0, 1, 6):
        for shift in (1, 20, 300):
            assert score(distance + shift, shift) == pytest.approx(score(distance, 0), abs=1e-4)
    assert abs(score(6, 0) - score(1, 0)) > 0.1
    assert abs(score(6, 0) - score(0, 6)) > 0.1, "before is not after"


def test_swiglu_equals_the_formula() -> None:
    gate = random(2, 3, 8)
    up = random(2, 3, 8, seed=1)
    expected = gate / (1 + np.exp(-gate)) * up
    for form in (ops.swiglu, paddle_kernels.fused_swiglu):
        np.testing.assert_allclose(form(paddle.to_tensor(gate), paddle.to_tensor(up)).numpy(), expected, atol=1e-6)
    both = paddle.to_tensor(np.concatenate([gate, up], -1))
    np.testing.assert_allclose(decoding_ops.joined_swiglu(both).numpy(), expected, atol=1e-6)


def test_the_plain_forms_are_the_default() -> None:
    assert Ops() == Ops(
        *(masks.causal_mask, masks.document_mask, ops.attention, ops.rms_norm, ops.rotary, ops.swiglu),
        *(ops.cross_entropy, MatmulOps(), ExpertOps(), DecodingOps()),
    )
    assert ops_of({}) == Ops()


def test_a_kernel_is_in_the_group_of_its_operation() -> None:
    def kernel() -> None:
        """Of any operation."""

    packed = dict.fromkeys([field.name for field in dataclasses.fields(PackedOps)], kernel)
    others = dict.fromkeys(("swiglu", "matmul", "dispatch_rows", "joined_swiglu", "decoder_for", "adamw"), kernel)
    assert ops_of(packed | others) == Ops(
        swiglu=kernel,
        matmuls=MatmulOps(matmul=kernel),
        experts=ExpertOps(dispatch_rows=kernel),
        decoding=DecodingOps(kernel, kernel, PackedOps(*[kernel] * len(packed))),
    )
    assert optimizer_ops_of(others) == OptimizerOps(adamw=kernel)


def test_a_group_of_kernels_comes_as_a_whole() -> None:
    with pytest.raises(TypeError, match="none for pack, pack_stack, packed_grouped_matmul, packed_embedding"):
        ops_of({"packed_matmul": print, "write_packed": print})


@pytest.mark.parametrize("name", ["matmuls", "heads_first", "products"])
def test_a_kernel_of_no_operation_is_refused(name: str) -> None:
    for build in (ops_of, optimizer_ops_of):
        with pytest.raises(TypeError, match=f"no operations: {name}; there are adamw, attention, "):
            build({name: print})


@pytest.mark.parametrize("group", [Ops, MatmulOps, ExpertOps, DecodingOps, PackedOps, OptimizerOps])
def test_a_group_has_few_fields(group: Any) -> None:
    assert len(dataclasses.fields(group)) <= 10


# The kernels of the fused forms are not part of a Paddle for the CPU: flash attention falls back to a plain one,
# the others are replaced by what Paddle's documentation says of them.


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (1, 5)])
def test_flash_attention_is_causal_by_itself(queries: int, keys: int) -> None:
    q = paddle.to_tensor(random(2, queries, 4, 8, seed=1))
    k, v = (paddle.to_tensor(random(2, keys, 4, 8, seed=s)) for s in (2, 3))
    expected = ops.attention(q, k, v, masks.causal_mask(queries, keys, paddle.float32))
    found = paddle_kernels.flash_attention(q, k, v, paddle_kernels.no_mask(queries, keys, paddle.float32))
    np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=1e-5)


def test_flash_attention_refuses_what_it_would_get_wrong() -> None:
    x = paddle.zeros([1, 2, 1, 4])
    with pytest.raises(AssertionError, match="as a flag"):
        paddle_kernels.flash_attention(x, x, x, masks.causal_mask(2, 2, paddle.float32))
    with pytest.raises(AssertionError, match="chunked prefill"):
        paddle_kernels.no_mask(2, 5, paddle.float32)


def test_fused_rotary_asks_for_halves_and_gives_full_angles(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(q: Any, k: Any, v: Any, *, sin: Any, cos: Any, use_neox_rotary_style: bool) -> tuple[Any, Any, Any]:
        assert k is v is None
        assert not use_neox_rotary_style, "that would turn adjacent numbers, not the two halves"
        assert cos.shape == sin.shape == [1, q.shape[1], 1, q.shape[3]]
        assert cos.dtype == sin.dtype == q.dtype
        first, second = paddle.split(q, 2, axis=-1)
        return q * cos + paddle.concat([-second, first], axis=-1) * sin, None, None

    monkeypatch.setattr(paddle.incubate.nn.functional, "fused_rotary_position_embedding", kernel)
    x = paddle.to_tensor(random(2, 3, 2, 8))
    (cos, sin) = rotation([0, 4, 9], 8)
    np.testing.assert_allclose(
        paddle_kernels.fused_rotary(x, cos, sin).numpy(), ops.rotary(x, cos, sin).numpy(), atol=1e-6
    )


def test_fused_rms_norm_takes_the_first_of_two_results(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(x: Any, shape: list[int], weight: Any, eps: float) -> tuple[Any, Any]:
        assert shape == [x.shape[-1]]
        inverse = paddle.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return x * inverse * weight, inverse.flatten()

    monkeypatch.setattr(F, "rms_norm", kernel)
    x = paddle.to_tensor(random(2, 3, 8))
    weight = paddle.to_tensor(random(8, seed=1))
    expected = ops.rms_norm(x, weight, 0.01).numpy()
    np.testing.assert_allclose(paddle_kernels.fused_rms_norm(x, weight, 0.01).numpy(), expected, rtol=1e-5)


# products of rows with a matrix each

COUNTS = [([3, 0, 4, 1], 8), ([0, 0, 0, 8], 8), ([5, 1, 0, 0], 9), ([0, 0], 5), ([7], 7), ([1, 1, 1, 1, 1, 1], 6)]
"""Rows of each matrix, and how many rows there are: the last may belong to none."""


@pytest.mark.parametrize(("counts", "num_rows"), COUNTS)
def test_rows_with_a_matrix_each(counts: list[int], num_rows: int) -> None:
    x = random(num_rows, 5)
    weight = random(len(counts), 5, 7, seed=1)
    given = random(num_rows, 7, seed=2)
    expected = [np.zeros([num_rows, 7]), np.zeros_like(x), np.zeros_like(weight)]
    first = 0
    for matrix, count in enumerate(counts):
        rows = slice(first, first + count)
        expected[0][rows] = x[rows] @ weight[matrix]
        expected[1][rows] = given[rows] @ weight[matrix].T
        expected[2][matrix] = x[rows].T @ given[rows]
        first += count
    leaves = [paddle.to_tensor(values, stop_gradient=False) for values in (x, weight)]
    y = expert_ops.grouped_matmul(*leaves, paddle.to_tensor(counts, dtype="int64"))
    y.backward(paddle.to_tensor(given))
    for found, values in zip((y, *(leaf.grad for leaf in leaves)), expected, strict=True):
        np.testing.assert_allclose(found.numpy(), values, rtol=1e-5, atol=1e-6)
