"""The forward pass of a micro-batch inside of a step program, with the loss to differentiate and the outputs."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import nn

from llmsuite.base.typing import Tensor
from llmsuite.models import token_context
from llmsuite.parallel.program.clip import StepScalar
from llmsuite.parallel.program.experts import BALANCE_LOSS
from llmsuite.parallel.program.masters import cast_masters
from llmsuite.parallel.program.pipeline import TOKEN_VALUES

MAXIMUM = "maximum of "
"""Prefix of the names of vectors whose maximum over the global batch is the result, not their sum."""


@dataclasses.dataclass(frozen=True)
class LossFactor:
    """Factor of the loss of a micro-batch before its backward pass."""

    constant: float = 1.0
    of_step: StepScalar | None = None
    """Another factor, which changes from step to step."""

    def of(self, loss: Tensor) -> Tensor:
        """The factor of a loss. It is NaN where the loss is not finite, and so is every gradient then: on every
        pipeline stage, the norm of the gradient alone decides whether a step is accepted."""
        factor = paddle.full_like(loss, self.constant)
        if self.of_step is not None:
            factor = factor * self.of_step.read(loss.process_mesh).reshape(loss.shape)
        return paddle.where(paddle.isfinite(loss), factor, paddle.full_like(loss, math.nan))


class Step(nn.Layer):
    """Forward pass of a micro-batch, from its inputs to [differentiated loss, *sums]."""

    def __init__(
        self,
        model: Any,
        names: Sequence[str],
        loss: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
        replicate: Callable[[Tensor], Tensor],
        factor: LossFactor,
        compute_dtypes: Mapping[str, Any],
        inverse_weight: StepScalar,
    ):
        """
        Args:
            model: of the run.
            names: of the inputs.
            loss: from inputs by name to sums by name.
            replicate: turns a sum into the same number on every rank of its mesh.
            factor: of the differentiated loss.
            compute_dtypes: dtypes of the parameters that the model computes with as 16-bit copies.
            inverse_weight: factor that turns the sum "loss" into its part of the mean over the global batch.
        """
        super().__init__()
        self.model = model
        self._names = names
        self._loss = loss
        self._replicate = replicate
        self._factor = factor
        self._compute_dtypes = compute_dtypes
        self._inverse_weight = inverse_weight
        self.sums: Mapping[str, int] = {}
        """Sizes of the outputs by name, in their order: 0 for a number, the length for a vector."""

    def forward(self, *inputs: Tensor) -> Tensor:
        return self._traced(*inputs)

    # nothing branches on values, so the code needs no translation
    @paddle.jit.not_to_static
    def _traced(self, *inputs: Tensor) -> Tensor:
        given = dict(zip(self._names, inputs))
        for value in given.values():
            value.stop_gradient = True  # otherwise the program computes gradients that nothing needs
        keys = given.pop(TOKEN_VALUES, None)
        keys = None if keys is None else keys.detach()  # otherwise Paddle 3.3.1 makes a gradient of integers
        with cast_masters(self.model, self._compute_dtypes), token_context.tokens(keys):
            found = dict(self._loss(given))
        # each sum is reduced alone: in a stack of partial and complete sums Paddle 3.3.1 takes all for partial. Without
        # this, the placement of a sum would decide whether a rank outputs the total or its own part
        sums = {name: self._replicate(value) for name, value in found.items()}
        loss = sums["loss"]
        # before the backward pass, so that gradients need no division, and the balance loss can be added
        sums["loss"] = loss * self._inverse_weight.read(loss.process_mesh).reshape(loss.shape)
        trained = sums["loss"]
        if BALANCE_LOSS in sums:
            trained = sums["loss"] + sums[BALANCE_LOSS]
        sums = {name: value.detach() for name, value in sums.items()}
        numbers = {name: value for name, value in sums.items() if not value.shape}
        vectors = {name: value for name, value in sums.items() if value.shape}
        self.sums = {**dict.fromkeys(numbers, 0), **{name: value.shape[0] for name, value in vectors.items()}}
        # Paddle differentiates the sum of all outputs, of which only the first has a gradient
        outputs = paddle.stack([trained * self._factor.of(sums["loss"]), *numbers.values()])
        if not vectors:
            return outputs
        # as rows: Paddle 3.3.1 has no gradient for a concatenation of tensors with one dim
        return paddle.concat([part.unsqueeze(0) for part in (outputs, *vectors.values())], 1).flatten()


def trained_sums(sums: Tensor, *labels: Tensor) -> Tensor:
    """The loss function that Paddle requires: it returns the outputs of a step unchanged."""
    return sums


def over_micro_batches(outputs: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
    """The outputs of all micro-batches [micro-batches, outputs] as those of a step [outputs]: their sums, or their
    maxima for names with `MAXIMUM`; `sizes` is that of `Step.sums`."""
    is_maximum = np.repeat([name.startswith(MAXIMUM) for name in sizes], [size or 1 for size in sizes.values()])
    return np.where(is_maximum, outputs.max(0), outputs.sum(0))


def split(outputs: np.ndarray, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The outputs of a step by name, numbers and vectors; `sizes` is that of `Step.sums`. Of vectors with `MAXIMUM` the
    maximum, under the name without the prefix."""
    ends = itertools.accumulate(size or 1 for size in sizes.values())
    found: dict[str, Any] = {}
    for (name, size), part in zip(sizes.items(), np.split(outputs, [*ends][:-1]), strict=True):
        if name.startswith(MAXIMUM):
            found[name.removeprefix(MAXIMUM)] = float(part.max())
        else:
            found[name] = part if size else float(part[0])
    return found
