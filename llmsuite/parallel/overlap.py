"""Column-parallel linear layers whose backward pass computes while it sends.

The gradient of such a layer's input is a partial sum on each rank. Paddle's rule sums it over tp inside the operation,
and waits for it. Here the sum begins first, and the gradient of the weight, an equally large product, is computed
meanwhile, as in Megatron-LM's `LinearWithGradAccumulationAndAsyncCommunication`. Messages and numbers are the same.
"""

from __future__ import annotations

from typing import Any

import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import nn
from paddle.autograd import PyLayer
from paddle.distributed.auto_parallel.api import dtensor_from_local

from llmsuite.models.shard_plan import ShardPlan
from llmsuite.parallel import collective
from llmsuite.parallel.mesh import Mesh
from llmsuite.typing import Tensor


def overlap_sums(model: Any, plan: ShardPlan, mesh: Mesh) -> None:
    """Overlap the backward sums of a model's column-parallel linear layers. Layers with adapters or fake quantisation
    stay as they are."""
    for name, module in model.named_sublayers():
        if type(module) is nn.Linear and plan.dim(f"{name}.weight") == 1:
            module.__dict__["forward"] = _Overlapped(module, mesh).forward


class _Overlapped:
    """Computes in place of an `nn.Linear` whose weight is split along dim 1."""

    def __init__(self, layer: nn.Linear, mesh: Mesh):
        self._layer, self._mesh = layer, mesh

    def forward(self, x: Tensor) -> Tensor:
        """[..., D], the same on every rank, to [..., F], split along F."""
        layer = self._layer
        if not paddle.in_dynamic_mode():  # in a program local values have no gradient (Paddle 3.3.1)
            return F.linear(x, layer.weight, layer.bias)
        product = _Product.apply(x, layer.weight, (self._mesh,))
        return product if layer.bias is None else product + layer.bias


class _Product(PyLayer):
    """x W of distributed tensors; the mesh comes in a tuple, which PyLayer does not look into."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, meshes: tuple[Mesh]) -> Tensor:
        (ctx.mesh,) = meshes
        # the parameter itself: under sharding stage 3 it has other memory by the time of the backward pass
        ctx.save_for_backward(x, weight)
        product = paddle.matmul(x._local_value(), weight._local_value())
        return dtensor_from_local(product, ctx.mesh.tensor, [dist.Shard(product.ndim - 1)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensor()
        mesh, given, local = ctx.mesh, gradient._local_value(), weight._local_value()
        of_x = of_weight = arrival = None
        if not x.stop_gradient:
            of_x = paddle.matmul(given.astype(local.dtype), local, transpose_y=True)
            arrival = collective.begin_sum(of_x, mesh.tensor_group)
        if not weight.stop_gradient:
            rows = x._local_value().astype(local.dtype).reshape([-1, local.shape[0]])
            columns = given.astype(local.dtype).reshape([-1, local.shape[1]])
            product = paddle.matmul(rows, columns, transpose_x=True)
            of_weight = dtensor_from_local(product, mesh.tensor, [dist.Shard(1)])
        if arrival is not None:
            arrival.wait()
        if of_x is not None:
            of_x = dtensor_from_local(of_x.astype(x.dtype), mesh.tensor, [dist.Replicate()])
        return of_x, of_weight
