"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) on the matrices of any family, for one card.

Shapes: I inputs and O outputs of a matrix, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import paddle
import paddle.nn.functional as F
from paddle import nn

from llmsuite.models.blocks import ZEROS
from llmsuite.models.shard_plan import ShardPlan
from llmsuite.models.targets import is_trained, pick_modules
from llmsuite.typing import Tensor


class LoraLinear(nn.Layer):
    """x W + scale (x A) B, with a frozen matrix W, the weight of `linear`, and factors A [I, R] and B [R, O]."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float):
        super().__init__()
        self.scale, self.is_on = scale, True
        self.complete_sum: Callable[[Tensor], Tensor] = identity
        """Applied to either product with x: adds up the parts of the ranks, where each has only a part of the sum."""
        self.weight, self.bias = linear.weight, linear.bias
        num_inputs, num_outputs = linear.weight.shape
        self.lora_A = self.create_parameter([num_inputs, rank], attr=ZEROS)
        self.lora_B = self.create_parameter([rank, num_outputs], attr=ZEROS)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        if not self.is_on:
            return y
        narrow = self.complete_sum(paddle.matmul(x, self.lora_A)) * self.scale
        return self.complete_sum(y) + paddle.matmul(narrow, self.lora_B)


def identity(x: Tensor) -> Tensor:
    return x


def add_adapters(model: nn.Layer, modules: Sequence[str], rank: int, scale: float) -> None:
    """Put adapters on these modules, see `adapted_modules`, and freeze the rest."""
    found = dict(model.named_sublayers(include_self=True))
    for name, parameter in model.named_parameters():
        parameter.stop_gradient = parameter.stop_gradient or not is_trained(name)
    for name in modules:
        owner, _, attribute = name.rpartition(".")
        setattr(found[owner], attribute, LoraLinear(found[name], rank, scale))


def adapters(model: nn.Layer) -> Iterator[LoraLinear]:
    """The adapters of a model; none where `add_adapters` was not called."""
    return (module for module in model.sublayers() if isinstance(module, LoraLinear))


def adapted_modules(
    model: nn.Layer, plan: ShardPlan, patterns: Sequence[str] | None, key: str = "lora.target_modules"
) -> list[str]:
    """Names of the modules of a whole model that get adapters; see `pick_modules`."""
    linear = (name for name, module in model.named_sublayers() if isinstance(module, nn.Linear))
    return pick_modules(list(linear), plan, patterns, key)
