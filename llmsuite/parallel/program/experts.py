"""Routed experts inside of whole-step programs, and what their gates have counted.

How many rows an expert gets is known to no Python there: the counts are a tensor, and each rank has a row for every
choice of its tokens, those of the experts of other ranks too, which cost no product. What depends on them is computed
on plain tensors, as Paddle knows no rule for it.

Shapes: B rows of a micro-batch, L length, D hidden, E experts, k experts of a token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local, dtensor_to_local

from llmsuite.errors import UserError
from llmsuite.models.exact import is_exactly, named_kind
from llmsuite.models.experts import Experts, check_experts, route_in_program, sequence_loads, sequence_losses
from llmsuite.models.moe import Gate
from llmsuite.parallel import collective
from llmsuite.parallel.program.pipeline import LENGTHS, Beside, StagedModel
from llmsuite.parallel.program.sums import summed
from llmsuite.parallel.recompute import results_again_in_program
from llmsuite.typing import Tensor

_OWN_GATE = "has a forward pass of its own, which a program of a step does not run; override its `choose` or `scores`"
SHARES = "balance_shares"
"""The input that says what the balance loss of each row weighs in what is trained."""
LOADS, BALANCE_LOSS = "experts/loads", "experts/balance_loss"
"""Sums of a loss with routed experts: tokens of each expert, gate by gate, and the balance loss, which is trained."""


def with_experts(loss: Any) -> Any:
    """A loss that programs have of a model with routed experts, with the sums `LOADS` and, where there is the input
    `SHARES`, `BALANCE_LOSS`."""

    def with_balance(model: Any, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        seen = _Seen(inputs[LENGTHS], has_losses=SHARES in inputs)
        travels = model.beside(seen) if isinstance(model, StagedModel) else contextlib.nullcontext()
        with _in_program(model, seen), travels:
            found = dict(loss(model, inputs))
        found[LOADS] = seen.loads().sum(0)
        if SHARES in inputs:
            found[BALANCE_LOSS] = (seen.losses() * inputs[SHARES]).sum()
        return found

    return with_balance


def makes_rows_again(model: Any) -> bool:
    """Whether a program computes rows of experts again: where all experts are trained, as nothing else asks for them;
    and not of a pipeline."""
    found = [module for module in model.sublayers() if isinstance(module, Experts)]
    return not isinstance(model, StagedModel) and bool(found) and all(_is_trained(experts) for experts in found)


def _is_trained(experts: Experts) -> bool:
    stacks = experts.gate_proj, experts.up_proj, experts.down_proj
    return not any(stack.weight.stop_gradient for stack in stacks)


class _Seen(Beside):
    """What the gates of a model have made of a micro-batch, in the order of its layers, on the mesh that the model has
    come to."""

    def __init__(self, lengths: Tensor, has_losses: bool):
        """The input `LENGTHS`, and whether there is a balance loss."""
        self.lengths, self.has_losses = lengths, has_losses
        self._sent_lengths = lengths
        self._loads: list[Tensor] = []
        self._losses: list[Tensor] = []
        self._dtype: Any = None
        """The dtype of the activations that losses were sent with."""

    def add(self, loads: Tensor, losses: Tensor | None) -> None:
        """Tokens of each row that a gate has sent to each expert, [B, E], and its balance loss of each row, [B]."""
        self._loads.append(loads)
        if losses is not None:
            self._losses.append(losses)

    def loads(self) -> Tensor:
        """[B, gates x E]: those of all gates."""
        return self._loads[0] if len(self._loads) == 1 else paddle.concat(self._loads, 1)

    def losses(self) -> Tensor:
        """[B]: the sum over all gates."""
        return self._losses[0] if len(self._losses) == 1 else paddle.add_n(self._losses)

    def leave(self, x: Tensor, send: Callable[[Tensor], Tensor]) -> Tensor:
        """As `program.pipeline.Beside`. Losses go as a further column of the activations, spread over the tokens: by
        themselves, their gradients would be made, and sent, long before those of the activations, in other chunks."""
        self._sent_lengths = send(self._sent_lengths)
        self._loads = [send(self.loads())] if self._loads else []
        if not self._losses:
            return send(x)
        num_rows, length = x.shape[:2]
        self._dtype, x = x.dtype, x.astype("float32")  # with activations in 16 bits a loss is none of them
        column = (self.losses() / length).reshape([num_rows, 1, 1]).expand([num_rows, length, 1])
        return send(paddle.concat([x, dist.reshard(column, x.process_mesh, x.placements)], -1))

    def arrive(self, x: Tensor) -> Tensor:
        """As `program.pipeline.Beside`."""
        # of copies: Paddle 3.3.1 cannot send on what local operations use
        self.lengths = paddle.assign(self._sent_lengths)
        if self._losses:
            x, column = paddle.split(x, [x.shape[-1] - 1, 1], -1)
            whole = [dist.Shard(0), dist.Replicate()]
            self._losses = [dist.reshard(column, column.process_mesh, whole).sum([1, 2])]
            x = x.astype(self._dtype)
        return x


@contextlib.contextmanager
def _in_program(model: Any, seen: _Seen) -> Iterator[None]:
    """While active, gates and experts of a model compute as programs need it."""
    modules = list(model.named_sublayers())
    for name, module in modules:
        if isinstance(module, Gate) and not is_exactly(module, Gate):
            raise UserError(f"engine.program: is step, and {named_kind(name, module)} {_OWN_GATE}")
        if isinstance(module, Experts):
            check_experts(name, module, "engine.program: is step")
    forms: dict[Any, Any] = {module: _ProgramGate(module, seen) for _, module in modules if isinstance(module, Gate)}
    is_again = makes_rows_again(model)
    forms |= {module: _ProgramExperts(module, is_again) for module in model.sublayers() if isinstance(module, Experts)}
    before = [(module, module.__dict__.get("forward")) for module in forms]
    for module, form in forms.items():
        module.__dict__["forward"] = form.forward
    try:
        yield
    finally:
        for module, forward in before:
            if forward is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward


class _ProgramGate:
    """`Gate.forward`; the tokens of a data rank are the same on all its tensor parallel ranks, and so is what it
    makes of them."""

    def __init__(self, gate: Gate, seen: _Seen):
        self._gate, self._seen = gate, seen

    def forward(self, x: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As of `Gate`; which tokens count, the lengths of the rows tell."""
        logits = self._gate.logits(x)
        mesh, placements = logits.process_mesh, logits.placements
        local = dtensor_to_local(logits, mesh, placements)
        with self._own_bias():
            weights, chosen, scores = self._gate.choose(local)
        lengths = self._seen.lengths
        lengths = dtensor_to_local(lengths, mesh, lengths.placements)
        at = paddle.arange(local.shape[1], dtype=lengths.dtype)
        is_token = (at < lengths.unsqueeze(-1)).astype("float32")  # [B, L]
        loads, tokens = sequence_loads(chosen, scores.shape[-1], is_token)
        losses = None
        if self._seen.has_losses:
            losses = sequence_losses(loads, tokens, scores, chosen.shape[-1], is_token)
            losses = dtensor_from_local(losses, mesh, placements)
        self._seen.add(dtensor_from_local(loads, mesh, placements), losses)
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

    def __init__(self, experts: Experts, is_again: bool):
        """`is_again`: whether rows of tokens, and what the last product takes, are made again for the backward pass:
        they are more than op by op, and cost no product."""
        self._experts, self._is_again = experts, is_again

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
        route, experts = route_in_program(numbers, num_here), self._experts
        where, swiglu = (route.order, route.places, route.counts), experts.swiglu

        def gather(x: Tensor) -> Tensor:
            return experts.dispatch_in_program(x.flatten(0, 1), *where)

        if self._is_again:
            gather, swiglu = results_again_in_program(gather), results_again_in_program(swiglu)
        sorted_rows = experts.rows(gather(own_x), route.counts, self._local, swiglu)
        y = experts.combine_in_program(sorted_rows, own_weights.flatten(0, 1), *where).reshape(own_x.shape)
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
