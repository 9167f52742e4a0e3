"""Expert parallel: tokens are sent to the ranks that have their experts (dispatch), and the results back (combine).

The stack of experts is split over the ranks of an expert parallel group, consecutive experts to each, and each of those
shares is split again over its tensor parallel group. A tensor parallel group has the same tokens on all its ranks: each
dispatches those of its own experts only, and the results are summed over the group.

The exchange and its gradients are our own; Paddle's rules see a module that maps whole tensors to whole tensors.
"""

from __future__ import annotations

import fnmatch
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.autograd import PyLayer
from paddle.distributed.auto_parallel.api import dtensor_from_local, dtensor_to_local

from llmsuite.models import token_values
from llmsuite.models.dropout import RowDropout
from llmsuite.models.experts import Experts, check_experts, combine, dispatch, sort_rows
from llmsuite.models.quantised import QuantisedMatrix
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.parallel import collective
from llmsuite.parallel.gradients import SumGradients
from llmsuite.parallel.mesh import Mesh
from llmsuite.typing import Tensor


def share_experts(model: Any, plan: ShardPlan, mesh: Mesh) -> None:
    """Let the experts of a model compute with those of other ranks, where the mesh splits them."""
    if mesh.degrees.ep == mesh.degrees.tp == 1 or not plan.experts:
        return
    for name, module in model.named_sublayers():
        if fnmatch.fnmatchcase(name, plan.experts):
            check_experts(name, module, "parallel: tensor_parallel_degree and expert_parallel_degree")
            module.forward = SharedExperts(module, mesh).forward


class SharedExperts:
    """`Experts.forward` where a rank has some of the experts."""

    def __init__(self, experts: Experts, mesh: Mesh):
        self._experts, self._mesh = experts, mesh
        tp, ep = mesh.degrees.tp, mesh.degrees.ep
        weight = experts.gate_proj.weight
        weight = weight.codes if isinstance(weight, QuantisedMatrix) else weight
        self._num_here = weight.shape[0] // (tp if weight.is_dist() else 1)
        # slot of each expert among those with this tensor parallel coordinate, in the order of the ranks along ep; all
        # other experts have the slot behind the last
        slots = np.full([ep, tp, self._num_here], ep * self._num_here, dtype="int64")
        slots[:, mesh.coordinate["tp"]] = np.arange(ep * self._num_here).reshape(ep, -1)
        self._slots = slots.flatten()
        first = (mesh.of_experts.coordinate["ep"] * tp + mesh.coordinate["tp"]) * self._num_here
        for layer in experts.sublayers():
            if isinstance(layer, RowDropout):
                layer.first = first

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """`Experts.forward` for the tokens of this rank; every rank of the group calls it."""
        shape, num_slots = x.shape, self._mesh.degrees.ep * self._num_here
        if self._mesh.tensor is not None:
            x, weights, chosen = (self._whole(tensor) for tensor in (x, weights, chosen))
            x, weights = (SumGradients.apply(tensor, self._mesh.tensor_group) for tensor in (x, weights))
        route = sort_rows(paddle.to_tensor(self._slots).index_select(chosen.flatten()), num_slots)
        keys = self._experts.row_keys(route)
        rows = self._through_experts(dispatch(x.flatten(0, 1), route), route.counts, keys)
        y = combine(rows, weights.flatten(0, 1), route).reshape(shape)
        if self._mesh.tensor is None:
            return y
        y = _Sum.apply(y, self._mesh.tensor_group)
        return dtensor_from_local(y, self._mesh.tensor, [dist.Replicate()])

    def _through_experts(self, rows: Tensor, counts: list[int], keys: Tensor | None) -> Tensor:
        """Rows [N, D] through their experts.

        Args:
            rows: sorted by slot.
            counts: rows of each slot.
            keys: of the rows, where adapters drop some of their inputs.
        """
        group, ep = self._mesh.of_experts.expert_group, self._mesh.degrees.ep
        if group is None:
            with token_values.tokens(keys):
                return self._experts.rows(rows, counts, self._local)
        table = collective.all_gather(paddle.to_tensor(counts, dtype="int64"), group).numpy()
        table = table.reshape(ep, ep, self._num_here)  # rows from each rank to each rank's experts
        to_here = table[:, group.rank]
        sent, received = table[group.rank].sum(-1).tolist(), to_here.sum(-1).tolist()
        # rows arrive in the order of the ranks, and are computed in the order of the experts
        blocks = np.repeat(np.tile(np.arange(self._num_here), ep), to_here.flatten())
        by_expert = paddle.to_tensor(np.argsort(blocks, kind="stable"))
        by_rank = paddle.argsort(by_expert)
        rows = _Exchange.apply(rows, sent, received, group)
        rows = _Permute.apply(rows, (by_expert, by_rank))
        if keys is not None:
            keys = collective.all_to_all(keys.unsqueeze(-1), sent, received, group).squeeze(-1).index_select(by_expert)
        with token_values.tokens(keys):
            rows = self._experts.rows(rows, to_here.sum(0).tolist(), self._local)
        rows = _Permute.apply(rows, (by_rank, by_expert))
        return _Exchange.apply(rows, received, sent, group)

    def _local(self, stack: Tensor) -> Tensor:
        """The experts of this rank in a stack."""
        if self._mesh.tensor is None:
            return stack
        return dtensor_to_local(stack, self._mesh.tensor, stack.placements)

    def _whole(self, tensor: Tensor) -> Tensor:
        """The plain tensor, the same on every rank of the tensor parallel group."""
        whole = [dist.Replicate()]
        assert tensor.placements == whole, "activations in front of a region are whole"
        return dtensor_to_local(tensor, self._mesh.tensor, whole)


class _Exchange(PyLayer):
    """`collective.all_to_all`; gradients are sent back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.back = received, sent, group
        return collective.all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
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
    """Sum over a group whose ranks all go on with the sum: the backward pass sends nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone()
        collective.sum_in_group(total, group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()
