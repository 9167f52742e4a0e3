"""The optimizer: learning rate as a function of the step, gradient norm, and its state by parameter name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.engine import collective
from llmsuite.engine.sharding import ParameterShard
from llmsuite.errors import UserError
from llmsuite.recipe.schema import TrainSection

Tensor = Any

_SLOTS = ("beta1_pow_acc", "beta2_pow_acc", "moment1", "moment2")
"""What AdamW keeps of a parameter; SGD keeps nothing."""


class Optimizer:
    """Paddle's AdamW or SGD over this rank's shards, with what a resumable run needs around it."""

    def __init__(self, shards: Sequence[ParameterShard], train: TrainSection, total_steps: int):
        self.shards = list(shards)
        owned = [shard.owned for shard in self.shards if not shard.is_empty]
        self._peak, self._schedule = train.learning_rate, train.lr_schedule
        # rounded first: 0.07 * 100 is a little more than 7
        self._warmup_steps = math.ceil(round(train.warmup_ratio * total_steps, 6))
        self._floor, self._total_steps = train.min_lr_ratio, total_steps
        self._max_norm = train.max_grad_norm
        low_precision = any(p.dtype != paddle.float32 for p in owned)
        decay = {shard.name for shard in self.shards if len(shard.local_shape) > 1}
        if train.optimizer == "adamw":
            self._paddle = paddle.optimizer.AdamW(
                learning_rate=train.learning_rate,
                parameters=owned,
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
                parameters=owned,
                multi_precision=low_precision,
            )
        self._decay_rates = {"beta1_pow_acc": train.adam_beta1, "beta2_pow_acc": train.adam_beta2}
        self.slots = [*(_SLOTS if train.optimizer == "adamw" else ()), *(["master"] if low_precision else [])]

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
        """Add up the gradients over the ranks, divide them by the loss's weight and clip them.

        Returns:
            Their global norm before clipping.
        """
        finished = [(s, gradient) for s in self.shards if (gradient := s.finish_gradient()) is not None]
        for _, gradient in finished:
            gradient.scale_(1.0 / weight)
        # every element once, however many ranks hold it
        by_copies: dict[int, list[Tensor]] = {}
        for shard, gradient in finished:
            by_copies.setdefault(shard.copies, []).append(gradient.astype("float32").square().sum())
        squares = sum(float(paddle.add_n(parts)) / copies for copies, parts in by_copies.items())
        norm = math.sqrt(collective.sum_over_run([squares])[0])
        if self._max_norm is not None and norm > self._max_norm:
            for _, gradient in finished:
                gradient.scale_(self._max_norm / norm)
        for shard, gradient in finished:
            shard.set_gradient(gradient)
        return norm

    def step(self, step: int) -> None:
        """Update the parameters and drop the gradients."""
        self._paddle.set_lr(self.learning_rate(step))
        # slots are made in the first step; counted afresh, their names are the same for every optimizer of a process
        with paddle.utils.unique_name.guard():
            self._paddle.step()
        self._paddle.clear_grad(set_to_zero=False)
        for shard in self.shards:
            shard.publish()

    def state(self) -> Iterator[StateTensor]:
        """Every tensor of the state; "master" is the float32 copy of a 16-bit parameter.

        The names are the same on every rank, in the same order, also where a rank owns nothing of a parameter.
        """
        # what was loaded waits in the holder until the first gradient of its parameter comes
        stored = {**self._paddle._accumulators_holder, **self._paddle.state_dict()}
        masters = stored.get("master_weights", {})
        for shard in self.shards:
            for slot in self.slots:
                name = _paddle_name(shard.name, slot, "master" in self.slots)
                value = masters.get(shard.name) if slot == "master" else stored.get(name)
                yield StateTensor(shard, slot, self._first_value(shard, slot) if value is None else value)

    def _first_value(self, shard: ParameterShard, slot: str) -> Tensor:
        """What a slot is until the first gradient comes; some parameters never get one."""
        if slot in self._decay_rates:
            return paddle.full([1], self._decay_rates[slot], dtype="float32")
        owned = shard.owned.detach().astype("float32")
        return owned if slot == "master" else paddle.zeros_like(owned)

    def load_state(self, read: Callable[[StateTensor], np.ndarray]) -> None:
        """Take over a state: `read` gives this rank's part of each tensor."""
        slots: dict[str, Any] = {}
        masters: dict[str, Any] = {}
        for entry in self.state():
            if entry.shard.is_empty:
                continue
            name, value = entry.shard.name, paddle.to_tensor(read(entry))
            if entry.slot == "master":
                masters[name] = value
                masters[name].name = _master_name(name)
            else:
                slots[_paddle_name(name, entry.slot, "master" in self.slots)] = value
        self._paddle.set_state_dict({**slots, "master_weights": masters} if masters else slots)


@dataclasses.dataclass(frozen=True)
class StateTensor:
    """One tensor of an optimizer's state: a slot of a parameter."""

    shard: ParameterShard
    slot: str
    value: Tensor
    """This rank's part; of no elements where the rank owns nothing."""

    @property
    def name(self) -> str:
        return f"{self.shard.name}/{self.slot}"

    @property
    def is_scalar(self) -> bool:
        """Whether there is one number for the whole parameter, the same on every rank."""
        return self.slot_is_scalar(self.slot)

    @staticmethod
    def slot_is_scalar(slot: str) -> bool:
        return slot.endswith("pow_acc")


def _paddle_name(name: str, slot: str, has_master: bool) -> str:
    """What Paddle calls a slot, and looks it up by: it belongs to the master weight where there is one."""
    return f"{_master_name(name) if has_master else name}_{slot}_0"


def _master_name(name: str) -> str:
    return f"{name}_fp32_master_0"
