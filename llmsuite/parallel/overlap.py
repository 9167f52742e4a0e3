"""Column-parallel linear layers whose gradients of the input are summed over tp beside other work, or once for several.

The gradient of such a layer's input is a partial sum on each rank. Paddle's rule sums it over tp inside the operation,
and waits for it: where three layers have one input, three times. Here the sum begins first, and the gradients of the
weights, equally large products, are computed meanwhile, as in Megatron-LM's
`LinearWithGradAccumulationAndAsyncCommunication`; messages and numbers are the same. And layers of one input may share
an operation, as in Megatron-LM and PaddleNLP they share a matrix: their gradients of it are added up on the rank first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import nn
from paddle.autograd import PyLayer
from paddle.distributed.auto_parallel.api import dtensor_from_local

from llmsuite.devices.ops import Ops, sum_of_products
from llmsuite.models.exact import has_hooks, is_own, is_own_code, is_plain
from llmsuite.models.products import finish, gives_operands
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.parallel import collective
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.tensor import local_value, reshard
from llmsuite.typing import Tensor

Summed = Literal["beside", "at once", "later"]
"""When the gradient of the input is summed over tp: "beside" the products of the backward pass, "at once" inside the
operation, or "later": it is left as a partial sum to the operation in front, the scatter of sequence parallel."""


def overlap_sums(
    model: Any, plan: ShardPlan, mesh: Mesh, ops: Ops | None = None, scattered: Collection[str] = ()
) -> None:
    """Overlap the backward sums of a model's column-parallel linear layers. Layers with adapters or fake quantisation
    stay as they are. `ops` as of `fuse_projections`; `scattered` names layers whose sums are scattered in front of
    them, see `layers_to_scatter`."""
    for name, module in model.named_sublayers():
        if is_plain(module) and plan.dim(f"{name}.weight") == 1 and name not in scattered:
            module.__dict__["forward"] = _Overlapped(module, mesh, ops or Ops()).forward


def layers_to_scatter(model: Any, plan: ShardPlan, head_takes_all: bool) -> list[str]:
    """Column-parallel linear layers that alone read what is gathered along the sequence, under sequence parallel: the
    gradient of it is scattered, with half the bytes of a sum that every rank gets whole and then cuts. The first matrix
    of an MLP of two is one; the head is one with `head_takes_all`, where no tokens are picked in between."""
    found = []
    for name, module in model.named_sublayers():
        if plan.is_region(name):
            dims = {part: plan.dim(f"{name}.{part}.weight") for part, _ in module.named_sublayers()}
            if sorted(dims.values(), key=str) == [0, 1]:
                found += [f"{name}.{part}" for part, dim in dims.items() if dim == 1]
        elif head_takes_all and name in plan.last and plan.dim(f"{name}.weight") == 1:
            found.append(name)
    return found


def fuse_projections(
    model: Any,
    plan: ShardPlan,
    mesh: Mesh,
    sequence_parallel: bool,
    overlap: bool,
    ops: Ops | None = None,
) -> None:
    """Let the projections of one input share an operation, in every module that has some.

    Args:
        model: tensor parallel already.
        plan: the family's shard plan.
        mesh: this rank's place.
        sequence_parallel: whether inputs are gathered along the sequence in front of the modules.
        overlap: whether the device can send beside a backward pass.
        ops: the forms of the device, of which products of plain tensors are made; None for Paddle's own.
    """
    summed: Summed = "later" if sequence_parallel else "beside" if overlap else "at once"
    for module in modules_to_fuse(model, plan):
        module.products = _Fused(mesh, summed, ops or Ops()).products


def modules_to_fuse(model: Any, plan: ShardPlan) -> list[Any]:
    """The modules that have several projections of one input, which nothing else reads. Shared experts are none of
    them: their input is that of the gate too. Nor are modules whose forward pass somebody else has written, who may
    read it."""
    found = [m for name, m in model.named_sublayers() if plan.is_region(name) and is_own(vars(m).get("products"))]
    return [m for m in found if is_own_code(m) and not has_hooks(*m.sublayers())]


class _Overlapped:
    """Computes in place of an `nn.Linear` whose weight is split along dim 1."""

    def __init__(self, layer: nn.Linear, mesh: Mesh, ops: Ops):
        self._layer, self._how = layer, (mesh, "beside", ops, False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D], the same on every rank, to [..., F], split along F."""
        layer = self._layer
        if not paddle.in_dynamic_mode():  # in a program local values have no gradient (Paddle 3.3.1)
            return F.linear(x, layer.weight, layer.bias)
        (product,) = _Products.apply(x, layer.weight, self._how)
        return product if layer.bias is None else product + layer.bias


class _Fused:
    """Computes in place of `blocks.products`, of layers whose weights are split along dim 1."""

    def __init__(self, mesh: Mesh, summed: Summed, ops: Ops):
        self._mesh, self._summed, self._ops = mesh, summed, ops

    def products(self, layers: Sequence[nn.Layer], x: Tensor, then: nn.Layer | None = None) -> list[Tensor]:
        """[..., D], the same on every rank, to an output [..., F] of each layer, split along F."""
        assert all(type(layer) is nn.Linear for layer in layers), "a layer that is more than its matrix"
        linear: list[Any] = list(layers)
        gives = self._ops.operand_matmul is not None and gives_operands(layers, then)
        how = (self._mesh, self._summed, self._ops, gives)
        return finish(linear, x, _Products.apply(x, *(layer.weight for layer in linear), how))


class _Products(PyLayer):
    """x W of distributed tensors, for several W. Mesh, `Summed`, the forms of the device and whether outputs are those
    of `Ops.operand_matmul` come in a tuple, which PyLayer does not look into."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *weights, (mesh, summed, ops, gives_operands) = rest
        ctx.mesh, ctx.summed, ctx.ops, ctx.gives_operands = mesh, summed, ops, gives_operands
        # the parameters themselves: under sharding stage 3 they have other memory by the time of the backward pass
        ctx.save_for_backward(x, *weights)
        local = local_value(x)
        outputs = [sum_of_products(ops, [(local, local_value(weight))], False, gives_operands) for weight in weights]
        return tuple(dtensor_from_local(y, mesh.tensor, [dist.Shard(y.ndim - 1)]) for y in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensor()
        mesh, ops, of_x, arrival = ctx.mesh, ctx.ops, None, None
        locals_ = [local_value(weight) for weight in weights]
        given = [local_value(gradient) for gradient in gradients]
        if not ctx.gives_operands:
            given = [gradient.astype(local.dtype) for gradient, local in zip(given, locals_)]
        if not x.stop_gradient:
            of_x = sum_of_products(ops, list(zip(given, locals_)), True)
            if ctx.summed == "beside":
                arrival = collective.begin_sum(of_x, mesh.tensor_group)
        of_weights: list[Tensor | None] = []
        for weight, gradient, local in zip(weights, given, locals_):
            if weight.stop_gradient:
                of_weights.append(None)
                continue
            rows = local_value(x).astype(local.dtype).reshape([-1, local.shape[0]])
            product = ops.matmul(rows, gradient.reshape([-1, local.shape[1]]), True, False)
            of_weights.append(dtensor_from_local(product, mesh.tensor, [dist.Shard(1)]))
        if arrival is not None:
            arrival.wait()
        if of_x is not None:
            placement = dist.Partial() if arrival is None else dist.Replicate()
            of_x = dtensor_from_local(of_x.astype(x.dtype), mesh.tensor, [placement])
            of_x = reshard(of_x, mesh, [dist.Replicate()]) if ctx.summed == "at once" else of_x
        return of_x, *of_weights
