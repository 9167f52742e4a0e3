"""The gradient of an embedding that logits are made with, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from llmsuite.parallel.tied import dense_gradient, use_sparse_gradient

IDS = [[3, 1, 3], [0, 3, 4]]


def made() -> tuple[Any, Any]:
    """A model of one embedding, and the embedding."""
    embedding = nn.Embedding(7, 4)
    return nn.LayerList([embedding]), embedding


def gradient(is_sparse: bool, uses_head: bool, passes: int) -> Any:
    paddle.seed(0)
    model, embedding = made()
    if is_sparse:
        use_sparse_gradient(model, "0")
        (embedding,) = model
    for _ in range(passes):
        hidden = embedding(paddle.to_tensor(IDS)).tanh()
        logits = paddle.matmul(hidden, embedding.weight, transpose_y=True) if uses_head else hidden
        (logits * paddle.arange(logits.shape[-1], dtype="float32")).sum().backward()
    found = embedding.weight.grad
    assert found.is_selected_rows() is (is_sparse and not uses_head)
    return dense_gradient(found, embedding.weight).numpy()


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("uses_head", [True, False])
def test_the_gradient_is_the_same(uses_head: bool, passes: int) -> None:
    expected, found = (gradient(is_sparse, uses_head, passes) for is_sparse in (False, True))
    assert found.shape == (7, 4)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_a_freed_embedding_has_one() -> None:
    """Such as under sharding stage 3, where it is gathered for the forward pass only if no logits are made with it."""
    model, _ = made()
    use_sparse_gradient(model, "0")
    (embedding,) = model
    embedding(paddle.to_tensor(IDS)).sum().backward()
    embedding.weight.get_tensor()._clear()
    found = dense_gradient(embedding.weight.grad, embedding.weight).numpy()
    assert np.array_equal(found, np.outer([1, 1, 0, 3, 1, 0, 0], np.ones(4)))


def test_a_frozen_embedding_has_none() -> None:
    model, embedding = made()
    embedding.weight.stop_gradient = True
    use_sparse_gradient(model, "0")
    (embedding,) = model
    assert embedding(paddle.to_tensor(IDS)).stop_gradient
