"""A sparse gradient for an embedding with whose weight the logits are made, too: rows of the tokens of a pass.

A dense one is as large as the embedding and almost all zeros, and is made and added to the gradient of the head at the
end of the backward pass, when all other gradients have their memory. Paddle adds rows to the head's in place.
"""

from __future__ import annotations

import functools

import paddle
import paddle.nn.functional as F
from paddle import nn

from llmsuite.typing import Tensor


def use_sparse_gradient(embedding: nn.Layer) -> None:
    """Let the gradient of an embedding be rows [N, D], of the N tokens of a pass. One with an adapter stays as it is,
    and those of other devices than the CPU: Paddle 3.3.1 adds rows to a gradient on some of them only."""
    if type(embedding) is nn.Embedding and embedding.weight.dtype == paddle.float32 and paddle.get_device() == "cpu":
        embedding.__dict__["forward"] = functools.partial(_look_up, embedding)


def _look_up(embedding: nn.Embedding, input_ids: Tensor) -> Tensor:
    """Ids [B, L] to rows [B, L, D]."""
    return F.embedding(input_ids, embedding.weight, sparse=paddle.in_dynamic_mode())


def dense_gradient(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient [V, D] of rows alone, which a parameter has where the loss depends on no logits, with zeros between
    them; any other as it is."""
    if not gradient.is_selected_rows():
        return gradient
    rows = gradient.get_selected_rows()
    values = gradient._get_tensor_from_selected_rows()
    return paddle.scatter_nd_add(paddle.zeros_like(parameter), paddle.to_tensor(rows.rows()).unsqueeze(-1), values)
