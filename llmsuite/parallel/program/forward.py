"""The forward pass of a micro-batch inside of a whole-step program, and what of it is trained and told."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import nn

from llmsuite.models import token_values
from llmsuite.parallel.program.clip import StepNumber
from llmsuite.parallel.program.experts import BALANCE_LOSS
from llmsuite.parallel.program.masters import in_16_bits
from llmsuite.parallel.program.pipeline import TOKEN_VALUES
from llmsuite.typing import Tensor


@dataclasses.dataclass(frozen=True)
class LossFactor:
    """What the loss of a micro-batch is multiplied with before its backward pass."""

    constant: float = 1.0
    of_step: StepNumber | None = None
    """A further factor, which is another one in each step."""

    def of(self, loss: Tensor) -> Tensor:
        """The factor of a loss. It is no number where that is not finite, and neither is any gradient then: so the
        norm of the gradient alone tells whether a step is accepted, on every pipeline stage."""
        factor = paddle.full_like(loss, self.constant)
        if self.of_step is not None:
            factor = factor * self.of_step.read(loss.process_mesh).reshape(loss.shape)
        return paddle.where(paddle.isfinite(loss), factor, paddle.full_like(loss, math.nan))


class Step(nn.Layer):
    """The forward pass of a micro-batch, from its inputs to [trained, *sums]."""

    def __init__(
        self,
        model: Any,
        names: Sequence[str],
        loss: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
        whole: Callable[[Tensor], Tensor],
        factor: LossFactor,
        narrow: Mapping[str, Any],
    ):
        """
        Args:
            model: that computes.
            names: of the inputs.
            loss: of inputs by name.
            whole: a sum to the same number on every rank of its mesh.
            factor: of what is trained.
            narrow: dtypes of the parameters that the model computes with as 16-bit copies.
        """
        super().__init__()
        self.model, self._names, self._loss, self._make_whole, self._factor = model, names, loss, whole, factor
        self._narrow = narrow
        self.sums: Mapping[str, int] = {}
        """Names of what it tells, in their order: of numbers 0, of vectors how many numbers they have."""

    def forward(self, *inputs: Tensor) -> Tensor:
        return self._traced(*inputs)

    # nothing in it branches on values, so its code needs no translation
    @paddle.jit.not_to_static
    def _traced(self, *inputs: Tensor) -> Tensor:
        given = dict(zip(self._names, inputs))
        for value in given.values():
            value.stop_gradient = True  # else there are operations for gradients that nobody asks for
        keys = given.pop(TOKEN_VALUES, None)
        keys = None if keys is None else keys.detach()  # else Paddle 3.3.1 makes a gradient of integers
        with in_16_bits(self.model, self._narrow), token_values.tokens(keys):
            found = dict(self._loss(given))
        # each by itself: of parts of sums and whole ones in one stack Paddle 3.3.1 takes all for parts. And else its
        # placement would decide whether a rank is told the sum or its own part
        sums = {name: self._make_whole(value) for name, value in found.items()}
        trained = sums["loss"] + sums[BALANCE_LOSS] if BALANCE_LOSS in sums else sums["loss"]
        sums = {name: value.detach() for name, value in sums.items()}
        numbers = {name: value for name, value in sums.items() if not value.shape}
        vectors = {name: value for name, value in sums.items() if value.shape}
        self.sums = {**dict.fromkeys(numbers, 0), **{name: value.shape[0] for name, value in vectors.items()}}
        # what is trained is the sum of all of them, of which only the first has a gradient
        told = paddle.stack([trained * self._factor.of(sums["loss"]), *numbers.values()])
        if not vectors:
            return told
        # as rows: of what has one dim only, Paddle 3.3.1 finds no gradient behind a concatenation
        return paddle.concat([part.unsqueeze(0) for part in (told, *vectors.values())], 1).flatten()


def trained_sums(sums: Tensor, *labels: Tensor) -> Tensor:
    """The loss that Paddle asks for: the sums of a step as they are."""
    return sums


def split(told: np.ndarray, sizes: Mapping[str, int]) -> dict[str, Any]:
    """What a step has told by name, numbers and vectors, of `Step.sums`."""
    ends = itertools.accumulate(size or 1 for size in sizes.values())
    parts = zip(sizes.items(), np.split(told, [*ends][:-1]), strict=True)
    return {name: part if size else float(part[0]) for (name, size), part in parts}
