"""The inside of a TP region, between its column-parallel and its row-parallel matrices, with plain tensors.

Every operation there is on this rank's shard alone: its heads, or its columns of an MLP. With distributed tensors
Paddle would infer the placements of each operation, which takes the host longer than to launch most of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local, dtensor_to_local

from llmsuite.base.typing import Tensor
from llmsuite.models.blocks import RMSNorm
from llmsuite.models.linear import Linear, LinearKernel, is_matrix
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.parallel.mesh import Mesh


def accept_local_shards(module: Any, name: str, plan: ShardPlan, mesh: Mesh) -> bool:
    """Let a module compute with plain tensors after its projections, where each rank can do so alone; its parts take
    distributed tensors as before too.

    Args:
        module: one whose projections are fused.
        name: its name in the model.
        plan: the family's shard plan.
        mesh: of the run, with this rank's coordinates.

    Returns:
        False where the module has more than column-parallel matrices, norms of single heads, and one row-parallel
        matrix at the end: more may need the full tensors. Such a module does not change.
    """
    matrices = {key: part for key, part in module.named_sublayers() if is_matrix(part)}
    dims = [plan.dim(f"{name}.{key}.weight") for key in matrices]
    norms = [part for part in module.sublayers() if isinstance(part, RMSNorm)]
    known = {id(parameter) for part in (*matrices.values(), *norms) for parameter in part.parameters()}
    if sorted(dims, key=str) != [0, *[1] * (len(dims) - 1)]:
        return False
    if any(id(parameter) not in known for parameter in module.parameters()):
        return False
    if any(norm.weight.shape != [module.head_size] for norm in norms):  # a norm over all heads
        return False
    last = list(matrices.values())[dims.index(0)]
    if not isinstance(last, Linear):
        return False
    last.kernel = _RowParallelKernel(last.kernel, mesh)
    for norm in norms:
        norm.norm = _HeadNorm(norm.norm, mesh)
    return True


def add_local_biases(layers: Sequence[Any], products: Sequence[Tensor], mesh: Mesh) -> list[Tensor]:
    """Outputs of column-parallel layers from their products, both this rank's shards."""
    outputs = []
    for layer, product in zip(layers, products, strict=True):
        y = product
        if layer.bias is not None:
            y = product + dtensor_to_local(layer.bias, mesh.tensor, [dist.Shard(0)])
        outputs.append(y)
    return outputs


class _RowParallelKernel:
    """Product of this rank's shard of an input and a row-parallel matrix, by another kernel."""

    def __init__(self, kernel: LinearKernel, mesh: Mesh):
        self._kernel = kernel
        self._mesh = mesh

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not x.is_dist():
            x = dtensor_from_local(x, self._mesh.tensor, [dist.Shard(x.ndim - 1)])
        return self._kernel(x, weight, bias)


class _HeadNorm:
    """A norm of this rank's heads. The gain is the same on all ranks, and each has the part of its gradient that comes
    from its own heads."""

    def __init__(self, norm: Callable[..., Tensor], mesh: Mesh):
        self._norm = norm
        self._mesh = mesh

    def __call__(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        if not x.is_dist():
            gain = dtensor_to_local(gain, self._mesh.tensor, [dist.Partial()])
        return self._norm(x, gain, eps)
