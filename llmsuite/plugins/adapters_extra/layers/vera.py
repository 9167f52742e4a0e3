"""The layer of VeRA (Kopiczko et al. 2023, arXiv 2310.11454).

Shapes: I inputs and O outputs of a matrix, R rank.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn

from llmsuite.adapters.layers.adapter import Adapter
from llmsuite.adapters.paddlenlp_peft import import_alone
from llmsuite.base.typing import Tensor
from llmsuite.contract.hookspecs import AdapterConfig
from llmsuite.models.linear import bias_attr_of

_VeRALinear: Any = import_alone("paddlenlp.peft.vera.vera_layers")[0].VeRALinear


class VeraLinear(Adapter, _VeRALinear):
    """x W + scale ((x A) d) B b, of which only the vectors d [R] and b [O] are trained (VeRA, Kopiczko et al. 2023,
    arXiv 2310.11454, eq. 2).

    A [I, R] and B [R, O] are random and frozen; they are named `lora_A0` and `lora_B0`, as other frozen factors are. In
    paddlenlp's own layer B is zero, so that nothing trains once A and B are frozen, W is copied, and the vectors are
    multiplied as diagonal matrices, one of them [O, O].
    """

    def __init__(self, linear: nn.Linear, config: AdapterConfig):
        """
        Args:
            linear: the layer it replaces.
            config: rank and scale.
        """
        num_inputs, num_outputs = linear.weight.shape
        with paddle.LazyGuard():
            nn.Linear.__init__(self, num_inputs, num_outputs, bias_attr=bias_attr_of(linear))
            self.lora_A0 = self.create_parameter([num_inputs, config.rank])
            self.lora_B0 = self.create_parameter([config.rank, num_outputs])
            self.lora_d = self.create_parameter([config.rank])
            self.lora_b = self.create_parameter([num_outputs])
        self.lora_A0.stop_gradient = self.lora_B0.stop_gradient = True
        self.scaling = config.scale
        self.is_enabled = True
        self.take(linear)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        y = self.base(x)
        if not self.is_enabled:
            return y
        low_rank = self.reduce_partial_sum(self.matmul(self.lora_dropout(x), self.lora_A0))
        # d is not multiplied by the scale first: Paddle 3.3.1 would sum its gradient over ranks in each backward pass
        low_rank = low_rank * self.scaling * self.lora_d
        return self.reduce_partial_sum(y) + self.matmul(low_rank, self.lora_B0) * self.lora_b

    def merge(self) -> None:
        raise AssertionError("merged where weights are read, see `llmsuite.checkpoint.convert.adapter`")
