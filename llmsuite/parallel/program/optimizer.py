"""The optimizer inside of whole-step programs: Paddle's, its clipping, its learning rate, and the state they share.

Each program has an optimizer of its own. What they have in common lies in the memory of this process under the names
that programs know it by: so a program takes over where another one stopped, and a checkpoint is read from there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import paddle

from llmsuite.parallel.learning_rate import LearningRate
from llmsuite.parallel.optimizer import StateTensor, paddle_optimizer
from llmsuite.parallel.partition import FIRST_VALUES, OPTIMIZER_SLOTS
from llmsuite.parallel.sharding import ParameterShard
from llmsuite.schema.recipe import TrainSection
from llmsuite.typing import Tensor

_numbers = itertools.count()


class ProgramOptimizer:
    """AdamW or SGD with its state, as programs update it; the interface of `parallel.optimizer.Optimizer` to all that
    saves and restores."""

    def __init__(self, shards: Sequence[ParameterShard], train: TrainSection, total_steps: int):
        """
        Args:
            shards: of every trained parameter; each rank holds them as its model does.
            train: section of the recipe.
            total_steps: steps of the run; where the learning rate ends.
        """
        self.shards, self._train = list(shards), train
        self.slots = [*OPTIMIZER_SLOTS[train.optimizer]]
        self.learning_rate = LearningRate(train, total_steps).at
        self._values = {
            f"{shard.name}_{slot}": self._first_value(shard, slot) for shard in self.shards for slot in self.slots
        }
        self.of_paddle([])  # what it refuses is refused before anything is built

    def _first_value(self, shard: ParameterShard, slot: str) -> Tensor:
        first = FIRST_VALUES.get(slot)
        if first is not None:
            return paddle.full([1], first(self._train), dtype="float32")
        return paddle.zeros_like(shard.master_or_shard.detach())

    @property
    def values(self) -> dict[str, Tensor]:
        """Every tensor of the state, by "PARAMETER_SLOT"."""
        return self._values

    def of_paddle(self, parameters: Sequence[Tensor]) -> tuple[Any, StepRate, NormClip]:
        """A new optimizer of Paddle's for a program, its learning rate and what clips its gradients."""
        rate, clip = StepRate(self.learning_rate), NormClip(self._train.max_grad_norm)
        decay = {shard.name for shard in self.shards if len(shard.local_shape) > 1}
        return paddle_optimizer(self._train, list(parameters), rate, decay, clip), rate, clip

    # the interface for checkpoints

    def state(self) -> Iterator[StateTensor]:
        """As `Optimizer.state`."""
        for shard in self.shards:
            for slot in self.slots:
                yield StateTensor(shard, slot, self._values[f"{shard.name}_{slot}"])

    def load_state(self, read: Callable[[StateTensor], np.ndarray]) -> None:
        """As `Optimizer.load_state`."""
        for entry in self.state():
            entry.value.copy_(paddle.to_tensor(read(entry)), True)

    def to_host(self, shard: ParameterShard) -> None:
        """As `Optimizer.to_host`: programs keep their state where it is."""


class StepRate(paddle.optimizer.lr.LRScheduler):
    """The learning rate as a function of the step. A number that is set later does not reach a program (Paddle 3.3.1),
    what a scheduler says does."""

    def __init__(self, at: Callable[[int], float]):
        """`at` gives the rate of a step, counted from 1."""
        self._at = at
        super().__init__()

    def get_lr(self) -> float:
        return self._at(max(self.last_epoch, 1))

    def begin(self, step: int) -> None:
        """The next run of the program is this step."""
        self.step(step)


class NormClip(paddle.nn.ClipGradByGlobalNorm):
    """Clipping by the global norm, which also tells the norm; it is told where nothing is clipped, too."""

    def __init__(self, max_norm: float | None):
        super().__init__(1.0 if max_norm is None else max_norm)
        self._max_norm = max_norm
        self.variable = f"global_norm_{next(_numbers)}"
        """Name of the variable in which a step leaves the norm before clipping. Where programs have one in common, only
        the last one that was made writes it (Paddle 3.3.1), and Paddle's own numbers begin anew for each."""

    def _pir_clip(self, params_grads: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Called while a program is made, with the gradients of a step; parameters that are frozen have none."""
        squares = [gradient.square().sum() for _, gradient in params_grads if gradient is not None]
        norm = paddle.sqrt(paddle.stack(squares).sum())
        told = norm.reshape([1])
        told.persistable = True  # else it is freed before anybody can read it
        paddle._C_ops.set_persistable_value(told, self.variable)
        if self._max_norm is None:
            return params_grads
        limit = paddle.full([], self._max_norm, "float32")
        factor = limit / paddle.maximum(norm, limit)
        return [(p, gradient if gradient is None else gradient * factor) for p, gradient in params_grads]
