"""Matrix products, and how a device rounds what they take and return.

A CPU has no bfloat16 layers of Paddle's. With bf16 there, tensors stay float32, and operands of products (and what
products return, where `rounds_outputs` says so) are rounded to bfloat16 values. On other devices nothing is rounded
here: their tensors have the dtype.

Shapes: I inputs and O outputs of a matrix, N tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import paddle
import paddle.nn.functional as F

from llmsuite.base.typing import Tensor

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Pairs of activations [..., I] and matrices [I, O] ([O, I] with `transpose_y`) whose products are summed; I may
differ between pairs."""


def matmul(x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
    """Activations x [..., I] times a matrix y [I, O], either of which may be given transposed: [..., O]."""
    return paddle.matmul(x, y, transpose_x, transpose_y)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., I] times a matrix [I, O], plus a bias [O] if there is one: [..., O]."""
    return F.linear(x, weight, bias)


def round_activation(x: Tensor) -> Tensor:
    """x as a product takes it, and saves it for the gradient of its matrix: unchanged."""
    return x


def round_attention_input(x: Tensor) -> Tensor:
    """x as the products inside attention take it: unchanged."""
    return x


@dataclasses.dataclass(frozen=True)
class MatmulOps:
    """The matrix products of a device."""

    matmul: Callable[[Tensor, Tensor, bool, bool], Tensor] = matmul
    """Takes plain tensors. A device's kernel has no gradient: `llmsuite.models.linear_ops` computes it."""
    sum_matmul: Callable[[Pairs, bool], Tensor] | None = None
    """`sum_of_products` in one operation. None: the products are computed, then added."""
    rounded_output_matmul: Callable[[Pairs, bool], Tensor] | None = None
    """`sum_of_products` whose output is rounded as `round_activation` does. Then the activations between the products
    of an MLP are rounded too, and so are their gradients (for attention see `rounds_attention`). None: outputs are not
    rounded."""
    program_matmul: Callable[..., Tensor] | None = None
    """`matmul` with a gradient, for static programs. Takes x, a matrix, a flag for a transposed matrix, and a flag to
    round the output as `rounded_output_matmul` does. None: `matmul` is Paddle's own, or does not work in programs."""
    round_activation: Callable[[Tensor], Tensor] = round_activation
    round_attention_input: Callable[[Tensor], Tensor] = round_attention_input
    """Rounds an input of the products inside attention (queries, keys, values and weights), and returns it as float32:
    for generation, whose attention consists of other operations. See `rounds_attention`."""
    rounded_grad_cross_entropy: Callable[[Tensor, Tensor], tuple[Tensor, Callable[[Tensor], Tensor]]] | None = None
    """`Ops.cross_entropy` of at least one token, for plain tensors, and a function from the gradient of its output to
    the gradient of the logits, rounded as by `round_activation`; call it once. It has no gradient in Paddle's graph.
    None: `Ops.cross_entropy`, whose gradient is rounded afterwards."""

    @property
    def has_device_matmul(self) -> bool:
        """True if `matmul` is an operation of the device, whose gradient is in `llmsuite.models.linear_ops`; False for
        Paddle's own."""
        return self.matmul is not matmul

    @property
    def rounds_inputs(self) -> bool:
        """True if products round their inputs."""
        return self.round_activation is not round_activation

    @property
    def rounds_outputs(self) -> bool:
        """True if products can round their outputs (`rounded_output_matmul`)."""
        return self.rounded_output_matmul is not None

    @property
    def rounds_attention_inputs(self) -> bool:
        """True if the products inside attention round their inputs."""
        return self.round_attention_input is not round_attention_input

    @property
    def rounds_attention(self) -> bool:
        """True if `Ops.rotary` and `Ops.attention` take and return tensors that are rounded by `round_activation`, and
        so are their gradients."""
        return self.rounds_outputs and self.rounds_attention_inputs

    def sum_of_products(self, pairs: Pairs, transpose_y: bool, round_output: bool = False) -> Tensor:
        """The sum of the products of at least one pair, [..., O]. With `round_output` it is rounded as
        `round_activation` does, on devices with `rounds_outputs`."""
        if round_output:
            assert self.rounded_output_matmul is not None, "the device rounds outputs of products"
            return self.rounded_output_matmul(pairs, transpose_y)
        if self.sum_matmul is not None:
            return self.sum_matmul(pairs, transpose_y)
        first, *rest = (self.matmul(x, y, False, transpose_y) for x, y in pairs)
        for product in rest:
            first.add_(product)
        return first
