"""A sparse gradient for a tied embedding, whose weight makes the logits too: one row for each token of a pass.

A dense one is as large as the embedding and almost all zeros. It would be made at the end of the backward pass, when
all other gradients have their memory, and added to the gradient that the weight has from the logits. Rows are added to
that one in place, on devices whose Paddle can (`DeviceBackend.adds_sparse_rows`).
"""

from __future__ import annotations

import functools

import paddle
import paddle.nn.functional as F
from paddle import nn

from llmsuite.typing import Tensor


def use_sparse_gradient(embedding: nn.Layer) -> None:
    """Let the gradient of an embedding be rows [N, D], of the N tokens of a pass. One with an adapter, or in 16 bits,
    stays as it is."""
    is_plain = type(embedding) is nn.Embedding and "forward" not in vars(embedding)
    if is_plain and embedding.weight.dtype == paddle.float32:
        embedding.__dict__["forward"] = functools.partial(_look_up, embedding)


def _look_up(embedding: nn.Embedding, input_ids: Tensor) -> Tensor:
    """Ids [B, L] to rows [B, L, D]."""
    return F.embedding(input_ids, embedding.weight, sparse=paddle.in_dynamic_mode())


def dense_gradient(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A sparse gradient as a dense one [V, D], with zeros between its rows; a dense one as it is. Sparse is that of a
    tied embedding where the loss depends on no logits; under sharding stage 3 the parameter may have been freed."""
    if not gradient.is_selected_rows():
        return gradient
    rows = gradient.get_selected_rows()
    values = gradient._get_tensor_from_selected_rows()
    zeros = paddle.zeros(parameter.shape, parameter.dtype)
    return paddle.scatter_nd_add(zeros, paddle.to_tensor(rows.rows()).unsqueeze(-1), values)
