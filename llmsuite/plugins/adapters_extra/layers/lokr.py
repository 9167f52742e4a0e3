"""The layers of LoKr (Yeh et al. 2023, LyCORIS, arXiv 2309.14859).

Shapes: I inputs and O outputs of a matrix, R rank; E experts.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn

from llmsuite.adapters.layers.structured import StructuredLinear, WeightShard
from llmsuite.adapters.paddlenlp_peft import import_alone
from llmsuite.base.typing import Tensor
from llmsuite.contract.hookspecs import AdapterConfig
from llmsuite.models.experts import GroupedLinear
from llmsuite.models.linear import bias_attr_of
from llmsuite.plugins.adapters_extra.layers.structured import StructuredExperts

_LoKrLinear: Any = import_alone("paddlenlp.peft.lokr.lokr_layers")[0].LoKrLinear


class LokrLinear(StructuredLinear, _LoKrLinear):
    """x W + scale x (kron(w1, w2))^T (LoKr, Yeh et al. 2023, LyCORIS, arXiv 2309.14859); see `kron_update`.

    paddlenlp's own layer forms the full Kronecker product in each pass, cannot be merged or disabled, and cannot be
    built without memory, as its constructor multiplies.
    """

    def __init__(self, linear: nn.Linear, config: AdapterConfig):
        """
        Args:
            linear: the layer it replaces.
            config: rank and scale.
        """
        num_inputs, num_outputs = linear.weight.shape
        shapes = config.method.shapes(config.rank, num_inputs, num_outputs)
        with paddle.LazyGuard():
            nn.Linear.__init__(self, num_inputs, num_outputs, bias_attr=bias_attr_of(linear))
            for name, shape in shapes.items():
                setattr(self, name, self.create_parameter(shape))
        self.use_w1 = True
        self.use_w2 = "lokr_w2" in shapes
        self.scale = config.scale
        self._names = list(shapes)
        self.part = WeightShard()
        self.is_enabled = True
        self.take(linear)

    def adapter_parameters(self) -> list[Tensor]:
        return [getattr(self, name) for name in self._names]

    def update(self, x: Tensor, *parameters: Tensor) -> Tensor:
        return kron_update(x, *parameters) * self.scale


class LokrExperts(StructuredExperts):
    """LoKr (Yeh et al. 2023, arXiv 2309.14859) for each expert."""

    def __init__(self, stacked: GroupedLinear, config: AdapterConfig):
        """
        Args:
            stacked: the stack that it replaces.
            config: rank and scale.
        """
        super().__init__(stacked)
        num_experts, *sizes = stacked.weight.shape
        shapes = config.method.shapes(config.rank, *sizes)
        self._scale = config.scale
        self._names = list(shapes)
        with paddle.LazyGuard():
            for name, shape in shapes.items():
                setattr(self, name, self.create_parameter([num_experts, *shape]))

    def adapter_parameters(self) -> list[Tensor]:
        return [getattr(self, name) for name in self._names]

    def update(self, x: Tensor, *parameters: Tensor) -> Tensor:
        return kron_update(x, *parameters) * self._scale


def kron_update(x: Tensor, outer: Tensor, *inner: Tensor) -> Tensor:
    """x (kron(w1, w2))^T without forming that matrix: x as [I1, I2] is multiplied by w2 on one side and by w1 on the
    other (LoKr, Yeh et al. 2023, LyCORIS, arXiv 2309.14859).

    Args:
        x: [..., I1 I2].
        outer: w1 [O1, I1].
        inner: w2 [O2, I2], or two matrices whose product it is.

    Returns:
        [..., O1 O2].
    """
    leading = x.shape[:-1]
    (num_outer, outer_inputs) = outer.shape
    y = x.reshape([*leading, outer_inputs, -1])
    for factor in reversed(inner):
        y = paddle.matmul(y, factor, transpose_y=True)
    swap = [*range(len(leading)), len(leading) + 1, len(leading)]
    y = paddle.matmul(
        y.transpose(swap), outer, transpose_y=True
    )  # transposed, so that it is one matrix product and not one per token
    return y.transpose(swap).reshape([*leading, num_outer * inner[0].shape[0]])
