"""Routed experts for one card: each expert computes only the tokens that are routed to it.

Shapes: B batch, L length, T tokens (B x L), D hidden, E experts, F width of an expert, k experts of a token. A row is a
token routed to one of its experts: there are T x k rows, or N of them where this card has only some of the experts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.autograd import PyLayer

from llmsuite.base.errors import UserError
from llmsuite.base.typing import Tensor
from llmsuite.devices.expert_ops import grouped_matmul as grouped_in_program
from llmsuite.devices.matmul_ops import matmul
from llmsuite.devices.ops import Ops, clamped_swiglu
from llmsuite.devices.tensors import array_of
from llmsuite.models import token_context
from llmsuite.models.blocks import ZEROS
from llmsuite.models.dropout import RowDropout
from llmsuite.models.exact import describe_module, is_exactly, is_own
from llmsuite.models.linear import WithMatmul
from llmsuite.models.quantised import GroupedMatrix, by_matrix

Local = Callable[[Tensor], Tensor]
"""Maps a stack of experts to this rank's shard of it, as a plain tensor."""
Counts = Sequence[int] | Tensor
"""Number of rows of each expert; a tensor [E] while a static program is traced, which does not know the numbers. Then
there may be trailing rows that belong to no expert here."""


def unsharded(stack: Tensor) -> Tensor:
    return stack


class GroupedLinear(nn.Layer, WithMatmul):
    """A stack of one matrix per expert, [E, inputs, outputs], and possibly a bias of each, [E, outputs]."""

    never_packed = ("bias",)
    bias: Tensor | None
    in_program: Callable[[Tensor, Tensor, Tensor], Tensor]
    """`llmsuite.devices.expert_ops.grouped_matmul` while a static program is traced."""

    def __init__(self, num_experts: int, num_inputs: int, num_outputs: int, biased: bool = False):
        super().__init__()
        self.in_program = grouped_in_program
        self.weight = self.create_parameter([num_experts, num_inputs, num_outputs], attr=ZEROS)
        self.bias = self.create_parameter([num_experts, num_outputs], attr=ZEROS) if biased else None

    def product(self, x: Tensor, counts: Counts, local: Local = unsharded) -> Tensor:
        """Rows [N, inputs], sorted by expert with `counts` of them each, to [N, outputs]."""
        return self.with_bias(self.matrix_product(x, counts, local), counts, local)

    def with_bias(self, y: Tensor, counts: Counts, local: Local = unsharded) -> Tensor:
        """Rows [N, outputs], sorted by expert, with the bias of their expert, if there are biases."""
        return y if self.bias is None else grouped_bias(y, local(self.bias), counts)

    def of_expert(self, x: Tensor, number: int) -> Tensor:
        """Rows [N, inputs] of the expert with this number to [N, outputs]."""
        y = paddle.matmul(x, self.weight[number])
        return y if self.bias is None else y + self.bias[number]

    def matrix_product(self, x: Tensor, counts: Counts, local: Local) -> Tensor:
        """`product` without the bias."""
        if isinstance(self.weight, GroupedMatrix):  # a `QuantisedMatrix`, or packed weights of generation
            assert isinstance(counts, Sequence), "refused before the run"
            return self.weight.grouped_product(x, counts)
        return self.grouped(x, local(self.weight), counts)

    def grouped(self, x: Tensor, weight: Tensor, counts: Counts) -> Tensor:
        """`grouped_matmul` by the device's kernels."""
        if isinstance(counts, Sequence):
            return grouped_matmul(x, weight, counts, self.matmul)
        return self.in_program(x, weight, counts)


class RowCounts:
    """Copies the number of rows of each expert to the host: the shapes of all that follows depend on it. Another one,
    for a device that computes nothing, has numbers of its own."""

    def here(self, counts: Tensor, num_rows: int, slots: Sequence[int] | None = None) -> list[int]:
        """Number of rows of each expert of this card.

        Args:
            counts: these numbers on the device.
            num_rows: rows of the tokens of this rank, for all experts together.
            slots: the place in `counts` of each expert, len(counts) or more where it is on another rank; None where
                this card has all experts, in their order.
        """
        found: list[int] = array_of(counts).tolist()
        return found

    def of_ranks(self, table: Tensor, own: Sequence[int]) -> np.ndarray:
        """Number of rows that each rank of an expert parallel group has for each expert, [ranks x experts].

        Args:
            table: these numbers on the device.
            own: those of this rank.
        """
        return array_of(table)


READ_COUNTS = RowCounts()


class TokenDispatcher:
    """The way of tokens to the experts that they have chosen, and of the outputs back, where this card has all experts.
    Other ones are for ranks that share the experts, and for programs."""

    def run(self, experts: Experts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Outputs of experts, with the arguments and the result of `Experts.forward`."""
        tokens = x.flatten(0, 1)
        route = sort_rows(chosen.flatten(), experts.gate_proj.weight.shape[0], experts.row_counts)
        with token_context.tokens(experts.row_keys(route)):
            rows = experts.rows(dispatch(tokens, route), route.counts)
        return combine(rows, weights.flatten(0, 1), route).reshape(x.shape)


class Experts(nn.Layer):
    """Gated MLPs of all routed experts. There is no capacity: no token is dropped, however many go to one expert."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        width: int,
        ops: Ops,
        biased: bool = False,
        clamp: tuple[float, float] | None = None,
    ):
        """`biased` and `clamp` as in `shape_spec.MoE`."""
        super().__init__()
        self.dispatcher = TokenDispatcher()
        self.row_counts = READ_COUNTS
        self.swiglu = ops.swiglu if clamp is None else functools.partial(clamped_swiglu, *clamp)
        self.dispatch_in_program = ops.experts.dispatch_rows
        self.combine_in_program = ops.experts.combine_rows
        self.gate_proj = GroupedLinear(num_experts, hidden_size, width, biased)
        self.up_proj = GroupedLinear(num_experts, hidden_size, width, biased)
        self.down_proj = GroupedLinear(num_experts, width, hidden_size, biased)
        for stacked in (self.gate_proj, self.up_proj, self.down_proj):
            stacked.in_program = ops.experts.grouped_matmul

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x [B, L, D], and weights and numbers of each token's experts [B, L, k], to [B, L, D]."""
        return self.dispatcher.run(self, x, weights, chosen)

    def row_keys(self, route: Route) -> Tensor | None:
        """The key of each row's token, [N], for adapters with dropout; None where there are none."""
        if not any(isinstance(layer, RowDropout) and layer.training for layer in self.sublayers()):
            return None
        keys = token_context.current()
        assert keys is not None, "dropout in a pass whose tokens have no keys"
        return keys.flatten().index_select(token_of_row(route, keys.size), 0)

    def rows(
        self,
        x: Tensor,
        counts: Counts,
        local: Local = unsharded,
        swiglu: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Outputs of the experts, [N, D], for rows [N, D] sorted by expert with `counts` of them each; `swiglu`
        replaces the device's."""
        swiglu = swiglu or self.swiglu
        inner = swiglu(self.gate_proj.product(x, counts, local), self.up_proj.product(x, counts, local))
        return self.down_proj.product(inner, counts, local)


def check_experts(name: str, module: Any, what: str) -> None:
    """Raise UserError for routed experts whose code is not that of `Experts`, where another dispatcher takes their
    tokens; `what` is the feature that needs it. Their `rows` may be a plugin's where the dispatcher calls them."""
    if not is_exactly(module, Experts, "row_keys") or not is_own(type(module.dispatcher).run):
        raise UserError(
            f"{what}: {describe_module(name, module)} is not exactly llmsuite's Experts, whose tokens are sorted and "
            "sent in another way here; its own code would not be run"
        )


class LoadBalance:
    """Load of each expert of a gate in a step, and the auxiliary loss of an uneven load."""

    def __init__(self) -> None:
        self.factor = 0.0
        """Factor of the gradient of the loss; 0 for no loss."""
        self.reset()

    def reset(self) -> None:
        """Set load and loss to zero."""
        self.load: Tensor = paddle.zeros([])
        """[E]: tokens routed to each expert."""
        self.loss: Tensor = paddle.zeros([])
        """Sum of the loss over sequences."""

    def record(self, weights: Tensor, chosen: Tensor, scores: Tensor, token_mask: Tensor | None) -> Tensor:
        """Add the routing of a micro-batch. Returns `weights`, whose backward pass adds the gradient of the loss.

        The loss of a sequence of T tokens is the sum over experts of f P, where f is E / (k T) times the number of
        tokens of the expert, and P the mean over tokens of its share of the scores (DeepSeek-V3, arXiv 2412.19437,
        eq. 17 to 20).

        Args:
            weights: weights of each token's experts, [B, L, k].
            chosen: indices of these experts, [B, L, k].
            scores: scores of all experts, [B, L, E].
            token_mask: 1 for tokens, 0 for padding, [B, L]; None when there is none.
        """
        loads, tokens = sequence_loads(chosen, scores.shape[-1], token_mask)
        self.load = self.load + loads.sum(0)
        if not self.factor:
            return weights
        loss = sequence_losses(loads, tokens, scores, chosen.shape[-1], token_mask).sum()
        self.loss = self.loss + loss.detach()
        return _WithLoss.apply(weights, loss, self.factor)


def sequence_loads(chosen: Tensor, num_experts: int, token_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Number of tokens of each sequence that are routed to each expert, [B, E], and number of tokens of each sequence,
    [B or 1, 1], without padding; arguments as of `LoadBalance.record`."""
    picked = F.one_hot(chosen, num_experts).sum(-2)  # [B, L, E]
    if token_mask is None:
        return picked.sum(1).detach(), paddle.full([1, 1], float(chosen.shape[1]))
    return (picked * token_mask.unsqueeze(-1)).sum(1).detach(), token_mask.sum(1, keepdim=True).clip(min=1.0)


def sequence_losses(
    loads: Tensor, tokens: Tensor, scores: Tensor, num_chosen: int, token_mask: Tensor | None
) -> Tensor:
    """The auxiliary loss of each sequence, [B]; the formula is that of `LoadBalance.record`.

    Args:
        loads: tokens of each expert, [B, E], from `sequence_loads`.
        tokens: tokens of each sequence, [B or 1, 1], from `sequence_loads`.
        scores: scores of all experts, [B, L, E].
        num_chosen: number of experts of a token.
        token_mask: 1 for tokens, 0 for padding, [B, L]; None when there is none.
    """
    parts = scores / scores.sum(-1, keepdim=True)
    if token_mask is not None:
        parts = parts * token_mask.unsqueeze(-1)
    return (loads * (scores.shape[-1] / num_chosen) / tokens * (parts.sum(1) / tokens)).sum(-1)


class _WithLoss(PyLayer):
    """Identity of the first argument; its backward pass adds the gradient of the second one times a factor.

    The auxiliary loss of a layer then need not travel to the end of the model, through other pipeline stages and out
    of recomputed layers.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(loss)
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensor()
        return gradient, paddle.ones_like(loss) * ctx.factor


@dataclasses.dataclass(frozen=True)
class Route:
    """Permutation that sorts rows by expert."""

    order: Tensor
    """[N]: index of each sorted row among all T x k rows, token by token."""
    inverse_order: Tensor
    """[T x k]: index of each row among the sorted ones; N or more where its expert is on another rank."""
    counts: list[int]
    """Number of rows of each expert."""


@dataclasses.dataclass(frozen=True)
class ProgramRoute:
    """A `Route` while a static program is traced."""

    order: Tensor
    """[T x k]: `Route.order`; rows whose expert is on another rank come last."""
    inverse_order: Tensor
    """[T x k]: index of each row among the sorted ones."""
    counts: Tensor
    """[E]: number of rows of each expert."""


def route_in_program(experts: Tensor, num_experts: int) -> ProgramRoute:
    """`sort_rows` while a static program is traced: its shapes are fixed, so rows of experts on other ranks stay."""
    order = paddle.argsort(experts, stable=True)
    return ProgramRoute(order, paddle.argsort(order), _counts(experts, order, num_experts))


def _counts(experts: Tensor, order: Tensor, num_experts: int) -> Tensor:
    """The number of rows of each expert [E], from the experts of the rows and the order that sorts them."""
    # not `bincount`, which reads the smallest and the largest value on the host
    numbers = paddle.arange(num_experts, dtype=experts.dtype)
    ends = paddle.searchsorted(experts.index_select(order), numbers, right=True)
    return ends - paddle.concat([paddle.zeros([1], ends.dtype), ends[:-1]])


def sort_rows(
    experts: Tensor, num_experts: int, row_counts: RowCounts = READ_COUNTS, slots: Sequence[int] | None = None
) -> Route:
    """Sort rows by expert.

    Args:
        experts: index of each row's expert, [T x k]; `num_experts` for rows whose expert is on another rank.
        num_experts: number of experts on this card.
        row_counts: copies their numbers of rows to the host.
        slots: see `RowCounts.here`.
    """
    with paddle.no_grad():
        order = paddle.argsort(experts, stable=True)
        counts = row_counts.here(_counts(experts, order, num_experts), experts.shape[0], slots)
        return Route(order[: sum(counts)], paddle.argsort(order), counts)


def token_of_row(route: Route, num_tokens: int) -> Tensor:
    """Index of each sorted row's token, [N]."""
    return route.order // (route.inverse_order.shape[0] // num_tokens)


def dispatch(tokens: Tensor, route: Route) -> Tensor:
    """Copy tokens [T, D] to sorted rows [N, D]."""
    return _Dispatch.apply(tokens, route)


def combine(rows: Tensor, weights: Tensor, route: Route) -> Tensor:
    """The weighted sum of the rows of each token, [T, D], from sorted rows [N, D] and weights [T, k]."""
    parts = _Combine.apply(rows, route).reshape([*weights.shape, rows.shape[-1]])
    return (parts * weights.astype(rows.dtype).unsqueeze(-1)).sum(1)


def grouped_matmul(x: Tensor, weight: Tensor, counts: Sequence[int], matmul: Callable[..., Tensor] = matmul) -> Tensor:
    """Grouped product, [N, outputs]: consecutive rows of x [N, inputs], `counts[i]` of them times matrix i of weight
    [E, inputs, outputs]."""
    return _GroupedMatmul.apply(x, weight, list(counts), (matmul,))


def grouped_scale(x: Tensor, scale: Tensor, counts: Counts) -> Tensor:
    """Consecutive rows of x [N, outputs], `counts[i]` of them times vector i of scale [E, outputs]: [N, outputs]."""
    if not isinstance(counts, Sequence):  # trailing rows without an expert are zeros: any scale will do
        indices = paddle.arange(x.shape[0], dtype="int64")
        of_row = paddle.searchsorted(counts.cumsum(), indices, right=True).clip(max=scale.shape[0] - 1)
        return x * paddle.gather(scale, of_row, 0)  # see `stages.language_model.pick_rows`
    return _GroupedScale.apply(x, scale, list(counts))


def grouped_bias(x: Tensor, bias: Tensor, counts: Counts) -> Tensor:
    """Consecutive rows of x [N, outputs], `counts[i]` of them plus vector i of bias [E, outputs]: [N, outputs]."""
    if not isinstance(counts, Sequence):  # trailing rows without an expert stay zeros
        indices = paddle.arange(x.shape[0], dtype="int64")
        of_row = paddle.searchsorted(counts.cumsum(), indices, right=True)
        padded = paddle.concat([bias, paddle.zeros([1, bias.shape[-1]], bias.dtype)])
        return x + paddle.gather(padded, of_row, 0)  # see `stages.language_model.pick_rows`
    return _GroupedBias.apply(x, bias, list(counts))


class _Dispatch(PyLayer):
    """Tokens to sorted rows. Forward and backward are gathers: a scatter-add would be slow, and its sums would depend
    on the order of the threads."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, route: Route) -> Tensor:
        ctx.route = route
        ctx.num_tokens = tokens.shape[0]
        return tokens.index_select(token_of_row(route, tokens.shape[0]), 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _unsort(gradient, ctx.route).reshape([ctx.num_tokens, -1, gradient.shape[-1]]).sum(1)


class _Combine(PyLayer):
    """Sorted rows to the order before sorting. Forward and backward are gathers, as in `_Dispatch`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return _unsort(rows, route)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.index_select(ctx.route.order, 0)


def _unsort(rows: Tensor, route: Route) -> Tensor:
    """Sorted rows [N, D] in the order before sorting, [T x k, D]; zeros for rows whose expert is on another rank."""
    num_rows = rows.shape[0]
    if num_rows == route.inverse_order.shape[0]:
        return rows.index_select(route.inverse_order, 0)
    padded = paddle.concat([rows, paddle.zeros([1, rows.shape[-1]], rows.dtype)])
    # rows of experts elsewhere come last in the order: all of them are the row of zeros
    return padded.index_select(route.inverse_order.clip(max=num_rows), 0)


class _GroupedMatmul(PyLayer):
    """One product per expert. All matrices get a gradient, also those of experts without rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int], how: tuple[Callable[..., Tensor]]) -> Tensor:
        ctx.save_for_backward(x, weight)
        (ctx.matmul,) = how
        ctx.counts = counts
        ctx.needs_x_grad = not x.stop_gradient
        ctx.needs_weight_grad = not weight.stop_gradient
        matrices = weight.unbind(0)
        return by_matrix(x, counts, lambda rows, number: ctx.matmul(rows, matrices[number]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensor()
        x_grad = None
        weight_grad = None
        gradients = gradient.split(ctx.counts)
        if ctx.needs_x_grad:
            pairs = zip(gradients, weight.unbind(0), strict=True)
            x_grad = paddle.concat([ctx.matmul(g, matrix, transpose_y=True) for g, matrix in pairs])
        if ctx.needs_weight_grad:
            parts = zip(x.split(ctx.counts), gradients, strict=True)
            weight_grad = paddle.stack([ctx.matmul(rows, g, transpose_x=True) for rows, g in parts])
        return x_grad, weight_grad


class _GroupedScale(PyLayer):
    """Rows times the vector of their expert. Each vector gets the sum over its rows in a fixed order as its gradient;
    that of `index_select` would be added in the order of the threads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.counts = counts
        return paddle.concat([rows * row for rows, row in zip(x.split(counts), scale.unbind(0), strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensor()
        x_grads = []
        scale_grads = []
        for rows, row_grads, row in zip(x.split(ctx.counts), gradient.split(ctx.counts), scale.unbind(0), strict=True):
            x_grads.append(row_grads * row)
            scale_grads.append((row_grads * rows).sum(0) if rows.shape[0] else paddle.zeros_like(row))
        return paddle.concat(x_grads), paddle.stack(scale_grads)


class _GroupedBias(PyLayer):
    """Rows plus the vector of their expert, with sums in a fixed order as in `_GroupedScale`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, counts: list[int]) -> Tensor:
        ctx.counts = counts
        ctx.needs_bias_grad = not bias.stop_gradient
        return paddle.concat([rows + row for rows, row in zip(x.split(counts), bias.unbind(0), strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        if not ctx.needs_bias_grad:
            return gradient, None
        return gradient, paddle.stack([rows.sum(0) for rows in gradient.split(ctx.counts)])
