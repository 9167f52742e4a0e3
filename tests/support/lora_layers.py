"""Layers with factors that are not zero."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn


def linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    """A linear layer with random values."""
    made = nn.Linear(num_inputs, num_outputs)
    made.bias.set_value(paddle.randn([num_outputs]))
    return made


def filled(layer: Any) -> Any:
    """The layer with random factors."""
    for name, parameter in layer.named_parameters():
        if name not in ("weight", "bias"):
            parameter.set_value(paddle.randn(parameter.shape))
    return layer
