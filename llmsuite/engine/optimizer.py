"""The optimizer: learning rate as a function of the step, gradient norm, and its state by parameter name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import paddle

from llmsuite.engine import collective
from llmsuite.errors import UserError
from llmsuite.recipe.schema import TrainSection

Tensor = Any

_SLOTS = ("beta1_pow_acc", "beta2_pow_acc", "moment1", "moment2")
"""What AdamW keeps of a parameter; SGD keeps nothing."""


class Optimizer:
    """Paddle's AdamW or SGD over named parameters, with what a resumable run needs around it."""

    def __init__(self, named_parameters: Mapping[str, Tensor], train: TrainSection, total_steps: int):
        self.parameters = dict(named_parameters)
        for name, parameter in self.parameters.items():
            parameter.name = name  # the state is stored under it
        self._peak, self._schedule = train.learning_rate, train.lr_schedule
        # rounded first: 0.07 * 100 is a little more than 7
        self._warmup_steps = math.ceil(round(train.warmup_ratio * total_steps, 6))
        self._floor, self._total_steps = train.min_lr_ratio, total_steps
        self._max_norm = train.max_grad_norm
        low_precision = any(p.dtype != paddle.float32 for p in self.parameters.values())
        decay = {name for name, p in self.parameters.items() if p.ndim > 1}
        if train.optimizer == "adamw":
            self._paddle = paddle.optimizer.AdamW(
                learning_rate=train.learning_rate,
                parameters=list(self.parameters.values()),
                beta1=train.adam_beta1,
                beta2=train.adam_beta2,
                epsilon=train.adam_epsilon,
                weight_decay=train.weight_decay,
                apply_decay_param_fun=decay.__contains__,
                multi_precision=low_precision,
            )
        else:
            if train.weight_decay:
                raise UserError("train.weight_decay: sgd has no decoupled decay; set it to 0 or use adamw")
            self._paddle = paddle.optimizer.SGD(
                learning_rate=train.learning_rate,
                parameters=list(self.parameters.values()),
                multi_precision=low_precision,
            )

    def learning_rate(self, step: int) -> float:
        """Rate of a step, counted from 1: linear warm-up, then constant, linear or cosine towards the floor."""
        if step <= self._warmup_steps:
            return self._peak * step / self._warmup_steps
        if self._schedule == "constant":
            return self._peak
        # the first step after warm-up has the full rate; the floor is where the step after the last would be
        done = (step - self._warmup_steps - 1) / (self._total_steps - self._warmup_steps)
        fall = (1 - done) if self._schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return self._peak * (self._floor + (1 - self._floor) * fall)

    @paddle.no_grad()
    def finish_gradients(self, weight: float) -> float:
        """Sum the gradients over the ranks, divide them by the loss's weight and clip them.

        Returns:
            Their global norm before clipping.
        """
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        collective.sum_in_place(gradients)
        for gradient in gradients:
            gradient.scale_(1.0 / weight)
        squares = [gradient.astype("float32").square().sum() for gradient in gradients]
        norm = math.sqrt(float(paddle.add_n(squares)))
        if self._max_norm is not None and norm > self._max_norm:
            for gradient in gradients:
                gradient.scale_(self._max_norm / norm)
        return norm

    def step(self, step: int) -> None:
        """Update the parameters and drop the gradients."""
        self._paddle.set_lr(self.learning_rate(step))
        # slots are made in the first step; counted afresh, their names are the same for every optimizer of a process
        with paddle.utils.unique_name.guard():
            self._paddle.step()
        self._paddle.clear_grad(set_to_zero=False)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the state as `parameter/slot`; "master" is the float32 copy of a 16-bit parameter."""
        stored = self._paddle.state_dict()
        masters = stored.get("master_weights", {})
        for name in self.parameters:
            for slot in _SLOTS:
                if (key := _paddle_name(name, slot, name in masters)) in stored:
                    yield f"{name}/{slot}", stored[key]
            if name in masters:
                yield f"{name}/master", masters[name]

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Take over a state as `state` gave it."""
        slots: dict[str, Any] = {}
        masters: dict[str, Any] = {}
        for key, value in state.items():
            name, slot = key.rsplit("/", 1)
            if slot == "master":
                masters[name] = paddle.to_tensor(value)
                masters[name].name = _master_name(name)
            else:
                slots[_paddle_name(name, slot, f"{name}/master" in state)] = paddle.to_tensor(value)
        self._paddle.set_state_dict({**slots, "master_weights": masters} if masters else slots)


def _paddle_name(name: str, slot: str, has_master: bool) -> str:
    """What Paddle calls a slot, and looks it up by: it belongs to the master weight where there is one."""
    return f"{_master_name(name) if has_master else name}_{slot}_0"


def _master_name(name: str) -> str:
    return f"{name}_fp32_master_0"
