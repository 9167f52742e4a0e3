"""Materialize a lazily built model: every rank reads the slices it holds, and never has memory for more.

The model is built without memory (`paddle.LazyGuard`). Under tensor parallel its parameters become distributed tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import paddle
from paddle.distributed.auto_parallel.api import dtensor_from_local

from llmsuite.adapters.parameters import shard_dim
from llmsuite.base.errors import UserError
from llmsuite.base.typing import ReadSlice, Tensor
from llmsuite.devices.tensors import tensor_of
from llmsuite.models.block_quant import ABSMAX
from llmsuite.models.quantised import QuantisedMatrix
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.partition import local_slice
from llmsuite.parallel.tensor import placement


@paddle.no_grad()
def materialize(
    model: Any,
    plan: ShardPlan,
    mesh: Mesh,
    read: ReadSlice | None,
    dtype: str,
    on_filled: Callable[[str, Tensor], None] = lambda name, parameter: None,
    are_plain: bool = False,
    bf16_frozen: Collection[str] = (),
) -> None:
    """Set the values of every parameter, one parameter after the other.

    Args:
        model: built under `paddle.LazyGuard`.
        plan: the family's shard plan.
        mesh: of the run, with this rank's coordinates.
        read: returns the initial values; None on a device that has no values (`DeviceBackend.has_values`), where
            parameters get memory only.
        dtype: dtype of the parameters, except those that have their own (`ShardPlan.has_own_dtype`).
        on_filled: called with name and parameter as soon as it has its values, before the next one has memory.
        are_plain: whether the slices become plain tensors, not distributed ones.
        bf16_frozen: names of the frozen parameters that are bfloat16, whatever the dtype of the others.
    """
    for name, parameter in model.named_parameters():
        keeps = plan.has_own_dtype(name)
        read_as = _DTYPES[parameter.dtype] if keeps else "float32"
        own_dtype = "bfloat16" if name in bf16_frozen else dtype
        if read is None:
            index = local_slice(name, parameter.shape, plan, mesh)
            local = paddle.empty([part.stop - part.start for part in index], read_as if keeps else own_dtype)
        else:
            local = tensor_of(read_local_values(name, parameter.shape, plan, mesh, read, read_as))
            if not keeps:
                local = local.astype(own_dtype)
        if are_plain or mesh.tensor is None:
            parameter._set_impl(local)
        else:
            dim = shard_dim(plan, name)
            parameter._set_impl(dtensor_from_local(local, mesh.tensor, [placement(dim)]))
        on_filled(name, parameter)
    _place_scales(model, plan, mesh)


def _place_scales(model: Any, plan: ShardPlan, mesh: Mesh) -> None:
    """Set where this rank's slice of the scales of each quantised matrix begins: whose block a scale belongs to, if
    they are quantised themselves, depends on its place in the full matrix."""
    for name, layer in model.named_sublayers():
        if isinstance(layer, QuantisedMatrix):
            shape = layer.format.shapes(layer.shape)[ABSMAX]
            rows, outputs = local_slice(f"{name}.{ABSMAX}", shape, plan, mesh)[-2:]
            layer.first_scale = (rows.start, outputs.start)


_DTYPES = {paddle.float32: "float32", paddle.uint8: "uint8", paddle.int8: "int8"}
"""NumPy's names of the dtypes that parameters are made with."""


def read_local_values(
    name: str, shape: Sequence[int], plan: ShardPlan, mesh: Mesh, read: ReadSlice, dtype: str = "float32"
) -> np.ndarray:
    """Values of the slice of a parameter that this rank holds before sharding.

    Raises:
        UserError: `read` returned another shape.
    """
    index = local_slice(name, shape, plan, mesh)
    values = np.ascontiguousarray(read(name, shape, index), dtype=dtype)
    if list(values.shape) != [part.stop - part.start for part in index]:
        raise UserError(f"parameter {name!r} is {list(shape)}; its values do not have this shape")
    return values
