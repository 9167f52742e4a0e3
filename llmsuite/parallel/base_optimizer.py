"""The part that optimizers of eager steps and of step programs share: schedule, slots, and the interface for saving."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.base.typing import Tensor
from llmsuite.contract.schema.recipe import TrainSection
from llmsuite.devices.base import DeviceBackend
from llmsuite.parallel.learning_rate import LearningRate
from llmsuite.parallel.partition import FIRST_VALUES, OPTIMIZER_SLOTS, moment_dtype, optimizer_slots
from llmsuite.parallel.sharding import ParameterShard

MASTER = "master"
"""Slot with the float32 copy of a 16-bit parameter."""


@dataclasses.dataclass(frozen=True)
class OptimizerClasses:
    """Paddle's optimizer classes, or subclasses of them."""

    adamw: Any = paddle.optimizer.AdamW
    sgd: Any = paddle.optimizer.SGD


PADDLE_CLASSES = OptimizerClasses()


@dataclasses.dataclass(frozen=True)
class StateTensor:
    """One tensor of an optimizer's state: a slot of a parameter."""

    shard: ParameterShard
    slot: str
    value: Tensor
    """This rank's shard; empty where the rank owns no element."""
    host: DeviceBackend | None = None
    """Device that may have moved the value to host memory; None when it never does."""

    @property
    def name(self) -> str:
        return f"{self.shard.name}/{self.slot}"

    def on_device(self) -> Tensor:
        """The value on the device, for collectives."""
        return self.host.to_device(self.value) if self.host else self.value

    gather_blocks: Callable[[Tensor], Tensor] | None = None
    """Returns the values of all blocks of the parameter, from those that this rank has; None for other slots."""

    @property
    def is_scalar(self) -> bool:
        """True where there is one number for the full parameter, the same on every rank."""
        return self.slot_is_scalar(self.slot)

    @staticmethod
    def slot_is_scalar(slot: str) -> bool:
        return slot.endswith("pow_acc")

    @staticmethod
    def slot_is_of_blocks(slot: str) -> bool:
        """True where there is one number for each block of the full parameter."""
        return slot.endswith("_absmax")


class BaseOptimizer(abc.ABC):
    """AdamW or SGD over this rank's shards, with a state that can be saved and resumed.

    A subclass decides where the slots lie, and how an update runs: `optimizer.Optimizer` eagerly,
    `program.optimizer.ProgramOptimizer` inside of compiled programs.
    """

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        train: TrainSection,
        total_steps: int,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ):
        """
        Args:
            shards: of every trained parameter of this rank.
            train: section of the recipe.
            total_steps: steps of the run, at whose end the learning rate ends.
            shapes: of the full parameters, by name; None where no vocabulary is padded.
        """
        self.shards = list(shards)
        self._shapes = shapes or {}
        self.learning_rate: Callable[[int], float] = LearningRate(train, total_steps).at
        """Function from a step, counted from 1, to its learning rate."""
        self.max_norm = train.max_grad_norm
        """Gradients with a larger global norm are multiplied by `max_norm / norm`; None for no clipping."""
        self.own_slots = [*OPTIMIZER_SLOTS[train.optimizer]]
        """The slots that Paddle's optimizer keeps of a parameter."""
        self._has_masters = any(shard.has_master for shard in self.shards)
        self._train = train
        self._first_numbers = {slot: FIRST_VALUES[slot](train) for slot in self.own_slots if slot in FIRST_VALUES}

    @property
    def kind(self) -> str:
        """`train.optimizer`."""
        return self._train.optimizer

    @property
    def decays_last(self) -> bool:
        """True where parameters decay after the update, as those of bitsandbytes do, instead of before it."""
        return self._train.optimizer == "adamw_8bit"

    @property
    def moment_dtype(self) -> str:
        """Dtype of moments that are not stored in blocks."""
        return moment_dtype(self._train)

    def slots_of(self, name: str, shape: Sequence[int]) -> list[str]:
        """The slots of a parameter of this full shape in a checkpoint, the same on every rank."""
        return [*optimizer_slots(self._train.optimizer, name, shape), *([MASTER] if self._has_masters else [])]

    def full_shape(self, shard: ParameterShard) -> Sequence[int]:
        """Shape of a full parameter without padding."""
        return self._shapes.get(shard.name, shard.shape)

    def state(self) -> Iterator[StateTensor]:
        """Every tensor of the state, the same names in the same order on every rank, also where a rank owns no element
        of a parameter."""
        values = self._slot_values()
        for shard in self.shards:
            for slot in self.slots_of(shard.name, self.full_shape(shard)):
                if slot == MASTER:
                    value = shard.main_param.detach()
                elif (shard.name, slot) in values:
                    value = values[shard.name, slot]
                else:
                    value = self._first_value(shard, slot)
                yield self._state_tensor(shard, slot, value)

    @abc.abstractmethod
    def load_state(self, read: Callable[[StateTensor], np.ndarray]) -> None:
        """Load a state: `read` returns this rank's shard of each tensor."""

    @abc.abstractmethod
    def to_host(self, shard: ParameterShard) -> None:
        """Move the state of a parameter to host memory after it was loaded, where the recipe offloads it."""

    @abc.abstractmethod
    def _slot_values(self) -> Mapping[tuple[str, str], Tensor]:
        """The slots that exist, by the names of parameter and slot."""

    def _state_tensor(self, shard: ParameterShard, slot: str, value: Tensor) -> StateTensor:
        """The entry of a slot in `state`."""
        return StateTensor(shard, slot, value)

    def _first_value(self, shard: ParameterShard, slot: str) -> Tensor:
        """Value of a slot before the first gradient; some parameters never get a gradient."""
        if slot in self._first_numbers:
            return paddle.full([1], self._first_numbers[slot], dtype="float32")
        return paddle.zeros_like(self._slot_part(shard), self.moment_dtype)

    def _slot_part(self, shard: ParameterShard) -> Tensor:
        """The part of a parameter whose slots this rank keeps."""
        return shard.main_param.detach()

    def _new_paddle_optimizer(
        self, parameters: Sequence[Tensor], rate: Any, clip: Any = None, classes: OptimizerClasses = PADDLE_CLASSES
    ) -> Any:
        """Make Paddle's optimizer for the recipe.

        Args:
            parameters: to update.
            rate: the learning rate, a number or a scheduler.
            clip: gradient clipping before the update.
            classes: to choose from.
        """
        train = self._train
        if train.optimizer != "sgd":
            decayed = {shard.name for shard in self.shards if shard.decays}
            return classes.adamw(
                learning_rate=rate,
                parameters=parameters,
                beta1=train.adam_beta1,
                beta2=train.adam_beta2,
                epsilon=train.adam_epsilon,
                weight_decay=0.0 if self.decays_last else train.weight_decay,
                apply_decay_param_fun=decayed.__contains__,
                grad_clip=clip,
            )
        assert not train.weight_decay, "sgd has no decoupled decay, and the section refuses it"
        return classes.sgd(learning_rate=rate, parameters=parameters, grad_clip=clip)
