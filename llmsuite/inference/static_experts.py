"""Routed experts in a static program, which is built before the number of tokens of each expert is known."""

from __future__ import annotations

from typing import Any

import paddle
import paddle.nn.functional as F

from llmsuite.base.errors import UserError
from llmsuite.base.typing import Tensor
from llmsuite.models.exact import describe_module
from llmsuite.models.experts import Experts, GroupedLinear, TokenDispatcher, check_experts
from llmsuite.models.quantised import GroupedMatrix


def make_static(model: Any) -> None:
    """Give the experts of a model that have all experts here the dispatcher below. Raises UserError for experts whose
    code is not llmsuite's."""
    for name, module in model.named_sublayers():
        if isinstance(module, Experts) and not isinstance(module.dispatcher, StaticDispatcher):
            check_static(name, module)
            module.dispatcher = StaticDispatcher()


def check_static(name: str, module: Experts) -> None:
    """Check that `StaticDispatcher` computes what experts do. Raises UserError if they override methods, because it
    calls none of them."""
    check_experts(name, module, "a program")
    stacks = (module.gate_proj, module.up_proj, module.down_proj)
    if type(module).rows is not Experts.rows or any(type(stack) is not GroupedLinear for stack in stacks):
        raise UserError(
            f"a program: {describe_module(name, module)} computes its rows in a way of its own, and a program has "
            "gated MLPs of plain matrices only"
        )


class StaticDispatcher(TokenDispatcher):
    """Dispatcher of a program: rows are sorted by expert, and each expert computes a slice."""

    def __init__(self, first: int | None = None):
        """`first` is, with expert parallelism, the number of the first expert of this rank; rows of other experts give
        zeros. None where all experts are here."""
        self._first = first

    def run(self, experts: Experts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x [B, L, D], and weights and numbers of the experts of each token [B, L, k], to [B, L, D]."""
        gate = experts.gate_proj.weight
        num_experts = gate.shape[0]
        num_chosen = chosen.shape[-1]
        flat = chosen.flatten()
        num_slots = num_experts
        if self._first is not None:
            here = paddle.logical_and(flat >= self._first, flat < self._first + num_experts)
            flat = paddle.where(here, flat - self._first, paddle.full_like(flat, num_experts))
            num_slots += 1
        order = paddle.argsort(flat, stable=True)
        rows = x.flatten(0, 1).index_select(order // num_chosen, 0)
        counts = F.one_hot(flat, num_slots).sum(0).astype("int64")
        found = (
            _grouped(experts, rows, counts)
            if isinstance(gate, GroupedMatrix)
            else self._by_expert(experts, rows, counts)
        )
        back = found.index_select(paddle.argsort(order), 0)
        scaled = back.reshape([-1, num_chosen, x.shape[-1]]) * weights.flatten(0, 1).astype(x.dtype).unsqueeze(-1)
        return scaled.sum(1).reshape(paddle.shape(x))

    def _by_expert(self, experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows [N, D], sorted by expert with `counts` rows of each, through unpacked experts, one after the other."""
        num_experts = experts.gate_proj.weight.shape[0]
        ends = counts.cumsum()
        parts = []
        for expert in range(num_experts):
            first = ends[expert - 1] if expert else paddle.zeros([], "int64")
            part = paddle.slice(rows, [0], [first], [ends[expert]])
            inner = experts.swiglu(*(of.of_expert(part, expert) for of in (experts.gate_proj, experts.up_proj)))
            parts.append(experts.down_proj.of_expert(inner, expert))
        if self._first is not None:
            parts.append(paddle.zeros_like(paddle.slice(rows, [0], [ends[num_experts - 1]], [ends[num_experts]])))
        return paddle.concat(parts)


def _grouped(experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
    """Rows [N, D], sorted by expert with `counts` rows of each, through packed experts: one operation for each
    stack."""

    def product(of: GroupedLinear, x: Tensor) -> Tensor:
        return of.with_bias(of.weight.grouped_product(x, counts), counts)

    inner = experts.swiglu(product(experts.gate_proj, rows), product(experts.up_proj, rows))
    return product(experts.down_proj, inner)
