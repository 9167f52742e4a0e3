"""The layers of `paddlenlp.peft` (3.0.0b4) as llmsuite runs them; importing this module takes paddlenlp.

What is ours: the layer is put in place of an existing one whose W it keeps, makes no second W, and computes on parts of
W under tensor parallel.

Shapes: I inputs and O outputs of a matrix, R rank.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn

from llmsuite.models.adapter import Adapter, identity
from llmsuite.models.paddlenlp_peft import import_alone
from llmsuite.typing import Tensor

_LoRALinear: Any = import_alone("paddlenlp.peft.lora.lora_layers")[0].LoRALinear


class LoraLinear(Adapter, _LoRALinear):
    """x W + scale (x A) B with factors A [I, R] and B [R, O] (Hu et al. 2021, arXiv 2106.09685)."""

    def __init__(self, linear: nn.Linear, config: Any):
        """
        Args:
            linear: the layer it replaces.
            config: a `paddlenlp.peft.LoRAConfig`.
        """
        num_inputs, num_outputs = linear.weight.shape
        with paddle.LazyGuard():  # the W that it makes takes no memory and draws no random numbers; it is not kept
            _LoRALinear.__init__(
                self,
                num_inputs,
                num_outputs,
                r=config.r,
                lora_alpha=config.lora_alpha,
                rslora=config.rslora,
                lora_plus_scale=config.lora_plus_scale,
                bias_attr=False if linear.bias is None else None,
            )
        self.lora_dropout = identity  # not a function of its own: layers that are alike share a program
        self.take(linear)

    @property
    def is_on(self) -> bool:
        return not self.disable_lora

    @is_on.setter
    def is_on(self, is_on: bool) -> None:
        self.disable_lora = not is_on

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        y = self.base(x)
        if self.disable_lora or self.merged:
            return y
        # theirs scales the wide product: one more tensor [..., O], and a twentieth of the time
        narrow = self.complete_sum(paddle.matmul(x, self.lora_A)) * self.scaling
        return self.complete_sum(y) + paddle.matmul(narrow, self.lora_B)


def adapter_layer(linear: nn.Linear, config: Any) -> Adapter:
    """The layer with an adapter that replaces a linear layer."""
    return LoraLinear(linear, config)
