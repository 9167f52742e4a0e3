"""A small model whose whole steps are programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from paddle import nn

from llmsuite.contract.schema.recipe import TrainSection
from llmsuite.parallel.program.layout import MeshLayout
from llmsuite.parallel.program.optimizer import ProgramOptimizer
from llmsuite.parallel.program.programs import StepPrograms
from tests.support import alone

SGD = TrainSection(
    max_steps=4,
    global_batch_size=4,
    micro_batch_size=2,
    learning_rate=0.5,
    optimizer="sgd",
    lr_schedule="linear",
    max_grad_norm=0.3,
)
ADAMW = dataclasses.replace(SGD, optimizer="adamw", weight_decay=0.1, adam_epsilon=1e-3)


class Product(nn.Layer):
    """Rows times a vector, which has no bias; and a number that is not trained."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        first = np.resize(np.array([1.0, -2.0, 0.5], "float32"), size)
        self.vector = self.create_parameter([size], default_initializer=nn.initializer.Assign(first))
        self.frozen = self.create_parameter([1], default_initializer=nn.initializer.Assign([2.0]))
        self.frozen.stop_gradient = True

    def forward(self, x: Any) -> Any:
        return (x * self.vector).sum(-1) * self.frozen


def _loss(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    y = model(inputs["x"])
    return {"loss": (y.square() * inputs["weights"]).sum(), "y": (y * inputs["weights"]).sum()}


def make_programs(model: Any, train: TrainSection) -> tuple[StepPrograms, ProgramOptimizer]:
    optimizer = ProgramOptimizer(alone.shards({"vector": model.vector}), train, 4)
    return StepPrograms(MeshLayout(model), optimizer, _loss), optimizer


def make_batch(step: int, width: int = 2) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(step)
    weights = draw.random([4, width], "float32")
    return {"x": draw.normal(size=[4, width, 3]).astype("float32"), "weights": weights / weights.sum()}
