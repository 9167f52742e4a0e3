"""Routed experts inside of whole-step programs, and what their gates have counted.

How many rows an expert gets is known to no Python there: the counts are a tensor, and each rank has a row for every
choice of its tokens, those of the experts of other ranks too, which cost no product. What depends on them is computed
on plain tensors, as Paddle knows no rule for it.

Shapes: B rows of a micro-batch, L length, D hidden, E experts, k experts of a token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local, dtensor_to_local

from llmsuite.models.experts import Experts, combine, dispatch, route_in_program, sequence_loads, sequence_losses
from llmsuite.models.moe import Gate
from llmsuite.parallel import collective
from llmsuite.parallel.program.sums import summed
from llmsuite.typing import Tensor

LENGTHS = "row_lengths"
"""The input of a program that says how many tokens of each row are no padding."""
SHARES = "balance_shares"
"""The input that says what the balance loss of each row weighs in what is trained."""
LOADS, BALANCE_LOSS = "experts/loads", "experts/balance_loss"
"""Sums of a loss with routed experts: tokens of each expert, gate by gate, and the balance loss, which is trained."""


def with_experts(loss: Any) -> Any:
    """A loss that programs have of a model with routed experts, with the sums `LOADS` and, where there is the input
    `SHARES`, `BALANCE_LOSS`."""

    def with_balance(model: Any, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        with _in_program(model, inputs) as gates:
            found = dict(loss(model, inputs))
        found[LOADS] = paddle.stack([gate.loads for gate in gates]).sum(1).flatten()
        if SHARES in inputs:
            found[BALANCE_LOSS] = (paddle.add_n([gate.losses for gate in gates]) * inputs[SHARES]).sum()
        return found

    return with_balance


@contextlib.contextmanager
def _in_program(model: Any, inputs: Mapping[str, Tensor]) -> Iterator[list[_ProgramGate]]:
    """While active, gates and experts of a model compute as programs need it."""
    gates = {module: _ProgramGate(module, inputs) for module in model.sublayers() if isinstance(module, Gate)}
    experts = {module: _ProgramExperts(module) for module in model.sublayers() if isinstance(module, Experts)}
    forms: dict[Any, Any] = {**gates, **experts}
    before = [(module, module.__dict__.get("forward")) for module in forms]
    for module, form in forms.items():
        module.__dict__["forward"] = form.forward
    try:
        yield list(gates.values())
    finally:
        for module, forward in before:
            if forward is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward


class _ProgramGate:
    """`Gate.forward`; the tokens of a data rank are the same on all its tensor parallel ranks, and so is what it
    makes of them."""

    def __init__(self, gate: Gate, inputs: Mapping[str, Tensor]):
        """`inputs` of the program."""
        self._gate, self._inputs = gate, inputs
        self.loads: Tensor = None
        """Tokens of each row that go to each expert, [B, E]."""
        self.losses: Tensor = None
        """The balance loss of each row, [B]; without one, None."""

    def forward(self, x: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As of `Gate`; which tokens count, the inputs tell."""
        logits = self._gate.logits(x)
        mesh, placements = logits.process_mesh, logits.placements
        local = dtensor_to_local(logits, mesh, placements)
        with self._own_bias():
            weights, chosen, scores = self._gate.choose(local)
        lengths = self._inputs[LENGTHS]
        lengths = dtensor_to_local(lengths, mesh, lengths.placements)
        at = paddle.arange(local.shape[1], dtype=lengths.dtype)
        is_token = (at < lengths.unsqueeze(-1)).astype("float32")  # [B, L]
        loads, tokens = sequence_loads(chosen, scores.shape[-1], is_token)
        self.loads = dtensor_from_local(loads, mesh, placements)
        if SHARES in self._inputs:
            losses = sequence_losses(loads, tokens, scores, chosen.shape[-1], is_token)
            self.losses = dtensor_from_local(losses, mesh, placements)
        return dtensor_from_local(weights, mesh, placements), dtensor_from_local(chosen, mesh, placements)

    @contextlib.contextmanager
    def _own_bias(self) -> Iterator[None]:
        """While active, the gate has a plain tensor for its bias, which every rank has whole."""
        table, name = self._gate._parameters, "e_score_correction_bias"
        bias = table.get(name)
        if bias is not None:
            table[name] = dtensor_to_local(bias, bias.process_mesh, bias.placements)
        try:
            yield
        finally:
            if bias is not None:
                table[name] = bias


class _ProgramExperts:
    """`Experts.forward`. A tensor parallel rank has some of the experts, and makes its part of the sums. So does a data
    rank under expert parallel, of the tokens of all of them.

    A program takes the stacks of experts that data ranks share out for copies of one stack.
    """

    def __init__(self, experts: Experts):
        self._experts = experts

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """As of `Experts`."""
        mesh, placements = x.process_mesh, x.placements
        assert placements[1].is_replicated(), "activations in front of a region are whole"
        whole, (ep, tp) = dist.Replicate(), (_expert_parts(mesh), mesh.shape[1])
        # where several ranks have the experts of a token, each has the gradient of its own
        of_data, of_tp = whole if ep > 1 else placements[0], whole
        shares = [dist.Partial() if ep > 1 else of_data, dist.Partial() if tp > 1 else of_tp]
        if ep > 1:
            x, weights, chosen = (dist.reshard(tensor, mesh, [whole, whole]) for tensor in (x, weights, chosen))
        own_x, own_weights = (dtensor_to_local(tensor, mesh, shares) for tensor in (x, weights))
        numbers = dtensor_to_local(chosen, mesh, chosen.placements).flatten()
        num_here = self._experts.gate_proj.weight.shape[0] // tp
        if ep * tp > 1:
            coordinate = collective.mesh().of_experts.coordinate
            numbers = numbers - (coordinate["ep"] * tp + coordinate["tp"]) * num_here
            is_here = paddle.logical_and(numbers >= 0, numbers < num_here)
            numbers = paddle.where(is_here, numbers, paddle.full_like(numbers, num_here))
        route = route_in_program(numbers, num_here)
        sorted_rows = self._experts.rows(dispatch(own_x.flatten(0, 1), route), route.counts, self._local)
        y = combine(sorted_rows, own_weights.flatten(0, 1), route).reshape(own_x.shape)
        if ep * tp == 1:
            return dtensor_from_local(y, mesh, placements)
        return summed(y, mesh, shares, [of_data, of_tp], placements)

    @staticmethod
    def _local(stack: Tensor) -> Tensor:
        """The experts of this rank in a stack; its gradient is a sum over the data ranks that have them too."""
        mesh, (_, of_tp) = stack.process_mesh, stack.placements
        has_copies = mesh.shape[0] > 1 and _expert_parts(mesh) == 1
        return dtensor_to_local(stack, mesh, [dist.Partial() if has_copies else dist.Replicate(), of_tp])


def _expert_parts(mesh: Any) -> int:
    """How many data ranks share out the experts: all of them, or each has all experts."""
    return collective.mesh().degrees.ep if mesh.shape[0] > 1 else 1
