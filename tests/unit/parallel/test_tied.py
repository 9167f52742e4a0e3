"""The gradient of an embedding that logits are made with, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from llmsuite.parallel.tied import add_rows, whole_gradient

IDS = [[3, 1, 3], [0, 3, 4]]


def gradient(rows_only: bool, uses_head: bool, passes: int) -> Any:
    paddle.seed(0)
    embedding = nn.Embedding(7, 4)
    if rows_only:
        add_rows(embedding)
    for _ in range(passes):
        hidden = embedding(paddle.to_tensor(IDS)).tanh()
        logits = paddle.matmul(hidden, embedding.weight, transpose_y=True) if uses_head else hidden
        (logits * paddle.arange(logits.shape[-1], dtype="float32")).sum().backward()
    found = embedding.weight.grad
    assert found.is_selected_rows() is (rows_only and not uses_head)
    return whole_gradient(found, embedding.weight).numpy()


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("uses_head", [True, False])
def test_the_gradient_is_the_same(uses_head: bool, passes: int) -> None:
    expected, found = (gradient(rows_only, uses_head, passes) for rows_only in (False, True))
    assert found.shape == (7, 4)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_a_frozen_embedding_has_none() -> None:
    embedding = nn.Embedding(7, 4)
    embedding.weight.stop_gradient = True
    add_rows(embedding)
    assert embedding(paddle.to_tensor(IDS)).stop_gradient
