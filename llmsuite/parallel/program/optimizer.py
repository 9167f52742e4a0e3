"""The optimizer inside of whole-step programs: Paddle's, its clipping, its learning rate, and the state they share.

Each program has an optimizer of its own. What they have in common lies in the memory of this process under the names
that programs know it by: so a program takes over where another one stopped, and a checkpoint is read from there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle._pir_ops import parameter

from llmsuite.parallel import collective
from llmsuite.parallel.learning_rate import LearningRate
from llmsuite.parallel.optimizer import PaddleKinds, StateTensor, paddle_optimizer
from llmsuite.parallel.partition import FIRST_VALUES, OPTIMIZER_SLOTS
from llmsuite.parallel.program.clip import LARGEST, NormClip, StepNumber, over_data
from llmsuite.parallel.program.slices import SlicedShard, over_tp, slice_dim
from llmsuite.parallel.sharding import ParameterShard
from llmsuite.schema.recipe import TrainSection
from llmsuite.typing import Tensor


@dataclasses.dataclass(frozen=True)
class Owners:
    """The data ranks that have a part of the optimizer's state each: one of equal slices along a dim, see `slices`."""

    count: int
    rank: int
    """This one among them."""
    group: Any = None

    def dim(self, shard: ParameterShard) -> int | None:
        """The dim that the state of a parameter is cut along; None where every rank has the whole."""
        return slice_dim(shard.local_shape, over_tp(shard.parameter), self.count)

    def part(self, whole: Tensor, dim: int | None) -> Tensor:
        """This rank's part of values that are cut along a dim."""
        return whole if dim is None else whole.chunk(self.count, dim)[self.rank].contiguous()

    def whole(self, part: Tensor, dim: int | None) -> Tensor:
        """The parts of all ranks, joined; every one of them calls it."""
        return part if dim is None else collective.all_gather(part, self.group, dim)


ONE_OWNER = Owners(1, 0)


@dataclasses.dataclass(frozen=True)
class OwnedState(StateTensor):
    """A tensor of a state that data ranks share; `value` is this rank's part."""

    owners: Owners = ONE_OWNER
    dims: Mapping[str, int | None] = dataclasses.field(default_factory=dict)

    def on_device(self) -> Tensor:
        return self.owners.whole(self.value, self.dims[self.shard.name])


class StateShards(dist.ShardingStage1):
    """Sharding stage 1 as Paddle's, but for dims that can be divided only."""

    def __init__(self, mesh: Any, dims: Mapping[str, int | None]):
        """`dims` by the name of a parameter, along which its state is cut over the first axis of the mesh."""
        super().__init__(mesh.dim_names[0], mesh)
        self._dims = dims

    def __call__(self, key: str, parameter: Any, tensor: Any) -> Any:
        if key == "grad":
            return tensor
        placements = [dist.Replicate() for _ in parameter.placements]
        if "beta" not in key:
            placements = over_data(parameter.placements, self._dims[parameter.name])
        return self._apply_placement(tensor, parameter, placements)


class ProgramOptimizer:
    """AdamW or SGD with its state, as programs update it; the interface of `parallel.optimizer.Optimizer` to all that
    saves and restores."""

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        train: TrainSection,
        total_steps: int,
        owners: Owners = ONE_OWNER,
        shared_out: Collection[str] = (),
    ):
        """
        Args:
            shards: of every trained parameter; each rank holds them as its model does.
            train: section of the recipe.
            total_steps: steps of the run; where the learning rate ends.
            owners: the data ranks that share the state.
            shared_out: names of stacks of experts of which each data rank has its own, on other pipeline stages.
        """
        self.shards, self._train, self._owners = list(shards), train, owners
        self._max_norm = train.max_grad_norm
        self.own_slots = [*OPTIMIZER_SLOTS[train.optimizer]]
        """What an optimizer of Paddle's keeps of a parameter."""
        has_master = any(shard.has_master for shard in self.shards)
        self.slots = [*self.own_slots, *(["master"] if has_master else [])]
        # a shard that is a slice itself brings its state together as it does the parameter
        self._has_slices = any(isinstance(shard, SlicedShard) for shard in self.shards)
        self._shared_out = frozenset([*shared_out, *(shard.name for shard in self.shards if shard.is_shared_out)])
        whole = {shard.name for shard in self.shards if self._has_slices} | self._shared_out
        self._cuts = {shard.name: None if shard.name in whole else owners.dim(shard) for shard in self.shards}
        self.learning_rate = LearningRate(train, total_steps).at
        self._values = {
            f"{shard.name}_{slot}": self._first_value(shard, slot) for shard in self.shards for slot in self.own_slots
        }
        self._of_paddle([], StepRate(self.learning_rate), None)  # what it refuses is refused before anything is built

    def _first_value(self, shard: ParameterShard, slot: str) -> Tensor:
        first = FIRST_VALUES.get(slot)
        if first is not None:
            return paddle.full([1], first(self._train), dtype="float32")
        return paddle.zeros_like(self._owners.part(shard.master_or_shard.detach(), self._cuts[shard.name]))

    @property
    def values(self) -> dict[str, Tensor]:
        """Every tensor of the state but masters, by "PARAMETER_SLOT"."""
        return self._values

    def of_paddle(
        self, parameters: Sequence[Tensor], mesh: Any, scale: float = 1.0, loss_scale: StepNumber | None = None
    ) -> tuple[Any, StepRate, NormClip]:
        """A new optimizer of Paddle's for a program.

        Args:
            parameters: all that the program updates, on whatever rank.
            mesh: [data, tp], whose data ranks share the state.
            scale: factor that gradients have when they are clipped.
            loss_scale: a further one, which the clipping takes off.

        Returns:
            The optimizer, its learning rate, and what clips its gradients.
        """
        dims = {p.name: self._state_dim(p) for p in parameters}
        rate, clip = StepRate(self.learning_rate), NormClip(self._max_norm, dims, scale, loss_scale, self._shared_out)
        made = self._of_paddle(parameters, rate, clip)
        # the state of a slice is cut as it is, by itself
        shares = StateShards(mesh, dims) if self._owners.count > 1 and not self._has_slices else None
        return dist.shard_optimizer(made, shares), rate, clip

    def _state_dim(self, parameter: Tensor) -> int | None:
        """The dim that the state of a distributed parameter is cut along over the data ranks."""
        if parameter.name in self._shared_out:
            return None
        over_data, *others = parameter.placements
        if self._has_slices:
            return over_data.get_dim() if over_data.is_shard() else None
        return slice_dim(parameter.shape, others, self._owners.count)

    def _of_paddle(self, parameters: Sequence[Tensor], rate: StepRate, clip: NormClip | None) -> Any:
        decay = {shard.name for shard in self.shards if len(shard.local_shape) > 1}
        made = paddle_optimizer(self._train, list(parameters), rate, decay, clip, _KINDS)
        made.factors = {shard.name: shard.parameter.optimize_attr["learning_rate"] for shard in self.shards}
        made.kept = self._values.get
        return made

    # the interface for checkpoints

    def state(self) -> Iterator[StateTensor]:
        """As `Optimizer.state`."""
        for shard in self.shards:
            for slot in self.own_slots:
                yield OwnedState(shard, slot, self._values[f"{shard.name}_{slot}"], None, self._owners, self._cuts)
            if "master" in self.slots:  # the parameter that a program knows: whole on every rank, or its slice
                yield StateTensor(shard, "master", shard.master_or_shard.detach())

    def load_state(self, read: Callable[[StateTensor], np.ndarray]) -> None:
        """As `Optimizer.load_state`."""
        for entry in self.state():
            whole = paddle.to_tensor(read(entry))
            if entry.slot == "master":
                entry.shard.load_master(whole)
                continue
            dim = None if entry.is_scalar else self._cuts[entry.shard.name]
            entry.value.copy_(self._owners.part(whole, dim), True)

    def to_host(self, shard: ParameterShard) -> None:
        """As `Optimizer.to_host`: programs keep their state where it is."""


class _WithFactors:
    """A part of an optimizer: each parameter has its own factor of the learning rate, as `ParamAttr` gives it. In
    programs of `dist.to_static` Paddle 3.3.1 knows nothing of it, and takes the same rate for all without a word."""

    factors: Mapping[str, float]
    """By the name of a parameter."""
    _learning_rate: StepRate
    """Paddle's name for it."""
    _own_rate: Any = None
    """The rate in the program once more, for parameters of this rank that have a factor: an update takes the rate to
    its mesh, but a product with it has to be on that of the first update (Paddle 3.3.1), maybe of another stage."""

    def _create_param_lr(self, param_and_grad: tuple[Any, Any]) -> Any:
        """Called while a program is made, for each parameter."""
        rate = super()._create_param_lr(param_and_grad)  # type: ignore[misc]
        if self._own_rate is None and {*self.factors.values()} != {1}:
            self._own_rate = parameter(self._learning_rate._var_name, rate.dtype, rate.shape)
            self._own_rate.persistable = True
        factor = self.factors.get(param_and_grad[0].name, 1)  # of another pipeline stage, which updates it: any
        if factor == 1:
            return rate
        mesh = param_and_grad[0].process_mesh
        on_mesh = dist.shard_tensor(paddle.full([], factor, "float32"), mesh, [dist.Replicate()] * mesh.ndim)
        return on_mesh * self._own_rate


class _WithState:
    """A part of an optimizer: its state is there when a program is made. What is not there Paddle 3.3.1 makes, with
    this run's beside it: for a moment a process would hold twice as much."""

    kept: Callable[[str], Tensor | None]
    """The state by "PARAMETER_SLOT"; None of parameters that another rank updates. A function, for Paddle copies an
    optimizer with all tensors that it has."""
    _opti_name_list: list[str]
    """Paddle's name for the names of variables, in the order in which they were made."""

    def _add_accumulator(self, name: str, param: Any, *arguments: Any, **options: Any) -> Any:
        """Called while a program is made, for each slot of each parameter."""
        made = super()._add_accumulator(name, param, *arguments, **options)  # type: ignore[misc]
        if (value := self.kept(f"{param.name}_{name}")) is not None:
            variable = paddle.static.global_scope().var(self._opti_name_list[-1])
            variable.get_tensor()._share_data_with(value.get_tensor())
        return made


class _AdamW(_WithFactors, _WithState, paddle.optimizer.AdamW):
    """Paddle's, with these factors; of a step that is not accepted it leaves parameters and state as they are."""

    _grad_clip: NormClip

    def _append_optimize_op(self, block: Any, param_and_grad: tuple[Any, Any]) -> Any:
        parameter, gradient = param_and_grad
        self._set_auxiliary_var("found_inf", self._grad_clip.rejected(gradient))
        return super()._append_optimize_op(block, (parameter, self._grad_clip.clipped(gradient)))


class _SGD(_WithFactors, paddle.optimizer.SGD):
    """The same, though Paddle's has no such input: the gradients of a step that is not accepted become 0."""

    _grad_clip: NormClip

    def _append_optimize_op(self, block: Any, param_and_grad: tuple[Any, Any]) -> Any:
        parameter, gradient = param_and_grad
        # what is no number is not below the bound either, and gives way to it
        bound = self._grad_clip.accepted(gradient).astype("float32") * LARGEST
        within = paddle.fmin(paddle.fmax(self._grad_clip.clipped(gradient), -bound), bound)
        return super()._append_optimize_op(block, (parameter, within))


_KINDS = PaddleKinds(_AdamW, _SGD)


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
