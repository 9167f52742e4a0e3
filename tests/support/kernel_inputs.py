"""Inputs of kernels, and how their outputs are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import paddle

from llmsuite.devices import masks

Tensor = Any
LIMIT = 1e-6
"""Limit of the largest difference, relative to the largest value."""


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.Generator(np.random.Philox(seed)).standard_normal(shape).astype("float32")


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype("float32")


def leaf(values: np.ndarray) -> Tensor:
    tensor = paddle.to_tensor(values)
    tensor.stop_gradient = False
    return tensor


def with_gradients(function: Callable[..., Tensor], inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    leaves = [leaf(values) for values in inputs]
    output = function(*leaves)
    (output * paddle.to_tensor(rounded(random(*output.shape, seed=9)))).sum().backward()
    return [output.numpy(), *(tensor.grad.numpy() for tensor in leaves)]


def check_equal(
    found: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: np.ndarray, limit: float = LIMIT
) -> None:
    for mine, expected in zip(with_gradients(found, inputs), with_gradients(plain, inputs), strict=True):
        assert mine.shape == expected.shape
        assert np.abs(mine - expected).max() <= limit * np.abs(expected).max()


HEADS = [(4, 4, 8), (6, 2, 16), (3, 1, 10)]
"""Query heads, key-value heads, size."""


ROWS_OF_DOCUMENTS = {
    "documents": [[(70, 0), (50, 70), (30, -1)], [(3, 0), (147, 3)]],  # -1: padding that is marked
    # a prompt of 20 and answers of 60, 40 and 30; padding
    "a prompt of three": [[(80, 0), (40, 60), (30, 100)], [(150, 0)]],
    # the second answer is in a block with the first one, or far from the prompt; then another prompt with two answers
    "two prompts": [[(40, 0), (20, 10), (5, 60), (70, 62), (15, 132)], [(130, 0), (20, 65)]],
}
"""The parts of each row: how long they are, and where what they belong to begins."""


def check_cached_attention(cached: Any, whole: Any, heads: tuple[int, int, int], name: str, limit: float) -> None:
    """The output for the last queries is that of all queries in one pass, though keys are read where a cache with free
    columns has them."""
    num_queries, num_keys, size = heads
    lengths, begins = zip(*(zip(*row) for row in ROWS_OF_DOCUMENTS[name]))
    spans = masks.document_spans(paddle.to_tensor(np.stack([np.repeat(*row) for row in zip(begins, lengths)])))
    length = spans.shape[2]
    q = paddle.to_tensor(random(2, length, num_queries, size, seed=1))
    keys, values = (paddle.to_tensor(random(2, num_keys, length + 9, size, seed=seed)) for seed in (2, 3))
    seen = [part[:, :, :length] for part in (keys, values)]
    expected = whole(q, *(part.transpose([0, 2, 1, 3]) for part in seen), spans).numpy()
    for count in (1, 63, 64, 100, length):
        found = cached(q[:, -count:], keys, values, spans[:, :, -count:], length).numpy()
        assert np.abs(found - expected[:, -count:]).max() <= limit * np.abs(expected).max(), count
