"""One pass of a model over the newest tokens of a batch, and the operations on its cache between passes.

A batch is padded on the left. Its cache is a list of tensors [B, …, S, …]; a column is a position, along the last dim
but one. All tensors have the same columns, so rows can be dropped, reordered and joined whatever a family caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import paddle

from llmsuite.errors import UserError
from llmsuite.inference.fused import accepts_buffer
from llmsuite.models.prefix import behind_padding, prefix_cache
from llmsuite.models.reft import chosen_columns
from llmsuite.models.token_values import tokens as tokens_with
from llmsuite.typing import Tensor

Cache = Sequence[Tensor]
_POSITIONS = 128
"""Positions of a prompt whose logits are in memory at once."""
_FASTER = 4
"""How many times as fast as a pass layer by layer `PromptPass` is, measured with 256 and 1,024 tokens."""
TWICE = 4096
"""Columns with which a token takes twice as long as without any, roughly, where the width of the model is not known."""
_TWICE_OF_WIDTH = 6
"""Times the width D: a layer multiplies a token with about 12 D^2 weights, and with 2 D numbers of each column."""


def piece_length(num_tokens: int, num_rows: int, num_before: int, twice: int = TWICE) -> int:
    """Columns of a piece of prompts that takes as long as so many tokens at their beginning, at least one: with more
    columns before it attention takes longer.

    Args:
        num_tokens: at the beginning.
        num_rows: prompts that are read together.
        num_before: columns that were read.
        twice: columns with which a token takes twice as long.
    """
    return max(1, round(num_tokens // num_rows * twice / (twice + num_before)))


class Decoder(Protocol):
    """The interface of a model for generation, live or exported."""

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and answer together."""

    @property
    def vocab_size(self) -> int: ...

    def forward(self, ids: np.ndarray, padding: np.ndarray, cache: Cache | None) -> tuple[np.ndarray, Cache]:
        """One pass.

        Args:
            ids: [B, L] int64, the tokens behind the cache.
            padding: [B] int64, how many of the first columns are padding.
            cache: the columns before; None at the start.

        Returns:
            Logits [B, V] float32 of the token behind the last column, and the cache with the new columns.
        """


class ModelDecoder:
    """A live model on this device, or this rank's part of one."""

    def __init__(self, model: Any, mesh: Any = None):
        """
        Args:
            model: in evaluation mode.
            mesh: this rank's place, for a model that is sharded over ranks; all of them make the same passes.
        """
        self._model = model
        self._mesh: Any = mesh if mesh is not None and mesh.degrees.pp > 1 else None
        self._tensor_mesh = mesh.tensor if mesh is not None else None
        self._placements: list[Any] = []
        self._accepts_buffer = accepts_buffer(model)
        self._next_logits, self._prompt_pass = (model.__dict__.get(name) for name in ("next_logits", "prompt_pass"))
        self.edited_ends = getattr(model, "edited_ends", None)
        """See `models.reft.add_interventions`."""
        self._cache_dtype = model.__dict__.get("cache_dtype")  # see `fused.fuse`
        self._num_prefix = int(getattr(model, "num_prefix_tokens", 0))
        is_whole = mesh is None or mesh.degrees.tp == mesh.degrees.pp == 1
        self.shares_prefixes = is_whole and self.edited_ends is None and not self._num_prefix
        """Whether keys and values depend on the tokens before them only, and are whole on this device."""
        self.reads_in_pieces = self.edited_ends is None
        """Whether a prompt may be read in several passes: interventions have to know where it ends."""
        if not self.reads_in_pieces or self._num_prefix:
            self._prompt_pass = None
        self.piece_factor = 1 if self._prompt_pass is None else _FASTER
        """How many times as many tokens as layer by layer are read in the same time."""
        self.twice = _TWICE_OF_WIDTH * int(model.config.hidden_size)
        """Columns with which a token takes twice as long as without any."""

    @property
    def max_length(self) -> int:
        return int(self._model.config.max_position_embeddings) - self._num_prefix

    @property
    def vocab_size(self) -> int:
        return int(self._model.config.vocab_size)

    def forward(self, ids: np.ndarray, padding: np.ndarray, cache: Cache | None) -> tuple[np.ndarray, Cache]:
        """See `Decoder`."""
        tokens, padding = paddle.to_tensor(ids), paddle.to_tensor(padding)
        chosen = None
        if self.edited_ends is not None:
            chosen = chosen_columns(padding, ids.shape[1], cache is None, self.edited_ends)
        with paddle.no_grad(), tokens_with(chosen):
            if self._next_logits is not None and cache is not None and ids.shape[1] == 1 and self._accepts_buffer:
                filled, whole = num_columns(cache), _reserve(cache, 1)
                logits = self._next_logits(tokens, padding, whole, filled)
                present: Cache = Columns(whole, filled + 1)
            elif self._mesh is not None:
                logits, present = self._through_stages(tokens, padding, cache)
            else:
                hidden, present = self._states(tokens, padding, cache)
                logits = self._model.logits(hidden[:, -1])
        return self._gathered(logits), present

    def _states(self, tokens: Tensor, padding: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
        """Normed hidden states [B, L, D] of the tokens of a pass, and the cache; arguments as for `forward`."""
        if self._prompt_pass is not None:
            (num_rows, length), filled = tokens.shape, 0 if cache is None else num_columns(cache)
            if cache is None:
                whole = self._prompt_pass.new_cache(num_rows, length + num_spare(length))
            else:
                whole = _reserve(cache, length)
            return self._prompt_pass(tokens, padding, whole, filled), Columns(whole, filled + length)
        if cache is not None and self._accepts_buffer:
            filled, whole = num_columns(cache), _reserve(cache, tokens.shape[1])
            hidden, _ = self._model.decode_step(tokens, padding, _pairs(whole), filled)
            return hidden, Columns(whole, filled + tokens.shape[1])
        pairs = None if cache is None else _pairs(self._distributed(cache))
        begins = cache is None and self._num_prefix > 0
        if begins:
            pairs = prefix_cache(self._model, tokens.shape[0], self._by_heads)
            if self._cache_dtype is not None:
                pairs = [(k.astype(self._cache_dtype), v.astype(self._cache_dtype)) for k, v in pairs]
        hidden, new = self._model.decode_step(tokens, padding, pairs, num_seen=self._num_prefix * begins)
        present: Cache = self._local([tensor for pair in new for tensor in pair])
        if begins:
            present = [behind_padding(tensor, padding, self._num_prefix) for tensor in present]
        return hidden, Columns.of(present) if self._accepts_buffer else present

    def _through_stages(self, tokens: Tensor, padding: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
        """`forward` of a model that is cut into pipeline stages."""
        from llmsuite.inference.stages import through_stages

        pairs, present = None if cache is None else _pairs(self._distributed(cache)), list[Tensor]()
        config, model = self._model.config, self._model

        def own(entering: Tensor | None) -> Tensor:
            hidden, new = model.decode_step(tokens, padding, pairs, entering=self._replicated(entering))
            present.extend(self._local([tensor for pair in new for tensor in pair]))
            if model.model.norm is None:
                return self._whole(hidden)
            return self._whole(model.logits(hidden[:, -1])).astype("float32")[:, : self.vocab_size]

        rows = tokens.shape[0]
        dtype = next(iter(model.parameters())).dtype
        logits = through_stages(self._mesh, own, [*tokens.shape, config.hidden_size], dtype, [rows, self.vocab_size])
        return logits, present

    def _replicated(self, entering: Tensor | None) -> Tensor | None:
        """Hidden states that all tensor parallel ranks have, as a tensor that the model computes with."""
        if entering is None or self._tensor_mesh is None:
            return entering
        import paddle.distributed as dist
        from paddle.distributed.auto_parallel.api import dtensor_from_local

        return dtensor_from_local(entering, self._tensor_mesh, [dist.Replicate()])

    def prompt_logits(self, ids: Sequence[int], num_tokens: int | None = None) -> Iterator[np.ndarray]:
        """Logits behind each token of a text but the last, each a prediction of the next one: those of a piece of the
        text after the other, [L, V] float32. Other passes may be made between two of them.

        Args:
            ids: the text.
            num_tokens: of a piece, at most; never more than are in memory at once.

        Raises:
            UserError: interventions or prefixes edit the model's prompts.
        """
        self.check_plain("echo: with logprobs")
        start, cache = 0, None
        while start < len(ids) - 1:
            columns = min(piece_length(num_tokens or _POSITIONS, 1, start, self.twice), _POSITIONS)
            piece = np.asarray([ids[start : min(start + columns, len(ids) - 1)]], "int64")
            start += columns
            with paddle.no_grad():
                hidden, cache = self._states(paddle.to_tensor(piece), paddle.zeros([1], "int64"), cache)
                found = self._gathered(self._model.logits(hidden[0]))
            yield found

    def check_plain(self, what: str) -> None:
        """Raise UserError for a model that gives nothing but answers; `what` else is asked for."""
        if self.edited_ends is not None or self._num_prefix:
            raise UserError(
                f"{what}: this model has interventions or prefixes, which are for prompts that are answered"
            )
        if self._mesh is not None:
            raise UserError(f"{what}: not of a model on several pipeline stages")

    def embed(self, texts: Sequence[Sequence[int]], num_tokens: int | None = None) -> Iterator[np.ndarray | None]:
        """The mean of the last normed hidden states of the tokens of each text, [B, D] float32, of length 1: read in
        pieces, with None behind each but the last. Other passes may be made between two of them.

        Args:
            texts: token ids.
            num_tokens: of a piece, at most; None for all.

        Raises:
            UserError: interventions or prefixes edit the model's prompts.
        """
        self.check_plain("embeddings")
        length, cache = max(map(len, texts)), None
        padding = np.asarray([length - len(text) for text in texts], "int64")
        ids = np.zeros([len(texts), length], "int64")
        for row, text in zip(ids, texts):
            row[length - len(text) :] = text
        sums: Any = 0.0
        start = 0
        while start < length:
            if start:
                yield None
            columns = length
            if num_tokens is not None:
                columns = piece_length(num_tokens * self.piece_factor, len(texts), start, self.twice)
            piece = paddle.to_tensor(ids[:, start : start + columns])
            with paddle.no_grad():
                hidden, cache = self._states(piece, paddle.to_tensor(padding), cache)
            values = hidden.astype("float32").numpy()
            # without padding, whose states need not be numbers
            sums += np.stack([row[max(0, first - start) :].sum(0, "float64") for row, first in zip(values, padding)])
            start += columns
        lengths = np.linalg.norm(sums, axis=1, keepdims=True)
        yield (sums / np.maximum(lengths, 1e-12)).astype("float32")

    def _distributed(self, cache: Cache) -> Cache:
        if self._tensor_mesh is None:
            return cache
        from paddle.distributed.auto_parallel.api import dtensor_from_local

        return [
            tensor if placements is None else dtensor_from_local(tensor, self._tensor_mesh, placements)
            for tensor, placements in zip(cache, self._placements)
        ]

    def _by_heads(self, local: Tensor) -> Tensor:
        """The keys or values of this rank's heads, [B, J, S, K], as a tensor that the model computes with."""
        if self._tensor_mesh is None:
            return local
        import paddle.distributed as dist
        from paddle.distributed.auto_parallel.api import dtensor_from_local

        return dtensor_from_local(local, self._tensor_mesh, [dist.Shard(1)])

    def _local(self, cache: Cache) -> Cache:
        from llmsuite.parallel.tensor import local_value

        if self._tensor_mesh is not None:
            self._placements = [tensor.placements if tensor.is_dist() else None for tensor in cache]
        return [local_value(tensor) for tensor in cache]

    def _whole(self, tensor: Tensor) -> Tensor:
        """A tensor that is cut over tensor parallel ranks, on each of them."""
        if not tensor.is_dist():
            return tensor
        import paddle.distributed as dist

        return dist.reshard(tensor, self._tensor_mesh, [dist.Replicate()])._local_value()

    def _gathered(self, logits: Tensor) -> np.ndarray:
        logits = self._whole(logits)
        return np.asarray(logits.astype("float32").numpy())[..., : self.vocab_size]  # behind it is padding


def _pairs(cache: Cache) -> list[tuple[Tensor, Tensor]]:
    return list(zip(cache[::2], cache[1::2]))


SPARE = 32
"""Most spare columns of a cache that has some; they cost a little in every pass."""
_LEAST_SPARE = 8


def num_spare(filled: int) -> int:
    """Spare columns of a cache with so many others: 8 to 32, a quarter of those it has."""
    return min(SPARE, max(_LEAST_SPARE, filled // 4))


class Columns(Sequence[Tensor]):
    """A cache with spare columns behind it, which passes fill one after the other: nothing is copied as it grows.

    Its tensors are views of the filled columns, made on access. The spare ones are filled once: a second pass behind
    the same cache gets a copy, so that a column that somebody holds is never overwritten.
    """

    def __init__(self, whole: list[Tensor], filled: int):
        self._whole, self.filled, self._is_continued = whole, filled, False

    @classmethod
    def of(cls, cache: Cache, num_new: int = 0) -> Columns:
        """A copy of a cache with room for new columns, and spare ones."""
        filled = num_columns(cache)
        # more pieces of a prompt may follow one: a copy for each would cost more than they do
        count = num_new + (filled // 2 if num_new > SPARE else num_spare(filled))
        return cls([_with_spare_columns(tensor, count) for tensor in cache], filled)

    def reserve(self, num_new: int) -> list[Tensor] | None:
        """All columns, of which those behind `filled` may be written now; None where that is not so."""
        if self._is_continued or self.filled + num_new > num_columns(self._whole):
            return None
        self._is_continued = True
        return self._whole

    def keep_rows(self, index: Tensor, first_column: int) -> Columns:
        """See the function."""
        tensors = [tensor[..., first_column:, :] for tensor in self._whole] if first_column else self._whole
        return Columns([paddle.index_select(tensor, index, 0) for tensor in tensors], self.filled - first_column)

    def __len__(self) -> int:
        return len(self._whole)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        return self._whole[number][..., : self.filled, :]


def _reserve(cache: Cache, num_new: int) -> list[Tensor]:
    """Tensors with `cache` in front and room for new columns behind."""
    whole = cache.reserve(num_new) if isinstance(cache, Columns) else None
    if whole is None:
        whole = Columns.of(cache, num_new).reserve(num_new)
    assert whole is not None
    return whole


def _with_spare_columns(tensor: Tensor, count: int) -> Tensor:
    return paddle.concat([tensor, paddle.zeros([*tensor.shape[:-2], count, tensor.shape[-1]], tensor.dtype)], -2)


@runtime_checkable
class Spread(Protocol):
    """A cache that others have a part of, and that is changed with theirs."""

    def keep_rows(self, rows: Sequence[int], first_column: int) -> Cache:
        """See `keep_rows`."""

    def join(self, other: Any) -> Cache:
        """See `join`."""


def keep_rows(cache: Cache, rows: Sequence[int], first_column: int = 0) -> Cache:
    """The cache of some rows, in this order, from `first_column` on: what is before is padding in all of them."""
    if isinstance(cache, Spread):
        return cache.keep_rows(rows, first_column)
    index = paddle.to_tensor(np.asarray(rows, "int64"))
    if isinstance(cache, Columns):
        return cache.keep_rows(index, first_column)
    if first_column:
        cache = [tensor[..., first_column:, :] for tensor in cache]
    return [paddle.index_select(tensor, index, 0) for tensor in cache]


def num_columns(cache: Cache) -> int:
    """Number of columns of a cache."""
    return cache.filled if isinstance(cache, Columns) else int(cache[0].shape[-2])


def join(first: Cache, second: Cache) -> Cache:
    """Two caches as one; the shorter gets padding on the left."""
    if isinstance(first, Spread):
        return first.join(second)
    length = max(num_columns(first), num_columns(second))
    return [paddle.concat([pad_to(a, length), pad_to(b, length)]) for a, b in zip(first, second)]


def pad_to(tensor: Tensor, length: int) -> Tensor:
    """A tensor of a cache with so many columns, padded on the left."""
    missing = length - tensor.shape[-2]
    if not missing:
        return tensor
    return paddle.concat([paddle.zeros([*tensor.shape[:-2], missing, tensor.shape[-1]], tensor.dtype), tensor], -2)
