"""A rank's part of a model as plain tensors, for a program of its own: what is sent between ranks are operations of it.

In dynamic mode parameters are distributed tensors and Paddle's rules compute with them (`llmsuite.parallel.tensor`). A
program of Paddle Inference knows no such tensors. So here each rank has a smaller model, with fewer heads, narrower
MLPs, some of the experts and a part of the vocabulary, and adds up what these give: once behind the embedding and once
at the end of each region of the shard plan; the logits are joined. The same plan says where.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F

from llmsuite.checkpoint.model_dir import ModelDirectory
from llmsuite.devices.base import DeviceBackend
from llmsuite.errors import UserError
from llmsuite.inference.load import check_cut, check_precision, check_twins, parameter_shapes, plain_ops, values_of
from llmsuite.inference.stages import keep_stage
from llmsuite.inference.static_experts import StaticExperts, check_static
from llmsuite.models.exact import is_own_code, is_plain, named_kind
from llmsuite.models.shard_plan import WHOLE, ShardPlan
from llmsuite.parallel import collective
from llmsuite.parallel.fill import ReadSlice, fill
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.tensor import check_embedding
from llmsuite.parallel.vocabulary import build_padded, is_padded, pad_values
from llmsuite.typing import Tensor

_FIRST_RING = 100
"""Paddle gives its groups the numbers from 10 on, in the order in which they are made."""


def ring_of(mesh: Mesh) -> int:
    """Paddle's number of the group over which the programs of a rank add up: 0 is that of all ranks. The tensor
    parallel groups of a pipeline have numbers of their own, by stage."""
    return 0 if mesh.degrees.pp == 1 else _FIRST_RING + mesh.coordinate["pp"]


def make_rings(mesh: Mesh) -> None:
    """Make the groups that the programs of the ranks of a mesh add up over; every rank calls it."""
    if mesh.degrees.tp == 1:
        return
    for stage, ranks in enumerate(mesh.rows("tp")):  # there are no data ranks
        collective.make_ring(0 if mesh.degrees.pp == 1 else _FIRST_RING + stage, ranks)


def load_part(source: ModelDirectory, backend: DeviceBackend, precision: str, mesh: Mesh) -> Any:
    """`load.load_model` of the part of a rank, as plain tensors. The rank of the mesh need not be this process.

    Raises:
        UserError: as `load_model`; the model cannot be cut so.
    """
    family, config = source.family, source.config
    check_precision(source, backend, precision)
    check_cut(family, config, mesh.degrees, "--tensor_parallel_degree")
    with paddle.LazyGuard():
        model = build_padded(family, config, plain_ops(backend, precision), mesh.degrees.tp)
    check_twins(model)
    read = values_of(source, mesh)(model)
    shapes = parameter_shapes(family, config)
    if is_padded(config, mesh.degrees.tp):
        read = pad_values(read, shapes)
    if mesh.degrees.pp > 1:
        keep_stage(model, family, mesh, shapes)
    take_part(model, family.shard_plan or WHOLE, mesh, read, backend.parameter_dtype(precision))
    model.eval()
    return model


def take_part(model: Any, plan: ShardPlan, mesh: Mesh, read: ReadSlice, dtype: str) -> None:
    """Give a lazily built model the slices of a rank as plain tensors; see `parallel.fill.fill`."""

    def read_addend(name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
        values = read(name, shape, index)
        # it is added to a part of a sum, so that one rank has it
        return np.zeros_like(values) if mesh.coordinate["tp"] and _is_bias_of_sum(name, plan) else values

    fill(model, plan, mesh, read_addend, dtype, are_plain=True)


def _is_bias_of_sum(name: str, plan: ShardPlan) -> bool:
    """Whether a parameter is the bias of a row-parallel matrix."""
    module, _, kind = name.rpartition(".")
    return kind == "bias" and module != plan.embedding and plan.dim(f"{module}.weight") == 0


def join_parts(model: Any, plan: ShardPlan, mesh: Mesh, ring: int) -> None:
    """Let the part of a model compute with those of the other ranks in programs, for good; nothing changes where tp
    is 1.

    Args:
        model: whose layers have their last forms: of what replaces a forward afterwards the sum would be lost.
        plan: the family's shard plan.
        mesh: of the rank whose part it is.
        ring: Paddle's number of the tensor parallel group.
    """
    if mesh.degrees.tp == 1:
        return
    modules = list(model.named_sublayers())
    for name, module in modules:
        if plan.experts and fnmatch.fnmatchcase(name, plan.experts):
            check_static(name, module)
            first = mesh.coordinate["tp"] * module.gate_proj.weight.shape[0]
            module.__dict__["forward"] = StaticExperts(module, first).forward
        if name == plan.embedding:
            check_embedding(name, module, "--tensor_parallel_degree")
            module.__dict__["forward"] = _lookup(module.weight, mesh, ring)
        elif plan.is_region(name):
            for place in _ends(name, module, plan):
                place.__dict__["forward"] = _with_sum(place.forward, ring)
    own, size, parts = model.logits, int(model.config.vocab_size), mesh.degrees.tp

    def logits(hidden: Tensor) -> Tensor:
        """[B, D] to [B, V], without the padding of the vocabulary."""
        return _joined(own(hidden), parts, ring)[:, :size]

    model.__dict__["logits"] = logits


def _ends(name: str, region: Any, plan: ShardPlan) -> list[Any]:
    """The modules of a region whose outputs are to be added up. Of llmsuite's own it is the region, once; behind the
    last matrix of somebody else's there may be more, which needs the whole sum: then it is each row-parallel matrix.

    Raises:
        UserError: a parameter that is cut so is no matrix of a linear layer.
    """
    if is_own_code(region):
        return [region]
    found = dict(region.named_sublayers(prefix=name))
    ends = []
    for parameter, _ in region.named_parameters(prefix=name):
        if plan.dim(parameter) != 0:
            continue
        owner, _, kind = parameter.rpartition(".")
        if kind != "weight" or not is_plain(found.get(owner)):
            raise UserError(
                f"--tensor_parallel_degree: {named_kind(name, region)} has a forward pass of its own, and {parameter}, "
                "which is cut along its inputs, is no matrix of a linear layer: nobody knows where ranks add up"
            )
        ends.append(found[owner])
    return ends


def _lookup(table: Tensor, mesh: Mesh, ring: int) -> Callable[[Tensor], Tensor]:
    """The embedding of ids: each rank looks up those that it has, zeros elsewhere."""
    size = table.shape[0]
    first = mesh.coordinate["tp"] * size

    def look_up(input_ids: Tensor) -> Tensor:
        ids = input_ids - first
        mine = paddle.logical_and(ids >= 0, ids < size)
        found = F.embedding(paddle.where(mine, ids, paddle.zeros_like(ids)), table)
        return _sum(found * mine.astype(found.dtype).unsqueeze(-1), ring)

    return look_up


def _with_sum(forward: Callable[..., Any], ring: int) -> Callable[..., Any]:
    def complete(*inputs: Any, **named: Any) -> Any:
        output = forward(*inputs, **named)
        if isinstance(output, tuple):  # attention returns its cache too
            return (_sum(output[0], ring), *output[1:])
        return _sum(output, ring)

    return complete


def _sum(part: Tensor, ring: int) -> Tensor:
    """The sum over the ranks of a ring."""
    return paddle._C_ops.all_reduce(part, ring, int(dist.ReduceOp.SUM))


def _joined(part: Tensor, count: int, ring: int) -> Tensor:
    """Columns [B, n] of all ranks side by side, [B, n x count]. Rows are what is joined, so they are the columns here;
    their number is known when the program is made, that of a batch is not."""
    return paddle._C_ops.all_gather(part.t(), ring, count).t()
