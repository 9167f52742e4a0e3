"""Linear layers whose kernel is a part that the device and the engine choose.

Shapes: I inputs and O outputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import nn
from typing_extensions import Self

from llmsuite.base.typing import Tensor
from llmsuite.devices import matmul_ops

LinearKernel = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Maps x [..., I], a matrix [I, O] and a bias [O] or None to x W + bias, [..., O]."""


def add_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    """y [..., O] plus a bias [O], where a layer has one."""
    if bias is None:
        return y
    return y + bias


def bias_attr_of(linear: nn.Linear) -> bool | None:
    """The argument `bias_attr` for a layer that has a bias where this one has: None, Paddle's default, or False."""
    if linear.bias is None:
        return False
    return None


class WithMatmul:
    """A layer that multiplies x [..., I] with matrices [I, O] by a function of its own choice."""

    matmul: Callable[..., Tensor] = staticmethod(matmul_ops.matmul)
    """The function, with the arguments of `paddle.matmul`."""

    def use_matmul(self, matmul: Callable[..., Tensor]) -> None:
        """Multiply by another function; an author's own choice of one stays."""
        if self.matmul is matmul_ops.matmul:
            self.matmul = matmul


class WithLinear:
    """A layer that computes x W + bias by a function of its own choice."""

    linear: LinearKernel = staticmethod(matmul_ops.linear)
    """The function."""

    def use_linear(self, linear: LinearKernel) -> None:
        """Compute by another function; an author's own choice of one stays."""
        if self.linear is matmul_ops.linear:
            self.linear = linear


class Linear(nn.Linear):
    """Paddle's linear layer with a choice of its kernel."""

    def __init__(self, num_inputs: int, num_outputs: int, weight_attr: Any = None, bias_attr: Any = None):
        """Arguments as those of `nn.Linear`."""
        super().__init__(num_inputs, num_outputs, weight_attr=weight_attr, bias_attr=bias_attr)
        self.kernel: LinearKernel = F.linear
        """Kernel of the product: other ones are a device's, or communicate with other ranks. Layers that are alike
        share one."""

    @classmethod
    def adopt(cls, linear: nn.Linear) -> Self:
        """A linear layer with the parameters and the hooks of one of Paddle's."""
        zeros = paddle.ParamAttr(initializer=nn.initializer.Constant(0.0))
        adopted = cls(1, 1, zeros, False if linear.bias is None else zeros)
        adopted.weight = linear.weight
        if linear.bias is not None:
            adopted.bias = linear.bias
        adopted._forward_pre_hooks.update(linear._forward_pre_hooks)
        adopted._forward_post_hooks.update(linear._forward_post_hooks)
        adopted.training = linear.training
        return adopted

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        return self.kernel(x, self.weight, self.bias)


def is_matrix(layer: Any) -> bool:
    """True for a linear layer that is nothing but its matrix and bias, whatever its kernel: Paddle's or
    `Linear`, of no subclass and with no replaced `forward`. paddlenlp's layers with adapters derive from `nn.Linear`
    too, and a user's subclass may compute something else."""
    return type(layer) in (nn.Linear, Linear) and "forward" not in vars(layer)


def is_plain_linear(*layers: Any) -> bool:
    """True if these are linear layers that are nothing but their matrix, with Paddle's kernel."""
    return all(is_matrix(layer) and not has_own_kernel(layer) for layer in layers)


def has_own_kernel(layer: Any) -> bool:
    """True for a linear layer with another kernel than Paddle's."""
    return isinstance(layer, Linear) and layer.kernel is not F.linear


def adopt_linears(model: nn.Layer) -> None:
    """Replace the linear layers of a model that are exactly Paddle's, such as those of a third-party family, by
    `Linear`, so that their kernel can be chosen. Parameters and hooks stay."""
    adopted: dict[int, Linear] = {}
    for parent in model.sublayers(include_self=True):
        for name, child in list(parent._sub_layers.items()):
            if type(child) is nn.Linear and is_matrix(child):
                if id(child) not in adopted:  # the same layer may have several parents
                    adopted[id(child)] = Linear.adopt(child)
                setattr(parent, name, adopted[id(child)])
