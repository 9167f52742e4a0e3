"""A rank's shard of a model as plain tensors, for its own program, in which collectives are operations.

In dynamic mode parameters are distributed tensors and Paddle's rules compute with them (`llmsuite.parallel.tensor`). A
program of Paddle Inference does not support such tensors. So here each rank has a smaller model, with fewer heads,
narrower MLPs, some of the experts and a part of the vocabulary. Outputs are summed over ranks after the embedding and
at the end of each TP region of the shard plan; logits are concatenated.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F

from llmsuite.base.errors import UserError
from llmsuite.base.typing import ReadSlice, Tensor
from llmsuite.checkpoint.model_dir import ModelDirectory
from llmsuite.devices.base import DeviceBackend
from llmsuite.inference.load import (
    check_cut,
    check_decode_overrides,
    check_precision,
    generation_ops,
    parameter_shapes,
    values_of,
)
from llmsuite.inference.stages import keep_stage_layers
from llmsuite.inference.static_experts import StaticDispatcher, check_static
from llmsuite.models.blocks import TiedHead
from llmsuite.models.embedding import Lookup, set_lookup
from llmsuite.models.exact import describe_module, is_own_code
from llmsuite.models.linear import is_plain_linear
from llmsuite.models.shard_plan import UNSHARDED, ShardPlan
from llmsuite.parallel import collective
from llmsuite.parallel.materialize import materialize
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.vocabulary import build_padded, is_padded, pad_values

_FIRST_RING = 100
"""Ring ids of tensor parallel groups begin here: Paddle numbers its own groups from 10 on, in order of creation."""


def ring_of(mesh: Mesh) -> int:
    """Paddle's ring id of the tensor parallel group of a rank. 0 is the group of all ranks; in a pipeline each stage
    has a group of its own."""
    return 0 if mesh.degrees.pp == 1 else _FIRST_RING + mesh.coordinate["pp"]


def make_rings(mesh: Mesh) -> None:
    """Create the tensor parallel groups of a mesh for programs; every rank calls it, because creation is collective."""
    if mesh.degrees.tp == 1:
        return
    for stage, ranks in enumerate(mesh.rows("tp")):  # there are no data ranks
        collective.make_ring(0 if mesh.degrees.pp == 1 else _FIRST_RING + stage, ranks)


def load_shard(source: ModelDirectory, backend: DeviceBackend, precision: str, mesh: Mesh) -> Any:
    """Load the shard of a rank as plain tensors. The rank of the mesh need not be this process.

    Args:
        source: the values.
        backend: of the device.
        precision: of parameters and activations.
        mesh: coordinates of the rank.

    Raises:
        UserError: as `load.load_model`; the model cannot be cut for the mesh.
    """
    family = source.family
    config = source.config
    check_precision(source, backend, precision)
    check_cut(family, config, mesh.degrees, "--tensor_parallel_degree")
    with paddle.LazyGuard():  # no memory for the full model: each parameter is read as its part
        model = build_padded(family, config, generation_ops(backend, precision), mesh.degrees.tp)
    check_decode_overrides(model)
    read = values_of(source, mesh)(model)
    shapes = parameter_shapes(family, config)
    if is_padded(config, mesh.degrees.tp):
        read = pad_values(read, shapes)
    if mesh.degrees.pp > 1:
        keep_stage_layers(model, family, mesh, shapes)
    fill_shard(model, family.shard_plan or UNSHARDED, mesh, read, backend.parameter_dtype(precision))
    model.eval()
    return model


def fill_shard(model: Any, plan: ShardPlan, mesh: Mesh, read: ReadSlice, dtype: str) -> None:
    """Give a lazily built model the slices of a rank as plain tensors; see `parallel.materialize.materialize`."""

    def read_addend(name: str, shape: Sequence[int], index: Sequence[slice]) -> np.ndarray:
        values = read(name, shape, index)
        # outputs are summed over ranks after the bias is added: only one rank may add it
        return np.zeros_like(values) if mesh.coordinate["tp"] and _is_bias_of_sum(name, plan) else values

    materialize(model, plan, mesh, read_addend, dtype, are_plain=True)


def _is_bias_of_sum(name: str, plan: ShardPlan) -> bool:
    """True for the bias of a row-parallel matrix."""
    module, _, kind = name.rpartition(".")
    if kind != "bias" or module == plan.embedding or plan.is_expert(name):
        return False
    return plan.dim(f"{module}.weight") == 0


def add_collectives(model: Any, plan: ShardPlan, mesh: Mesh, ring: int) -> None:
    """Add to the shard of a model the collectives of its program, irreversibly; nothing changes where tp is 1.

    Args:
        model: whose layers have their final forms.
        plan: the family's shard plan.
        mesh: coordinates of the shard's rank.
        ring: Paddle's ring id of the tensor parallel group.
    """
    if mesh.degrees.tp == 1:
        return
    modules = list(model.named_sublayers())
    for name, module in modules:
        if plan.experts and fnmatch.fnmatchcase(name, plan.experts):
            check_static(name, module)
            first = mesh.coordinate["tp"] * module.gate_proj.weight.shape[0]
            module.dispatcher = StaticDispatcher(first)
        if name == plan.embedding:
            set_lookup(model, name, _lookup_of_rank(module.weight.shape[0], mesh, ring), "--tensor_parallel_degree")
        elif plan.is_tp_region(name):
            for layer in _modules_to_sum(name, module, plan):
                layer.register_forward_post_hook(_all_reduce_hook(ring))
    gather = functools.partial(_gather_logits, mesh.degrees.tp, ring, int(model.config.vocab_size))
    if model.lm_head is None:
        model.tied_head = _GatheringHead(model.tied_head, gather)
    else:
        model.lm_head.register_forward_post_hook(lambda layer, inputs, logits: gather(logits))


class _GatheringHead(TiedHead):
    """Another tied head, whose logits are gathered from all ranks."""

    def __init__(self, inner: TiedHead, gather: Callable[[Tensor], Tensor]):
        super().__init__()
        self._inner = inner
        self._gather = gather

    def __call__(self, hidden: Tensor, embedding: Any) -> Tensor:
        return self._gather(self._inner(hidden, embedding))


def _gather_logits(num_ranks: int, ring: int, size: int, logits: Tensor) -> Tensor:
    """Logits [B, V] of all ranks, without the padding of the vocabulary, from those of this rank."""
    return _gather_columns(logits, num_ranks, ring)[:, :size]


def _modules_to_sum(name: str, region: Any, plan: ShardPlan) -> list[Any]:
    """The modules of a TP region whose outputs are summed over ranks. For llmsuite's own code it is the region. A
    third-party region may compute more after its last matrix, for which it needs the full sum: there it is each
    row-parallel matrix.

    Raises:
        UserError: a row-parallel parameter is not the matrix of a linear layer.
    """
    if is_own_code(region):
        return [region]
    found = dict(region.named_sublayers(prefix=name))
    ends = []
    for parameter, _ in region.named_parameters(prefix=name):
        if plan.dim(parameter) != 0:
            continue
        owner, _, kind = parameter.rpartition(".")
        if kind != "weight" or not is_plain_linear(found.get(owner)):
            raise UserError(
                f"--tensor_parallel_degree: {describe_module(name, region)} has a forward pass of its own, and "
                f"{parameter}, which is cut along its inputs, is no matrix of a linear layer: it is unknown where "
                "ranks have to sum"
            )
        ends.append(found[owner])
    return ends


def _lookup_of_rank(size: int, mesh: Mesh, ring: int) -> Lookup:
    """The vocabulary-parallel lookup of an embedding: each rank looks up its `size` ids, with zeros for the others."""
    first = mesh.coordinate["tp"] * size

    def lookup(input_ids: Tensor, table: Tensor) -> Tensor:
        ids = input_ids - first
        mine = paddle.logical_and(ids >= 0, ids < size)
        found = F.embedding(paddle.where(mine, ids, paddle.zeros_like(ids)), table)
        return _all_reduce(found * mine.astype(found.dtype).unsqueeze(-1), ring)

    return lookup


def _all_reduce_hook(ring: int) -> Callable[..., Any]:
    """A forward hook that sums the output of a layer over the ranks of a ring."""

    def hook(layer: Any, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):  # attention returns its cache too
            return (_all_reduce(output[0], ring), *output[1:])
        return _all_reduce(output, ring)

    return hook


def _all_reduce(part: Tensor, ring: int) -> Tensor:
    """Sum over the ranks of a ring. It is the operation itself, with the number of the ring, which the program keeps;
    Paddle's functions take a group, an object of this process."""
    return paddle._C_ops.all_reduce(part, ring, int(dist.ReduceOp.SUM))


def _gather_columns(part: Tensor, count: int, ring: int) -> Tensor:
    """Concatenate the columns [B, n] of all ranks to [B, n x count]. all_gather concatenates the first dim, so that it
    gets the transposed matrix; also its size n is known when the program is built, that of the batch is not."""
    return paddle._C_ops.all_gather(part.t(), ring, count).t()
