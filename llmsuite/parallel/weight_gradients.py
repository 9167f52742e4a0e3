"""Gradients of matrices that nothing trains, as sums over the passes while they are watched.

The engine makes gradients of what it trains. A frozen matrix has none, may be stored quantised, and under sharding
stage 3 is not there in a backward pass. But x^T dy needs no more of it than what its layer takes and gives.

Shapes: I inputs and O outputs of a matrix, N tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import paddle

from llmsuite.models.structured import Part
from llmsuite.parallel import collective
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.tensor import RankPart
from llmsuite.typing import Tensor


class WatchedGradient:
    """The gradient of the matrix of a linear layer: of the part of it that this rank has, in float32, summed over
    backward passes until `finish`."""

    def __init__(self, layer: Any, shape: Sequence[int], local_shape: Sequence[int], dim: int | None, mesh: Mesh):
        """
        Args:
            layer: called with x [..., I], gives [..., O], which has a gradient in training passes.
            shape: [I, O] of the matrix.
            local_shape: of this rank's part of it.
            dim: the dim that is cut over tp; None if none is.
            mesh: this rank's place.
        """
        self._part = Part() if mesh.tensor is None else RankPart(mesh, dim, shape)
        self._local_shape, self._dim, self._mesh = list(local_shape), dim, mesh
        self._sum: Tensor | None = None
        self._sees_part = False
        """Whether each rank of the tensor parallel group sees its part of the tokens only."""
        self._watching = layer.register_forward_post_hook(self._watch)

    def _watch(self, layer: Any, inputs: Sequence[Tensor], output: Tensor) -> None:
        if not output.stop_gradient:  # else layers run for recompute, which runs them again
            output.register_hook(functools.partial(self._add, inputs[0].detach()))

    @paddle.no_grad()
    def _add(self, x: Tensor, gradient: Tensor) -> None:
        if x.is_dist() and self._dim is None and x.placements[0].is_shard():
            self._sees_part = True
        pair = self._part.local(x), self._part.output_gradient(gradient, x)
        rows, columns = (tensor.flatten(0, -2).astype("float32") for tensor in pair)  # [N, I], [N, O]
        found = paddle.matmul(rows, columns, transpose_x=True)
        assert found.shape == self._local_shape, "activations that are cut in another way than the matrix"
        self._sum = found if self._sum is None else self._sum.add_(found)

    @paddle.no_grad()
    def finish(self) -> Tensor:
        """The whole gradient [I, O] of all data ranks' passes, zero where there were none; nothing is watched any more.
        Every rank that has a part of the matrix calls it."""
        self._watching.remove()
        total, self._sum = self._sum, None
        if total is None:
            total = paddle.zeros(self._local_shape)
        collective.sum_in_group(total, self._mesh.data_group)
        if self._dim is not None:
            return collective.all_gather(total, self._mesh.tensor_group, self._dim)
        if self._sees_part:
            collective.sum_in_group(total, self._mesh.tensor_group)
        return total
