"""Linear layers on distributed tensors, where a device has its own implementation of products.

The messages are those of Paddle's rules for its own product. Where a matrix is column-parallel (cut along its outputs),
a rank of the tensor parallel group computes its shard of the outputs, and the gradient of the input is a partial sum.
Where it is row-parallel (cut along its inputs), the output is a partial sum, and a rank computes its shard of the
gradient of the input. Where the matrix is replicated, a rank multiplies the tokens that it has.
"""

from __future__ import annotations

import dataclasses

import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local, dtensor_to_local

from llmsuite.base.typing import Tensor
from llmsuite.devices.ops import Ops
from llmsuite.models.linear_ops import LinearOps, RankLayout
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.program.sums import sum_partials
from llmsuite.parallel.tensor import local_value, reshard


class TensorParallelLinearOps(LinearOps):
    """`LinearOps` that also takes distributed tensors."""

    def __init__(self, ops: Ops, mesh: Mesh):
        super().__init__(ops)
        self._mesh = mesh

    def layout(self, x: Tensor, matrix: Tensor, transpose_y: bool) -> RankLayout:
        if not x.is_dist() and not matrix.is_dist():  # such as routed experts
            return RankLayout()
        return _TensorParallelLayout(self._mesh, x, matrix, transpose_y)

    def matmul_in_program(self, x: Tensor, matrix: Tensor, transpose_y: bool, round_output: bool = False) -> Tensor:
        """Product on the mesh [data, tp] of a step program, where each data rank has rows of its own."""
        if not x.is_dist():
            return super().matmul_in_program(x, matrix, transpose_y, round_output)
        assert self.matmuls.program_matmul is not None, "refused before the run"
        mesh = x.process_mesh
        over_data, x_over_tp = x.placements
        _, matrix_over_tp = matrix.placements
        over_tp = _Placements.of(x_over_tp, matrix_over_tp, x.ndim, transpose_y)
        # the input may be cut along the sequence: the product needs it gathered or cut along its last dim
        x = x if x_over_tp == over_tp.input else dist.reshard(x, mesh, [over_data, over_tp.input])
        # gradient of the matrix: each data rank has the part of its rows
        matrix_over_data = dist.Partial() if over_data.is_shard() else dist.Replicate()
        local_x = dtensor_to_local(x, mesh, [over_data, over_tp.input_gradient])
        local_matrix = dtensor_to_local(matrix, mesh, [matrix_over_data, over_tp.matrix_gradient])
        y = self.matmuls.program_matmul(local_x, local_matrix, transpose_y, round_output)
        if not over_tp.output.is_partial():
            return dtensor_from_local(y, mesh, [over_data, over_tp.output])
        assert not round_output, "a sum over ranks is of float32 numbers"
        replicated = [over_data, dist.Replicate()]
        # row-parallel: an all-reduce over tp completes the output
        return sum_partials(y, mesh, [over_data, over_tp.output], replicated, replicated)


@dataclasses.dataclass(frozen=True)
class _Placements:
    """Placements over tp of the inputs and outputs of a product, and of their gradients."""

    input: dist.Placement
    output: dist.Placement
    input_gradient: dist.Placement
    matrix_gradient: dist.Placement

    @classmethod
    def of(cls, x: dist.Placement, matrix: dist.Placement, ndim: int, transpose_y: bool) -> _Placements:
        """Placements of a product of an input with `ndim` dims, placed as `x`, and a matrix [I, O] ([O, I] with
        `transpose_y`), placed as `matrix`."""
        replicated = dist.Replicate()
        partial = dist.Partial()
        last = dist.Shard(ndim - 1)
        if not matrix.is_shard():
            assert x != last, "an input that is cut along the summed dim, and a matrix that is replicated"
            kept = replicated if x.is_partial() else x
            return cls(kept, kept, kept, partial if kept.is_shard() else replicated)
        if matrix.get_dim() == (1 if transpose_y else 0):
            return cls(last, partial, last, matrix)
        return cls(replicated, last, partial, matrix)


class _TensorParallelLayout(RankLayout):
    """Layout of an eager product on a rank of the tensor parallel group."""

    def __init__(self, mesh: Mesh, x: Tensor, matrix: Tensor, transpose_y: bool):
        self._mesh = mesh
        (x_placement,), (matrix_placement,) = (t.placements if t.is_dist() else [dist.Replicate()] for t in (x, matrix))
        placements = _Placements.of(x_placement, matrix_placement, x.ndim, transpose_y)
        self._input = [placements.input]
        self._output = [placements.output]
        self._input_gradient = [placements.input_gradient]
        self._matrix_gradient = [placements.matrix_gradient]

    def local(self, tensor: Tensor) -> Tensor:
        return local_value(tensor)

    def input(self, x: Tensor) -> Tensor:
        return local_value(reshard(x, self._mesh, self._input)) if x.is_dist() else x

    def output(self, y: Tensor) -> Tensor:
        return self._distributed(y, self._output)

    def output_gradient(self, gradient: Tensor) -> Tensor:
        # the gradient of a partial sum is the full gradient, on every rank
        placements = [dist.Replicate()] if self._output[0].is_partial() else self._output
        return local_value(reshard(gradient, self._mesh, placements))

    def input_gradient(self, gradient: Tensor) -> Tensor:
        return self._distributed(gradient, self._input_gradient)

    def matrix_gradient(self, gradient: Tensor) -> Tensor:
        return self._distributed(gradient, self._matrix_gradient)

    def _distributed(self, local: Tensor, placements: list[dist.Placement]) -> Tensor:
        return dtensor_from_local(local, self._mesh.tensor, placements)
