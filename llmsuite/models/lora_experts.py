"""Adapters of routed experts: the layers of `lora_layers.py` for each matrix of a stack.

PaddleNLP's and HF's experts are layers of their own, and so are their adapters; ours are stacks, as the matrices are.

Shapes: E experts, I inputs and O outputs of each one's matrix, R rank, N rows, sorted by expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import nn
from paddle.autograd import PyLayer

from llmsuite.models.adapter import Adapter, identity
from llmsuite.models.adapter_sizes import kron_shapes, square_size
from llmsuite.models.dropout import RowDropout
from llmsuite.models.experts import Counts, Local, Stacked, grouped_scale, whole
from llmsuite.models.peft_configs import scale_of
from llmsuite.models.quantised import QuantisedMatrix
from llmsuite.models.shard_plan import SQUARE
from llmsuite.models.structured import kron_update, mora_update
from llmsuite.typing import Tensor


class ExpertsAdapter(Adapter, Stacked):
    """A stack of E matrices W with an adapter of its own beside each."""

    def __init__(self, stacked: Stacked):
        """
        Args:
            stacked: the stack that it replaces.
        """
        nn.Layer.__init__(self)
        self.weight, self.bias, self.is_on = stacked.weight, None, True
        self.in_program = stacked.in_program
        self.lora_dropout = self.complete_sum = identity

    def product(self, x: Tensor, counts: Counts, local: Local = whole) -> Tensor:
        """As of `Stacked`."""
        y = super().product(x, counts, local)
        if not self.is_on:
            return y
        dropout = self.lora_dropout
        return self.adapted(y, dropout(x, counts) if isinstance(dropout, RowDropout) else x, counts, local)

    def adapted(self, y: Tensor, x: Tensor, counts: Counts, local: Local) -> Tensor:
        """The outputs [N, O] with the adapter.

        Args:
            y: those without it.
            x: what goes into the adapter, [N, I].
            counts: rows of each expert.
            local: a stack to this rank's part of it.
        """
        raise AssertionError(f"{type(self).__name__} has to define `adapted`")


class LoraExperts(ExpertsAdapter):
    """x W + scale (x A) B for each expert, with factors A [E, I, R] and B [E, R, O] of its own, and with a mixer
    M [E, R, R] between them."""

    def __init__(self, stacked: Stacked, config: Any):
        """
        Args:
            stacked: the stack that it replaces.
            config: a `paddlenlp.peft.LoRAConfig`.
        """
        super().__init__(stacked)
        num_experts, num_inputs, num_outputs = stacked.weight.shape
        self.scaling, self._mixes = scale_of(config), config.lora_use_mixer
        faster = paddle.ParamAttr(initializer=nn.initializer.Constant(0.0), learning_rate=config.lora_plus_scale)
        with paddle.LazyGuard():
            self.lora_A = self.create_parameter([num_experts, num_inputs, config.r])
            if self._mixes:
                self.lora_AB = self.create_parameter([num_experts, config.r, config.r])
            self.lora_B = self.create_parameter([num_experts, config.r, num_outputs], attr=faster)

    def adapted(self, y: Tensor, x: Tensor, counts: Counts, local: Local) -> Tensor:
        narrow = self.grouped(x, local(self.lora_A), counts) * self.scaling
        if self._mixes:
            narrow = self.grouped(narrow, local(self.lora_AB), counts)
        return y + self.grouped(narrow, local(self.lora_B), counts)


class DoraExperts(LoraExperts):
    """`DoraLinear` for each expert, with lengths m [E, O] (Liu et al. 2024, DoRA, arXiv 2402.09353, eq. 5)."""

    def __init__(self, stacked: Stacked, config: Any):
        super().__init__(stacked, config)
        num_experts, _, num_outputs = stacked.weight.shape
        with paddle.LazyGuard():
            self.lora_magnitude = self.create_parameter([num_experts, num_outputs])  # |W|, where values are read

    def adapted(self, y: Tensor, x: Tensor, counts: Counts, local: Local) -> Tensor:
        y = super().adapted(y, x, counts, local)
        return grouped_scale(y, local(self.lora_magnitude) / self._lengths(counts, local, y.dtype), counts)

    @paddle.no_grad()
    def _lengths(self, counts: Counts, local: Local, dtype: Any) -> Tensor:
        """|V|, the lengths of the columns of each expert's W + scale A B, [E, O]; 1 for experts without rows, whose W
        is not made. One W + scale A B is there at a time; in a program all are, as nobody knows which have rows."""
        first, second = local(self.lora_A), local(self.lora_B)
        if not isinstance(counts, Sequence):
            every = (local(self.weight) + paddle.matmul(first, second) * self.scaling).astype("float32")
            # while a program is made, `no_grad` says nothing
            return paddle.sqrt(every.square().sum(1) + 1e-12).astype(dtype).detach()
        found = []
        for number, count in enumerate(counts):
            if not count:
                found.append(paddle.ones([second.shape[-1]], dtype))
                continue
            is_stored = isinstance(self.weight, QuantisedMatrix)
            matrix = self.weight.one(number, dtype) if is_stored else local(self.weight)[number]
            wide = matrix + paddle.matmul(first[number], second[number]) * self.scaling
            found.append((wide.astype("float32").square().sum(0) + 1e-12).sqrt().astype(dtype))
        return paddle.stack(found)


class PissaExperts(LoraExperts):
    """`PissaLinear` for each expert (Meng et al. 2024, PiSSA, arXiv 2404.02948): A and B begin with the largest
    singular vectors of its W, as A0 and B0, whose product is taken off."""

    def __init__(self, stacked: Stacked, config: Any):
        super().__init__(stacked, config)
        num_experts, num_inputs, num_outputs = stacked.weight.shape
        with paddle.LazyGuard():
            self.lora_A0 = self.create_parameter([num_experts, num_inputs, config.r])
            self.lora_B0 = self.create_parameter([num_experts, config.r, num_outputs])
        self.lora_A0.stop_gradient = self.lora_B0.stop_gradient = True

    def adapted(self, y: Tensor, x: Tensor, counts: Counts, local: Local) -> Tensor:
        start = self.grouped(x, local(self.lora_A0), counts) * self.scaling
        return super().adapted(y, x, counts, local) - self.grouped(start, local(self.lora_B0), counts)


class StructuredExperts(ExpertsAdapter):
    """x W + f(x) for each expert, for an f that is linear in x and is computed again in the backward pass, as in
    `structured.StructuredLinear`. Experts are cut as wholes, so each f has all inputs and outputs of its W."""

    def update(self, x: Tensor, *parameters: Tensor) -> Tensor:
        """f of one expert: its rows [N, I] and parameters to [N, O]."""
        raise AssertionError(f"{type(self).__name__} has to define `update`")

    def own(self) -> list[Tensor]:
        """The adapter's parameters, a stack each, as `update` takes them."""
        raise AssertionError(f"{type(self).__name__} has to define `own`")

    def adapted(self, y: Tensor, x: Tensor, counts: Counts, local: Local) -> Tensor:
        return y + _Update.apply(x, *(local(stack) for stack in self.own()), (self, local, list(counts)))


class MoraExperts(StructuredExperts):
    """MoRA (Jiang et al. 2024, arXiv 2405.12130) for each expert, with square matrices M [E, S, S]."""

    def __init__(self, stacked: Stacked, config: Any):
        """
        Args:
            stacked: the stack that it replaces.
            config: a `paddlenlp.peft.LoRAConfig`.

        Raises:
            UserError: the rank is too large, see `square_size`.
        """
        super().__init__(stacked)
        num_experts, num_inputs, self._num_outputs = stacked.weight.shape
        size = square_size(config.r, num_inputs, self._num_outputs)
        with paddle.LazyGuard():
            setattr(self, SQUARE, self.create_parameter([num_experts, size, size]))

    def own(self) -> list[Tensor]:
        return [getattr(self, SQUARE)]

    def update(self, x: Tensor, *parameters: Tensor) -> Tensor:
        (square,) = parameters
        return mora_update(x, square, self._num_outputs)


class LokrExperts(StructuredExperts):
    """LoKr (Yeh et al. 2023, arXiv 2309.14859) for each expert."""

    def __init__(self, stacked: Stacked, config: Any):
        """
        Args:
            stacked: the stack that it replaces.
            config: a `peft_configs.LokrConfig`.
        """
        super().__init__(stacked)
        num_experts, *sizes = stacked.weight.shape
        shapes = kron_shapes(config.r, *sizes)
        self._scale, self._names = scale_of(config), list(shapes)
        with paddle.LazyGuard():
            for name, shape in shapes.items():
                setattr(self, name, self.create_parameter([num_experts, *shape]))

    def own(self) -> list[Tensor]:
        return [getattr(self, name) for name in self._names]

    def update(self, x: Tensor, *parameters: Tensor) -> Tensor:
        return kron_update(x, *parameters) * self._scale


class _Update(PyLayer):
    """f of the rows of each expert. The layer comes in a tuple, as in `structured`: its parameters may have other
    memory by the time of the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        *stacks, (layer, local, counts) = rest
        ctx.layer, ctx.local, ctx.counts, ctx.wants_x = layer, local, counts, not x.stop_gradient
        ctx.save_for_backward(x)
        groups = zip(x.split(counts), *(stack.unbind(0) for stack in stacks), strict=True)
        found = [layer.update(rows, *parameters) for rows, *parameters in groups if rows.shape[0]]
        return paddle.concat(found) if found else paddle.zeros([0, layer.weight.shape[-1]], x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,), stacks = ctx.saved_tensor(), [ctx.local(stack) for stack in ctx.layer.own()]
        of_x, of_parameters = [], []
        for number, (rows, of_rows) in enumerate(zip(x.split(ctx.counts), gradient.split(ctx.counts))):
            own = [stack[number].detach() for stack in stacks]
            if not ctx.counts[number]:  # no rows: nothing of x, but zeros of the parameters
                of_parameters.append([paddle.zeros_like(parameter) for parameter in own])
                continue
            leaves = [rows.detach(), *own]
            for leaf in leaves:
                leaf.stop_gradient = False
            with paddle.enable_grad():
                y = ctx.layer.update(*leaves)
            paddle.autograd.backward([y], [of_rows])
            of_x.append(leaves[0].grad)
            of_parameters.append([leaf.grad for leaf in leaves[1:]])
        dx = (paddle.concat(of_x) if of_x else paddle.zeros_like(x)) if ctx.wants_x else None
        return (dx, *(paddle.stack(list(found)) for found in zip(*of_parameters)))
