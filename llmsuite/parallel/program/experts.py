"""Routed experts inside of step programs, and the loads that their gates count.

The number of rows of an expert is not known in Python there: the counts are a tensor, and each rank has a row for every
choice of its tokens, also for experts of other ranks, whose rows cost no product. Operations that depend on the counts
run on plain tensors, as Paddle has no SPMD rule for them.

Shapes: B rows of a micro-batch, L length, D hidden, E experts, k experts of a token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local, dtensor_to_local

from llmsuite.base.errors import UserError
from llmsuite.base.typing import Tensor
from llmsuite.models.exact import describe_module, is_exactly
from llmsuite.models.experts import (
    Experts,
    TokenDispatcher,
    check_experts,
    route_in_program,
    sequence_loads,
    sequence_losses,
)
from llmsuite.models.moe import Gate, Routing
from llmsuite.parallel import collective
from llmsuite.parallel.program.pipeline import LENGTHS, SideOutputs, StagedModel
from llmsuite.parallel.program.sums import sum_partials
from llmsuite.parallel.recompute import recompute_in_program

_OWN_GATE = "has a forward pass of its own, which a program of a step does not run; override its `choose` or `scores`"
SHARES = "balance_shares"
"""Input with the weight of the balance loss of each row."""
LOADS = "experts/loads"
BALANCE_LOSS = "experts/balance_loss"
"""Sums of a loss with routed experts: tokens of each expert, gate by gate, and the balance loss, which is trained."""


def with_experts(loss: Any) -> Any:
    """Wrap the loss of a program for a model with routed experts: it also returns the sums `LOADS` and, with an input
    `SHARES`, `BALANCE_LOSS`."""

    def with_balance(model: Any, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        stats = _RouterStats(inputs[LENGTHS], has_losses=SHARES in inputs)
        sent_along: Any = contextlib.nullcontext()
        if isinstance(model, StagedModel):
            sent_along = model.with_side_outputs(stats)
        with _in_program(model, stats), sent_along:
            found = dict(loss(model, inputs))
        found[LOADS] = stats.loads().sum(0)
        if SHARES in inputs:
            found[BALANCE_LOSS] = (stats.losses() * inputs[SHARES]).sum()
        return found

    return with_balance


def recomputes_expert_rows(model: Any) -> bool:
    """True where a program recomputes the rows of experts: where all experts are trained, as nothing else needs the
    rows; and not in a pipeline."""
    found = [module for module in model.sublayers() if isinstance(module, Experts)]
    return not isinstance(model, StagedModel) and bool(found) and all(_is_trained(experts) for experts in found)


def _is_trained(experts: Experts) -> bool:
    stacks = experts.gate_proj, experts.up_proj, experts.down_proj
    return not any(stack.weight.stop_gradient for stack in stacks)


class _RouterStats(SideOutputs):
    """Loads and balance losses of the gates of a model for a micro-batch, in the order of its layers, on the mesh of
    the current pipeline stage."""

    def __init__(self, lengths: Tensor, has_losses: bool):
        """`lengths` is the input `LENGTHS`; with `has_losses` there is a balance loss."""
        self.lengths = lengths
        self.has_losses = has_losses
        self._sent_lengths = lengths
        self._loads: list[Tensor] = []
        self._losses: list[Tensor] = []
        self._dtype: Any = None
        """Dtype of the activations that the losses were sent with."""

    def add(self, loads: Tensor, losses: Tensor | None) -> None:
        """Tokens of each row that a gate has sent to each expert, [B, E], and its balance loss of each row, [B]."""
        self._loads.append(loads)
        if losses is not None:
            self._losses.append(losses)

    def loads(self) -> Tensor:
        """Loads of all gates, [B, gates x E]."""
        return self._loads[0] if len(self._loads) == 1 else paddle.concat(self._loads, 1)

    def losses(self) -> Tensor:
        """Balance losses summed over all gates, [B]."""
        return self._losses[0] if len(self._losses) == 1 else paddle.add_n(self._losses)

    def pack(self, x: Tensor, send: Callable[[Tensor], Tensor]) -> Tensor:
        """Send activations and side outputs. Losses are sent as one more column of the activations, spread over the
        tokens: if sent alone, their gradients would be made, and sent, long before those of the activations, in other
        chunks."""
        self._sent_lengths = send(self._sent_lengths)
        self._loads = [send(self.loads())] if self._loads else []
        if not self._losses:
            return send(x)
        num_rows, length = x.shape[:2]
        self._dtype = x.dtype
        x = x.astype("float32")  # a loss needs more than the 16 bits that activations may have
        column = (self.losses() / length).reshape([num_rows, 1, 1]).expand([num_rows, length, 1])
        return send(paddle.concat([x, dist.reshard(column, x.process_mesh, x.placements)], -1))

    def unpack(self, x: Tensor) -> Tensor:
        """Activations on the mesh of this part, without the column of losses."""
        # a copy: Paddle 3.3.1 cannot send a tensor that local operations use
        self.lengths = paddle.assign(self._sent_lengths)
        if self._losses:
            x, column = paddle.split(x, [x.shape[-1] - 1, 1], -1)
            rows = [dist.Shard(0), dist.Replicate()]
            self._losses = [dist.reshard(column, column.process_mesh, rows).sum([1, 2])]
            x = x.astype(self._dtype)
        return x


@contextlib.contextmanager
def _in_program(model: Any, stats: _RouterStats) -> Iterator[None]:
    """While active, gates and experts of a model have the routing and the dispatcher of programs."""
    modules = list(model.named_sublayers())
    for name, module in modules:
        if isinstance(module, Gate) and not is_exactly(module, Gate):
            raise UserError(f"engine.program: is step, and {describe_module(name, module)} {_OWN_GATE}")
        if isinstance(module, Experts):
            check_experts(name, module, "engine.program: is step")
    gates = [module for _, module in modules if isinstance(module, Gate)]
    experts = [module for _, module in modules if isinstance(module, Experts)]
    routings = [gate.routing for gate in gates]
    dispatchers = [module.dispatcher for module in experts]
    recomputes = recomputes_expert_rows(model)
    for gate in gates:
        gate.routing = _ProgramRouting(stats)
    for module in experts:
        module.dispatcher = _ProgramDispatcher(recomputes)
    try:
        yield
    finally:
        for gate, routing in zip(gates, routings):
            gate.routing = routing
        for module, dispatcher in zip(experts, dispatchers):
            module.dispatcher = dispatcher


class _ProgramRouting(Routing):
    """Routing in a program. The tokens of a data rank are the same on all its tensor parallel ranks, and so are the
    outputs."""

    def __init__(self, stats: _RouterStats):
        self._stats = stats

    def run(self, gate: Gate, x: Tensor, token_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the chosen experts, [B, L, k] each. The lengths of the rows say which tokens count."""
        logits = gate.logits(x)
        mesh = logits.process_mesh
        placements = logits.placements
        local = dtensor_to_local(logits, mesh, placements)
        with _own_bias(gate):
            weights, chosen, scores = gate.choose(local)
        lengths = self._stats.lengths
        lengths = dtensor_to_local(lengths, mesh, lengths.placements)
        at = paddle.arange(local.shape[1], dtype=lengths.dtype)
        is_token = (at < lengths.unsqueeze(-1)).astype("float32")  # [B, L]
        loads, tokens = sequence_loads(chosen, scores.shape[-1], is_token)
        losses = None
        if self._stats.has_losses:
            losses = sequence_losses(loads, tokens, scores, chosen.shape[-1], is_token)
            losses = dtensor_from_local(losses, mesh, placements)
        self._stats.add(dtensor_from_local(loads, mesh, placements), losses)
        return dtensor_from_local(weights, mesh, placements), dtensor_from_local(chosen, mesh, placements)


@contextlib.contextmanager
def _own_bias(gate: Gate) -> Iterator[None]:
    """While active, the bias of a gate, which is replicated, is a plain tensor."""
    table = gate._parameters
    name = "e_score_correction_bias"
    bias = table.get(name)
    if bias is not None:
        table[name] = dtensor_to_local(bias, bias.process_mesh, bias.placements)
    try:
        yield
    finally:
        if bias is not None:
            table[name] = bias


class _ProgramDispatcher(TokenDispatcher):
    """Dispatcher in a program. A tensor parallel rank has some of the experts, and computes partial
    sums. So does a data rank under expert parallel, for the tokens of all data ranks.

    A program takes the expert parallel stacks of data ranks for copies of one stack.
    """

    def __init__(self, recomputes: bool):
        """With `recomputes` the rows of tokens, and the inputs of the last product, are recomputed in the backward
        pass: they are more than in eager mode, and cost no product."""
        self._recomputes = recomputes

    def run(self, experts: Experts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Outputs [B, L, D] of the chosen experts for x [B, L, D], with weights and numbers of the experts [B, L,
        k]."""
        mesh = x.process_mesh
        placements = x.placements
        assert placements[1].is_replicated(), "activations before a TP region are replicated"
        replicated = dist.Replicate()
        ep = _ep_size(mesh)
        tp = mesh.shape[1]
        # where several ranks have the experts of a token, each has the gradient from its own experts
        over_data = replicated if ep > 1 else placements[0]
        over_tp = replicated
        partial = [dist.Partial() if ep > 1 else over_data, dist.Partial() if tp > 1 else over_tp]
        if ep > 1:
            # an all-gather of the tokens over the data ranks, not an all-to-all: sizes of messages are fixed in
            # programs
            gathered = [replicated, replicated]
            x, weights, chosen = (dist.reshard(tensor, mesh, gathered) for tensor in (x, weights, chosen))
        own_x, own_weights = (dtensor_to_local(tensor, mesh, partial) for tensor in (x, weights))
        numbers = dtensor_to_local(chosen, mesh, chosen.placements).flatten()
        num_here = experts.gate_proj.weight.shape[0] // tp
        if ep * tp > 1:
            numbers = numbers - collective.mesh().expert_part * num_here
            is_here = paddle.logical_and(numbers >= 0, numbers < num_here)
            numbers = paddle.where(is_here, numbers, paddle.full_like(numbers, num_here))
        route = route_in_program(numbers, num_here)
        indices = (route.order, route.inverse_order, route.counts)
        swiglu = experts.swiglu

        def gather(x: Tensor) -> Tensor:
            return experts.dispatch_in_program(x.flatten(0, 1), *indices)

        if self._recomputes:
            gather = recompute_in_program(gather)
            swiglu = recompute_in_program(swiglu)
        sorted_rows = experts.rows(gather(own_x), route.counts, self._local, swiglu)
        y = experts.combine_in_program(sorted_rows, own_weights.flatten(0, 1), *indices).reshape(own_x.shape)
        if ep * tp == 1:
            return dtensor_from_local(y, mesh, placements)
        # each rank has the outputs of its own experts
        return sum_partials(y, mesh, partial, [over_data, over_tp], placements)

    @staticmethod
    def _local(stack: Tensor) -> Tensor:
        """The experts of this rank in a stack; the gradient is a sum over the data ranks that also have them."""
        mesh = stack.process_mesh
        (_, over_tp) = stack.placements
        has_copies = mesh.shape[0] > 1 and _ep_size(mesh) == 1
        return dtensor_to_local(stack, mesh, [dist.Partial() if has_copies else dist.Replicate(), over_tp])


def _ep_size(mesh: Any) -> int:
    """Number of data ranks that the experts are split over; 1 where each has all experts."""
    return collective.mesh().degrees.ep if mesh.shape[0] > 1 else 1
