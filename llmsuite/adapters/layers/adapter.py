"""Base class of the adapters of all kinds, for one card."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paddle import nn

from llmsuite.base.typing import Tensor
from llmsuite.devices.ops import identity
from llmsuite.models.linear import WithLinear, WithMatmul
from llmsuite.models.quantised import QuantisedMatrix


class Adapter(nn.Layer, WithMatmul, WithLinear):
    """A linear layer with a frozen matrix W and an adapter.

    A second base class next to one of paddlenlp's layers. W and the bias are the parameters of an existing layer, not
    copies.
    """

    weight: Tensor | QuantisedMatrix
    bias: Tensor | None
    is_enabled: bool
    """False where the layer computes without its adapter, as the base model does."""
    lora_dropout: Callable[[Tensor], Tensor]
    """Dropout of the adapter's input; W gets x without dropout."""
    reduce_partial_sum: Callable[[Tensor], Tensor]
    """Reduction over tensor parallel ranks of each product with x, where a rank has only a partial sum."""

    def take(self, linear: nn.Linear | nn.Embedding) -> None:
        """Adopt W and bias of a layer."""
        self.lora_dropout = self.reduce_partial_sum = identity
        self.weight = linear.weight
        self.bias = linear.bias if isinstance(linear, nn.Linear) else None

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
        """W [I, O]; a quantised one is dequantised to a dtype."""
        return self.weight.dense(dtype) if isinstance(self.weight, QuantisedMatrix) else self.weight
