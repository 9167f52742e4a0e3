"""Column-parallel linear layers whose all-reduce of input gradients overlaps with other work, or is one for several.

The gradient of such a layer's input is a partial sum on each rank. Paddle's rule sums it over tp inside the operation,
and waits for it: where three layers have one input, three times. Here the all-reduce starts first, and the gradients of
the weights, equally large products, are computed meanwhile, as in Megatron-LM's
`LinearWithGradAccumulationAndAsyncCommunication`; messages and numbers are the same. And layers with the same input can
share an operation, as they share a matrix in Megatron-LM and PaddleNLP: their gradients of the input are added on the
rank first.
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

from llmsuite.base.typing import Tensor
from llmsuite.devices.matmul_ops import MatmulOps
from llmsuite.models.exact import has_hooks, is_own, is_own_code
from llmsuite.models.linear import Linear, adopt_linears, is_matrix, is_plain_linear
from llmsuite.models.linear_ops import can_round_outputs, finish_linears
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.parallel import collective
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.tensor import local_value, reshard
from llmsuite.parallel.tp_region import accept_local_shards, add_local_biases

SumMode = Literal["overlapped", "blocking", "deferred"]
"""When the gradient of the input is summed over tp: "overlapped" with the products of the backward pass, "blocking"
inside the operation, or "deferred": it stays a partial sum for the previous operation, the scatter of sequence
parallel."""


def overlap_sums(
    model: Any, plan: ShardPlan, mesh: Mesh, matmuls: MatmulOps | None = None, scattered: Collection[str] = ()
) -> None:
    """Overlap the backward sums of a model's column-parallel linear layers. Layers with adapters or fake quantisation
    do not change.

    Args:
        model: already tensor parallel.
        plan: the family's shard plan.
        mesh: of the run, with this rank's coordinates.
        matmuls: the device's products; None for Paddle's own.
        scattered: names of layers whose sums are reduce-scattered instead, see `layers_to_scatter`.
    """
    adopt_linears(model)
    kernel = OverlappedKernel(mesh, matmuls or MatmulOps())  # one for all layers: compiled layers have to be alike
    for name, module in model.named_sublayers():
        is_alone = isinstance(module, Linear) and is_plain_linear(module)
        if is_alone and plan.dim(f"{name}.weight") == 1 and name not in scattered:
            module.kernel = kernel


def layers_to_scatter(model: Any, plan: ShardPlan, head_needs_all_logits: bool) -> list[str]:
    """Names of the column-parallel linear layers that alone read an input that is gathered along the sequence, under
    sequence parallel. Its gradient is reduce-scattered, with half the bytes of an all-reduce that every rank then cuts.
    The first matrix of an MLP of two is such a layer; the head is one with `head_needs_all_logits`, where no tokens are
    selected in between."""
    found = []
    for name, module in model.named_sublayers():
        if plan.is_tp_region(name):
            dims = {part: plan.dim(f"{name}.{part}.weight") for part, _ in module.named_sublayers()}
            if sorted(dims.values(), key=str) == [0, 1]:
                found += [f"{name}.{part}" for part, dim in dims.items() if dim == 1]
        elif head_needs_all_logits and name in plan.last and plan.dim(f"{name}.weight") == 1:
            found.append(name)
    return found


def fuse_projections(
    model: Any,
    plan: ShardPlan,
    mesh: Mesh,
    sequence_parallel: bool,
    overlap: bool,
    matmuls: MatmulOps | None = None,
) -> None:
    """Fuse the projections of one input into one operation, in every module that has several. Where ranks can, they
    compute with plain tensors from there to the end of the module (`tp_region`).

    Args:
        model: already tensor parallel.
        plan: the family's shard plan.
        mesh: of the run, with this rank's coordinates.
        sequence_parallel: whether inputs are gathered along the sequence before the modules.
        overlap: whether the device can communicate during a backward pass.
        matmuls: the device's products of plain tensors; None for Paddle's own.
    """
    mode: SumMode = "overlapped" if overlap else "blocking"
    if sequence_parallel:
        mode = "deferred"
    names = {id(module): name for name, module in model.named_sublayers()}
    for module in modules_to_fuse(model, plan):
        is_local = accept_local_shards(module, names[id(module)], plan, mesh)
        region = module.sublayers() if is_local else ()
        module.apply_linears = _Fused(mesh, mode, matmuls or MatmulOps(), region).apply_linears


def modules_to_fuse(model: Any, plan: ShardPlan) -> list[Any]:
    """The modules that have several projections of one input that nothing else reads. Shared experts are not among
    them: the gate reads their input too. Nor are modules with a forward pass from outside llmsuite, which may read
    it."""
    found = [
        m for name, m in model.named_sublayers() if plan.is_tp_region(name) and is_own(vars(m).get("apply_linears"))
    ]
    return [m for m in found if is_own_code(m) and not has_hooks(*m.sublayers())]


class OverlappedKernel:
    """Product of a linear layer whose weight is split along dim 1."""

    def __init__(self, mesh: Mesh, matmuls: MatmulOps):
        self._settings = (mesh, "overlapped", matmuls, False, False)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., D], the same on every rank, to [..., F], split along F."""
        if not paddle.in_dynamic_mode():  # in a program local values have no gradient (Paddle 3.3.1)
            return F.linear(x, weight, bias)
        (product,) = _ColumnParallelMatmul.apply(x, weight, self._settings)
        return product if bias is None else product + bias


class _Fused:
    """Replacement of `blocks.apply_linears` for layers whose weights are split along dim 1."""

    def __init__(self, mesh: Mesh, mode: SumMode, matmuls: MatmulOps, region: Sequence[nn.Layer] = ()):
        """
        Args:
            mesh: of the run, with this rank's coordinates.
            mode: when the gradient of the input is summed.
            matmuls: the device's products of plain tensors.
            region: layers of the module that compute with this rank's shards as plain tensors; () where distributed
                ones are needed.
        """
        self._mesh = mesh
        self._mode = mode
        self._matmuls = matmuls
        self._region = region

    def apply_linears(self, layers: Sequence[nn.Layer], x: Tensor, then: nn.Layer | None = None) -> list[Tensor]:
        """[..., D], the same on every rank, to an output [..., F] of each layer, split along F: distributed tensors, or
        this rank's shards."""
        assert all(is_matrix(layer) for layer in layers), "a layer that is more than its matrix"
        linear: list[Any] = list(layers)
        round_outputs = self._matmuls.rounds_outputs and can_round_outputs(layers, then)
        # hooks get distributed tensors, such as those that record them
        is_local = bool(self._region) and not has_hooks(*self._region)
        settings = (self._mesh, self._mode, self._matmuls, round_outputs, is_local)
        outputs = _ColumnParallelMatmul.apply(x, *(layer.weight for layer in linear), settings)
        if is_local:
            return add_local_biases(linear, outputs, self._mesh)
        return finish_linears(linear, x, outputs)


class _ColumnParallelMatmul(PyLayer):
    """x W of distributed tensors, for several W. Mesh, `SumMode`, the device's implementations, whether outputs are
    those of `MatmulOps.rounded_output_matmul`, and whether they are plain shards come in a tuple, which PyLayer does
    not look into."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *weights, (mesh, mode, matmuls, round_outputs, is_local) = rest
        ctx.mesh = mesh
        ctx.mode = mode
        ctx.matmuls = matmuls
        ctx.round_outputs = round_outputs
        # the parameters themselves: under sharding stage 3 they have other memory by the time of the backward pass
        ctx.save_for_backward(x, *weights)
        local = local_value(x)
        outputs = [matmuls.sum_of_products([(local, local_value(weight))], False, round_outputs) for weight in weights]
        if is_local:
            return tuple(outputs)
        return tuple(dtensor_from_local(y, mesh.tensor, [dist.Shard(y.ndim - 1)]) for y in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensor()
        mesh = ctx.mesh
        matmuls = ctx.matmuls
        input_gradient = None
        pending = None
        locals_ = [local_value(weight) for weight in weights]
        given = [local_value(gradient) for gradient in gradients]
        if not ctx.round_outputs:
            given = [gradient.astype(local.dtype) for gradient, local in zip(given, locals_)]
        if not x.stop_gradient:
            input_gradient = matmuls.sum_of_products(list(zip(given, locals_)), True)
            if ctx.mode == "overlapped":
                # over tp: each rank has the gradient from its columns; the weights' gradients are computed meanwhile
                pending = collective.start_all_reduce(input_gradient, mesh.tensor_group)
        weight_gradients: list[Tensor | None] = []
        for weight, gradient, local in zip(weights, given, locals_):
            if weight.stop_gradient:
                weight_gradients.append(None)
                continue
            rows = local_value(x).astype(local.dtype).reshape([-1, local.shape[0]])
            product = matmuls.matmul(rows, gradient.reshape([-1, local.shape[1]]), True, False)
            weight_gradients.append(dtensor_from_local(product, mesh.tensor, [dist.Shard(1)]))
        if pending is not None:
            pending.wait()
        if input_gradient is not None:
            placement = dist.Partial() if pending is None else dist.Replicate()
            input_gradient = dtensor_from_local(input_gradient.astype(x.dtype), mesh.tensor, [placement])
            if ctx.mode == "blocking":  # one all-reduce for all layers of the input
                input_gradient = reshard(input_gradient, mesh, [dist.Replicate()])
        return input_gradient, *weight_gradients
