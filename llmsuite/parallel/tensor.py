"""Tensor and sequence parallel: where activations change their placements over tp.

Parameters are already distributed tensors (see `materialize`), so Paddle's SPMD rules compute with them. This module
adds hooks at the TP regions of the family's shard plan that reshard activations, and gives the model an embedding
lookup and operations on logits that do not gather the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle.autograd import PyLayer
from paddle.distributed.auto_parallel.api import dtensor_from_local, dtensor_to_local

from llmsuite.adapters.layers.adapter import Adapter
from llmsuite.adapters.layers.structured import StructuredLinear, WeightShard
from llmsuite.base.typing import Tensor
from llmsuite.devices.ops import Ops, entropy_of_sums
from llmsuite.launch import calls
from llmsuite.models.blocks import CausalLM
from llmsuite.models.divergence import Comparison, OverVocabulary, divergence
from llmsuite.models.dropout import Select, TokenDropout
from llmsuite.models.embedding import set_lookup
from llmsuite.models.gated_delta import GatedDeltaAttention, Projected
from llmsuite.models.logit_ops import LogitOps
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.parallel import collective
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.program import vocabulary as program


def apply_tensor_parallel(model: Any, plan: ShardPlan, mesh: Mesh, sequence_parallel: bool) -> None:
    """Make a model whose parameters are cut over tp compute with them; nothing changes where tp is 1.

    Args:
        model: materialized.
        plan: the family's shard plan.
        mesh: of the run, with this rank's coordinates.
        sequence_parallel: cut activations along the sequence between the regions of the plan.
    """
    if mesh.tensor is None:
        return
    outside = between_layers(sequence_parallel)
    replicated = [dist.Replicate()]
    modules = dict(model.named_sublayers())
    if plan.embedding in modules:  # not on every pipeline stage
        lookup = VocabularyParallelLookup(mesh, outside, modules[plan.embedding].weight.shape[0])
        set_lookup(model, plan.embedding, lookup.rows, "parallel.tensor_parallel_degree")
    if isinstance(model, CausalLM):
        model.logit_ops = VocabularyParallelLogitOps(model.ops, mesh, model.config.vocab_size)
    reduce_partial_sum = _reshard_to(mesh, outside)  # one function for all layers: compiled layers have to be alike
    reduce_column_norms = _reshard_to(mesh, replicated)
    select = _mask_shard(mesh)
    for name, module in model.named_sublayers():
        if _is_last_of_region(name, module, plan):
            # otherwise its adapter would all-reduce the sum before it is cut again
            module.reduce_partial_sum = reduce_partial_sum
        if isinstance(module, Adapter) and plan.dim(f"{name}.weight") == 0:
            module.reduce_column_norms = reduce_column_norms
        if isinstance(module, StructuredLinear):
            module.part = TensorParallelShard(mesh, plan.dim(f"{name}.weight"), module.weight.shape)
        if isinstance(module, TokenDropout):
            module.select = select
        if isinstance(module, GatedDeltaAttention):
            module.on_heads = call_on_own_heads
        if plan.is_tp_region(name):
            if sequence_parallel:
                # an all-gather along the sequence: column-parallel matrices need all tokens
                module.register_forward_pre_hook(_reshard_input(mesh, replicated))
            # partial sums of row-parallel matrices: an all-reduce, or under sequence parallel a reduce-scatter
            module.register_forward_post_hook(_reshard_output(mesh, outside))
        elif plan.is_last_norm(name) and sequence_parallel:
            # an all-gather along the sequence: head and loss select tokens of full rows
            module.register_forward_post_hook(_reshard_output(mesh, replicated))


def call_on_own_heads(function: Callable[..., list[Tensor]], projected: Projected, *more: Any) -> list[Tensor]:
    """`gated_delta.call_on_heads` with the heads of this rank: projections and parameters are cut by heads, and nothing
    is sent. Outputs and gates [B, L, H, V] are cut as the projections are; the cache is plain."""
    first = projected.tokens[0]
    own = Projected(
        [_own_part(part) for part in projected.tokens],
        [_own_part(kernel) for kernel in projected.kernels],
        _own_part(projected.log_rate),
        _own_part(projected.time_bias),
    )
    positions, past = more
    out, gate, *cache = function(own, None if positions is None else _own_part(positions), past)
    cut = [dtensor_from_local(part, first.process_mesh, first.placements) for part in (out, gate)]
    return [*cut, *cache]


def _own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, with a gradient that is cut in the same way; a plain tensor as it is."""
    if not tensor.is_dist():
        return tensor
    return dtensor_to_local(tensor, tensor.process_mesh, tensor.placements)


def _is_last_of_region(name: str, module: Any, plan: ShardPlan) -> bool:
    """True for the row-parallel matrix at the end of a TP region, with an adapter."""
    if not isinstance(module, Adapter):
        return False
    return plan.dim(f"{name}.weight") == 0 and plan.is_tp_region(name.rpartition(".")[0])


def between_layers(sequence_parallel: bool) -> list[Any]:
    """Placements over tp of the activations [B, L, D] between layers."""
    return [dist.Shard(1)] if sequence_parallel else [dist.Replicate()]


# placements


def placement(dim: int | None) -> Any:
    """The placement of a tensor that is sharded along a dim over the ranks of one axis; None where each has all."""
    if dim is None:
        return dist.Replicate()
    return dist.Shard(dim)


def local_value(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor; shares its memory."""
    return tensor._local_value() if tensor.is_dist() else tensor


def reshard(tensor: Tensor, mesh: Mesh, placements: list[Any]) -> Tensor:
    """A distributed tensor with other placements over tp; the tensor itself when it has them."""
    if not paddle.in_dynamic_mode():  # a program is being built: nothing is sent now; tp is the last axis of its mesh
        target = [*tensor.placements[:-1], *placements]
        return tensor if tensor.placements == target else dist.reshard(tensor, tensor.process_mesh, target)
    if tensor.placements == placements:
        return tensor
    with calls.recorded("reshard", tensor, mesh.tensor, mesh.tensor.process_ids):
        return dist.reshard(tensor, mesh.tensor, placements)


def _replicated(tensor: Tensor, mesh: Mesh) -> Tensor:
    """The tensor as a distributed one that is the same on every rank of the tensor parallel group."""
    return tensor if tensor.is_dist() else dtensor_from_local(tensor, mesh.tensor, [dist.Replicate()])


def _reshard_to(mesh: Mesh, placements: list[Any]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: reshard(tensor, mesh, placements)


def _mask_shard(mesh: Mesh) -> Callable[[Select, Tensor], Tensor]:
    """`TokenDropout.select` that makes on each rank the part of a mask [B, L, I] that fits its shard of the
    activations."""

    def select(mask: Select, x: Tensor) -> Tensor:
        (placement,) = x.placements
        index = [slice(None)] * 3
        assert not placement.is_partial(), "dropout of a sum that is not complete"
        if placement.is_shard():
            size = x.shape[placement.get_dim()] // mesh.degrees.tp
            at = mesh.coordinate["tp"]
            index[placement.get_dim()] = slice(at * size, (at + 1) * size)
        return dtensor_from_local(mask(index), mesh.tensor, x.placements)

    return select


def _reshard_input(mesh: Mesh, placements: list[Any]) -> Callable[..., Any]:
    def hook(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (reshard(inputs[0], mesh, placements), *inputs[1:])

    return hook


def _reshard_output(mesh: Mesh, placements: list[Any]) -> Callable[..., Any]:
    def hook(module: Any, inputs: tuple[Tensor, ...], output: Any) -> Any:
        if isinstance(output, tuple):  # attention returns its cache too
            return (reshard(output[0], mesh, placements), *output[1:])
        return reshard(output, mesh, placements)

    return hook


class TensorParallelShard(WeightShard):
    """The shard of a matrix on a rank of the tensor parallel group.

    With a column-parallel matrix a rank computes its shard of the outputs, and a partial sum of the gradient of the
    input; with a row-parallel matrix a partial sum of the outputs, and its shard of that gradient. Adapter parameters
    are replicated; a rank has the partial sum of their gradients that comes from its inputs, outputs or tokens.
    """

    def __init__(self, mesh: Mesh, dim: int | None, shape: Sequence[int]):
        """
        Args:
            mesh: of the run, with this rank's coordinates.
            dim: the dim of the matrix that is cut; None if none is.
            shape: of the full matrix, [inputs, outputs].
        """
        self._mesh = mesh
        self._dim = dim
        if dim is not None:
            size = shape[dim] // mesh.degrees.tp
            at = mesh.coordinate["tp"]
            part = slice(at * size, (at + 1) * size)
            self.inputs = part if dim == 0 else None
            self.outputs = None if dim == 0 else part

    def _placements(self, x: Tensor) -> tuple[list[Any], list[Any]]:
        """Placements of the input and of the output."""
        if self._dim is None:
            return x.placements, x.placements
        last = [dist.Shard(x.ndim - 1)]
        return (last, [dist.Partial()]) if self._dim == 0 else ([dist.Replicate()], last)

    def local(self, tensor: Tensor) -> Tensor:
        return local_value(tensor)

    def output(self, y: Tensor, x: Tensor) -> Tensor:
        placements, output_placements = self._placements(x)
        assert x.placements == placements, "an input that is cut in another way"
        return dtensor_from_local(y, self._mesh.tensor, output_placements)

    def output_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        _, (placement,) = self._placements(x)
        # the gradient of a partial sum is the full gradient, on every rank
        target = dist.Replicate() if placement.is_partial() else placement
        return local_value(reshard(gradient, self._mesh, [target]))

    def input_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        if self._dim != 1:
            return dtensor_from_local(gradient, self._mesh.tensor, x.placements)
        # column-parallel: each rank has the gradient from its outputs
        return reshard(self._sum(gradient), self._mesh, x.placements)

    def parameter_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        if self._dim is None and x.placements[0].is_replicated():
            return dtensor_from_local(gradient, self._mesh.tensor, x.placements)
        return self._sum(gradient)

    def _sum(self, gradient: Tensor) -> Tensor:
        return dtensor_from_local(gradient, self._mesh.tensor, [dist.Partial()])


# vocabulary


class VocabularyParallelLookup(dist.LocalLayer):
    """Embedding lookup with the rows of the table cut over tp: each rank looks up the ids it has; others get zeros.

    `F.embedding` on a table cut along the vocabulary would gather the table (Paddle 3.3.1).
    """

    def __init__(self, mesh: Mesh, placements: list[Any], num_rows: int):
        stacked = [(mesh.tensor, [dist.Shard(0)])]
        gradients = [(mesh.tensor, [dist.Replicate()]), (mesh.tensor, [dist.Shard(0)])]
        super().__init__(stacked, gradients)
        self._mesh = mesh
        self._placements = placements
        self._first = mesh.coordinate["tp"] * (num_rows // mesh.degrees.tp)

    def rows(self, input_ids: Tensor, table: Tensor) -> Tensor:
        """Ids [B, L] to the rows [B, L, D] of a table."""
        if not paddle.in_dynamic_mode():
            found = program.ProgramLookup(input_ids, self._first).rows(input_ids, table)
            return reshard(found, self._mesh, self._placements)
        parts = self(_replicated(input_ids, self._mesh), table)  # [tp, B, L, D], one part a rank
        # the sum over tp has one term that is not zero; under sequence parallel it is scattered along L
        return reshard(parts.sum(0), self._mesh, self._placements)

    def forward(self, input_ids: Tensor, rows: Tensor) -> Tensor:
        """Look up in the local rows; the leading dim of 1 becomes tp in the stacked output."""
        ids = input_ids - self._first
        mine = paddle.logical_and(ids >= 0, ids < rows.shape[0])
        found = F.embedding(paddle.where(mine, ids, paddle.zeros_like(ids)), rows)
        return _Masked.apply(found, (mine.astype(found.dtype).unsqueeze(-1),)).unsqueeze(0)


class _Masked(PyLayer):
    """Product with a mask, which comes in a tuple: a plain product would keep the other factor for its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, masks: tuple[Tensor]) -> Tensor:
        (ctx.mask,) = masks
        return x * ctx.mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.mask


class VocabularyParallelLogitOps(LogitOps):
    """`LogitOps` of logits that are cut along the vocabulary: only maxima, sums and target logits are exchanged
    (Shoeybi et al. 2019, arXiv 1909.08053, section 3).

    `F.cross_entropy` would gather the logits, and logsumexp over a dim that is cut is wrong (Paddle 3.3.1). Logits
    after the vocabulary are padding and get a probability of 0.
    """

    def __init__(self, ops: Ops, mesh: Mesh, vocabulary: int):
        """
        Args:
            ops: of the device.
            mesh: of the run, with this rank's coordinates.
            vocabulary: number of tokens, without padding.
        """
        super().__init__(ops)
        self._mesh = mesh
        self._vocabulary = vocabulary

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        if not paddle.in_dynamic_mode():
            return program.cross_entropy(logits, targets, self._vocabulary)
        shifted, ids, targets = self._shifted(logits, targets)
        is_target = (ids == targets).astype(shifted.dtype)
        nll = shifted.exp().sum(-1, keepdim=True).log() - (shifted * is_target).sum(-1, keepdim=True)
        return self._sum(nll.squeeze(-1))

    def nll_and_entropy(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        shifted, ids, targets = self._shifted(logits, targets)
        is_target = (ids == targets).astype(shifted.dtype)
        exponentials = shifted.exp()
        # one all-reduce over tp for each sum: parts of the vocabulary are on different ranks
        total, weighted, picked = (
            self._sum(part.sum(-1)) for part in (exponentials, exponentials * shifted, shifted * is_target)
        )
        return total.log() - picked, entropy_of_sums(total, weighted)

    def is_greedy_match(self, logits: Tensor, targets: Tensor) -> Tensor:
        shifted, ids, targets = self._shifted(logits, targets)
        # below zero where the target's logit is below the maximum, or an earlier token has the maximum
        earlier = paddle.logical_and(shifted >= 0, ids < targets).astype(shifted.dtype)
        # the target and earlier maxima may be on other ranks
        deficit = self._sum((shifted * (ids == targets).astype(shifted.dtype) - earlier).sum(-1))
        return (deficit >= 0).astype("float32")

    def divergence(self, logits: Tensor, taught: Tensor, comparison: Comparison) -> Tensor:
        ranks = _OverTensorRanks(self._mesh)
        own, other = (self._without_padding(part) for part in (logits, taught))
        # complete on every rank: nothing is sent
        return self._sum(divergence(own, other, comparison, ranks))

    def _without_padding(self, logits: Tensor) -> Tensor:
        """Logits [N, V] with a probability of 0 for the padding of the vocabulary."""
        if logits.shape[-1] == self._vocabulary:
            return logits
        here = logits.shape[-1] // self._mesh.degrees.tp
        first = self._mesh.coordinate["tp"] * here
        lowest = (paddle.arange(first, first + here) >= self._vocabulary).astype(logits.dtype) * -1e30
        return logits + dtensor_from_local(lowest, self._mesh.tensor, [dist.Shard(0)])

    def _sum(self, numbers: Tensor) -> Tensor:
        """The numbers [N], summed over tp where they are partial sums: plain, and the same on every rank."""
        replicated = [dist.Replicate()]
        return dtensor_to_local(reshard(numbers, self._mesh, replicated), self._mesh.tensor, replicated)

    def _shifted(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits minus the maximum of their row, [N, V], and their token ids, [V], both cut along the vocabulary; and
        the targets as [N, 1]. The maximum is subtracted so that no exponential overflows."""
        targets = _replicated(targets, self._mesh)
        here = logits.shape[-1] // self._mesh.degrees.tp
        first = self._mesh.coordinate["tp"] * here
        # cut as the logits are: otherwise each rank would keep a tensor as long as the vocabulary
        ids = paddle.arange(first, first + here, dtype=targets.dtype)
        if logits.shape[-1] > self._vocabulary:
            lowest = (ids >= self._vocabulary).astype(logits.dtype) * -1e30
            logits = logits + dtensor_from_local(lowest, self._mesh.tensor, [dist.Shard(0)])
        ids = dtensor_from_local(ids, self._mesh.tensor, [dist.Shard(0)])
        shifted = logits - logits.detach().max(-1, keepdim=True)
        return shifted, ids, targets.unsqueeze(-1)


class _OverTensorRanks(OverVocabulary):
    """Reductions over the ranks of the tensor parallel group. Only numbers of tokens are exchanged."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh

    def sum(self, numbers: Tensor) -> Tensor:
        collective.sum_in_group(numbers, self._mesh.tensor_group)
        return numbers

    def max(self, numbers: Tensor) -> Tensor:
        collective.max_in_group(numbers, self._mesh.tensor_group)
        return numbers

    def local(self, tensor: Tensor) -> Tensor:
        return local_value(tensor)

    def of_tokens(self, numbers: Tensor) -> Tensor:
        return dtensor_from_local(numbers, self._mesh.tensor, [dist.Replicate()])

    def of_vocabulary(self, gradient: Tensor) -> Tensor:
        return dtensor_from_local(gradient, self._mesh.tensor, [dist.Shard(1)])
