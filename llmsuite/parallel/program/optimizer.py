"""The optimizer inside of step programs: Paddle's, its clipping, its learning rate, and the state that programs share.

Each program has an optimizer of its own. Their common state lies in the memory of this process, under the variable
names of the programs: so a program continues where another one stopped, and checkpoints are saved from there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle._pir_ops import parameter

from llmsuite.base.typing import Tensor
from llmsuite.contract.schema.recipe import TrainSection
from llmsuite.devices.tensors import tensor_of
from llmsuite.parallel import collective
from llmsuite.parallel.base_optimizer import MASTER, BaseOptimizer, OptimizerClasses, StateTensor
from llmsuite.parallel.program.clip import LARGEST, NormClip, StepScalar, over_data
from llmsuite.parallel.program.slices import SlicedShard, over_tp, slice_dim
from llmsuite.parallel.sharding import ParameterShard


@dataclasses.dataclass(frozen=True)
class ZeroGroup:
    """The data ranks that the optimizer's state is sharded over (ZeRO): each has one of equal slices along a dim, see
    `slices`."""

    count: int
    rank: int
    """This rank's number among them."""
    group: Any = None

    def dim(self, shard: ParameterShard) -> int | None:
        """The dim that the state of a parameter is cut along; None where every rank has the full state."""
        return slice_dim(shard.local_shape, over_tp(shard.parameter), self.count)

    def shard(self, full: Tensor, dim: int | None) -> Tensor:
        """This rank's shard of values that are cut along a dim."""
        return full if dim is None else full.chunk(self.count, dim)[self.rank].contiguous()

    def gather(self, shard: Tensor, dim: int | None) -> Tensor:
        """The concatenated shards of all ranks; every rank of the group calls it."""
        if dim is None:
            return shard
        # over all data ranks, for checkpoints: files have full tensors, whatever the number of ranks
        return collective.all_gather(shard, self.group, dim)


SINGLE_RANK = ZeroGroup(1, 0)


@dataclasses.dataclass(frozen=True)
class ShardedState(StateTensor):
    """A tensor of a state that is sharded over data ranks; `value` is this rank's shard."""

    zero_group: ZeroGroup = SINGLE_RANK
    dims: Mapping[str, int | None] = dataclasses.field(default_factory=dict)

    def on_device(self) -> Tensor:
        return self.zero_group.gather(self.value, self.dims[self.shard.name])


class StateShards(dist.ShardingStage1):
    """Paddle's sharding stage 1, but only along dims that the ranks divide."""

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


class ProgramOptimizer(BaseOptimizer):
    """AdamW or SGD whose state programs update."""

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        train: TrainSection,
        total_steps: int,
        zero_group: ZeroGroup = SINGLE_RANK,
        expert_parallel: Collection[str] = (),
    ):
        """
        Args:
            shards: of every trained parameter; each rank holds them as its model does.
            train: section of the recipe.
            total_steps: steps of the run, at whose end the learning rate ends.
            zero_group: the data ranks that the state is sharded over.
            expert_parallel: names of stacks of experts where each data rank has its own, on other pipeline stages.
        """
        super().__init__(shards, train, total_steps)
        self._zero_group = zero_group
        # a shard that is itself a slice gathers its state in the same way as the parameter
        self._has_slices = any(isinstance(shard, SlicedShard) for shard in self.shards)
        self._expert_parallel = frozenset(
            [*expert_parallel, *(shard.name for shard in self.shards if shard.is_expert_parallel)]
        )
        uncut = {shard.name for shard in self.shards if self._has_slices} | self._expert_parallel
        self._cuts = {shard.name: None if shard.name in uncut else zero_group.dim(shard) for shard in self.shards}
        self._values = {
            f"{shard.name}_{slot}": self._first_value(shard, slot) for shard in self.shards for slot in self.own_slots
        }
        # Paddle checks the settings here, before anything is built
        self._of_paddle([], StepRate(self.learning_rate), None)

    def _slot_part(self, shard: ParameterShard) -> Tensor:
        return self._zero_group.shard(shard.main_param.detach(), self._cuts[shard.name])

    @property
    def values(self) -> dict[str, Tensor]:
        """Every tensor of the state except masters, by "PARAMETER_SLOT"."""
        return self._values

    def make_paddle_optimizer(
        self, parameters: Sequence[Tensor], mesh: Any, scale: float = 1.0, loss_scale: StepScalar | None = None
    ) -> tuple[Any, StepRate, NormClip]:
        """Make a Paddle optimizer for a program.

        Args:
            parameters: all parameters that the program updates, on any rank.
            mesh: [data, tp]; the state is sharded over its data ranks.
            scale: factor that gradients have when they are clipped.
            loss_scale: another factor, which the clipping divides out.

        Returns:
            The optimizer, its learning rate, and its gradient clipping.
        """
        dims = {p.name: self._state_dim(p) for p in parameters}
        rate = StepRate(self.learning_rate)
        clip = NormClip(self.max_norm, dims, scale, loss_scale, self._expert_parallel)
        made = self._of_paddle(parameters, rate, clip)
        # the state of a slice has the shape of the slice, so it needs no cut
        shares = StateShards(mesh, dims) if self._zero_group.count > 1 and not self._has_slices else None
        return dist.shard_optimizer(made, shares), rate, clip

    def _state_dim(self, parameter: Tensor) -> int | None:
        """The dim that the state of a distributed parameter is cut along over the data ranks."""
        if parameter.name in self._expert_parallel:
            return None
        over_data, *others = parameter.placements
        if self._has_slices:
            return over_data.get_dim() if over_data.is_shard() else None
        return slice_dim(parameter.shape, others, self._zero_group.count)

    def _of_paddle(self, parameters: Sequence[Tensor], rate: StepRate, clip: NormClip | None) -> Any:
        made = self._new_paddle_optimizer(list(parameters), rate, clip, _KINDS)
        made.factors = {shard.name: shard.parameter.optimize_attr["learning_rate"] for shard in self.shards}
        made.kept = self._values.get
        return made

    # the interface for checkpoints

    def _slot_values(self) -> Mapping[tuple[str, str], Tensor]:
        names = [(shard.name, slot) for shard in self.shards for slot in self.own_slots]
        return {(name, slot): self._values[f"{name}_{slot}"] for name, slot in names}

    def _state_tensor(self, shard: ParameterShard, slot: str, value: Tensor) -> StateTensor:
        if slot == MASTER:  # the parameter of the programs: replicated, or this rank's slice
            return StateTensor(shard, slot, value)
        return ShardedState(shard, slot, value, None, self._zero_group, self._cuts)

    def load_state(self, read: Callable[[StateTensor], np.ndarray]) -> None:
        """Load a state: `read` returns each tensor before it is sharded over the ZeRO group."""
        for entry in self.state():
            full = tensor_of(read(entry))
            if entry.slot == MASTER:
                entry.shard.load_master(full)
                continue
            dim = None if entry.is_scalar else self._cuts[entry.shard.name]
            entry.value.copy_(self._zero_group.shard(full, dim), False)

    def to_host(self, shard: ParameterShard) -> None:
        """Do nothing: programs do not offload their state."""


class _WithFactors:
    """Mixin of an optimizer: each parameter has its own factor of the learning rate, which `ParamAttr` sets. In
    programs of `dist.to_static` Paddle 3.3.1 silently ignores it and uses one rate for all parameters."""

    factors: Mapping[str, float]
    """Factors by the name of a parameter."""
    _learning_rate: StepRate
    """An attribute of Paddle's optimizers."""
    _own_rate: Any = None
    """A second variable for the rate in the program, for parameters of this rank with a factor. An update moves the
    rate to its mesh, but a product with it would have to be on the mesh of the first update (Paddle 3.3.1), which may
    be that of another stage."""

    def _create_param_lr(self, param_and_grad: tuple[Any, Any]) -> Any:
        """Called while a program is built, for each parameter."""
        rate = super()._create_param_lr(param_and_grad)  # type: ignore[misc]
        if self._own_rate is None and {*self.factors.values()} != {1}:
            self._own_rate = parameter(self._learning_rate._var_name, rate.dtype, rate.shape)
            self._own_rate.persistable = True
        # a parameter of another pipeline stage has no factor here; that stage updates it, so any factor does
        factor = self.factors.get(param_and_grad[0].name, 1)
        if factor == 1:
            return rate
        mesh = param_and_grad[0].process_mesh
        on_mesh = dist.shard_tensor(paddle.full([], factor, "float32"), mesh, [dist.Replicate()] * mesh.ndim)
        return on_mesh * self._own_rate


class _WithState:
    """Mixin of an optimizer: its state exists before a program is built. Otherwise Paddle 3.3.1 would allocate another
    state, and for a moment a process would hold two."""

    kept: Callable[[str], Tensor | None]
    """The state by "PARAMETER_SLOT"; None for parameters that another rank updates. It is a function because Paddle
    copies an optimizer with all tensors that are its attributes."""
    _opti_name_list: list[str]
    """An attribute of Paddle's optimizers: names of variables, in the order in which they were made."""

    def _add_accumulator(self, name: str, param: Any, *arguments: Any, **options: Any) -> Any:
        """Called while a program is built, for each slot of each parameter."""
        made = super()._add_accumulator(name, param, *arguments, **options)  # type: ignore[misc]
        value = self.kept(f"{param.name}_{name}")
        if value is not None:
            variable = paddle.static.global_scope().var(self._opti_name_list[-1])
            variable.get_tensor()._share_data_with(value.get_tensor())
        return made


class _AdamW(_WithFactors, _WithState, paddle.optimizer.AdamW):
    """Paddle's AdamW with these mixins. A step that is not accepted does not change parameters and state."""

    _grad_clip: NormClip

    def _append_optimize_op(self, block: Any, param_and_grad: tuple[Any, Any]) -> Any:
        parameter, gradient = param_and_grad
        self._set_auxiliary_var("found_inf", self._grad_clip.rejected(gradient))
        return super()._append_optimize_op(block, (parameter, self._grad_clip.clipped(gradient)))


class _SGD(_WithFactors, paddle.optimizer.SGD):
    """Paddle's SGD with factors. It has no input to skip an update: the gradients of a step that is not accepted become
    0."""

    _grad_clip: NormClip

    def _append_optimize_op(self, block: Any, param_and_grad: tuple[Any, Any]) -> Any:
        parameter, gradient = param_and_grad
        # fmin and fmax return the other argument for a NaN: so NaN becomes the bound, which is 0
        bound = self._grad_clip.accepted(gradient).astype("float32") * LARGEST
        within = paddle.fmin(paddle.fmax(self._grad_clip.clipped(gradient), -bound), bound)
        return super()._append_optimize_op(block, (parameter, within))


_KINDS = OptimizerClasses(_AdamW, _SGD)


class StepRate(paddle.optimizer.lr.LRScheduler):
    """The learning rate as a function of the step. It is a scheduler, because a program does not see a number that is
    set later (Paddle 3.3.1)."""

    def __init__(self, at: Callable[[int], float]):
        """`at` returns the rate of a step, counted from 1."""
        self._at = at
        super().__init__()

    def get_lr(self) -> float:
        return self._at(max(self.last_epoch, 1))

    def begin(self, step: int) -> None:
        """Set the step of the next run of the program."""
        self.step(step)
