"""Greedy decoding as one static program that includes the loop."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn
from paddle.static import InputSpec

from llmsuite.base.typing import Tensor
from llmsuite.models.blocks import dim_size

SPEC = [
    InputSpec([None, None], "int64", "input_ids"),
    InputSpec([None], "int64", "padding"),
    InputSpec([1], "int64", "max_new_tokens"),
    InputSpec([None], "int64", "stop_ids"),
]


class GreedyLoop(nn.Layer):
    """Greedy decoding of a batch, which becomes the program."""

    def __init__(self, model: Any, cache_shapes: list[list[int]], dtype: str):
        """`cache_shapes` and `dtype` as in `llmsuite.inference.export_manifest.ExportManifest`."""
        super().__init__()
        self.model = model
        self._cache_shapes = cache_shapes
        self._dtype = dtype

    def forward(self, input_ids: Tensor, padding: Tensor, max_new_tokens: Tensor, stop_ids: Tensor) -> Tensor:
        """Decode the most likely tokens, one after the other.

        Args:
            input_ids: [B, L], padded on the left.
            padding: [B], number of padding positions at the beginning of each row.
            max_new_tokens: [1], at least 1.
            stop_ids: [N], at least one; -1 for none.

        Returns:
            [B, n]: the new tokens, until each row has a stop token or there are max_new_tokens of them. A finished row
            repeats its stop token.
        """

        def choose(hidden: Tensor) -> Tensor:
            return self.model.logits(hidden[:, -1]).argmax(-1, keepdim=True)

        def ends(token: Tensor) -> Tensor:
            return (token == stop_ids.unsqueeze(0)).any(-1, keepdim=True)

        def is_unfinished(count: Tensor, token: Tensor, found: Tensor, ended: Tensor, *cache: Tensor) -> Tensor:
            return paddle.logical_and(count < max_new_tokens, paddle.logical_not(ended.all())).squeeze()

        def step(count: Tensor, token: Tensor, found: Tensor, ended: Tensor, *cache: Tensor) -> list[Tensor]:
            hidden, present = self.model.decode_step(token, padding, list(zip(cache[::2], cache[1::2])))
            token = paddle.where(ended, token, choose(hidden))
            ended = paddle.logical_or(ended, ends(token))
            return [count + 1, token, paddle.concat([found, token], 1), ended, *_flat(present)]

        rows = dim_size(input_ids, 0)
        empty = [paddle.zeros([rows, *shape], self._dtype) for shape in self._cache_shapes]
        hidden, present = self.model.decode_step(input_ids, padding, list(zip(empty[::2], empty[1::2])))
        token = choose(hidden)
        state = [paddle.ones([1], "int64"), token, token, ends(token), *_flat(present)]
        return paddle.static.nn.while_loop(is_unfinished, step, state)[2]


def _flat(cache: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [tensor for pair in cache for tensor in pair]
