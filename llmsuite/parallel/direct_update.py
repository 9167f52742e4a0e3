"""Updates of bfloat16 parameters that have no float32 masters (`train.master_weights: false`).

AdamW computes as the fused kernel of PyTorch for CUDA does on bfloat16 parameters (`adam_math` in
ATen/native/cuda/fused_adam_utils.cuh, the `adamw_torch_fused` of transformers): parameter, gradient and moments become
float32, the new moment goes into the update before it is rounded, and each of the three results is rounded once. The
other implementation of PyTorch, `foreach` (`adamw_torch`), rounds after each of its operations, and is not this one.

With `adamw_8bit` only the parameters whose moments are not stored in blocks come here. Their moments are float32, and
the parameter is rounded twice, after the update and after weight decay, as bitsandbytes does (`kOptimizer32bit2State`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np
import paddle

from llmsuite.base.typing import Tensor
from llmsuite.contract.schema.recipe import TrainSection
from llmsuite.devices.tensors import array_of, tensor_of
from llmsuite.parallel.partition import UPDATE_CHUNK, moment_dtype
from llmsuite.parallel.sharding import ParameterShard

MOMENTS = ("moment1", "moment2")
_POWERS = ("beta1_pow_acc", "beta2_pow_acc")
_MANY = 1 << 30
"""Number of updates after which no decay rate differs from 0 to that power."""


@dataclasses.dataclass
class DirectState:
    """The state of a parameter; SGD has none."""

    moments: dict[str, Tensor]
    """By slot; shaped as `main_param`."""
    num_updates: int = 0
    """Updates so far: those with a gradient of this parameter."""


class DirectUpdate:
    """The optimizer of parameters that have no masters."""

    def __init__(self, shards: Sequence[ParameterShard], train: TrainSection):
        """
        Args:
            shards: of these parameters.
            train: section of the recipe.
        """
        self._train = train
        self.states: dict[str, DirectState] = {}
        slots = () if train.optimizer == "sgd" else MOMENTS
        for shard in shards:
            moments = {slot: paddle.zeros(shard.main_param.shape, moment_dtype(train)) for slot in slots}
            self.states[shard.name] = DirectState(moments)

    @paddle.no_grad()
    def update(self, shard: ParameterShard, gradient: Tensor, rate: float) -> None:
        """Update a parameter.

        Args:
            shard: of the parameter.
            gradient: of the shard, bfloat16.
            rate: learning rate, of parameters without a factor of their own.
        """
        state = self.states[shard.name]
        state.num_updates += 1
        rate *= shard.main_param.optimize_attr["learning_rate"]
        if self._train.optimizer == "sgd":
            self._descend(shard, gradient.contiguous(), rate)
        elif self._train.optimizer == "adamw_8bit":
            self._adamw_8bit(shard, state, gradient.contiguous(), rate)
        else:
            self._adamw(shard, state, gradient.contiguous(), rate)

    def _descend(self, shard: ParameterShard, gradient: Tensor, rate: float) -> None:
        for values, new in _chunks([shard.main_param.detach(), gradient]):
            changed = values.astype("float32") - new.astype("float32") * rate
            paddle.assign(changed.astype(values.dtype), values)

    def _adamw(self, shard: ParameterShard, state: DirectState, gradient: Tensor, rate: float) -> None:
        """The update of PyTorch's kernel: operations with a decay rate or epsilon are in float64 there, the others in
        float32. It matters for ties: 0.9 times a bfloat16 number is often in the middle of two."""
        train = self._train
        correction1 = np.float32(1 - train.adam_beta1**state.num_updates)
        root = np.float32(math.sqrt(1 - train.adam_beta2**state.num_updates))
        step = float(np.float32(rate / float(correction1)))
        decay = self._decay(shard, rate)
        for values, new, moment1, moment2 in self._chunks(shard, state, gradient):
            value = values.astype("float32")
            if decay:
                value = (value.astype("float64") * (1 - decay)).astype("float32")
            g = new.astype("float64")
            m = (moment1.astype("float64") * train.adam_beta1 + g * (1 - train.adam_beta1)).astype("float32")
            v = (moment2.astype("float64") * train.adam_beta2 + g * g * (1 - train.adam_beta2)).astype("float32")
            size = ((v.sqrt() / float(root)).astype("float64") + train.adam_epsilon).astype("float32")
            value = value - m * step / size
            for target, found in ((values, value), (moment1, m), (moment2, v)):
                paddle.assign(found.astype(target.dtype), target)

    def _adamw_8bit(self, shard: ParameterShard, state: DirectState, gradient: Tensor, rate: float) -> None:
        """The update of bitsandbytes' kernel, all in float32."""
        betas = [np.float32(beta) for beta in self._betas]
        beta1, beta2 = (float(beta) for beta in betas)
        added1, added2 = (float(np.float32(1) - beta) for beta in betas)
        root = math.sqrt(1 - beta2**state.num_updates)
        step = rate * root / (1 - beta1**state.num_updates)
        epsilon = self._train.adam_epsilon * root
        decay = self._decay(shard, rate)
        for values, new, moment1, moment2 in self._chunks(shard, state, gradient):
            g = new.astype("float32")
            m = moment1 * beta1 + g * added1
            v = moment2 * beta2 + g * added2 * g
            value = (values.astype("float32") - m / (v.sqrt() + epsilon) * step).astype(values.dtype)
            if decay:
                value = (value.astype("float32") * (1 - decay)).astype(values.dtype)
            for target, found in ((values, value), (moment1, m), (moment2, v)):
                paddle.assign(found, target)

    def _decay(self, shard: ParameterShard, rate: float) -> float:
        """The part of a parameter that weight decay takes."""
        if shard.decays:
            return rate * self._train.weight_decay
        return 0.0

    def _chunks(self, shard: ParameterShard, state: DirectState, gradient: Tensor) -> Iterator[list[Tensor]]:
        """Parts of the parameter, its gradient and its moments that share their memory."""
        return _chunks([shard.main_param.detach(), gradient, *(state.moments[slot] for slot in MOMENTS)])

    def slots(self, state: DirectState) -> dict[str, Tensor]:
        """The state of a parameter by the names of its slots in a checkpoint, as Paddle's optimizers name them."""
        if not state.moments:
            return {}
        powers = {
            slot: tensor_of([beta ** (state.num_updates + 1)], "float32") for slot, beta in zip(_POWERS, self._betas)
        }
        return powers | state.moments

    def load(self, state: DirectState, slot: str, value: Tensor) -> None:
        """Load a slot: a moment, or the number of updates from the power of the larger decay rate."""
        if slot in MOMENTS:
            state.moments[slot].copy_(value.astype(state.moments[slot].dtype), False)
        elif slot == _POWERS[self._betas.index(max(self._betas))]:
            state.num_updates = _num_updates(float(array_of(value).reshape(-1)[0]), max(self._betas))

    @property
    def _betas(self) -> tuple[float, float]:
        return self._train.adam_beta1, self._train.adam_beta2


def _num_updates(power: float, beta: float) -> int:
    """The number of updates n of a power beta ** (n + 1) in float32."""
    if beta <= 0 or power < 1e-30:  # rounded to a few bits, or to 0; the correction is 1 in any case
        return _MANY
    return round(math.log(power) / math.log(beta)) - 1


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Parts of tensors of one size that share their memory, so that few values are in float32 at a time."""
    assert all(tensor.is_contiguous() for tensor in tensors), "flat views would be copies"
    flat = [tensor.flatten() for tensor in tensors]
    for first in range(0, flat[0].shape[0], UPDATE_CHUNK):
        yield [tensor[first : first + UPDATE_CHUNK] for tensor in flat]
