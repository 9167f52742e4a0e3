"""A sparse gradient for a tied embedding, whose weight also makes the logits: one row for each token of a pass.

A dense one is as large as the embedding and almost all zeros. It would be made at the end of the backward pass, when
all other gradients have their memory, and added to the gradient that the weight has from the logits. Rows are added to
that one in place, on devices whose Paddle can (`DeviceBackend.adds_sparse_gradients`).
"""

from __future__ import annotations

from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import nn

from llmsuite.base.typing import Tensor
from llmsuite.devices.tensors import tensor_of
from llmsuite.models.embedding import is_plain_embedding, set_lookup


def use_sparse_gradient(model: nn.Layer, name: str) -> None:
    """Make the gradient of the embedding `name` of a model sparse: rows [N, D] of the N tokens of a pass. An embedding
    with an adapter, with a forward pass of its own, or in 16 bits, does not change."""
    embedding: Any = dict(model.named_sublayers())[name]
    if is_plain_embedding(embedding) and embedding.weight.dtype == paddle.float32:
        set_lookup(model, name, _rows_with_sparse_gradient, "model.tie_word_embeddings")


def _rows_with_sparse_gradient(input_ids: Tensor, table: Tensor) -> Tensor:
    """Ids [B, L] to rows [B, L, D] of a table [V, D]."""
    return F.embedding(input_ids, table, sparse=paddle.in_dynamic_mode())


def dense_gradient(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient as a dense tensor [V, D]. It is sparse for a tied embedding where the loss depends on no logits;
    under sharding stage 3 the parameter may have been freed, so only its shape and dtype are used."""
    if not gradient.is_selected_rows():
        return gradient
    rows = gradient.get_selected_rows()
    values = gradient._get_tensor_from_selected_rows()
    zeros = paddle.zeros(parameter.shape, parameter.dtype)
    return paddle.scatter_nd_add(zeros, tensor_of(rows.rows()).unsqueeze(-1), values)
