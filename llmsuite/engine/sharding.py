"""One parameter as this rank's optimizer sees it: whole, or under sharding a part of it.

Sharding cuts the flattened local value into equal parts, one a rank of the sharding axis (Rajbhandari et al. 2020,
ZeRO, arXiv 1910.02054). Stage 1 keeps the optimizer's state of the own part only; stage 2 adds up each
gradient straight into the own part and frees the rest, a parameter at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.base.framework import EagerParamBase

from llmsuite.engine import collective
from llmsuite.engine.mesh import Mesh
from llmsuite.engine.parallelize import local_value

Tensor = Any


class ParameterShard:
    """Owns what the optimizer updates of a parameter, and carries values and gradients between it and the model."""

    def __init__(
        self, name: str, parameter: Tensor, mesh: Mesh, cut_dim: int | None, stage: int, is_tied: bool = False
    ):
        """
        Args:
            name: full parameter name.
            parameter: of the model; a distributed tensor under tensor parallel.
            mesh: this rank's place.
            cut_dim: dim that is cut over tp; None when every rank holds the parameter whole.
            stage: 0 to 2.
            is_tied: whether the first and the last pipeline stage both have it.
        """
        self.name, self.parameter, self._mesh, self._stage = name, parameter, mesh, stage
        self._is_tied = is_tied and mesh.degrees.pp > 1
        self._dim = cut_dim if mesh.degrees.tp > 1 else None
        local = local_value(parameter)
        self.shape, self.local_shape = list(parameter.shape), list(local.shape)
        self._size = int(np.prod(self.local_shape, dtype="int64"))
        self._parts = mesh.degrees.sharding if stage else 1
        self._part_size = -(-self._size // self._parts)
        first = mesh.coordinate["sharding"] * self._part_size if stage else 0
        self._range = slice(min(first, self._size), min(first + self._part_size, self._size))
        if self._parts > 1:
            self.owned = _parameter(name, local.flatten()[self._range].clone())
        elif parameter.is_dist():  # Paddle's optimizers know their parameters by name, and this one is not theirs
            self.owned = _parameter(name, local)
        else:
            self.owned = parameter
            parameter.name = name

    def refresh(self) -> None:
        """Take over the parameter's present value, after it was loaded."""
        if self._parts > 1 and not self.is_empty:
            self.owned.copy_(local_value(self.parameter).flatten()[self._range], True)

    @property
    def is_empty(self) -> bool:
        """Whether the parameter is so small that this rank owns nothing of it."""
        return self._range.start == self._range.stop

    @property
    def copies(self) -> int:
        """How many ranks of the run hold the same part of a finished gradient."""
        degrees = self._mesh.degrees
        copies = degrees.num_data_ranks // self._parts * (1 if self._dim is not None else degrees.tp)
        return 2 * copies if self._is_tied else copies

    def finish_gradient(self) -> Tensor | None:
        """The gradient of the own part, added up over all data ranks; None when there is none."""
        gradient = self.parameter.grad
        if gradient is None or not gradient._is_initialized():  # a distributed one is emptied, not taken away
            return None
        if gradient.is_dist() and gradient.placements != self.parameter.placements:
            # under sequence parallel each rank has seen its part of the sequence only
            gradient = dist.reshard(gradient, self._mesh.tensor, self.parameter.placements)
        own = local_value(gradient)
        if self._parts == 1:
            collective.sum_in_group(own, self._mesh.data_group)
        elif self._stage == 1:
            collective.sum_in_group(own, self._mesh.data_group)
            own = own.flatten()[self._range]
        else:
            flat, missing = own.flatten(), self._part_size * self._parts - self._size
            padded = paddle.concat([flat, paddle.zeros([missing], flat.dtype)]) if missing else flat
            own = collective.reduce_scatter(padded, self._mesh.sharding_group)
            collective.sum_in_group(own, self._mesh.dp_group)
            own = own[: self._range.stop - self._range.start]
            self.parameter.clear_gradient(set_to_zero=False)
        if self._is_tied:
            collective.sum_in_group(own, self._mesh.tied_group)
        if self.is_empty:
            self.parameter.clear_gradient(False)  # by keyword it is set to zero nevertheless (Paddle 3.3.1)
            return None
        return own

    def set_gradient(self, gradient: Tensor) -> None:
        """Hand a finished gradient to the optimizer; it is copied, so nothing may change it afterwards."""
        if self.owned is not self.parameter:
            self.owned._set_grad_ivar(gradient)
            self.parameter.clear_gradient(False)  # only now: `gradient` may lie in its memory

    def publish(self) -> None:
        """Bring the updated parts of all ranks into the model's parameter."""
        if self._parts > 1:
            whole = collective.all_gather(self._padded(self.owned.detach()), self._mesh.sharding_group)
            value = whole[: self._size].reshape(self.local_shape)
            local_value(self.parameter).copy_(value, True)

    def gather_parameter(self) -> Tensor:
        """The whole parameter. Every rank of the run calls it."""
        return self._whole(local_value(self.parameter))

    def gather_part(self, part: Tensor) -> Tensor:
        """The whole of a tensor that is cut as what this rank owns. Every rank of the run calls it."""
        if self._parts > 1:
            flat = collective.all_gather(self._padded(part), self._mesh.sharding_group)
            part = flat[: self._size].reshape(self.local_shape)
        return self._whole(part)

    def cut(self, local: np.ndarray) -> np.ndarray:
        """What this rank owns of a tensor that is cut over tp already."""
        return local.reshape(-1)[self._range] if self._parts > 1 else local

    def _whole(self, local: Tensor) -> Tensor:
        return local if self._dim is None else collective.all_gather(local, self._mesh.tensor_group, self._dim)

    def _padded(self, part: Tensor) -> Tensor:
        """A part with zeros behind, so that the parts of all ranks have one size."""
        missing = self._part_size - part.shape[0]
        return paddle.concat([part, paddle.zeros([missing], part.dtype)]) if missing else part


def _parameter(name: str, value: Tensor) -> EagerParamBase:
    """A leaf with the memory of a tensor, for an optimizer to update."""
    result = EagerParamBase(shape=value.shape, dtype=value.dtype, name=name, trainable=True)
    result.get_tensor()._share_data_with(value.get_tensor())
    return result
