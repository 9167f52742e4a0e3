"""Dropout whose mask is the same on every mesh, however a batch is sharded: a hash decides, no generator has a state.

The mask is a function of the seed, the step, the layer's name, the index of the input, and the token with its context:
the ids of its document up to itself. So a mask depends neither on where a row is in a batch or in a packed row, nor on
which rank computes it, nor on whether it is recomputed. Tokens with the same context, as in two answers to one prompt,
are the same computation and get the same mask.

Shapes: B rows, L length, I inputs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.autograd import PyLayer

from llmsuite.base.typing import Tensor
from llmsuite.devices.masks import document_spans
from llmsuite.devices.tensors import tensor_of
from llmsuite.models.rotation import positions
from llmsuite.models.token_context import current

_PRIME = (1 << 31) - 1
_MULTIPLIERS = 0x45D9F3B, 0x2C1B3C6D
_SHIFT = 15

Select = Callable[[Sequence[slice]], Tensor]
"""Maps slices of rows, tokens and inputs to that part of a mask [B, L, I]."""


def token_keys(input_ids: Tensor, document_starts: Tensor | None, seed: int, step: int) -> Tensor:
    """A key of each token, [B, L] in int32: a polynomial in the ids of its context, modulo a prime.

    Args:
        input_ids: [B, L].
        document_starts: for rows of several documents, as `CausalLM.hidden_states` takes it.
        seed: seed of the recipe.
        step: number of the step, counted from 1.
    """
    length = input_ids.shape[1]
    salt = _hash(f"dropout:{seed}:{step}")
    powers = np.empty(length + 1, "int64")
    powers[0] = 1
    base = salt % (_PRIME - 2) + 2
    for i in range(length):
        powers[i + 1] = powers[i] * base % _PRIME
    weights = tensor_of(powers[1:])
    if document_starts is None:
        terms = (input_ids + 1) * weights % _PRIME
        return _scrambled((terms.cumsum(1) % _PRIME).astype("int32"))
    terms = (input_ids + 1) * weights.take(positions(document_starts).clip(min=0)) % _PRIME
    before = paddle.concat(
        [paddle.zeros_like(terms[:, :1]), terms.cumsum(1)], 1
    )  # sums over the tokens before each index
    begin, end, own = document_spans(document_starts.clip(min=0)).unbind(1)
    sums = [before.take_along_axis(index, 1) for index in (end, begin, own)]
    context = sums[0] - sums[1] + before[:, 1:] - sums[2]
    return _scrambled((context % _PRIME).astype("int32"))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _scrambled(keys: Tensor) -> Tensor:
    """A one-to-one map of int32 after which every bit depends on every bit. Products wrap around."""
    for multiplier in _MULTIPLIERS:
        keys = keys * _constant(multiplier)
        keys = keys ^ (keys >> _constant(_SHIFT))
    return keys


def _constant(value: int) -> Tensor:
    return tensor_of(value, dtype="int32")  # with a Python number Paddle would multiply in floating point


# the layer


class TokenDropout(nn.Layer):
    """Set inputs to zero with a probability, and divide the others by the probability of keeping them; identity in
    evaluation (Srivastava et al. 2014, Dropout)."""

    def __init__(self, rate: float, name: str, seed: int, num_inputs: int):
        """
        Args:
            rate: probability that an element becomes zero.
            name: full name of the layer in the model.
            seed: seed of the recipe.
            num_inputs: number of inputs of the unsharded matrix that follows.
        """
        super().__init__()
        self.rate = rate
        self._inputs = _random_int32(f"dropout:{seed}:{name}", num_inputs)
        self.select: Callable[[Select, Tensor], Tensor] = _full_mask
        """Selects the mask of a tensor; under tensor parallelism it takes this rank's shard."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, I] to [B, L, I]."""
        if not self.training:
            return x
        with paddle.no_grad():
            mask = self.select(self.mask, x)
        mask.stop_gradient = True
        return _Masked.apply(x, (mask,), 1 / (1 - self.rate))

    def mask(self, index: Sequence[slice]) -> Tensor:
        """Mask of the kept elements, in bool, for slices of [B, L, I]."""
        keys = current()
        assert keys is not None, "dropout in a pass whose tokens have no keys"
        rows, tokens, inputs = index
        return _is_kept(keys[rows, tokens], self._inputs[inputs], self.rate)


class RowDropout(nn.Layer):
    """`TokenDropout` for a stack of experts, whose inputs are rows of tokens, sorted by expert: each expert has its own
    masks. The current keys are those of the rows (`models.experts`)."""

    def __init__(self, rate: float, name: str, seed: int, shape: Sequence[int]):
        """
        Args:
            rate: probability that an element becomes zero.
            name: full name of the layer in the model.
            seed: seed of the recipe.
            shape: shape of the unsharded stack, [experts, inputs, outputs].
        """
        super().__init__()
        self.rate = rate
        num_experts, num_inputs, _ = shape
        self._inputs = _random_int32(f"dropout:{seed}:{name}", num_inputs)
        self._experts = _random_int32(f"dropout:{seed}:{name}:experts", num_experts)
        self.first = 0
        """Index of the first expert of this rank; its other experts follow."""

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """[N, I] to [N, I]; `counts` has the number of rows of each expert."""
        if not self.training:
            return x
        keys = current()
        assert keys is not None, "dropout in a pass whose rows have no keys"
        with paddle.no_grad():
            experts = np.repeat(self._experts[self.first : self.first + len(counts)], counts)
            mask = _is_kept(_scrambled(keys ^ tensor_of(experts)), self._inputs, self.rate)
        mask.stop_gradient = True
        return _Masked.apply(x, (mask,), 1 / (1 - self.rate))


def _random_int32(name: str, size: int) -> np.ndarray:
    """Pseudo-random int32 numbers that depend only on a name, [size]."""
    stream = np.random.Philox(key=_hash(name))
    return np.random.Generator(stream).integers(-(1 << 31), 1 << 31, size, dtype="int32")


def _is_kept(keys: Tensor, inputs: np.ndarray, rate: float) -> Tensor:
    """Mask of the kept elements, [..., I] in bool, from keys [...] and random numbers of the inputs [I]."""
    first, second = _MULTIPLIERS
    mixed = (keys.unsqueeze(-1) ^ tensor_of(inputs)) * _constant(first)
    mixed = (mixed ^ (mixed >> _constant(_SHIFT))) * _constant(second)
    return mixed >= _constant(round(rate * (1 << 32)) - (1 << 31))


def _full_mask(mask: Select, x: Tensor) -> Tensor:
    return mask([slice(None)] * 3)


class _Masked(PyLayer):
    """x times a mask and a factor. Only the mask is saved, one byte per element: it comes in a tuple, so that PyLayer
    does not treat it as an input with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, masks: tuple[Tensor], factor: float) -> Tensor:
        (ctx.mask,) = masks
        ctx.factor = factor
        return x * (ctx.mask.astype(x.dtype) * factor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (ctx.mask.astype(gradient.dtype) * ctx.factor)
