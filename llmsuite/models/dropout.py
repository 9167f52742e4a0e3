"""Dropout whose mask is the same on every mesh, however a batch is cut: nothing is drawn, a hash decides.

It is a function of the seed, the step, the layer's name, the number of the input, and the token with all that it sees:
the ids of its document up to itself. So a mask depends neither on where a row lies in a batch or in a packed row, nor
on who computes it, nor on whether it is computed again. Tokens that see the same, as two answers to one prompt do, are
the same computation and get the same mask.

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

from llmsuite.devices.ops import document_spans
from llmsuite.models.rotation import positions
from llmsuite.models.token_values import current
from llmsuite.typing import Tensor

_PRIME = (1 << 31) - 1
_MULTIPLIERS = 0x45D9F3B, 0x2C1B3C6D
_SHIFT = 15

Select = Callable[[Sequence[slice]], Tensor]
"""Rows, tokens and inputs [B, L, I] of a mask to its values there."""


def token_keys(input_ids: Tensor, document_starts: Tensor | None, seed: int, step: int) -> Tensor:
    """A key of each token, [B, L] in int32: a polynomial in the ids that it sees, modulo a prime.

    Args:
        input_ids: [B, L].
        document_starts: for rows of several documents, as `CausalLM.hidden_states` takes it.
        seed: of the recipe.
        step: counted from 1.
    """
    length = input_ids.shape[1]
    salt = _hash(f"dropout:{seed}:{step}")
    powers = np.empty(length + 1, "int64")
    powers[0], base = 1, salt % (_PRIME - 2) + 2
    for i in range(length):
        powers[i + 1] = powers[i] * base % _PRIME
    weights = paddle.to_tensor(powers[1:])
    if document_starts is None:
        terms = (input_ids + 1) * weights % _PRIME
        return _scrambled((terms.cumsum(1) % _PRIME).astype("int32"))
    terms = (input_ids + 1) * weights.take(positions(document_starts).clip(min=0)) % _PRIME
    before = paddle.concat([paddle.zeros_like(terms[:, :1]), terms.cumsum(1)], 1)  # of the tokens before each place
    begin, end, own = document_spans(document_starts.clip(min=0)).unbind(1)
    sums = [before.take_along_axis(place, 1) for place in (end, begin, own)]
    seen = sums[0] - sums[1] + before[:, 1:] - sums[2]
    return _scrambled((seen % _PRIME).astype("int32"))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _scrambled(keys: Tensor) -> Tensor:
    """A one-to-one map of int32 after which every bit depends on every bit. Products wrap around."""
    for multiplier in _MULTIPLIERS:
        keys = keys * _constant(multiplier)
        keys = keys ^ (keys >> _constant(_SHIFT))
    return keys


def _constant(value: int) -> Tensor:
    return paddle.to_tensor(value, dtype="int32")  # a bare number would be multiplied as a floating-point one


# the layer


class TokenDropout(nn.Layer):
    """Sets inputs to zero with a probability, and divides the others by that of keeping them; off in evaluation
    (Srivastava et al. 2014, Dropout)."""

    def __init__(self, rate: float, name: str, seed: int, num_inputs: int):
        """
        Args:
            rate: probability that an element becomes zero.
            name: of the layer, in the whole model.
            seed: of the recipe.
            num_inputs: of the whole matrix behind it.
        """
        super().__init__()
        self.rate = rate
        self._inputs = _drawn(f"dropout:{seed}:{name}", num_inputs)
        self.select: Callable[[Select, Tensor], Tensor] = _whole
        """Makes a mask for a tensor; under tensor parallel it asks for this rank's part."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, I] to [B, L, I]."""
        if not self.training:
            return x
        with paddle.no_grad():
            mask = self.select(self.mask, x)
        mask.stop_gradient = True
        return _Masked.apply(x, (mask,), 1 / (1 - self.rate))

    def mask(self, index: Sequence[slice]) -> Tensor:
        """Which elements are kept, in bool: those of an index into [B, L, I]."""
        keys = current()
        assert keys is not None, "dropout in a pass whose tokens have no keys"
        rows, at, inputs = index
        return _is_kept(keys[rows, at], self._inputs[inputs], self.rate)


class RowDropout(nn.Layer):
    """The same for a stack of experts, whose inputs are rows of tokens, sorted by expert: each expert has masks of its
    own. The keys of a pass are those of the rows, see `models.experts`."""

    def __init__(self, rate: float, name: str, seed: int, shape: Sequence[int]):
        """
        Args:
            rate: probability that an element becomes zero.
            name: of the layer, in the whole model.
            seed: of the recipe.
            shape: of the whole stack, [experts, inputs, outputs].
        """
        super().__init__()
        self.rate = rate
        num_experts, num_inputs, _ = shape
        self._inputs = _drawn(f"dropout:{seed}:{name}", num_inputs)
        self._experts = _drawn(f"dropout:{seed}:{name}:experts", num_experts)
        self.first = 0
        """Number of the first of the experts whose rows there are; the others follow."""

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """[N, I] to [N, I], with so many rows for each expert."""
        if not self.training:
            return x
        keys = current()
        assert keys is not None, "dropout in a pass whose rows have no keys"
        with paddle.no_grad():
            experts = np.repeat(self._experts[self.first : self.first + len(counts)], counts)
            mask = _is_kept(_scrambled(keys ^ paddle.to_tensor(experts)), self._inputs, self.rate)
        mask.stop_gradient = True
        return _Masked.apply(x, (mask,), 1 / (1 - self.rate))


def _drawn(name: str, size: int) -> np.ndarray:
    """A random int32 for each input of a layer."""
    stream = np.random.Philox(key=_hash(name))
    return np.random.Generator(stream).integers(-(1 << 31), 1 << 31, size, dtype="int32")


def _is_kept(keys: Tensor, inputs: np.ndarray, rate: float) -> Tensor:
    """Keys [...] and numbers of the inputs [I] to which elements are kept, [..., I] in bool."""
    first, second = _MULTIPLIERS
    mixed = (keys.unsqueeze(-1) ^ paddle.to_tensor(inputs)) * _constant(first)
    mixed = (mixed ^ (mixed >> _constant(_SHIFT))) * _constant(second)
    return mixed >= _constant(round(rate * (1 << 32)) - (1 << 31))


def _whole(mask: Select, x: Tensor) -> Tensor:
    return mask([slice(None)] * 3)


class _Masked(PyLayer):
    """A product with a mask and a number. Only the mask is kept, a byte an element: it comes in a tuple."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, masks: tuple[Tensor], factor: float) -> Tensor:
        (ctx.mask,), ctx.factor = masks, factor
        return x * (ctx.mask.astype(x.dtype) * factor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (ctx.mask.astype(gradient.dtype) * ctx.factor)
