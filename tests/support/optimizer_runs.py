"""Steps of an optimizer on a few parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.contract.schema.recipe import TrainSection
from llmsuite.parallel.optimizer import Optimizer
from tests.support import alone

SHAPES = {
    "layer.weight": [3, 4],
    "norm.weight": [4],
    # one name begins with another
    "scale": [5],
    "scale_up": [2, 5],
    # gets no gradient
    "unused.weight": [2, 2],
}
RATES = {"scale_up": 0.25}
"""Factors of the learning rate of parameters that have their own, as in LoRA+."""
NUM_STEPS = 6


Arrays = dict[str, np.ndarray]


def section(**keys: Any) -> TrainSection:
    common = {"max_steps": NUM_STEPS, "global_batch_size": 1, "micro_batch_size": 1, "max_grad_norm": None}
    return TrainSection(**{**common, "learning_rate": 0.05, "lr_schedule": "linear", "warmup_ratio": 0.3, **keys})


def initial() -> Arrays:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype("float32") for name, shape in SHAPES.items()}


def gradients(step: int) -> Arrays:
    rng = np.random.default_rng(step)
    return {name: rng.standard_normal(SHAPES[name]).astype("float32") for name in SHAPES if name != "unused.weight"}


def parameters(values: Mapping[str, np.ndarray], dtype: str = "float32") -> dict[str, Any]:
    made = {}
    for name, value in values.items():
        zeros = paddle.nn.initializer.Constant(0.0)
        made[name] = paddle.create_parameter(list(value.shape), dtype, default_initializer=zeros)
        made[name].set_value(paddle.to_tensor(value).astype(dtype))
        made[name].optimize_attr["learning_rate"] = RATES.get(name, 1.0)
    return made


def backward(optimizer: Optimizer, gradient: Mapping[str, np.ndarray]) -> None:
    mine = alone.parameters(optimizer)
    paddle.add_n([(mine[n] * paddle.to_tensor(g)).sum() for n, g in gradient.items()]).backward()


def run(optimizer: Optimizer, steps: Sequence[int], weight: float = 1.0) -> Arrays:
    for step in steps:
        backward(optimizer, gradients(step))
        optimizer.finish_gradients(weight)
        optimizer.step(step)
    return {name: parameter.numpy() for name, parameter in alone.parameters(optimizer).items()}
