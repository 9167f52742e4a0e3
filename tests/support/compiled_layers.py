"""Layers as programs."""

from __future__ import annotations

from typing import Any

import paddle

from llmsuite.models.blocks import GatedMLP


def compiled(mlp: GatedMLP) -> Any:
    """The layer as a program, in which nothing of Python's is made again from its source."""

    class Compiled(paddle.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = mlp

        @paddle.jit.not_to_static
        def run(self, x: Any) -> Any:
            return self.mlp.forward(x)

        def forward(self, x: Any) -> Any:
            return self.run(x)

    return paddle.jit.to_static(Compiled(), full_graph=True)
