"""Gradients of frozen matrices, as sums over the passes while they are captured.

The engine makes gradients of trained parameters only. A frozen matrix has none, may be stored quantised, and under
sharding stage 3 is not gathered in a backward pass. But its gradient x^T dy needs only the input and the output
gradient of its layer.

Shapes: I inputs and O outputs of a matrix, N tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import paddle

from llmsuite.adapters.layers.structured import WeightShard
from llmsuite.base.typing import Tensor
from llmsuite.parallel import collective
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.tensor import TensorParallelShard


class CapturedWeightGradient:
    """The gradient of the matrix of a linear layer: of the part of it that this rank has, in float32, summed over
    backward passes until `finish`."""

    def __init__(self, layer: Any, shape: Sequence[int], local_shape: Sequence[int], dim: int | None, mesh: Mesh):
        """
        Args:
            layer: from x [..., I] to [..., O], which has a gradient in training passes.
            shape: [I, O] of the matrix.
            local_shape: of this rank's shard of it.
            dim: the dim that is cut over tp; None if none is.
            mesh: of the run, with this rank's coordinates.
        """
        self._part = WeightShard() if mesh.tensor is None else TensorParallelShard(mesh, dim, shape)
        self._local_shape = list(local_shape)
        self._dim = dim
        self._mesh = mesh
        self._sum: Tensor | None = None
        self._has_token_shards = False
        """True where each rank of the tensor parallel group computes with its part of the tokens only."""
        self._watching = layer.register_forward_post_hook(self._watch)

    def _watch(self, layer: Any, inputs: Sequence[Tensor], output: Tensor) -> None:
        if not output.stop_gradient:  # else layers run for recompute, which runs them again
            output.register_hook(functools.partial(self._add, inputs[0].detach()))

    @paddle.no_grad()
    def _add(self, x: Tensor, gradient: Tensor) -> None:
        if x.is_dist() and self._dim is None and x.placements[0].is_shard():
            self._has_token_shards = True
        pair = self._part.local(x), self._part.output_gradient(gradient, x)
        rows, columns = (tensor.flatten(0, -2).astype("float32") for tensor in pair)  # [N, I], [N, O]
        found = paddle.matmul(rows, columns, transpose_x=True)
        assert found.shape == self._local_shape, "activations that are cut in another way than the matrix"
        self._sum = found if self._sum is None else self._sum.add_(found)

    @paddle.no_grad()
    def finish(self) -> Tensor:
        """Stop capturing, and return the full gradient [I, O] of all data ranks' passes; zero where there were none.
        Every rank that has a shard of the matrix calls it."""
        self._watching.remove()
        total = self._sum
        self._sum = None
        if total is None:
            total = paddle.zeros(self._local_shape)
        # over data ranks first, while each rank has its shard of the matrix only
        collective.sum_in_group(total, self._mesh.data_group)
        if self._dim is not None:
            # shards of the matrix, along the dim that tp cuts
            return collective.all_gather(total, self._mesh.tensor_group, self._dim)
        if self._has_token_shards:
            # a replicated matrix under sequence parallel: each rank has the gradient from its tokens
            collective.sum_in_group(total, self._mesh.tensor_group)
        return total
