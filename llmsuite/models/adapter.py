"""What adapters of all kinds have in common, for one card."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paddle import nn

from llmsuite.devices.ops import linear, matmul
from llmsuite.models.exact import is_plain
from llmsuite.models.quantised import QuantisedMatrix
from llmsuite.typing import Tensor


class Adapter(nn.Layer):
    """A linear layer with an adapter beside its matrix W, which is frozen.

    A base class beside one of paddlenlp's layers. W and the bias are those of an existing layer: the parameters
    themselves, not copies.
    """

    weight: Tensor | QuantisedMatrix
    bias: Tensor | None
    is_on: bool
    """False: the layer computes what it did without its adapter."""
    lora_dropout: Callable[[Tensor], Tensor]
    """Applied to what goes into the adapter; W gets all of x."""
    complete_sum: Callable[[Tensor], Tensor]
    """Applied to each product with x: adds up the parts of the ranks, where each has only a part of the sum."""
    matmul, linear = staticmethod(matmul), staticmethod(linear)

    def take(self, linear: nn.Linear | nn.Embedding) -> None:
        """Take over W and bias of a layer."""
        self.lora_dropout = self.complete_sum = identity
        self.weight, self.bias = linear.weight, getattr(linear, "bias", None)

    def base(self, x: Tensor) -> Tensor:
        """x W + bias."""
        if isinstance(self.weight, QuantisedMatrix):
            return self.weight.product(x, self.bias)
        return self.linear(x, self.weight, self.bias)

    def weight_product(self, x: Tensor) -> Tensor:
        """x W."""
        if isinstance(self.weight, QuantisedMatrix):
            return self.weight.product(x, None)
        return self.matmul(x, self.weight)

    def dense_weight(self, dtype: Any) -> Tensor:
        """W [I, O]; of a quantised one what its codes stand for, in a dtype."""
        return self.weight.dense(dtype) if isinstance(self.weight, QuantisedMatrix) else self.weight


def identity(x: Tensor) -> Tensor:
    return x


def is_plain_linear(module: nn.Layer) -> bool:
    """Whether a module is a linear layer without an adapter, and nothing more. paddlenlp's layers with one are
    `nn.Linear` too, and a class of somebody else's that derives from it may compute something else."""
    return is_plain(module)
