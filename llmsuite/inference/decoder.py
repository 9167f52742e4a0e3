"""One pass of a model over the newest tokens of a batch, and what is done to its cache between passes.

A batch is padded on the left. Its cache is a list of tensors [B, …, S, …], their columns the last dim but one and the
same in each of them, so that rows can be taken out, reordered and joined whatever a family keeps in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import paddle

Tensor = Any
Cache = list[Tensor]


class Decoder(Protocol):
    """What generation asks of a model, live or exported."""

    @property
    def max_length(self) -> int:
        """Tokens of prompt and answer together."""

    @property
    def vocab_size(self) -> int: ...

    def forward(self, ids: np.ndarray, padding: np.ndarray, cache: Cache | None) -> tuple[np.ndarray, Cache]:
        """One pass.

        Args:
            ids: [B, L] int64, what follows the cache.
            padding: [B] int64, how many of the first columns are padding.
            cache: of the columns before; None at the start.

        Returns:
            Logits [B, V] float32 of what follows the last column, and the cache with the new columns.
        """


class ModelDecoder:
    """A live model on this device, or this rank's part of one."""

    def __init__(
        self,
        model: Any,
        autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        mesh: Any = None,
    ):
        """
        Args:
            model: in evaluation mode.
            autocast: makes the context of a pass.
            mesh: this rank's place, for a model that is cut over ranks; all of them make the same passes.
        """
        self._model, self._autocast = model, autocast
        self._tensor_mesh = mesh.tensor if mesh is not None else None
        self._placements: list[Any] = []

    @property
    def max_length(self) -> int:
        return int(self._model.config.max_position_embeddings)

    @property
    def vocab_size(self) -> int:
        return int(self._model.config.vocab_size)

    def forward(self, ids: np.ndarray, padding: np.ndarray, cache: Cache | None) -> tuple[np.ndarray, Cache]:
        """See `Decoder`."""
        pairs = None
        if cache is not None:
            whole = self._distributed(cache)
            pairs = list(zip(whole[::2], whole[1::2]))
        with paddle.no_grad(), self._autocast():
            hidden, present = self._model.go_on(paddle.to_tensor(ids), paddle.to_tensor(padding), pairs)
            logits = self._model.logits(hidden[:, -1])
        return self._gathered(logits), self._local([tensor for pair in present for tensor in pair])

    def _distributed(self, cache: Cache) -> Cache:
        if self._tensor_mesh is None:
            return cache
        from paddle.distributed.auto_parallel.api import dtensor_from_local

        return [
            tensor if placements is None else dtensor_from_local(tensor, self._tensor_mesh, placements)
            for tensor, placements in zip(cache, self._placements)
        ]

    def _local(self, cache: Cache) -> Cache:
        from llmsuite.engine.parallelize import local_value

        if self._tensor_mesh is not None:
            self._placements = [tensor.placements if tensor.is_dist() else None for tensor in cache]
        return [local_value(tensor) for tensor in cache]

    def _gathered(self, logits: Tensor) -> np.ndarray:
        if logits.is_dist():
            import paddle.distributed as dist

            logits = dist.reshard(logits, self._tensor_mesh, [dist.Replicate()])._local_value()
        return np.asarray(logits.astype("float32").numpy())


class Uncached:
    """A decoder that reads the whole text again in every pass; its cache is the text."""

    def __init__(self, decoder: Decoder):
        self._decoder = decoder

    @property
    def max_length(self) -> int:
        return self._decoder.max_length

    @property
    def vocab_size(self) -> int:
        return self._decoder.vocab_size

    def forward(self, ids: np.ndarray, padding: np.ndarray, cache: Cache | None) -> tuple[np.ndarray, Cache]:
        """See `Decoder`."""
        text = paddle.to_tensor(ids).unsqueeze(-1)
        if cache is not None:
            text = paddle.concat([cache[0], text], 1)
        return self._decoder.forward(text.squeeze(-1).numpy(), padding, None)[0], [text]


def keep_rows(cache: Cache, rows: Sequence[int], first_column: int = 0) -> Cache:
    """The cache of some rows, in this order, without the columns before one that are padding in all of them."""
    index = paddle.to_tensor(np.asarray(rows, "int64"))
    if first_column:
        cache = [tensor[..., first_column:, :] for tensor in cache]
    return [paddle.index_select(tensor, index, 0) for tensor in cache]


def num_columns(cache: Cache) -> int:
    """How long it is."""
    return int(cache[0].shape[-2])


def join(first: Cache, second: Cache) -> Cache:
    """Two caches as one; the shorter gets padding on the left."""
    length = max(num_columns(first), num_columns(second))
    return [paddle.concat([_pad_to(a, length), _pad_to(b, length)]) for a, b in zip(first, second)]


def _pad_to(tensor: Tensor, length: int) -> Tensor:
    missing = length - tensor.shape[-2]
    if not missing:
        return tensor
    return paddle.concat([paddle.zeros([*tensor.shape[:-2], missing, tensor.shape[-1]], tensor.dtype), tensor], -2)
