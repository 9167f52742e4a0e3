"""One pass of a model over the newest tokens of a batch, and the operations on its cache between passes.

A batch is padded on the left. Its cache is a list of tensors [B, …, S, …]; the last dim but one is that of positions,
padding included. All tensors have the same positions, so rows can be removed, reordered and joined whatever a family
caches. Only the states of linear attention, [B, …], have no positions (`StateCache`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import paddle

from llmsuite.adapters.layers.prefix import move_prefix_after_padding, prefix_cache
from llmsuite.adapters.layers.reft import chosen_columns
from llmsuite.base.errors import UserError
from llmsuite.base.typing import Tensor
from llmsuite.devices.tensors import tensor_of
from llmsuite.models.blocks import keeps_state
from llmsuite.models.token_context import tokens as tokens_with

Cache = Sequence[Tensor]
_LOGITS_CHUNK = 128
"""Most positions of a prompt whose logits are in memory together."""
_PREFILL_SPEEDUP = 4
"""Speed of `FusedPrefill` relative to a pass layer by layer, measured with 256 and 1,024 tokens."""
DOUBLE_COST_LEN = 4096
"""Cache length with which a token takes roughly twice as long as without a cache, where the width of the model is not
known."""
_FEWEST_TOKENS = 16
"""Tokens of the shortest chunk: fewer take as long. Measured with 14,000 positions of 128 numbers, where a pass over 2
tokens takes as long as one over 16."""
_DOUBLE_COST_PER_WIDTH = 6
"""Times the width D: a layer multiplies a token with about 12 D^2 weights, and with 2 D numbers of each position."""


def chunk_length(num_tokens: int, num_rows: int, num_before: int, double_cost_len: int = DOUBLE_COST_LEN) -> int:
    """Positions of the next chunk of prompts, at least one. The chunk takes as long as `num_tokens` at the beginning of
    the prompts: the more positions were read before, the longer attention takes. But it has at least `_FEWEST_TOKENS`
    (or `num_tokens`, if that is less): a pass reads the cache once, for however few tokens, which takes as long.

    Args:
        num_tokens: of a chunk at the beginning.
        num_rows: prompts that are read together.
        num_before: positions that were read.
        double_cost_len: cache length with which a token takes twice as long.
    """
    least = min(_FEWEST_TOKENS, num_tokens) // num_rows
    return max(1, least, round(num_tokens // num_rows * double_cost_len / (double_cost_len + num_before)))


ChunkTokens = int | Callable[[], int] | None
"""Most tokens of a chunk, or a function that returns them for the next one; None for any number."""


def next_chunk(num_tokens: ChunkTokens) -> int | None:
    """Return the most tokens of the next chunk; None for any number."""
    return num_tokens() if callable(num_tokens) else num_tokens


@dataclasses.dataclass(frozen=True)
class DecoderTraits:
    """The properties of a decoder that decide how prompts are read with it."""

    supports_prefix_cache: bool = False
    """True where keys and values depend on earlier tokens only, and this device has all heads."""
    supports_chunked_prefill: bool = True
    """True where a prompt may be read in several passes: interventions have to know where it ends."""
    prefill_speedup: int = 1
    """Tokens that are read in the time of one token of a pass layer by layer."""
    double_cost_len: int = DOUBLE_COST_LEN
    """Cache length with which a token takes twice as long as without a cache."""


class Decoder(Protocol):
    """The interface of a model for generation, live or exported."""

    @property
    def traits(self) -> DecoderTraits: ...

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and answer together."""

    @property
    def vocab_size(self) -> int: ...

    def forward(self, ids: np.ndarray, padding: np.ndarray, cache: Cache | None) -> tuple[np.ndarray, Cache]:
        """Make one pass.

        Args:
            ids: [B, L] int64, the tokens that follow the cache.
            padding: [B] int64, number of padding positions at the beginning of each row.
            cache: of the positions before; None at the start.

        Returns:
            Logits [B, V] float32 of the token after the last position, and the cache with the new positions.
        """


@runtime_checkable
class PromptDecoder(Protocol):
    """The interface of a decoder that also has the logits of the tokens of a text."""

    def prompt_logits(self, ids: Sequence[int], num_tokens: ChunkTokens = None) -> Iterator[np.ndarray]:
        """Yield the logits of each token of a text but the last, chunk by chunk, see `ModelDecoder.prompt_logits`."""


class ModelDecoder:
    """A live model on this device, or this rank's shard of one."""

    def __init__(self, model: Any, mesh: Any = None):
        """
        Args:
            model: in evaluation mode.
            mesh: this rank's coordinates, for a model that is sharded over ranks; all ranks make the same passes.
        """
        self._model = model
        self._mesh: Any = mesh if mesh is not None and mesh.degrees.pp > 1 else None
        self._tensor_mesh = mesh.tensor if mesh is not None else None
        self._placements: list[Any] = []
        self._accepts_buffer = model.decoding.accepts_buffer
        self._next_logits = model.decoding.next_logits
        self._prefill = model.decoding.prefill
        self.edited_ends = model.edited_ends
        """The `edited_ends` of `adapters.layers.reft.add_interventions`; None without interventions."""
        self._cache_dtype = model.decoding.cache_dtype
        self._states = states_of(model)
        self._num_prefix = model.num_prefix_tokens
        is_unsharded = mesh is None or mesh.degrees.tp == mesh.degrees.pp == 1
        edits_prompts = self.edited_ends is not None or self._num_prefix > 0
        if edits_prompts:
            self._prefill = None
        self.traits = DecoderTraits(
            supports_prefix_cache=is_unsharded and not edits_prompts and not self._states,
            supports_chunked_prefill=self.edited_ends is None,
            prefill_speedup=1 if self._prefill is None else _PREFILL_SPEEDUP,
            double_cost_len=_DOUBLE_COST_PER_WIDTH * int(model.config.hidden_size),
        )

    @property
    def max_length(self) -> int:
        return int(self._model.config.max_position_embeddings) - self._num_prefix

    @property
    def vocab_size(self) -> int:
        return int(self._model.config.vocab_size)

    def forward(self, ids: np.ndarray, padding: np.ndarray, cache: Cache | None) -> tuple[np.ndarray, Cache]:
        """Make one pass, see `Decoder.forward`."""
        tokens = tensor_of(ids)
        padding = tensor_of(padding)
        chosen = None
        if self.edited_ends is not None:
            chosen = chosen_columns(padding, ids.shape[1], cache is None, self.edited_ends)
        with paddle.no_grad(), tokens_with(chosen):
            if self._next_logits is not None and cache is not None and ids.shape[1] == 1 and self._accepts_buffer:
                filled = cache_len(cache)
                buffers = _reserve(cache, 1)
                logits = self._next_logits(tokens, padding, buffers, filled)
                present: Cache = KVCache(buffers, filled + 1)
            elif self._mesh is not None:
                logits, present = self._through_stages(tokens, padding, cache)
            else:
                hidden, present = self._hidden_states(tokens, padding, cache)
                logits = self._model.logits(hidden[:, -1])
        return self._as_numpy(logits), present

    def _hidden_states(self, tokens: Tensor, padding: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
        """Normed hidden states [B, L, D] of the tokens of a pass, and the cache; arguments as for `forward`."""
        if self._prefill is not None:
            num_rows, length = tokens.shape
            if cache is None:
                filled = 0
                buffers = self._prefill.new_cache(num_rows, length + num_spare(length))
            else:
                filled = cache_len(cache)
                buffers = _reserve(cache, length)
            return self._prefill(tokens, padding, buffers, filled), KVCache(buffers, filled + length)
        if cache is not None and self._accepts_buffer:
            filled = cache_len(cache)
            buffers = _reserve(cache, tokens.shape[1])
            hidden, _ = self._model.decode_step(tokens, padding, _pairs(buffers), filled)
            return hidden, KVCache(buffers, filled + tokens.shape[1])
        pairs = None if cache is None else _pairs(self._distributed(cache))
        begins = cache is None and self._num_prefix > 0
        if begins:
            pairs = prefix_cache(self._model, tokens.shape[0], self._by_heads)
            if self._cache_dtype is not None:
                pairs = [(k.astype(self._cache_dtype), v.astype(self._cache_dtype)) for k, v in pairs]
        hidden, new = self._model.decode_step(tokens, padding, pairs, prefix_len=self._num_prefix * begins)
        present: Cache = self._local([tensor for pair in new for tensor in pair])
        if begins:
            present = [move_prefix_after_padding(tensor, padding, self._num_prefix) for tensor in present]
        if self._states:
            return hidden, StateCache(present, self._states)
        return hidden, KVCache.of(present) if self._accepts_buffer else present

    def _through_stages(self, tokens: Tensor, padding: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
        """The pass of a model that is cut into pipeline stages."""
        from llmsuite.inference.stages import run_stages

        pairs = None if cache is None else _pairs(self._distributed(cache))
        present = list[Tensor]()
        config = self._model.config
        model = self._model

        def own(stage_input: Tensor | None) -> Tensor:
            hidden, new = model.decode_step(tokens, padding, pairs, stage_input=self._replicated(stage_input))
            present.extend(self._local([tensor for pair in new for tensor in pair]))
            if model.model.norm is None:
                return self._gather(hidden)
            return self._gather(model.logits(hidden[:, -1])).astype("float32")[:, : self.vocab_size]

        rows = tokens.shape[0]
        dtype = next(iter(model.parameters())).dtype
        logits = run_stages(self._mesh, own, [*tokens.shape, config.hidden_size], dtype, [rows, self.vocab_size])
        return logits, StateCache(present, self._states) if self._states else present

    def _replicated(self, stage_input: Tensor | None) -> Tensor | None:
        """Hidden states that all tensor parallel ranks have, as a distributed tensor."""
        if stage_input is None or self._tensor_mesh is None:
            return stage_input
        import paddle.distributed as dist
        from paddle.distributed.auto_parallel.api import dtensor_from_local

        return dtensor_from_local(stage_input, self._tensor_mesh, [dist.Replicate()])

    def prompt_logits(self, ids: Sequence[int], num_tokens: ChunkTokens = None) -> Iterator[np.ndarray]:
        """Yield the logits of each token of a text but the last, each a prediction of the next one, chunk by chunk:
        [L, V] float32. Other passes may be made between two chunks.

        Args:
            ids: token ids of the text.
            num_tokens: most tokens of a chunk, or a function that returns them for the next one; None for as many
                logits as are in memory together.

        Raises:
            UserError: interventions or prefixes edit the model's prompts.
        """
        self.check_supports("echo: with logprobs")
        start = 0
        cache = None
        while start < len(ids) - 1:
            most = next_chunk(num_tokens) or _LOGITS_CHUNK
            size = min(chunk_length(most, 1, start, self.traits.double_cost_len), _LOGITS_CHUNK)
            chunk = np.asarray([ids[start : min(start + size, len(ids) - 1)]], "int64")
            start += size
            with paddle.no_grad():
                hidden, cache = self._hidden_states(tensor_of(chunk), paddle.zeros([1], "int64"), cache)
                logits = self._as_numpy(self._model.logits(hidden[0]))
            yield logits

    def check_supports(self, what: str) -> None:
        """Raise UserError for a model that only generates answers; `what` is the requested output, for the message."""
        if self.edited_ends is not None or self._num_prefix:
            raise UserError(
                f"{what}: this model has interventions or prefixes, which are for prompts that are answered"
            )
        if self._mesh is not None:
            raise UserError(f"{what}: not of a model on several pipeline stages")

    def embed(self, texts: Sequence[Sequence[int]], num_tokens: ChunkTokens = None) -> Iterator[np.ndarray | None]:
        """Embed texts: the mean of the last normed hidden states over the tokens of each text, normalised to length 1.

        Yields:
            None after each chunk but the last, so that other passes may be made in between; then the vectors, [B, D]
            float32.

        Args:
            texts: token ids.
            num_tokens: most tokens of a chunk, or a function that returns them for the next one; None for all.

        Raises:
            UserError: interventions or prefixes edit the model's prompts.
        """
        self.check_supports("embeddings")
        length = max(map(len, texts))
        cache = None
        padding = np.asarray([length - len(text) for text in texts], "int64")
        ids = np.zeros([len(texts), length], "int64")
        for row, text in zip(ids, texts):
            row[length - len(text) :] = text
        sums: Any = 0.0  # in float64: a mean over very many tokens
        start = 0
        while start < length:
            if start:
                yield None
            size = length
            if (most := next_chunk(num_tokens)) is not None:
                traits = self.traits
                size = chunk_length(most * traits.prefill_speedup, len(texts), start, traits.double_cost_len)
            chunk = tensor_of(ids[:, start : start + size])
            with paddle.no_grad():
                hidden, cache = self._hidden_states(chunk, tensor_of(padding), cache)
            values = hidden.astype("float32").numpy()
            # padding is left out: its states need not be finite
            sums += np.stack([row[max(0, first - start) :].sum(0, "float64") for row, first in zip(values, padding)])
            start += size
        lengths = np.linalg.norm(sums, axis=1, keepdims=True)
        yield (sums / np.maximum(lengths, 1e-12)).astype("float32")  # clamped: a sum of zeros has no direction

    def _distributed(self, cache: Cache) -> Cache:
        if self._tensor_mesh is None:
            return cache
        from paddle.distributed.auto_parallel.api import dtensor_from_local

        return [
            tensor if placements is None else dtensor_from_local(tensor, self._tensor_mesh, placements)
            for tensor, placements in zip(cache, self._placements)
        ]

    def _by_heads(self, local: Tensor) -> Tensor:
        """The keys or values of this rank's heads, [B, J, S, K], as a distributed tensor that is cut by heads."""
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

    def _gather(self, tensor: Tensor) -> Tensor:
        """The full tensor of one that is cut over tensor parallel ranks, on each of them."""
        if not tensor.is_dist():
            return tensor
        import paddle.distributed as dist

        # an all-gather: every rank samples, so every rank needs all logits
        return dist.reshard(tensor, self._tensor_mesh, [dist.Replicate()])._local_value()

    def _as_numpy(self, logits: Tensor) -> np.ndarray:
        logits = self._gather(logits)
        # the vocabulary is padded where its size is no multiple of the tensor parallel degree
        return np.asarray(logits.astype("float32").numpy())[..., : self.vocab_size]


def _pairs(cache: Cache) -> list[tuple[Tensor, Tensor]]:
    return list(zip(cache[::2], cache[1::2]))


MAX_SPARE = 32
"""Most spare positions of a cache that has some; they cost a little in every pass."""
_MIN_SPARE = 8


def num_spare(filled: int) -> int:
    """Spare positions of a cache with `filled` positions: a quarter of them, between 8 and 32."""
    return min(MAX_SPARE, max(_MIN_SPARE, filled // 4))


class KVCache(Sequence[Tensor]):
    """A cache with spare positions at its end, which passes fill one after the other: nothing is copied as it grows.

    Its tensors are views of the filled positions, made on access. The spare ones are filled once: a second pass that
    continues the same cache gets a copy, so that a position that is still in use is never overwritten.
    """

    def __init__(self, buffers: list[Tensor], seq_len: int):
        """
        Args:
            buffers: keys and values of each layer, [B, …, S, …] with spare positions.
            seq_len: filled positions.
        """
        self._buffers = buffers
        self.seq_len = seq_len
        self._is_continued = False

    @classmethod
    def of(cls, cache: Cache, num_new: int = 0) -> KVCache:
        """Copy a cache, with room for `num_new` positions, and spare ones."""
        seq_len = cache_len(cache)
        # more chunks of a prompt may follow one: a copy for each would cost more than they do
        spare = seq_len // 2 if num_new > MAX_SPARE else num_spare(seq_len)
        return cls([_with_spare(tensor, num_new + spare) for tensor in cache], seq_len)

    def reserve(self, num_new: int) -> list[Tensor] | None:
        """The buffers, in which `num_new` positions after `seq_len` may be written now; None where there is no room, or
        they were reserved before."""
        if self._is_continued or self.seq_len + num_new > cache_len(self._buffers):
            return None
        self._is_continued = True
        return self._buffers

    def select_rows(self, index: Tensor, first: int) -> KVCache:
        """The cache of rows [n], from position `first` on."""
        tensors = [tensor[..., first:, :] for tensor in self._buffers] if first else self._buffers
        return KVCache([paddle.index_select(tensor, index, 0) for tensor in tensors], self.seq_len - first)

    def __len__(self) -> int:
        return len(self._buffers)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        return self._buffers[number][..., : self.seq_len, :]


class StateCache(Sequence[Tensor]):
    """A cache some of whose tensors are states without positions, which are padded and cut for no length."""

    def __init__(self, tensors: Sequence[Tensor], states: frozenset[int]):
        """
        Args:
            tensors: [B, …, S, …] each, states [B, …].
            states: numbers of the states among them.
        """
        self._tensors = list(tensors)
        self._states = states
        self._with_positions = next(number for number in range(len(self._tensors)) if number not in states)

    @property
    def seq_len(self) -> int:
        """Number of positions, padding included."""
        return int(self._tensors[self._with_positions].shape[-2])

    def select_rows(self, index: Tensor, first: int) -> StateCache:
        """The cache of rows [n], from position `first` on."""
        tensors = [
            tensor[..., first:, :] if first and number not in self._states else tensor
            for number, tensor in enumerate(self._tensors)
        ]
        return StateCache([paddle.index_select(tensor, index, 0) for tensor in tensors], self._states)

    def joined(self, other: Cache) -> StateCache:
        """Join the rows of this cache and another one; the shorter cache gets padding on the left."""
        length = max(self.seq_len, cache_len(other))
        tensors = []
        for number, (own, their) in enumerate(zip(self, other)):
            if number not in self._states:
                own = pad_left(own, length)
                their = pad_left(their, length)
            tensors.append(paddle.concat([own, their]))
        return StateCache(tensors, self._states)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, number: Any) -> Any:
        return self._tensors[number]


def states_of(model: Any) -> frozenset[int]:
    """Numbers of the tensors in the cache of a model that are states without positions."""
    return frozenset(
        2 * number + part for number, layer in enumerate(model.model.layers) if keeps_state(layer) for part in (0, 1)
    )


def _reserve(cache: Cache, num_new: int) -> list[Tensor]:
    """Buffers that begin with `cache` and have room for `num_new` positions."""
    buffers = cache.reserve(num_new) if isinstance(cache, KVCache) else None
    if buffers is None:
        buffers = KVCache.of(cache, num_new).reserve(num_new)
    assert buffers is not None
    return buffers


def _with_spare(tensor: Tensor, count: int) -> Tensor:
    return paddle.concat([tensor, paddle.zeros([*tensor.shape[:-2], count, tensor.shape[-1]], tensor.dtype)], -2)


@runtime_checkable
class ShardedCache(Protocol):
    """A cache whose other shards are on other ranks, and are changed with it."""

    def select_rows(self, rows: Sequence[int], first: int) -> Cache:
        """The cache of some rows, on all ranks, as the function `select_rows` gives it."""

    def join(self, other: Any) -> Cache:
        """Join this cache and another one on all ranks, as the function `join_caches` does."""


def select_rows(cache: Cache, rows: Sequence[int], first: int = 0) -> Cache:
    """The cache of some rows, in this order, from position `first` on: earlier ones are padding in all of them."""
    if isinstance(cache, ShardedCache):
        return cache.select_rows(rows, first)
    index = tensor_of(np.asarray(rows, "int64"))
    if isinstance(cache, KVCache | StateCache):
        return cache.select_rows(index, first)
    if first:
        cache = [tensor[..., first:, :] for tensor in cache]
    return [paddle.index_select(tensor, index, 0) for tensor in cache]


def cache_len(cache: Cache) -> int:
    """Number of positions in a cache, padding included."""
    return cache.seq_len if isinstance(cache, KVCache | StateCache) else int(cache[0].shape[-2])


def join_caches(first: Cache, second: Cache) -> Cache:
    """Join the rows of two caches; the shorter cache gets padding on the left."""
    if isinstance(first, ShardedCache):
        return first.join(second)
    if isinstance(first, StateCache):
        return first.joined(second)
    length = max(cache_len(first), cache_len(second))
    return [paddle.concat([pad_left(a, length), pad_left(b, length)]) for a, b in zip(first, second)]


def pad_left(tensor: Tensor, length: int) -> Tensor:
    """A tensor of a cache with `length` positions, padded on the left."""
    missing = length - tensor.shape[-2]
    if not missing:
        return tensor
    return paddle.concat([paddle.zeros([*tensor.shape[:-2], missing, tensor.shape[-1]], tensor.dtype), tensor], -2)
