"""Products of distributed tensors on the parts of the ranks, where a device has a form of its own for products.

Messages are those that Paddle's rules have for its own product. Where a matrix is cut along its outputs, a rank of the
tensor parallel group makes its part of the outputs, and the gradient of the input is a partial sum. Where it is cut
along its inputs, the output is a partial sum, and a rank makes its part of the gradient of the input. Where every rank
has the whole matrix, a rank multiplies the tokens that it has.
"""

from __future__ import annotations

import dataclasses

import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local, dtensor_to_local

from llmsuite.devices.ops import Ops
from llmsuite.models.products import Place, Products
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.program.sums import summed
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

    def in_program(self, x: Tensor, matrix: Tensor, transpose_y: bool, gives_operand: bool = False) -> Tensor:
        """On the mesh [data, tp] of a program of a whole step, where each data rank has rows of its own."""
        if not x.is_dist():
            return super().in_program(x, matrix, transpose_y, gives_operand)
        assert self.ops.program_matmul is not None, "refused before the run"
        mesh, (rows, given), (_, of_matrix) = x.process_mesh, x.placements, matrix.placements
        own = _Placements.of(given, of_matrix, x.ndim, transpose_y)
        x = x if given == own.input else dist.reshard(x, mesh, [rows, own.input])
        share = dist.Partial() if rows.is_shard() else dist.Replicate()  # of a sum over the data ranks
        of_x = dtensor_to_local(x, mesh, [rows, own.input_gradient])
        of_matrix = dtensor_to_local(matrix, mesh, [share, own.matrix_gradient])
        y = self.ops.program_matmul(of_x, of_matrix, transpose_y, gives_operand)
        if not own.output.is_partial():
            return dtensor_from_local(y, mesh, [rows, own.output])
        assert not gives_operand, "a sum over ranks is of float32 numbers"
        whole = [rows, dist.Replicate()]
        return summed(y, mesh, [rows, own.output], whole, whole)


@dataclasses.dataclass(frozen=True)
class _Placements:
    """Placements over tp of what a product takes and makes."""

    input: dist.Placement
    output: dist.Placement
    input_gradient: dist.Placement
    matrix_gradient: dist.Placement

    @classmethod
    def of(cls, given: dist.Placement, matrix: dist.Placement, ndim: int, transpose_y: bool) -> _Placements:
        """For an input of so many dims as it is given, and a matrix [I, O], or with `transpose_y` [O, I]."""
        whole, part, last = dist.Replicate(), dist.Partial(), dist.Shard(ndim - 1)
        if not matrix.is_shard():
            assert given != last, "an input that is cut along what is summed, and a matrix that is whole"
            kept = whole if given.is_partial() else given
            return cls(kept, kept, kept, part if kept.is_shard() else whole)
        if matrix.get_dim() == (1 if transpose_y else 0):
            return cls(last, part, last, matrix)
        return cls(whole, last, part, matrix)


class _RankPlace(Place):
    """A rank of the tensor parallel group, op by op."""

    def __init__(self, mesh: Mesh, x: Tensor, matrix: Tensor, transpose_y: bool):
        self._mesh = mesh
        (given,), (of_matrix,) = (t.placements if t.is_dist() else [dist.Replicate()] for t in (x, matrix))
        own = _Placements.of(given, of_matrix, x.ndim, transpose_y)
        self._input, self._output, self._of_input = [own.input], [own.output], [own.input_gradient]
        self._of_matrix = [own.matrix_gradient]

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
        return self._distributed(gradient, self._of_input)

    def matrix_gradient(self, gradient: Tensor) -> Tensor:
        return self._distributed(gradient, self._of_matrix)

    def _distributed(self, local: Tensor, placements: list[dist.Placement]) -> Tensor:
        return dtensor_from_local(local, self._mesh.tensor, placements)
