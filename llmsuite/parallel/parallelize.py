"""From a model for one card to this rank's part of it, in the order it happens:

values of this rank's slices -> experts of several ranks -> tensor parallel -> sequence parallel

The model is built without memory (`paddle.LazyGuard`), so a rank never holds more than its own slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import nn
from paddle.autograd import PyLayer
from paddle.distributed.auto_parallel.api import dtensor_from_local, dtensor_to_local

from llmsuite.errors import UserError
from llmsuite.launch import calls
from llmsuite.models.lora import LoraLinear
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.parallel.experts import share_experts
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.partition import local_slice
from llmsuite.typing import Tensor

ReadSlice = Callable[[str, Sequence[int], Sequence[slice]], np.ndarray]
"""Name, whole shape, one slice a dim -> the values of the slice."""


def parallelize(
    model: Any,
    plan: ShardPlan,
    mesh: Mesh,
    read: ReadSlice,
    dtype: str,
    sequence_parallel: bool,
    filled: Callable[[str, Tensor], None] = lambda name, parameter: None,
) -> None:
    """Turn a lazily built model into this rank's part of it.

    Args:
        model: built under `paddle.LazyGuard`.
        plan: of its family.
        mesh: this rank's place.
        read: initial values.
        dtype: of the parameters.
        sequence_parallel: cut activations along the sequence between the regions of the plan.
        filled: called with name and parameter as soon as a parameter has its values, before the next one has memory.
    """
    fill(model, plan, mesh, read, dtype, filled)
    share_experts(model, plan, mesh)
    if mesh.tensor is None:
        return
    outside = between_layers(sequence_parallel)
    whole = [dist.Replicate()]
    modules = dict(model.named_sublayers())
    if plan.embedding in modules:  # not on every pipeline stage
        embedding = modules[plan.embedding]
        embedding.forward = VocabularyParallelLookup(embedding, mesh, outside).lookup
    model.cross_entropy = _vocabulary_parallel_cross_entropy(mesh)
    settle = _to(mesh, outside)  # one for all, or compiled layers would differ
    for name, module in model.named_sublayers():
        if (
            isinstance(module, LoraLinear)
            and plan.dim(f"{name}.weight") == 0
            and plan.is_region(name.rpartition(".")[0])
        ):
            # the last matrix of a region: else its adapter would have the whole sum made before it is cut again
            module.settle = settle
        if plan.is_region(name):
            if sequence_parallel:
                module.register_forward_pre_hook(_on_input(mesh, whole))
            module.register_forward_post_hook(_on_output(mesh, outside))
        elif name == plan.last_norm and sequence_parallel:
            module.register_forward_post_hook(_on_output(mesh, whole))


def between_layers(sequence_parallel: bool) -> list[Any]:
    """Placements over tp of the activations [B, L, D] between layers."""
    return [dist.Shard(1)] if sequence_parallel else [dist.Replicate()]


@paddle.no_grad()
def fill(
    model: Any,
    plan: ShardPlan,
    mesh: Mesh,
    read: ReadSlice,
    dtype: str,
    filled: Callable[[str, Tensor], None] = lambda name, parameter: None,
) -> None:
    """Give every parameter its values, a slice at a time; under tensor parallel it becomes a distributed tensor."""
    for name, parameter in model.named_parameters():
        local = paddle.to_tensor(read_local(name, parameter.shape, plan, mesh, read))
        local = local if plan.is_gate_bias(name) else local.astype(dtype)
        if mesh.tensor is None:
            parameter._set_impl(local)
        else:
            dim = plan.dim(name)
            placements = [dist.Replicate() if dim is None else dist.Shard(dim)]
            parameter._set_impl(dtensor_from_local(local, mesh.tensor, placements))
        filled(name, parameter)


def read_local(name: str, shape: Sequence[int], plan: ShardPlan, mesh: Mesh, read: ReadSlice) -> np.ndarray:
    """The values of a parameter that this rank holds when sharding does not cut it, as float32."""
    index = local_slice(name, shape, plan, mesh)
    values = np.ascontiguousarray(read(name, shape, index), dtype="float32")
    if list(values.shape) != [part.stop - part.start for part in index]:
        raise UserError(f"parameter {name!r} is {list(shape)}; its values do not have this shape")
    return values


def local_value(tensor: Tensor) -> Tensor:
    """What of a tensor lies on this rank; shares its memory."""
    return tensor._local_value() if tensor.is_dist() else tensor


def _replicated(tensor: Tensor, mesh: Mesh) -> Tensor:
    """As a distributed tensor that every rank of the tensor parallel group has alike."""
    return tensor if tensor.is_dist() else dtensor_from_local(tensor, mesh.tensor, [dist.Replicate()])


class VocabularyParallelLookup(dist.LocalLayer):
    """Embedding lookup with the rows of the table cut over tp: each rank looks up the ids it has, zeros elsewhere.

    `F.embedding` on a table cut along the vocabulary would gather the table (Paddle 3.3.1).
    """

    def __init__(self, embedding: nn.Embedding, mesh: Mesh, placements: list[Any]):
        stacked = [(mesh.tensor, [dist.Shard(0)])]
        gradients = [(mesh.tensor, [dist.Replicate()]), (mesh.tensor, [dist.Shard(0)])]
        super().__init__(stacked, gradients)
        self._weight, self._mesh, self._placements = embedding.weight, mesh, placements
        self._first = mesh.coordinate["tp"] * (embedding.weight.shape[0] // mesh.degrees.tp)

    def lookup(self, input_ids: Tensor) -> Tensor:
        """Ids [B, L] to vectors [B, L, D]."""
        parts = self(_replicated(input_ids, self._mesh), self._weight)  # [tp, B, L, D], one part a rank
        return reshard(parts.sum(0), self._mesh, self._placements)

    def forward(self, input_ids: Tensor, rows: Tensor) -> Tensor:
        """On the local rows; a leading dim of 1 that becomes tp in the stacked output."""
        ids = input_ids - self._first
        mine = paddle.logical_and(ids >= 0, ids < rows.shape[0])
        found = F.embedding(paddle.where(mine, ids, paddle.zeros_like(ids)), rows)
        return _Masked.apply(found, (mine.astype(found.dtype).unsqueeze(-1),)).unsqueeze(0)


class _Masked(PyLayer):
    """A product with a mask, given as the only one of a tuple. A plain product would keep the other factor too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, masks: tuple[Tensor]) -> Tensor:
        (ctx.mask,) = masks
        return x * ctx.mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.mask


def _vocabulary_parallel_cross_entropy(mesh: Mesh) -> Callable[[Tensor, Tensor], Tensor]:
    """`cross_entropy` of logits that are cut along the vocabulary: only maxima, sums and picked logits are exchanged.

    `F.cross_entropy` would gather the logits, and logsumexp over a dim that is cut is wrong (Paddle 3.3.1).
    """

    def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
        targets = _replicated(targets, mesh)
        shifted = logits - logits.detach().max(-1, keepdim=True)
        here = logits.shape[-1] // mesh.degrees.tp
        first = mesh.coordinate["tp"] * here
        # cut as the logits: else each rank would keep a tensor as long as the whole vocabulary
        ids = paddle.arange(first, first + here, dtype=targets.dtype)
        ids = dtensor_from_local(ids, mesh.tensor, [dist.Shard(0)])
        is_target = (ids == targets.unsqueeze(-1)).astype(shifted.dtype)
        nll = shifted.exp().sum(-1, keepdim=True).log() - (shifted * is_target).sum(-1, keepdim=True)
        # from here on every rank has the same plain numbers
        whole = [dist.Replicate()]
        return dtensor_to_local(reshard(nll.squeeze(-1), mesh, whole), mesh.tensor, whole)

    return cross_entropy


def _to(mesh: Mesh, placements: list[Any]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: reshard(tensor, mesh, placements)


def _on_input(mesh: Mesh, placements: list[Any]) -> Callable[..., Any]:
    def hook(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (reshard(inputs[0], mesh, placements), *inputs[1:])

    return hook


def _on_output(mesh: Mesh, placements: list[Any]) -> Callable[..., Any]:
    def hook(module: Any, inputs: tuple[Tensor, ...], output: Any) -> Any:
        if isinstance(output, tuple):  # attention returns its cache too
            return (reshard(output[0], mesh, placements), *output[1:])
        return reshard(output, mesh, placements)

    return hook


def reshard(tensor: Tensor, mesh: Mesh, placements: list[Any]) -> Tensor:
    """A distributed tensor with other placements over tp; itself when it has them."""
    if tensor.placements == placements:
        return tensor
    if not paddle.in_dynamic_mode():  # a program is being made: nothing is sent
        return dist.reshard(tensor, mesh.tensor, placements)
    with calls.made("reshard", tensor, mesh.tensor, mesh.tensor.process_ids):
        return dist.reshard(tensor, mesh.tensor, placements)
