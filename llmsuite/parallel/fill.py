"""Give a lazily built model its values: every rank reads the slices it holds, and never has memory for more.

The model is built without memory (`paddle.LazyGuard`). Under tensor parallel its parameters become distributed tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local

from llmsuite.errors import UserError
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.partition import local_slice
from llmsuite.typing import Tensor

ReadSlice = Callable[[str, Sequence[int], Sequence[slice]], np.ndarray]
"""Name, whole shape, one slice a dim -> the values of the slice."""


@paddle.no_grad()
def fill(
    model: Any,
    plan: ShardPlan,
    mesh: Mesh,
    read: ReadSlice,
    dtype: str,
    on_filled: Callable[[str, Tensor], None] = lambda name, parameter: None,
    are_plain: bool = False,
    narrow: Collection[str] = (),
) -> None:
    """Give every parameter its values, one parameter after the other.

    Args:
        model: built under `paddle.LazyGuard`.
        plan: the family's shard plan.
        mesh: this rank's place.
        read: gives the initial values.
        dtype: dtype of the parameters, but for those that have their own (`ShardPlan.has_own_dtype`).
        on_filled: called with name and parameter as soon as it has its values, before the next one has memory.
        are_plain: whether the slices become plain tensors, without the whole that they are of.
        narrow: names of the parameters that are bfloat16 whatever the dtype of the others.
    """
    for name, parameter in model.named_parameters():
        keeps = plan.has_own_dtype(name)
        read_as = _DTYPES[parameter.dtype] if keeps else "float32"
        local = paddle.to_tensor(read_local(name, parameter.shape, plan, mesh, read, read_as))
        local = local if keeps else local.astype("bfloat16" if name in narrow else dtype)
        if are_plain or mesh.tensor is None:
            parameter._set_impl(local)
        else:
            dim = plan.dim(name)
            placements = [dist.Replicate() if dim is None else dist.Shard(dim)]
            parameter._set_impl(dtensor_from_local(local, mesh.tensor, placements))
        on_filled(name, parameter)


_DTYPES = {paddle.float32: "float32", paddle.uint8: "uint8", paddle.int8: "int8"}
"""NumPy's names of the dtypes that parameters are made with."""


def read_local(
    name: str, shape: Sequence[int], plan: ShardPlan, mesh: Mesh, read: ReadSlice, dtype: str = "float32"
) -> np.ndarray:
    """The values of a parameter that this rank holds when sharding does not cut it."""
    index = local_slice(name, shape, plan, mesh)
    values = np.ascontiguousarray(read(name, shape, index), dtype=dtype)
    if list(values.shape) != [part.stop - part.start for part in index]:
        raise UserError(f"parameter {name!r} is {list(shape)}; its values do not have this shape")
    return values
