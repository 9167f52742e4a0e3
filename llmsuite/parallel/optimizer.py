"""The optimizer: learning rate as a function of the step, gradient norm, and its state by parameter name."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import paddle

from llmsuite.devices.base import DeviceBackend
from llmsuite.devices.ops import Ops
from llmsuite.parallel import collective
from llmsuite.parallel.learning_rate import LearningRate
from llmsuite.parallel.partition import FIRST_VALUES, OPTIMIZER_SLOTS
from llmsuite.parallel.sharding import ParameterShard
from llmsuite.schema.recipe import TrainSection
from llmsuite.typing import Tensor


@dataclasses.dataclass(frozen=True)
class PaddleKinds:
    """The classes of Paddle's optimizers, or of ones that are built on these."""

    adamw: Any = paddle.optimizer.AdamW
    sgd: Any = paddle.optimizer.SGD


PLAIN = PaddleKinds()
PLAIN_OPS = Ops()


class _KernelAdamW(paddle.optimizer.AdamW):
    """Paddle's, with updates by a kernel of the device."""

    def __init__(self, update: Callable[..., None], **options: Any):
        super().__init__(**options)
        self._kernel = update

    def update(self, pairs: Sequence[tuple[Tensor, Tensor]], factor: float) -> None:
        """`step` of these parameters with these gradients, which are multiplied by a factor first: all in one call.
        Paddle's would copy each gradient to its parameter, and call an operation for each."""
        if not pairs:
            return
        parameters, gradients = zip(*pairs)
        _create_slots(self, parameters)
        names = (self._moment1_acc_str, self._moment2_acc_str, self._beta1_pow_acc_str, self._beta2_pow_acc_str)
        slots = [[self._get_accumulator_master(name, parameter) for parameter in parameters] for name in names]
        rates = [self.get_lr() * p.optimize_attr["learning_rate"] for p in parameters]
        decays = [self._weight_decay if self._apply_decay_param_fun(p.name) else 0.0 for p in parameters]
        self._kernel(parameters, gradients, factor, rates, slots, (self._beta1, self._beta2), self._epsilon, decays)


def _create_slots(optimizer: Any, parameters: Sequence[Tensor]) -> None:
    """Those that are not there yet; values that were loaded go into them."""
    optimizer._create_accumulators(paddle.static.default_main_program().global_block(), parameters)


def paddle_optimizer(
    train: TrainSection,
    parameters: Sequence[Tensor],
    rate: Any,
    decay: Collection[str],
    clip: Any = None,
    kinds: PaddleKinds = PLAIN,
) -> Any:
    """Paddle's optimizer of a recipe.

    Args:
        train: section of the recipe.
        parameters: what it updates.
        rate: the learning rate, a number or a scheduler.
        decay: names of the parameters whose weights decay.
        clip: what it does to the gradients first.
        kinds: classes to choose from.
    """
    if train.optimizer == "adamw":
        return kinds.adamw(
            learning_rate=rate,
            parameters=parameters,
            beta1=train.adam_beta1,
            beta2=train.adam_beta2,
            epsilon=train.adam_epsilon,
            weight_decay=train.weight_decay,
            apply_decay_param_fun=decay.__contains__,
            grad_clip=clip,
        )
    assert not train.weight_decay, "sgd has no decoupled decay, and the section refuses it"
    return kinds.sgd(learning_rate=rate, parameters=parameters, grad_clip=clip)


class SavedOptimizer(Protocol):
    """The part of an optimizer that saving and resuming use."""

    shards: list[ParameterShard]
    slots: list[str]

    def state(self) -> Iterator[StateTensor]:
        """Every tensor of the state, the same names in the same order on every rank."""

    def load_state(self, read: Callable[[StateTensor], np.ndarray]) -> None:
        """Take over a state: `read` gives this rank's shard of each tensor."""

    def to_host(self, shard: ParameterShard) -> None:
        """Called once a parameter was loaded."""


class Optimizer:
    """Paddle's AdamW or SGD over this rank's shards, with what a resumable run needs around it."""

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        train: TrainSection,
        total_steps: int,
        host: DeviceBackend | None = None,
        ops: Ops = PLAIN_OPS,
    ):
        """
        Args:
            shards: of every trained parameter of this rank.
            train: section of the recipe.
            total_steps: steps of the run; where the learning rate ends.
            host: device that moves moments and masters to host memory between updates; None to leave them in place.
            ops: of the device, for the gradients.
        """
        self.shards, self._host, self._ops = list(shards), host, ops
        self._finished: list[tuple[ParameterShard, Tensor]] = []
        self._factor = 1.0
        """What these are still to be multiplied by."""
        owned = [shard.master_or_shard for shard in self.shards if not shard.is_empty]
        self.learning_rate = LearningRate(train, total_steps).at
        self._max_norm = train.max_grad_norm
        decay = {shard.name for shard in self.shards if len(shard.local_shape) > 1}
        kinds = PLAIN if ops.adamw is None else PaddleKinds(functools.partial(_KernelAdamW, ops.adamw))
        self._paddle = paddle_optimizer(train, owned, train.learning_rate, decay, kinds=kinds)
        # of these slots only: a key that its optimizer does not read is told to be idle
        own_slots = OPTIMIZER_SLOTS[train.optimizer]
        self._decay_rates = {slot: FIRST_VALUES[slot](train) for slot in own_slots if slot in FIRST_VALUES}
        has_master = any(shard.has_master for shard in self.shards)
        self.slots = [*own_slots, *(["master"] if has_master else [])]
        for shard in self.shards:
            self.to_host(shard)

    def reserve(self) -> None:
        """Allocate the state of the optimizer, before the first forward pass, where that has not been done; one that
        lies on the host stays there. Paddle would allocate it in the first update, among freed activations, whose
        memory is fragmented from then on."""
        if self._host or not self._paddle._parameter_list:
            return
        with paddle.utils.unique_name.guard():  # as in `step`
            _create_slots(self._paddle, self._paddle._parameter_list)

    def begin_backward(self, is_last: bool) -> None:
        """Called before each backward pass. `is_last`: no further pass of the step adds to these gradients, so they are
        reduced over the ranks while the pass runs."""
        for shard in self.shards:
            shard.is_last_pass = is_last

    @paddle.no_grad()
    def finish_gradients(self, weight: float) -> float:
        """Reduce the gradients over the ranks, divide them by the weight of the loss, and clip them.

        Returns:
            Their global norm before clipping.
        """
        finished = [(s, gradient) for s in self.shards if (gradient := s.finish_gradient()) is not None]
        # every element counts once, however many ranks hold it
        by_replicas: dict[int, list[Tensor]] = {}
        for shard, gradient in finished:
            by_replicas.setdefault(shard.replica_count, []).append(gradient)
        squares = [
            self._ops.square_sum(gradients, 1.0 / weight).astype("float64") / paddle.full([], count, "float64")
            for count, gradients in by_replicas.items()
        ]
        norm = math.sqrt(collective.sum_over_run([paddle.add_n(squares) if squares else 0.0])[0])
        clipped = 1.0 if self._max_norm is None or not norm > self._max_norm else self._max_norm / norm
        self._finished, self._factor = finished, clipped / weight
        return norm

    @property
    def finished(self) -> Sequence[tuple[ParameterShard, Tensor]]:
        """The finished gradients of a step, before it updates the parameters."""
        self._scale()
        return tuple(self._finished)

    @paddle.no_grad()
    def _scale(self) -> None:
        for _, gradient in self._finished:
            self._ops.scale(gradient, self._factor)
        self._factor = 1.0

    def drop_gradients(self) -> None:
        """Drop the finished gradients, in place of a step."""
        self._finished = []
        for shard in self.shards:
            shard.drop_gradient()

    @paddle.no_grad()
    def step(self, step: int) -> None:
        """Update the parameters and drop the gradients."""
        self._paddle.set_lr(self.learning_rate(step))
        if not isinstance(self._paddle, _KernelAdamW):
            self._scale()
        finished, self._finished = dict(self._finished), []
        # state on the host is moved a parameter at a time; else all are updated at once
        for group in [[shard] for shard in self.shards] if self._host else [self.shards]:
            for shard in group:
                self._to_device(shard)
            # the first step names the slots; counted from 0, the names are the same for all optimizers of a process
            with paddle.utils.unique_name.guard():
                self._update([(shard, finished.pop(shard)) for shard in group if shard in finished])
            for shard in group:
                shard.master_or_shard.clear_gradient(False)
                shard.write_back()
                self.to_host(shard)

    def _update(self, pairs: Sequence[tuple[ParameterShard, Tensor]]) -> None:
        if isinstance(self._paddle, _KernelAdamW):
            self._paddle.update([(shard.master_or_shard, gradient) for shard, gradient in pairs], self._factor)
            for shard, _ in pairs:
                shard.drop_gradient()
            return
        for shard, gradient in pairs:
            shard.set_gradient(gradient)
        if self._paddle._parameter_list:  # none where a pipeline stage has no adapter
            self._paddle.step()

    def to_host(self, shard: ParameterShard) -> None:
        """Move what only the update needs of a parameter to host memory, where the recipe says so."""
        if self._host:
            self._move(shard, self._host.to_host)

    def _to_device(self, shard: ParameterShard) -> None:
        if self._host:
            self._move(shard, self._host.to_device)

    def _move(self, shard: ParameterShard, move: Callable[[Tensor], Tensor]) -> None:
        for slot, values in self._paddle._accumulators.items():
            if shard.name in values and slot not in self._decay_rates:  # those Paddle keeps on the host itself
                moved = move(values[shard.name])
                moved.name = values[shard.name].name
                values[shard.name] = moved
        if shard.shard_is_copy:
            moved = move(shard.master_or_shard.detach())
            shard.master_or_shard.get_tensor()._share_data_with(moved.get_tensor())

    def state(self) -> Iterator[StateTensor]:
        """Every tensor of the state; "master" is the float32 copy of a 16-bit parameter.

        The names are the same on every rank, in the same order, also where a rank owns nothing of a parameter.
        """
        # loaded slots wait in the holder until the first gradient of their parameter
        stored = {**self._paddle._accumulators_holder, **self._paddle.state_dict()}
        for shard in self.shards:
            for slot in self.slots:
                value = (
                    shard.master_or_shard.detach() if slot == "master" else stored.get(_paddle_name(shard.name, slot))
                )
                value = self._first_value(shard, slot) if value is None else value
                yield StateTensor(shard, slot, value, self._host)

    def _first_value(self, shard: ParameterShard, slot: str) -> Tensor:
        """Value of a slot before the first gradient; some parameters never get one."""
        if slot in self._decay_rates:
            return paddle.full([1], self._decay_rates[slot], dtype="float32")
        return paddle.zeros_like(shard.master_or_shard.detach())

    def load_state(self, read: Callable[[StateTensor], np.ndarray]) -> None:
        """Take over a state: `read` gives this rank's shard of each tensor."""
        slots: dict[str, Any] = {}
        for entry in self.state():
            if entry.shard.is_empty:
                continue
            value = paddle.to_tensor(read(entry), place=paddle.CPUPlace())  # the first step moves it to the device
            if entry.slot == "master":
                entry.shard.load_master(value)
                self.to_host(entry.shard)
            else:
                slots[_paddle_name(entry.shard.name, entry.slot)] = value
        self._paddle.set_state_dict(slots)


@dataclasses.dataclass(frozen=True)
class StateTensor:
    """One tensor of an optimizer's state: a slot of a parameter."""

    shard: ParameterShard
    slot: str
    value: Tensor
    """This rank's shard; without elements where the rank owns nothing."""
    host: DeviceBackend | None = None
    """Device whose host memory the value may lie in; None when it never does."""

    @property
    def name(self) -> str:
        return f"{self.shard.name}/{self.slot}"

    def on_device(self) -> Tensor:
        """The value on the device, for collectives."""
        return self.host.to_device(self.value) if self.host else self.value

    @property
    def is_scalar(self) -> bool:
        """Whether there is one number for the whole parameter, the same on every rank."""
        return self.slot_is_scalar(self.slot)

    @staticmethod
    def slot_is_scalar(slot: str) -> bool:
        return slot.endswith("pow_acc")


def _paddle_name(name: str, slot: str) -> str:
    """Paddle's name of a slot."""
    return f"{name}_{slot}_0"
