"""Expert parallel: tokens are sent to the ranks that have their experts (dispatch), and the results back (combine).

The stack of experts is split over the ranks of an expert parallel group, consecutive experts to each, and each of those
shards is split again over its tensor parallel group. A tensor parallel group has the same tokens on all its ranks: each
dispatches the tokens of its own experts only, and the results are summed over the group.

The exchange and its gradients are our own; Paddle's rules see a module that maps replicated tensors to replicated
tensors.
"""

from __future__ import annotations

import fnmatch
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.autograd import PyLayer
from paddle.distributed.auto_parallel.api import dtensor_from_local, dtensor_to_local

from llmsuite.base.typing import Tensor
from llmsuite.devices.tensors import tensor_of
from llmsuite.models import token_context
from llmsuite.models.dropout import RowDropout
from llmsuite.models.experts import Experts, TokenDispatcher, check_experts, combine, dispatch, sort_rows
from llmsuite.models.quantised import QuantisedMatrix
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.parallel import collective
from llmsuite.parallel.gradients import SumGradients
from llmsuite.parallel.mesh import Mesh


def apply_expert_parallel(model: Any, plan: ShardPlan, mesh: Mesh) -> None:
    """Make the routed experts of a model exchange tokens with other ranks, where the mesh splits the experts."""
    if mesh.degrees.ep == mesh.degrees.tp == 1 or not plan.experts:
        return
    for name, module in model.named_sublayers():
        if fnmatch.fnmatchcase(name, plan.experts):
            check_experts(name, module, "parallel: tensor_parallel_degree and expert_parallel_degree")
            module.dispatcher = ExpertParallelDispatcher(module, mesh)


class ExpertParallelDispatcher(TokenDispatcher):
    """Dispatcher of a rank that has some of the experts."""

    def __init__(self, experts: Experts, mesh: Mesh):
        self._mesh = mesh
        tp = mesh.degrees.tp
        ep = mesh.degrees.ep
        weight = experts.gate_proj.weight
        weight = weight.codes if isinstance(weight, QuantisedMatrix) else weight
        self._num_here = weight.shape[0] // (tp if weight.is_dist() else 1)
        # slot of each expert among those with this tensor parallel coordinate, in the order of the ranks along ep; all
        # other experts have one more slot, after the last
        slots = np.full([ep, tp, self._num_here], ep * self._num_here, dtype="int64")
        slots[:, mesh.coordinate["tp"]] = np.arange(ep * self._num_here).reshape(ep, -1)
        self._slots = slots.flatten()
        first = mesh.expert_part * self._num_here
        for layer in experts.sublayers():
            if isinstance(layer, RowDropout):
                layer.first = first

    def run(self, experts: Experts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Outputs [B, L, D] of the chosen experts for the tokens of this rank; every rank of the group calls it.

        Args:
            experts: those of this rank.
            x: [B, L, D].
            weights: of the chosen experts, [B, L, k].
            chosen: numbers of the chosen experts, [B, L, k].
        """
        shape = x.shape
        num_slots = self._mesh.degrees.ep * self._num_here
        if self._mesh.tensor is not None:
            x, weights, chosen = (self._plain(tensor) for tensor in (x, weights, chosen))
            # backward: each rank has the gradients that come from its own experts only
            x, weights = (SumGradients.apply(tensor, self._mesh.tensor_group) for tensor in (x, weights))
        slots = tensor_of(self._slots).index_select(chosen.flatten())
        route = sort_rows(slots, num_slots, experts.row_counts, self._slots.tolist())
        keys = experts.row_keys(route)
        rows = self._through_experts(experts, dispatch(x.flatten(0, 1), route), route.counts, keys)
        y = combine(rows, weights.flatten(0, 1), route).reshape(shape)
        if self._mesh.tensor is None:
            return y
        # each rank has the outputs of its own experts; the sum over tp has those of all
        y = _Sum.apply(y, self._mesh.tensor_group)
        return dtensor_from_local(y, self._mesh.tensor, [dist.Replicate()])

    def _through_experts(self, experts: Experts, rows: Tensor, counts: list[int], keys: Tensor | None) -> Tensor:
        """Rows [N, D] through their experts.

        Args:
            experts: those of this rank.
            rows: sorted by slot.
            counts: rows of each slot.
            keys: of the rows, where adapters drop some of their inputs.
        """
        group = self._mesh.expert_mesh.expert_group
        ep = self._mesh.degrees.ep
        if group is None:
            with token_context.tokens(keys):
                return experts.rows(rows, counts, self._local)
        # how many rows each rank sends: receivers need the sizes before the rows, so this comes first
        gathered = collective.all_gather(tensor_of(counts, dtype="int64"), group)
        table = experts.row_counts.of_ranks(gathered, counts)
        table = table.reshape(ep, ep, self._num_here)  # rows from each rank to each rank's experts
        to_here = table[:, group.rank]
        sent = table[group.rank].sum(-1).tolist()
        received = to_here.sum(-1).tolist()
        # rows arrive in the order of the ranks, and are computed in the order of the experts
        blocks = np.repeat(np.tile(np.arange(self._num_here), ep), to_here.flatten())
        by_expert = tensor_of(np.argsort(blocks, kind="stable"))
        by_rank = paddle.argsort(by_expert)
        rows = _Exchange.apply(rows, sent, received, group)  # dispatch, over ep: to the ranks of the chosen experts
        rows = _Permute.apply(rows, (by_expert, by_rank))
        if keys is not None:
            # the keys of the rows' tokens, in the same way, so that dropout masks do not depend on the rank
            keys = collective.all_to_all(keys.unsqueeze(-1), sent, received, group).squeeze(-1).index_select(by_expert)
        with token_context.tokens(keys):
            rows = experts.rows(rows, to_here.sum(0).tolist(), self._local)
        rows = _Permute.apply(rows, (by_rank, by_expert))
        return _Exchange.apply(rows, received, sent, group)  # combine: back to the ranks of the tokens

    def _local(self, stack: Tensor) -> Tensor:
        """The experts of this rank in a stack."""
        if self._mesh.tensor is None:
            return stack
        return dtensor_to_local(stack, self._mesh.tensor, stack.placements)

    def _plain(self, tensor: Tensor) -> Tensor:
        """The plain tensor, the same on every rank of the tensor parallel group."""
        replicated = [dist.Replicate()]
        assert tensor.placements == replicated, "activations before a TP region are replicated"
        return dtensor_to_local(tensor, self._mesh.tensor, replicated)


class _Exchange(PyLayer):
    """`collective.all_to_all` with a gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.back = received, sent, group
        return collective.all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        # the same exchange, with the sizes swapped: each gradient returns to the rank that sent its row
        return collective.all_to_all(gradient, *ctx.back)


class _Permute(PyLayer):
    """Rows in another order; the inverse order comes with it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, orders: tuple[Tensor, Tensor]) -> Tensor:
        order, ctx.inverse = orders
        return rows.index_select(order, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.index_select(ctx.inverse, 0)


class _Sum(PyLayer):
    """Sum over a group whose ranks all compute with the sum afterwards: the backward pass is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone()  # PyLayer's input stays as it is, and the sum is in place
        collective.sum_in_group(total, group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()
