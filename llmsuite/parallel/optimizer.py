"""The optimizer of eager steps: reduction and clipping of gradients, and the update of this rank's shards."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.base.spans import spanned
from llmsuite.base.typing import Tensor
from llmsuite.contract.schema.recipe import TrainSection
from llmsuite.devices.base import DeviceBackend
from llmsuite.devices.optimizer_ops import OptimizerOps, taken
from llmsuite.devices.tensors import array_of, tensor_of
from llmsuite.parallel import collective
from llmsuite.parallel.base_optimizer import MASTER, PADDLE_CLASSES, BaseOptimizer, OptimizerClasses, StateTensor
from llmsuite.parallel.block_moments import BlockAdamW, decay_factor
from llmsuite.parallel.direct_update import DirectUpdate
from llmsuite.parallel.partition import has_block_moments
from llmsuite.parallel.sharding import ParameterShard

DEFAULT_OPS = OptimizerOps()


class _KernelAdamW(paddle.optimizer.AdamW):
    """Paddle's AdamW, with updates by a kernel of the device."""

    def __init__(self, update: Callable[..., None], **options: Any):
        super().__init__(**options)
        self._kernel = update
        self._ages: dict[str, tuple[float, int]] = {}
        """Power of a beta before the first update here, and number of updates since, by the name of a parameter."""

    def set_state_dict(self, state_dict: Any) -> None:
        super().set_state_dict(state_dict)
        self._ages = {}

    def update(self, pairs: Sequence[tuple[Tensor, Tensor]], factor: float) -> None:
        """Update all parameters with the same number of updates in one call, with gradients that are multiplied by
        `factor` first. Paddle's `step` would copy each gradient to its parameter, and call an operation for each.

        Args:
            pairs: parameters and their gradients.
            factor: of the gradients.
        """
        if not pairs:
            return
        parameters, gradients = zip(*pairs)
        _create_slots(self, parameters)
        names = (self._moment1_acc_str, self._moment2_acc_str, self._beta1_pow_acc_str, self._beta2_pow_acc_str)
        slots = []
        for name in names:
            slots.append([self._get_accumulator_master(name, parameter) for parameter in parameters])
        rates = [self.get_lr() * p.optimize_attr["learning_rate"] for p in parameters]
        decays = [self._weight_decay if self._apply_decay_param_fun(p.name) else 0.0 for p in parameters]
        betas = self._beta1, self._beta2
        of_same_age: dict[tuple[float, int], list[int]] = {}
        # by the power of the larger beta, which is not 0 for long
        for number, power in enumerate(slots[2] if betas[0] > betas[1] else slots[3]):
            of_same_age.setdefault(self._next_age(parameters[number].name, power), []).append(number)
        for members in of_same_age.values():
            self._kernel(
                taken(parameters, members),
                taken(gradients, members),
                factor,
                taken(rates, members),
                [taken(slot, members) for slot in slots],
                betas,
                self._epsilon,
                taken(decays, members),
            )

    def _next_age(self, name: str, power: Tensor) -> tuple[float, int]:
        """Return a key that parameters with the same number of updates share, and count one more update."""
        if name not in self._ages:  # once, not in each update: it may wait for a device
            self._ages[name] = float(array_of(power).reshape(-1)[0]), 0
        first, count = self._ages[name]
        self._ages[name] = first, count + 1
        return first, count


def _create_slots(optimizer: Any, parameters: Sequence[Tensor]) -> None:
    """Allocate the slots that do not exist yet; loaded values are put into them."""
    optimizer._create_accumulators(paddle.static.default_main_program().global_block(), parameters)


class Optimizer(BaseOptimizer):
    """The optimizer of eager steps: reduces gradients over the ranks, clips them, and updates this rank's shards."""

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        train: TrainSection,
        total_steps: int,
        host: DeviceBackend | None = None,
        ops: OptimizerOps = DEFAULT_OPS,
        shapes: Mapping[str, Sequence[int]] | None = None,
        is_transposed: Callable[[str], bool] = lambda name: False,
    ):
        """
        Args:
            shards: of every trained parameter of this rank.
            train: section of the recipe.
            total_steps: steps of the run, at whose end the learning rate ends.
            host: device that moves moments and masters to host memory between updates; None to leave them in place.
            ops: the device's operations on gradients.
            shapes: of the full parameters, by name; None where no vocabulary is padded.
            is_transposed: returns True for the name of a parameter that PyTorch stores transposed.
        """
        super().__init__(shards, train, total_steps, shapes)
        self._host = host
        self._ops = ops
        self._finished: list[tuple[ParameterShard, Tensor]] = []
        self._factor = 1.0
        """Factor that the finished gradients have not been multiplied by yet."""
        of_blocks = [s for s in self.shards if has_block_moments(train.optimizer, s.name, self.full_shape(s))]
        of_shards = {shard.name: self.full_shape(shard) for shard in of_blocks}
        assert host is None or not of_blocks, "refused before the run"
        self._blocks = BlockAdamW(of_blocks, of_shards, is_transposed, train)
        """Updates the parameters whose moments are stored in blocks; Paddle's optimizer has the others."""
        others = [s for s in self.shards if not s.is_empty and s.name not in self._blocks.states]
        assert host is None or train.master_weights, "refused before the run"
        self._direct = DirectUpdate([] if train.master_weights else others, train)
        """Updates the parameters that have no masters; then nothing is left for Paddle's optimizer."""
        owned = [s.main_param for s in others if s.name not in self._direct.states]
        classes = PADDLE_CLASSES
        if ops.adamw is not None:
            classes = OptimizerClasses(functools.partial(_KernelAdamW, ops.adamw))
        self._paddle = self._new_paddle_optimizer(owned, train.learning_rate, classes=classes)
        for shard in self.shards:
            self.to_host(shard)

    def reserve(self) -> None:
        """Allocate the state of the optimizer before the first forward pass, unless it exists or lies on the host.
        Paddle would allocate it in the first update, between freed activations, and fragment their memory."""
        if self._host or not self._paddle._parameter_list:
            return
        with paddle.utils.unique_name.guard():  # as in `step`
            _create_slots(self._paddle, self._paddle._parameter_list)

    def begin_backward(self, is_last: bool) -> None:
        """Called before each backward pass. With `is_last` no later pass of the step adds to these gradients, so they
        are reduced over the ranks while the pass runs."""
        for shard in self.shards:
            shard.is_last_pass = is_last

    @spanned("gradients")
    @paddle.no_grad()
    def finish_gradients(self, weight: float) -> float:
        """Reduce the gradients over the ranks, and find the factor that the update multiplies them by: it divides them
        by the weight of the loss, and clips their norm.

        Args:
            weight: weight of the loss times the loss scale.

        Returns:
            Their global norm before clipping.
        """
        # in the order of the shards, which is the same on all ranks: reductions that have not started do so here
        finished = [(s, gradient) for s in self.shards if (gradient := s.finish_gradient()) is not None]
        finished = _sum_over_copies(finished)
        # every element counts once in the norm, however many ranks hold it, and of copies that of the first one
        by_replicas: dict[int, list[Tensor]] = {}
        counted = set[str]()
        for shard, gradient in finished:
            if shard.shared_as not in counted:
                by_replicas.setdefault(shard.replica_count, []).append(gradient)
            if shard.shared_as:
                counted.add(shard.shared_as)
        squares = [
            self._ops.square_sum(gradients, 1.0 / weight).astype("float64") / paddle.full([], count, "float64")
            for count, gradients in by_replicas.items()
        ]
        # summed over all ranks: each holds shards of some parameters only. In float64, as it adds up squares of all
        # parameters of the model
        norm = math.sqrt(collective.sum_over_run([paddle.add_n(squares) if squares else 0.0])[0])
        # a norm that is not a number clips nothing: the guard decides on the step
        clipped = 1.0 if self.max_norm is None or not norm > self.max_norm else self.max_norm / norm
        self._finished = finished
        self._factor = clipped / weight
        return norm

    def final_gradients(self) -> list[tuple[ParameterShard, Tensor]]:
        """The gradients of a step with their shards, as the update will use them. They are divided and clipped in place
        for it, which the update then does not repeat."""
        self._scale_gradients()
        return list(self._finished)

    @paddle.no_grad()
    def _scale_gradients(self) -> None:
        for _, gradient in self._finished:
            self._ops.scale(gradient, self._factor)
        self._factor = 1.0

    def drop_gradients(self) -> None:
        """Drop the finished gradients instead of an update."""
        self._finished = []
        for shard in self.shards:
            shard.drop_gradient()

    @spanned("optimizer")
    @paddle.no_grad()
    def step(self, step: int) -> None:
        """Update the parameters and drop the gradients."""
        self._paddle.set_lr(self.learning_rate(step))
        if not isinstance(self._paddle, _KernelAdamW) or not self._train.master_weights:
            self._scale_gradients()
        finished = dict(self._finished)
        self._finished = []
        self._update_blocks(finished, step)
        self._update_directly(finished, step)
        # state on the host is moved one parameter at a time; otherwise all are updated together
        groups = [[shard] for shard in self.shards] if self._host else [self.shards]
        for group in groups:
            for shard in group:
                self._to_device(shard)
            # the first step names the slots; counted from 0, the names are the same for all optimizers of a process
            with paddle.utils.unique_name.guard():
                self._update([(shard, finished.pop(shard)) for shard in group if shard in finished])
            for shard in group:
                shard.write_back()
                self.to_host(shard)

    def _update_blocks(self, finished: dict[ParameterShard, Tensor], step: int) -> None:
        """Update the parameters whose moments are stored in blocks, and take them out of the finished ones."""
        own = [shard for shard in finished if shard.name in self._blocks.states]
        gradients = {shard: finished.pop(shard) for shard in own}
        self._blocks.update(gradients, self._factor, self.learning_rate(step))
        for shard in own:
            shard.drop_gradient()

    def _update_directly(self, finished: dict[ParameterShard, Tensor], step: int) -> None:
        """Update the parameters that have no masters, and take them out of the finished ones."""
        for shard in [shard for shard in finished if shard.name in self._direct.states]:
            self._direct.update(shard, finished.pop(shard), self.learning_rate(step))
            shard.drop_gradient()

    def _update(self, pairs: Sequence[tuple[ParameterShard, Tensor]]) -> None:
        own = [(shard.main_param, gradient) for shard, gradient in pairs]
        if isinstance(self._paddle, _KernelAdamW):
            self._paddle.update(own, self._factor)
        elif own:
            # Paddle's `step` would take the gradients of the parameters: to give a parameter a gradient it copies at
            # least a number, and waits for the device
            self._paddle._apply_optimize(None, None, own)
        for shard, _ in pairs:
            shard.drop_gradient()
        if self.decays_last:
            for shard, _ in pairs:
                rate = self._paddle.get_lr() * shard.main_param.optimize_attr["learning_rate"]
                factor = decay_factor(shard, rate, self._train.weight_decay)
                if factor is not None:
                    shard.main_param.detach().scale_(factor)

    def to_host(self, shard: ParameterShard) -> None:
        """Move the state that only the update needs of a parameter to host memory, where the recipe offloads it."""
        if self._host:
            self._move(shard, self._host.to_host)

    def _to_device(self, shard: ParameterShard) -> None:
        if self._host:
            self._move(shard, self._host.to_device)

    def _move(self, shard: ParameterShard, move: Callable[[Tensor], Tensor]) -> None:
        for slot, values in self._paddle._accumulators.items():
            if shard.name in values and slot not in self._first_numbers:  # Paddle itself keeps those on the host
                moved = move(values[shard.name])
                moved.name = values[shard.name].name  # by which Paddle's state_dict has it
                values[shard.name] = moved
        if shard.shard_is_copy:
            moved = move(shard.main_param.detach())
            # the tensor stays, with other memory: Paddle's optimizer refers to it
            shard.main_param.get_tensor()._share_data_with(moved.get_tensor())

    def _slot_values(self) -> Mapping[tuple[str, str], Tensor]:
        # loaded slots wait in the holder until the first gradient of their parameter
        stored = {**self._paddle._accumulators_holder, **self._paddle.state_dict()}
        values = {}
        for shard in self.shards:
            for slot in self.own_slots:
                value = stored.get(_paddle_name(shard.name, slot))
                if value is not None:
                    values[shard.name, slot] = value
        for name, state in self._blocks.states.items():
            for slot, value in self._blocks.slots(state).items():
                values[name, slot] = value
        for name, of_parameter in self._direct.states.items():
            for slot, value in self._direct.slots(of_parameter).items():
                values[name, slot] = value
        return values

    def _state_tensor(self, shard: ParameterShard, slot: str, value: Tensor) -> StateTensor:
        gather = None
        if StateTensor.slot_is_of_blocks(slot):
            gather = self._blocks.states[shard.name].blocks.gather
        return StateTensor(shard, slot, value, self._host, gather)

    def load_state(self, read: Callable[[StateTensor], np.ndarray]) -> None:
        """Load a state: `read` returns this rank's shard of each tensor."""
        slots: dict[str, Any] = {}
        for entry in self.state():
            if entry.shard.is_empty:
                continue
            value = tensor_of(read(entry), place=paddle.CPUPlace())  # the first step moves it to the device
            if entry.slot == MASTER:
                entry.shard.load_master(value)
                self.to_host(entry.shard)
            elif entry.shard.name in self._blocks.states:
                self._blocks.load(self._blocks.states[entry.shard.name], entry.slot, value)
            elif entry.shard.name in self._direct.states:
                self._direct.load(self._direct.states[entry.shard.name], entry.slot, value)
            else:
                slots[_paddle_name(entry.shard.name, entry.slot)] = value
        # Paddle's optimizer takes them when a parameter has its first gradient
        self._paddle.set_state_dict(slots)


def _sum_over_copies(finished: list[tuple[ParameterShard, Tensor]]) -> list[tuple[ParameterShard, Tensor]]:
    """The gradients with, for each copy of a parameter, the sum over its copies, in memory of its own."""
    of_copies: dict[str, list[Tensor]] = {}
    for shard, gradient in finished:
        if shard.shared_as:
            of_copies.setdefault(shard.shared_as, []).append(gradient)
    sums = {name: paddle.add_n(gradients) for name, gradients in of_copies.items()}
    return [(shard, sums[shard.shared_as].clone() if shard.shared_as else gradient) for shard, gradient in finished]


def _paddle_name(name: str, slot: str) -> str:
    """Paddle's name of a slot."""
    return f"{name}_{slot}_0"
