"""Products of distributed tensors on the parts of the ranks, where a device has a form of its own for products.

Messages are those that Paddle's rules have for its own product.
"""

from __future__ import annotations

import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local

from llmsuite.devices.ops import Ops
from llmsuite.models.products import Place, Products
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.tensor import local_value, reshard
from llmsuite.typing import Tensor


class RankProducts(Products):
    """`Products` of distributed tensors too."""

    def __init__(self, ops: Ops, mesh: Mesh):
        super().__init__(ops)
        self._mesh = mesh

    def place(self, x: Tensor, matrix: Tensor, transpose_y: bool) -> Place:
        if not x.is_dist() and not matrix.is_dist():  # such as routed experts
            return Place()
        return _RankPlace(self._mesh, x, matrix, transpose_y)


class _RankPlace(Place):
    """A rank of the tensor parallel group.

    With a matrix that is cut along its outputs it makes its part of them, and has a part of the sum that the gradient
    of the input is; with one cut along its inputs the other way round. With one that all have whole it computes for the
    part of the tokens that it has.
    """

    def __init__(self, mesh: Mesh, x: Tensor, matrix: Tensor, transpose_y: bool):
        self._mesh, self._given = mesh, x.placements if x.is_dist() else [dist.Replicate()]
        self._matrix = matrix.placements if matrix.is_dist() else [dist.Replicate()]
        (given,), (of_matrix,), last = self._given, self._matrix, [dist.Shard(x.ndim - 1)]
        whole, part = [dist.Replicate()], [dist.Partial()]
        cut = of_matrix.get_dim() if of_matrix.is_shard() else None
        self._of_matrix = self._matrix
        if cut is None:
            assert self._given != last, "an input that is cut along what is summed, and a matrix that is whole"
            self._input = whole if given.is_partial() else self._given
            self._output = self._of_input = self._input
            self._of_matrix = part if self._input[0].is_shard() else whole
        elif cut == (1 if transpose_y else 0):
            self._input, self._output, self._of_input = last, part, last
        else:
            self._input, self._output, self._of_input = whole, last, part

    def local(self, tensor: Tensor) -> Tensor:
        return local_value(tensor)

    def input(self, x: Tensor) -> Tensor:
        return local_value(reshard(x, self._mesh, self._input)) if x.is_dist() else x

    def output(self, y: Tensor) -> Tensor:
        return self._distributed(y, self._output)

    def output_gradient(self, gradient: Tensor) -> Tensor:
        wanted = [dist.Replicate()] if self._output[0].is_partial() else self._output
        return local_value(reshard(gradient, self._mesh, wanted))

    def input_gradient(self, gradient: Tensor) -> Tensor:
        given = [dist.Replicate()] if self._given[0].is_partial() else self._given
        return reshard(self._distributed(gradient, self._of_input), self._mesh, given)

    def matrix_gradient(self, gradient: Tensor) -> Tensor:
        return self._distributed(gradient, self._of_matrix)

    def _distributed(self, local: Tensor, placements: list[dist.Placement]) -> Tensor:
        return dtensor_from_local(local, self._mesh.tensor, placements)
