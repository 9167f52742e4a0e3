"""Routed experts for one card: each computes only the tokens that are routed to it.

Shapes: B batch, L length, T tokens (B x L), D hidden, E experts, F width of an expert, k experts of a token. A row is a
token routed to one of its experts: there are T x k rows, or N where this card has only some of the experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.autograd import PyLayer

from llmsuite.devices.ops import Ops, matmul
from llmsuite.devices.ops import grouped_matmul as grouped_in_program
from llmsuite.errors import UserError
from llmsuite.models import token_values
from llmsuite.models.blocks import ZEROS
from llmsuite.models.dropout import RowDropout
from llmsuite.models.exact import is_of_exact_class, is_own, named_kind
from llmsuite.models.quantised import by_matrix
from llmsuite.typing import Tensor

Local = Callable[[Tensor], Tensor]
"""A stack of experts to those of this rank, as a plain tensor."""
Counts = Sequence[int] | Tensor
"""How many rows each expert has; while a program is made, which does not know them, a tensor [E]. Then there may be
rows behind them that belong to no expert here."""


def whole(stack: Tensor) -> Tensor:
    return stack


class Stacked(nn.Layer):
    """The same matrix of every expert, [E, inputs, outputs]."""

    matmul = staticmethod(matmul)
    in_program: Callable[[Tensor, Tensor, Tensor], Tensor] = staticmethod(grouped_in_program)

    def __init__(self, num_experts: int, num_inputs: int, num_outputs: int):
        super().__init__()
        self.weight = self.create_parameter([num_experts, num_inputs, num_outputs], attr=ZEROS)

    def product(self, x: Tensor, counts: Counts, local: Local = whole) -> Tensor:
        """Rows [N, inputs], sorted by expert with so many `counts` for each, to [N, outputs]."""
        if hasattr(self.weight, "grouped_product"):  # a `QuantisedMatrix`, or what generation stores
            assert isinstance(counts, Sequence), "refused before the run"
            return self.weight.grouped_product(x, counts)
        return self.grouped(x, local(self.weight), counts)

    def grouped(self, x: Tensor, weight: Tensor, counts: Counts) -> Tensor:
        """`grouped_matmul` in the form of the device."""
        if isinstance(counts, Sequence):
            return grouped_matmul(x, weight, counts, self.matmul)
        return self.in_program(x, weight, counts)


class Experts(nn.Layer):
    """Gated MLPs. No token is dropped, however many are routed to one expert."""

    def __init__(self, num_experts: int, hidden_size: int, width: int, ops: Ops):
        super().__init__()
        self.swiglu = ops.swiglu
        self.dispatch_in_program, self.combine_in_program = ops.dispatch_rows, ops.combine_rows
        self.gate_proj = Stacked(num_experts, hidden_size, width)
        self.up_proj = Stacked(num_experts, hidden_size, width)
        self.down_proj = Stacked(num_experts, width, hidden_size)
        for stacked in (self.gate_proj, self.up_proj, self.down_proj):
            stacked.in_program = ops.grouped_matmul

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x [B, L, D], and weights and numbers of each token's experts [B, L, k], to [B, L, D]."""
        tokens = x.flatten(0, 1)
        route = sort_rows(chosen.flatten(), self.gate_proj.weight.shape[0])
        with token_values.tokens(self.row_keys(route)):
            rows = self.rows(dispatch(tokens, route), route.counts)
        return combine(rows, weights.flatten(0, 1), route).reshape(x.shape)

    def row_keys(self, route: Route) -> Tensor | None:
        """The key of each row's token, [N], for adapters that drop some of their inputs; None where none does."""
        if not any(isinstance(layer, RowDropout) and layer.training for layer in self.sublayers()):
            return None
        keys = token_values.current()
        assert keys is not None, "dropout in a pass whose tokens have no keys"
        return keys.flatten().index_select(token_of_row(route, keys.size), 0)

    def rows(
        self, x: Tensor, counts: Counts, local: Local = whole, swiglu: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> Tensor:
        """Rows [N, D], sorted by expert with so many `counts` for each, through the experts; `swiglu` in another form
        than the device's."""
        swiglu = swiglu or self.swiglu
        inner = swiglu(self.gate_proj.product(x, counts, local), self.up_proj.product(x, counts, local))
        return self.down_proj.product(inner, counts, local)


def check_experts(name: str, module: Any, what: str) -> None:
    """Raise UserError for routed experts whose code is not that of `Experts`, where another form takes its place;
    `what` needs that form. Their `rows` may be anybody's where the form calls them."""
    given = [code for name, code in vars(module).items() if name in ("forward", "row_keys")]
    # a forward of llmsuite's own is that of ranks which share experts
    if not is_of_exact_class(module, Experts, "row_keys") or not all(map(is_own, given)):
        raise UserError(
            f"{what}: {named_kind(name, module)} is not exactly llmsuite's Experts, whose tokens are sorted and sent "
            "in another way here; its own code would not be run"
        )


class Balance:
    """How many tokens a gate has routed to each expert in a step, and the auxiliary loss of an uneven load."""

    def __init__(self) -> None:
        self.factor = 0.0
        """Factor of the gradient of the loss; 0 for no loss."""
        self.begin()

    def begin(self) -> None:
        """Forget what was counted."""
        self.load: Tensor = paddle.zeros([])
        """[E]: tokens routed to each expert."""
        self.loss: Tensor = paddle.zeros([])
        """Sum of the loss over sequences."""

    def count(self, weights: Tensor, chosen: Tensor, scores: Tensor, counted: Tensor | None) -> Tensor:
        """Count the routing of a micro-batch. Returns `weights`, whose backward pass adds the gradient of the loss.

        The loss of a sequence of T tokens is the sum over experts of f P: f is E / (k T) times its tokens, P the mean
        of its part of the scores (DeepSeek-V3, arXiv 2412.19437, eq. 17 to 20).

        Args:
            weights: weights of each token's experts, [B, L, k].
            chosen: numbers of these experts.
            scores: scores of all experts, [B, L, E].
            counted: 1 for tokens, 0 for padding, [B, L]; None when there is none.
        """
        loads, tokens = sequence_loads(chosen, scores.shape[-1], counted)
        self.load = self.load + loads.sum(0)
        if not self.factor:
            return weights
        loss = sequence_losses(loads, tokens, scores, chosen.shape[-1], counted).sum()
        self.loss = self.loss + loss.detach()
        return _WithLoss.apply(weights, loss, self.factor)


def sequence_loads(chosen: Tensor, num_experts: int, counted: Tensor | None) -> tuple[Tensor, Tensor]:
    """How many tokens of each sequence are routed to each expert, [B, E], and how many there are, [B or 1, 1];
    arguments as of `Balance.count`."""
    picked = F.one_hot(chosen, num_experts).sum(-2)  # [B, L, E]
    if counted is None:
        return picked.sum(1).detach(), paddle.full([1, 1], float(chosen.shape[1]))
    return (picked * counted.unsqueeze(-1)).sum(1).detach(), counted.sum(1, keepdim=True).clip(min=1.0)


def sequence_losses(loads: Tensor, tokens: Tensor, scores: Tensor, num_chosen: int, counted: Tensor | None) -> Tensor:
    """The loss of each sequence, [B], see `Balance.count`.

    Args:
        loads: of `sequence_loads`.
        tokens: beside them.
        scores: of all experts, [B, L, E].
        num_chosen: experts of a token.
        counted: 1 for tokens, 0 for padding, [B, L]; None when there is none.
    """
    parts = scores / scores.sum(-1, keepdim=True)
    if counted is not None:
        parts = parts * counted.unsqueeze(-1)
    return (loads * (scores.shape[-1] / num_chosen) / tokens * (parts.sum(1) / tokens)).sum(-1)


class _WithLoss(PyLayer):
    """Identity of the first argument; its backward pass differentiates the second one too, times a factor.

    So a layer's own loss need not be carried to the end of the model, through other pipeline stages and out of
    recomputed layers.
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
    """Where each row is once rows are sorted by expert."""

    order: Tensor
    """[N]: the place of each sorted row among all T x k, token by token."""
    places: Tensor
    """[T x k]: where each row is among the sorted ones; at N or beyond, where its expert is elsewhere."""
    counts: list[int]
    """Rows of each expert."""


@dataclasses.dataclass(frozen=True)
class ProgramRoute:
    """A `Route` while a program is made."""

    order: Tensor
    """[T x k]: as `Route.order`; rows whose expert is elsewhere are the last."""
    places: Tensor
    """[T x k]: where each row is among the sorted ones."""
    counts: Tensor
    """[E]: rows of each expert."""


def route_in_program(experts: Tensor, num_experts: int) -> ProgramRoute:
    """`sort_rows` while a program is made, which has a row for each choice, wherever its expert is."""
    order = paddle.argsort(experts, stable=True)
    numbers = paddle.arange(num_experts, dtype=experts.dtype)
    ends = paddle.searchsorted(experts.index_select(order), numbers, right=True)
    counts = ends - paddle.concat([paddle.zeros([1], ends.dtype), ends[:-1]])
    return ProgramRoute(order, paddle.argsort(order), counts)


def sort_rows(experts: Tensor, num_experts: int) -> Route:
    """Sort rows by expert.

    Args:
        experts: number of each row's expert, [T x k]; `num_experts` for rows whose expert is elsewhere.
        num_experts: number of experts on this card.
    """
    with paddle.no_grad():
        order = paddle.argsort(experts, stable=True)
        counts = paddle.bincount(experts, minlength=num_experts + 1).tolist()[:num_experts]
        return Route(order[: sum(counts)], paddle.argsort(order), counts)


def token_of_row(route: Route, num_tokens: int) -> Tensor:
    """[N]: the number of each sorted row's token."""
    return route.order // (route.places.shape[0] // num_tokens)


def dispatch(tokens: Tensor, route: Route) -> Tensor:
    """Tokens [T, D] to sorted rows [N, D]."""
    return _Dispatch.apply(tokens, route)


def combine(rows: Tensor, weights: Tensor, route: Route) -> Tensor:
    """Sorted rows [N, D] to the weighted sum of the rows of each token, [T, D]. weights [T, k]."""
    parts = _Combine.apply(rows, route).reshape([*weights.shape, rows.shape[-1]])
    return (parts * weights.astype(rows.dtype).unsqueeze(-1)).sum(1)


def grouped_matmul(x: Tensor, weight: Tensor, counts: Sequence[int], matmul: Callable[..., Tensor] = matmul) -> Tensor:
    """Consecutive rows of x [N, inputs], so many for each matrix of weight [E, inputs, outputs], to [N, outputs]."""
    return _GroupedMatmul.apply(x, weight, list(counts), (matmul,))


def grouped_scale(x: Tensor, scale: Tensor, counts: Counts) -> Tensor:
    """Consecutive rows of x [N, outputs], so many for each of the vectors of scale [E, outputs], times it."""
    if not isinstance(counts, Sequence):  # rows behind them are zeros, times whatever
        at = paddle.arange(x.shape[0], dtype="int64")
        of_row = paddle.searchsorted(counts.cumsum(), at, right=True).clip(max=scale.shape[0] - 1)
        return x * scale.index_select(of_row, 0)
    return _GroupedScale.apply(x, scale, list(counts))


class _Dispatch(PyLayer):
    """Forward and backward are gathers: a scatter-add depends on the order, and is slow."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, route: Route) -> Tensor:
        ctx.route, ctx.num_tokens = route, tokens.shape[0]
        return tokens.index_select(token_of_row(route, tokens.shape[0]), 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _in_place(gradient, ctx.route).reshape([ctx.num_tokens, -1, gradient.shape[-1]]).sum(1)


class _Combine(PyLayer):
    """Forward and backward are gathers, as in `_Dispatch`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return _in_place(rows, route)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.index_select(ctx.route.order, 0)


def _in_place(rows: Tensor, route: Route) -> Tensor:
    """Sorted rows [N, D] in their order before, [T x k, D]; zeros for rows whose expert is elsewhere."""
    num_rows = rows.shape[0]
    if num_rows == route.places.shape[0]:
        return rows.index_select(route.places, 0)
    padded = paddle.concat([rows, paddle.zeros([1, rows.shape[-1]], rows.dtype)])
    return padded.index_select(route.places.clip(max=num_rows), 0)


class _GroupedMatmul(PyLayer):
    """One product an expert. All matrices get a gradient, also those of experts without rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int], how: tuple[Callable[..., Tensor]]) -> Tensor:
        ctx.save_for_backward(x, weight)
        (ctx.matmul,), ctx.counts, ctx.wanted = how, counts, (not x.stop_gradient, not weight.stop_gradient)
        matrices = weight.unbind(0)
        return by_matrix(x, counts, lambda rows, number: ctx.matmul(rows, matrices[number]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensor()
        of_x = of_weight = None
        gradients = gradient.split(ctx.counts)
        if ctx.wanted[0]:
            pairs = zip(gradients, weight.unbind(0), strict=True)
            of_x = paddle.concat([ctx.matmul(g, matrix, transpose_y=True) for g, matrix in pairs])
        if ctx.wanted[1]:
            parts = zip(x.split(ctx.counts), gradients, strict=True)
            of_weight = paddle.stack([ctx.matmul(rows, g, transpose_x=True) for rows, g in parts])
        return of_x, of_weight


class _GroupedScale(PyLayer):
    """All vectors get a gradient, a sum over their rows in order; that of `index_select` would add as it comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.counts = counts
        return paddle.concat([rows * row for rows, row in zip(x.split(counts), scale.unbind(0), strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensor()
        of_x, of_scale = [], []
        for rows, of_rows, row in zip(x.split(ctx.counts), gradient.split(ctx.counts), scale.unbind(0), strict=True):
            of_x.append(of_rows * row)
            of_scale.append((of_rows * rows).sum(0) if rows.shape[0] else paddle.zeros_like(row))
        return paddle.concat(of_x), paddle.stack(of_scale)
