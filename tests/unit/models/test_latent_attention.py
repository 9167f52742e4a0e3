"""Latent attention by a device's attention is the formula: heads of two parts, one rotated key, values of any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from llmsuite.devices.masks import causal_mask, document_mask
from llmsuite.devices.ops import Ops
from llmsuite.inference.attention import with_cached_attention
from llmsuite.models.latent_attention import absorbed_attention, latent_attention, up_matrices
from llmsuite.plugins.cpu_kernels import kernels

Tensor = Any
ROWS = 2
LENGTH = 70
HEADS = 3
NOPE = 16
ROPE = 8
STARTS = [[0] * 30 + [30] * 40, [0] * 70]
FORMS = {
    "plain": Ops(),
    "kernel": Ops(kernels.no_mask, kernels.spans, kernels.attention),
    "bf16 kernel": Ops(kernels.no_mask, kernels.spans, kernels.bf16_attention),
    "generation": with_cached_attention(Ops()),
}


def _formula(q_nope: Tensor, q_rope: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = paddle.einsum("blhk,bshk->bhls", q_nope, k_nope) + paddle.einsum("blhk,bsk->bhls", q_rope, k_rope[:, :, 0])
    weights = F.softmax(scores * (NOPE + ROPE) ** -0.5 + mask, -1)
    return paddle.einsum("bhls,bshv->blhv", weights, v)


def _with_gradients(attend: Callable[..., Tensor], value: int) -> list[np.ndarray]:
    paddle.seed(value)
    sizes = ((HEADS, NOPE), (HEADS, ROPE), (HEADS, NOPE), (1, ROPE), (HEADS, value))
    given = [paddle.randn([ROWS, LENGTH, *size]) for size in sizes]
    for x in given:
        x.stop_gradient = False
    output = attend(*given)
    (output * paddle.randn(output.shape)).sum().backward()
    return [output.numpy(), *(x.grad.numpy() for x in given)]


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "several"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [NOPE, NOPE + ROPE, 40], ids=["smaller values", "equal", "larger"])
def test_outputs_and_gradients_are_those_of_the_formula(value: int, form: str, documents: bool) -> None:
    kernels.load()
    ops = FORMS[form]
    starts = paddle.to_tensor(STARTS)
    masks = [
        document(starts, paddle.float32) if documents else causal(LENGTH, LENGTH, paddle.float32)
        for document, causal in ((ops.document_mask, ops.causal_mask), (document_mask, causal_mask))
    ]
    found = _with_gradients(lambda *given: latent_attention(ops, *given, masks[0]), value)
    expected = _with_gradients(lambda *given: _formula(*given, masks[1]), value)
    # bfloat16 keeps 8 bits of each factor; four rounded factors meet in a gradient
    limit = 4 * 2**-8 if form == "bf16 kernel" else 2e-6
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape
        assert np.abs(mine - theirs).max() <= limit * np.abs(theirs).max()


@pytest.mark.parametrize("value", [NOPE, 40])
@pytest.mark.parametrize("num_new", [1, 5])
def test_a_few_queries_attend_to_compressed_keys_as_to_whole_ones(num_new: int, value: int) -> None:
    paddle.seed(num_new)
    rank = 12
    ops = FORMS["generation"]
    latent = paddle.randn([ROWS, LENGTH, rank])
    k_rope = paddle.randn([ROWS, LENGTH, ROPE])
    up = paddle.randn([rank, HEADS * (NOPE + value)])
    of_keys, of_values = up.reshape([rank, HEADS, -1]).split([NOPE, value], -1)
    q_nope, q_rope = (paddle.randn([ROWS, num_new, HEADS, size]) for size in (NOPE, ROPE))
    mask = causal_mask(num_new, LENGTH, "float32")
    k_nope, v = (paddle.einsum("bsc,chn->bshn", latent, matrix) for matrix in (of_keys, of_values))
    expected = latent_attention(ops, q_nope, q_rope, k_nope, k_rope.unsqueeze(2), v, mask)
    found = absorbed_attention(ops, q_nope, q_rope, latent, k_rope, *up_matrices(up, rank, [NOPE, value]), mask)
    assert float((found - expected).abs().max()) < 2e-6 * float(expected.abs().max())
