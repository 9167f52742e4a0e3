"""Routed experts in a static program, where the number of rows of an expert is not known before it runs."""

from __future__ import annotations

from typing import Any

import paddle
import paddle.nn.functional as F

from llmsuite.errors import UserError
from llmsuite.models.exact import named_kind
from llmsuite.models.experts import Experts, Stacked, check_experts
from llmsuite.typing import Tensor


def make_static(model: Any) -> None:
    """Replace the forward of a model's experts by the form below, for good. Raises UserError for experts whose code is
    not llmsuite's."""
    for name, module in model.named_sublayers():
        if isinstance(module, Experts) and "forward" not in module.__dict__:
            check_static(name, module)
            module.__dict__["forward"] = StaticExperts(module).forward


def check_static(name: str, module: Experts) -> None:
    """Raise UserError for experts that `StaticExperts` cannot take the place of: it calls none of their methods."""
    check_experts(name, module, "a program")
    stacks = (module.gate_proj, module.up_proj, module.down_proj)
    if type(module).rows is not Experts.rows or any(type(stack) is not Stacked for stack in stacks):
        raise UserError(
            f"a program: {named_kind(name, module)} computes its rows in a way of its own, and a program has gated "
            "MLPs of plain matrices only"
        )


class StaticExperts:
    """`llmsuite.models.experts.Experts` for a program: rows are sorted by expert, and each expert takes a slice."""

    def __init__(self, experts: Experts, first: int | None = None):
        """`first`: where other ranks have the other experts, the number of the first one here; rows of the others give
        zeros."""
        self._experts, self._first = experts, first

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x [B, L, D], and weights and numbers of the experts of each token [B, L, k], to [B, L, D]."""
        gate = self._experts.gate_proj.weight
        num_experts, num_chosen = gate.shape[0], chosen.shape[-1]
        flat = chosen.flatten()
        num_slots = num_experts
        if self._first is not None:
            here = paddle.logical_and(flat >= self._first, flat < self._first + num_experts)
            flat = paddle.where(here, flat - self._first, paddle.full_like(flat, num_experts))
            num_slots += 1
        order = paddle.argsort(flat, stable=True)
        rows = x.flatten(0, 1).index_select(order // num_chosen, 0)
        counts = F.one_hot(flat, num_slots).sum(0).astype("int64")
        found = self._stored(rows, counts) if hasattr(gate, "grouped_product") else self._by_expert(rows, counts)
        back = found.index_select(paddle.argsort(order), 0)
        scaled = back.reshape([-1, num_chosen, x.shape[-1]]) * weights.flatten(0, 1).astype(x.dtype).unsqueeze(-1)
        return scaled.sum(1).reshape(paddle.shape(x))

    def _stored(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows [N, D], so many `counts` for each expert, through stored experts, by one operation a stack."""
        own = self._experts
        inner = own.swiglu(*(of.weight.grouped_product(rows, counts) for of in (own.gate_proj, own.up_proj)))
        return own.down_proj.weight.grouped_product(inner, counts)

    def _by_expert(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The same through other ones, an expert after the other."""
        gate, up, down = (of.weight for of in (self._experts.gate_proj, self._experts.up_proj, self._experts.down_proj))
        num_experts, ends, parts = gate.shape[0], counts.cumsum(), []
        for expert in range(num_experts):
            first = ends[expert - 1] if expert else paddle.zeros([], "int64")
            part = paddle.slice(rows, [0], [first], [ends[expert]])
            inner = self._experts.swiglu(paddle.matmul(part, gate[expert]), paddle.matmul(part, up[expert]))
            parts.append(paddle.matmul(inner, down[expert]))
        if self._first is not None:
            parts.append(paddle.zeros_like(paddle.slice(rows, [0], [ends[num_experts - 1]], [ends[num_experts]])))
        return paddle.concat(parts)
