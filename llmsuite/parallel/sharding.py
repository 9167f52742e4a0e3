"""One parameter as this rank's optimizer sees it: the full parameter, or under sharding a shard of it.

Sharding splits the flattened local value into equal shards, one for each rank of the sharding axis (Rajbhandari et al.
2020, ZeRO, arXiv 1910.02054). In stage 1 a rank keeps the optimizer's state of its own shard only. In stage 2 every
gradient is reduced into the own shard as soon as a backward pass has made it, and the rest is freed. In stage 3 a rank
keeps only its own shard of the parameter itself; `zero3` gathers it where it is used.

For a 16-bit parameter the optimizer updates a float32 copy, its master, and gradients are accumulated in float32: over
micro-batches and over ranks. With `train.master_weights: false` there are no such copies, and gradients are accumulated
in the 16 bits of the parameter, as in PyTorch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle.base.framework import EagerParamBase
from paddle.distributed.auto_parallel.api import dtensor_from_local

from llmsuite.adapters.prefix_shapes import is_shared_by_all_ranks
from llmsuite.base.typing import Tensor
from llmsuite.devices.optimizer_ops import add_gradient
from llmsuite.devices.tensors import tensor_of
from llmsuite.parallel import collective
from llmsuite.parallel.buckets import Bucket
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.partition import SCATTER, Partition, has_master, shard_range, sharding_stage_of
from llmsuite.parallel.tensor import local_value, reshard
from llmsuite.parallel.tied import dense_gradient


@dataclasses.dataclass(frozen=True)
class ShardOptions:
    """Use of a parameter in a run."""

    is_tied: bool = False
    """True where the first and the last pipeline stage both have it."""
    is_frozen: bool = False
    """True where no optimizer gets it. Only stage 3 shards such a parameter."""
    keeps_master: bool = True
    """`train.master_weights`: true where the optimizer updates a float32 copy of a 16-bit parameter."""
    shared_as: str = ""
    """Name that all copies of one parameter have: each of them is updated by the sum of their gradients. Copies have
    the same shape, and lie on the same ranks. Empty for a parameter without copies."""


TRAINED = ShardOptions()


class ParameterShard:
    """The shard of a parameter that the optimizer updates; moves values and gradients between it and the model."""

    def __init__(
        self,
        name: str,
        parameter: Tensor,
        mesh: Mesh,
        tp_dim: int | None,
        stage: int,
        options: ShardOptions = TRAINED,
    ):
        """
        Args:
            name: full parameter name.
            parameter: the model's; a distributed tensor under tensor parallel. In stage 3 it is empty afterwards.
            mesh: with this rank's coordinates; for a stack of experts, the expert mesh.
            tp_dim: dim that is split over tp; None when every rank holds the full parameter.
            stage: sharding stage, 0 to 3.
            options: use of the parameter.
        """
        self.name = name
        self.shared_as = options.shared_as
        self.parameter = parameter
        self._mesh = mesh
        stage = sharding_stage_of(name, stage)
        self._tp_dim = tp_dim if mesh.degrees.tp > 1 else None
        local = self._local().detach()
        self.shape = list(parameter.shape)
        self.local_shape = list(local.shape)
        self.is_expert_parallel = mesh.ep_size > 1
        """True for a stack of experts where other data ranks have other experts."""
        if self.is_expert_parallel:
            self.shape[0] *= mesh.ep_size
        size = int(np.prod(self.local_shape, dtype="int64"))
        own = shard_range(size, mesh, stage, options.is_frozen)
        self._range = own.range
        dtype = "float32" if parameter.dtype == paddle.float32 else "16 bit"
        master = has_master(dtype, options.is_frozen, options.keeps_master)
        self.partition = Partition(
            size=size,
            stage=stage,
            num_shards=own.num_shards,
            shard_size=own.size,
            num_owned=own.num_owned,
            has_master=master,
            is_tied=options.is_tied and mesh.degrees.pp > 1,
            is_shared=is_shared_by_all_ranks(name),
        )
        """The part of the parameter that this rank has."""

        shard = local
        if own.num_shards > 1:
            shard = self._own_part(local).clone()
        # Paddle's optimizers know their parameters by name, update what has a gradient, and take no distributed ones
        self.main_param = _leaf(name, shard.astype("float32") if self.has_master else shard)
        self.main_param.optimize_attr = dict(parameter.optimize_attr)  # a learning rate of its own, as of LoRA+

        self._sum: Tensor | None = None
        """The gradient accumulated so far, in the dtype of `main_param`; where every pass reduces it, the padded shard
        of this rank."""
        self._is_held = False
        self._arriving: Callable[[], Tensor] | None = None
        """In stage 3: waits for the parameter that is being gathered, and returns its full local value."""
        if self.partition.is_stored_sharded:
            self._stored = shard
            self.free()
        self.is_last_pass = False
        """True while the running backward pass is the step's last one through this parameter."""
        self.bucket = Bucket([self])
        """The parameters whose gradients are reduced in one call with this one's."""
        if (self.partition.reduce_in_backward or mesh.degrees.num_data_ranks > 1) and not parameter.stop_gradient:
            parameter._register_backward_hook(self._pass_ended)

    @property
    def has_master(self) -> bool:
        """True where the optimizer updates a float32 copy."""
        return self.partition.has_master

    # values

    def _local(self) -> Tensor:
        """This rank's shard of the model's parameter before sharding; shares its memory."""
        return local_value(self.parameter)

    @property
    def range(self) -> slice:
        """The range of the flattened local value that this rank owns."""
        return self._range

    @property
    def offsets(self) -> tuple[int, ...]:
        """Index of the first element of the local value in the full parameter, for each dim."""
        mesh = self._mesh
        found = [0] * len(self.local_shape)
        number = mesh.coordinate["tp"] if self._tp_dim is not None else 0
        if self.is_expert_parallel:  # as `partition.local_slice`
            number += mesh.coordinate["ep"] * (mesh.degrees.tp if self._tp_dim is not None else 1)
        dim = self._tp_dim or 0
        found[dim] = number * self.local_shape[dim]
        return tuple(found)

    @property
    def is_empty(self) -> bool:
        """True where this rank owns no element of the parameter, because the parameter is small."""
        return self._range.start == self._range.stop

    @property
    def shard_is_copy(self) -> bool:
        """True where `main_param` has memory of its own, which only the update needs."""
        return not self.is_empty and self.partition.has_own_copy

    @paddle.no_grad()
    def load(self, values: np.ndarray | Tensor) -> None:
        """Load the values that this rank holds before sharding, also into the master."""
        given = tensor_of(values) if isinstance(values, np.ndarray) else values
        local = given.astype(self.parameter.dtype)
        shard = self._own_part(local)
        if not self.partition.is_stored_sharded:
            self._local().copy_(local, False)
        elif not self.is_empty:
            self._stored.copy_(shard, False)
        if (self.has_master or self.partition.num_shards > 1) and not self.is_empty:
            self.main_param.copy_(shard.astype(self.main_param.dtype), False)

    @paddle.no_grad()
    def load_master(self, shard: Tensor) -> None:
        """Load this rank's shard of a float32 master."""
        self.main_param.copy_(shard, False)

    @paddle.no_grad()
    def write_back(self) -> None:
        """Copy the updated values into the model's parameter; in stage 3, into the shard it is gathered from."""
        assert self._arriving is None, f"{self.name}: its old values are still being gathered"
        shard = self.main_param.detach()
        if self.has_master:
            shard = shard.astype(self.parameter.dtype)
        if self.partition.is_stored_sharded:
            if self.has_master and not self.is_empty:
                self._stored.copy_(shard, False)
        elif self.partition.gathers_update:
            self._local().copy_(self._gather_shards(shard), False)
        elif self.has_master:
            self._local().copy_(shard, False)

    def start_gather(self) -> None:
        """In stage 3: start to gather the parameter, unless it is gathered. Every rank of the sharding axis calls it,
        and calls `gather` later."""
        if self.partition.is_stored_sharded and self._arriving is None and not self.parameter._is_initialized():
            with paddle.no_grad():  # as a decorator Paddle 3.3.1 keeps the mode before in one place for all threads
                self._arriving = self._start_gathering(self._stored)

    def gather(self) -> None:
        """In stage 3: gather the parameter, unless it is gathered. Every rank of the sharding axis calls it."""
        self.start_gather()
        if self._arriving is None:
            return
        with paddle.no_grad():
            full = self._arriving()
            self._arriving = None
            if self.parameter.is_dist():
                full = dtensor_from_local(full, self._mesh.tensor, self.parameter.placements)
            # into the tensor that autograd has saved references to, so that a backward pass finds it filled again
            self.parameter.get_tensor()._share_data_with(full.get_tensor())

    def free(self) -> None:
        """In stage 3: free the gathered parameter."""
        if self._arriving is not None:  # its memory is being written: nobody else may get it before that is over
            self.gather()
        if self.partition.is_stored_sharded and not self._is_held:
            self.parameter.get_tensor()._clear()

    def keep_gathered(self) -> None:
        """Gather the parameter as `gather` does, and keep it: `free` does nothing until `release`."""
        self.gather()
        self._is_held = True

    def release(self) -> None:
        """Free a parameter that was kept gathered."""
        self._is_held = False
        self.free()

    @paddle.no_grad()
    def copy_of_stored(self) -> Tensor:
        """Copy of this rank's part of the parameter between passes."""
        return self._held().clone()

    @paddle.no_grad()
    def stored_form(self, values: np.ndarray) -> Tensor:
        """This rank's part of a parameter between passes, from the values it would hold before sharding."""
        if self.partition.is_stored_sharded and self.is_empty:
            return self._stored.clone()
        local = tensor_of(values).astype(self.parameter.dtype)
        return self._own_part(local).clone() if self.partition.is_stored_sharded else local

    @paddle.no_grad()
    def swap_stored(self, other: Tensor) -> None:
        """Exchange this rank's part of the parameter between passes with another value, in place."""
        held = self._held()
        before = held.clone()
        held.copy_(other, False)
        other.copy_(before, False)

    def _held(self) -> Tensor:
        if self.partition.is_stored_sharded:
            return self._stored
        return self._local().detach()

    def gather_parameter(self) -> Tensor:
        """The full parameter. Every rank of the run calls it."""
        if self.partition.is_stored_sharded:
            return self._gather_full(self._gather_shards(self._stored))
        return self._gather_full(self._local())

    def gather_shard(self, shard: Tensor) -> Tensor:
        """The full tensor of one that is sharded like `main_param`. Every rank of the run calls it."""
        if self.partition.num_shards > 1:
            shard = self._gather_shards(shard)
        return self._gather_full(shard)

    def gather_number(self, number: Tensor) -> Tensor:
        """A number [1] that the optimizer keeps of the parameter. Every rank of the run calls it."""
        return number

    def own_shard(self, local: np.ndarray) -> np.ndarray:
        """This rank's shard of a tensor that is already split over tp."""
        if self.partition.num_shards > 1:
            return local.reshape(-1)[self._range]
        return local

    @property
    def decays(self) -> bool:
        """True where weight decay takes a part of the parameter: of matrices, not of vectors such as gains of norms and
        biases, of which those of experts are a stack."""
        return len(self.local_shape) > 1 and not self.name.endswith(".bias")

    # gradients

    @property
    def replica_count(self) -> int:
        """Number of ranks of the run that hold the same shard of a finished gradient."""
        degrees = self._mesh.degrees
        count = degrees.num_data_ranks // self.partition.num_shards
        if self._tp_dim is None:
            count *= degrees.tp
        if self.partition.is_tied:
            return 2 * count
        if self.partition.is_shared:
            return degrees.pp * count
        return count

    def finish_gradient(self) -> Tensor | None:
        """The gradient of this rank's shard, reduced over all data ranks; None when there is none. It may be that of
        the model's parameter, which `drop_gradient` frees."""
        own = self.bucket.finish(self)
        if own is None:
            return None
        if self.partition.reduces_each_pass:
            own = own[: self._range.stop - self._range.start]
        elif self.partition.num_shards > 1:
            own = own.flatten()[self._range]
        for kind in self.partition.model_sums:
            collective.sum_in_group(own, self._mesh.group(kind))
        if self.is_empty:
            self.drop_gradient()
            return None
        return own

    def drop_gradient(self) -> None:
        """Free the gradient of the model's parameter."""
        # False by position: by keyword Paddle 3.3.1 ignores it, and zeroes the gradient
        self.parameter.clear_gradient(False)

    @paddle.no_grad()
    def _pass_ended(self) -> None:
        """Called when a backward pass has made the parameter's gradient and needs neither of them any more.

        Backward passes run the same operations on all ranks of a group, so the calls come in the same order there.
        """
        if self.partition.reduce_in_backward:
            self._collect()
        if self.partition.is_shared:  # other layers or chunks may add to it
            return
        if self.is_last_pass and not self.partition.reduces_each_pass:  # else only the sum over dp is left
            self.bucket.add(self, self.take_gradient())

    def _collect(self) -> None:
        own = self._local_gradient()
        if own is None:
            return
        if not self.partition.reduces_each_pass:
            self.add_shard(own)
            self.drop_gradient()  # after it was added, as it may have the memory of `own`
            self.free()
            return
        own = self._widened(own).flatten()  # else clearing a distributed gradient would empty it too
        self.drop_gradient()
        self.free()
        self.bucket.scatter(self, own)

    # the interface for its bucket, see `buckets.BucketMember`

    @property
    def is_sent(self) -> bool:
        """True where there is a gradient, and other data ranks to reduce it with."""
        return not self.parameter.stop_gradient and self._mesh.degrees.num_data_ranks > 1

    @property
    def shard_size(self) -> int:
        """Elements of a shard, with padding."""
        return self.partition.shard_size

    @property
    def sum_size(self) -> int:
        """Elements of the gradient when it is reduced, with the padding of its shards."""
        return self.partition.sum_size

    @property
    def scatter_group(self) -> Any:
        """Ranks that every backward pass reduce-scatters the gradient over."""
        return self._mesh.group(SCATTER.group)

    @property
    def sum_group(self) -> Any:
        """Ranks that the gradient is summed over once a step; None when there is one."""
        return self._mesh.group(self.partition.reductions[-1].group)

    def as_shards(self, gradient: Tensor) -> Tensor:
        """A flat gradient as [shards, shard size], one row for each rank of the sharding axis."""
        return self._padded(gradient, self.partition.num_shards).reshape([self.partition.num_shards, self.shard_size])

    def add_shard(self, own: Tensor) -> None:
        """Accumulate the gradient of one backward pass, or this rank's shard of it, in the dtype of `main_param`."""
        if self._sum is None:
            self._sum = self._widened(own)
        else:
            add_gradient(self._sum, own)

    def take_gradient(self) -> Tensor | None:
        """The gradient this rank has accumulated, here or in the parameter itself."""
        if self.partition.reduce_in_backward:
            own = self._sum
            self._sum = None
            return own
        return self._local_gradient()

    def _local_gradient(self) -> Tensor | None:
        """The parameter's gradient on this rank, summed over tp; in float32, where there is a master and other ranks
        have a part of it."""
        gradient = self.parameter.grad
        if gradient is None or not gradient._is_initialized():  # a cleared distributed gradient is empty, not None
            return None
        local = dense_gradient(local_value(gradient), self.parameter)
        if gradient.is_dist() and gradient.placements != self.parameter.placements:
            # partial: under sequence parallel each rank has the gradient from its part of the sequence only
            mesh = self._mesh.tensor
            placements = self.parameter.placements
            part = dtensor_from_local(self._widened(local), mesh, gradient.placements)
            local = local_value(reshard(part, self._mesh, placements))
            self.drop_gradient()  # the sum has memory of its own
        return local

    def _widened(self, gradient: Tensor) -> Tensor:
        """A gradient in the dtype that gradients are accumulated in."""
        if self.has_master and gradient.dtype != paddle.float32:
            return gradient.astype("float32")
        return gradient

    # shards

    def _own_part(self, local: Tensor) -> Tensor:
        """This rank's shard of a local value."""
        if self.partition.num_shards > 1:
            return local.flatten()[self._range]
        return local

    def _gather_shards(self, shard: Tensor) -> Tensor:
        """The local value, gathered from the shards of all ranks of the sharding axis."""
        return self._start_gathering(shard)()

    def _start_gathering(self, shard: Tensor) -> Callable[[], Tensor]:
        """Start to gather the shards of all ranks of the sharding axis. Returns a function that waits for them and
        returns the local value."""
        # over the sharding axis, in whose order the flattened value is cut; padded, as all parts must have one size
        wait = collective.start_all_gather(self._padded(shard), self._mesh.sharding_group)

        def gathered() -> Tensor:
            flat = wait()
            if flat.shape[0] != self.partition.size:
                flat = flat[: self.partition.size]
            return flat.reshape(self.local_shape)

        return gathered

    def _padded(self, flat: Tensor, num_shards: int = 1) -> Tensor:
        """With zeros at the end, so that the shards of all ranks have one size."""
        missing = num_shards * self.shard_size - flat.shape[0]
        if missing:
            return paddle.concat([flat, paddle.zeros([missing], flat.dtype)])
        return flat

    def _gather_full(self, local: Tensor) -> Tensor:
        # tp before ep, the reverse of the split: the experts of a rank of ep are split over its tp group
        if self._tp_dim is not None:
            local = collective.all_gather(local, self._mesh.tensor_group, self._tp_dim)
        return collective.all_gather(local, self._mesh.expert_group)


def _leaf(name: str, value: Tensor) -> EagerParamBase:
    """A leaf with the memory of a tensor, for an optimizer to update."""
    result = EagerParamBase(shape=value.shape, dtype=value.dtype, name=name, trainable=True)
    result.get_tensor()._share_data_with(value.get_tensor())
    return result
