"""One parameter as this rank's optimizer sees it: whole, or under sharding a part of it.

Sharding cuts the flattened local value into equal parts, one a rank of the sharding axis (Rajbhandari et al. 2020,
ZeRO, arXiv 1910.02054). Stage 1 keeps the optimizer's state of the own part only. Stage 2 adds every gradient up
into the own part as soon as a backward pass has made it, and frees the rest. Stage 3 keeps of the parameter itself
no more than the own part; `gathering` brings the whole together where it is used.

Of a 16-bit parameter the optimizer updates a float32 copy, its master, and gradients are added up in float32: over
micro-batches, where they come, and over ranks.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import paddle
from paddle.base.framework import EagerParamBase
from paddle.distributed.auto_parallel.api import dtensor_from_local

from llmsuite.parallel import collective
from llmsuite.parallel.buckets import Bucket
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.partition import has_master, piece_of, reduce_in_backward
from llmsuite.parallel.tensor import local_value, reshard
from llmsuite.typing import Tensor


class ParameterShard:
    """Owns what the optimizer updates of a parameter, and carries values and gradients between it and the model."""

    def __init__(
        self,
        name: str,
        parameter: Tensor,
        mesh: Mesh,
        cut_dim: int | None,
        stage: int,
        is_tied: bool = False,
        is_frozen: bool = False,
    ):
        """
        Args:
            name: full parameter name.
            parameter: of the model; a distributed tensor under tensor parallel. In stage 3 it is empty afterwards.
            mesh: this rank's place; of a stack of experts, in the mesh of experts.
            cut_dim: dim that is cut over tp; None when every rank holds the parameter whole.
            stage: 0 to 3.
            is_tied: whether the first and the last pipeline stage both have it.
            is_frozen: whether no optimizer will get it. All that can be cut of it then is itself, in stage 3.
        """
        self.name, self.parameter, self._mesh, self._stage = name, parameter, mesh, stage
        self._is_tied = is_tied and mesh.degrees.pp > 1
        self._dim = cut_dim if mesh.degrees.tp > 1 else None
        local = local_value(parameter).detach()
        self.shape, self.local_shape = list(parameter.shape), list(local.shape)
        if mesh.expert_parts > 1:
            self.shape[0] *= mesh.expert_parts
        self._size = int(np.prod(self.local_shape, dtype="int64"))
        piece = piece_of(self._size, mesh, stage, is_frozen)
        self._parts, self._range = piece.parts, piece.range
        self.part_size = piece.size
        """Elements of a part, with padding."""

        self.has_master = has_master("float32" if parameter.dtype == paddle.float32 else "16 bit", is_frozen)
        part = local.flatten()[self._range].clone() if self._parts > 1 else local
        # Paddle's optimizers know their parameters by name, update what has a gradient, and take no distributed ones
        self.master_or_shard = _leaf(name, part.astype("float32") if self.has_master else part)

        self._sum: Tensor | None = None
        """What has been collected of the gradient: float32, of a cut one the padded part."""
        self._is_stored_in_parts = stage == 3 and self._parts > 1
        if self._is_stored_in_parts:
            self._stored = part
            self.free()
        self._reduce_in_backward = reduce_in_backward(stage, self._parts, self.has_master)
        self._adds_up_early = stage >= 2 and self._parts > 1
        self.is_last_pass = False
        """Whether the backward pass that is under way is the step's last one through this parameter."""
        self.bucket = Bucket([self])
        """Whose gradients travel together with this one."""
        if (self._reduce_in_backward or mesh.degrees.num_data_ranks > 1) and not parameter.stop_gradient:
            parameter._register_backward_hook(self._pass_ended)

    # values

    @property
    def is_empty(self) -> bool:
        """Whether the parameter is so small that this rank owns nothing of it."""
        return self._range.start == self._range.stop

    @property
    def owned_is_copy(self) -> bool:
        """Whether `owned` has memory of its own, which nothing but the update needs."""
        return not self.is_empty and (self.has_master or (self._parts > 1 and not self._is_stored_in_parts))

    @paddle.no_grad()
    def load(self, values: np.ndarray | Tensor) -> None:
        """Take over values of what lies on this rank without sharding, and begin a master from them."""
        given = paddle.to_tensor(values) if isinstance(values, np.ndarray) else values
        local = given.astype(self.parameter.dtype)
        part = local.flatten()[self._range] if self._parts > 1 else local
        if not self._is_stored_in_parts:
            local_value(self.parameter).copy_(local, True)
        elif not self.is_empty:
            self._stored.copy_(part, True)
        if (self.has_master or self._parts > 1) and not self.is_empty:
            self.master_or_shard.copy_(part.astype("float32"), True)

    @paddle.no_grad()
    def load_master(self, part: Tensor) -> None:
        """Take over the own part of a float32 master."""
        self.master_or_shard.copy_(part, True)

    @paddle.no_grad()
    def write_back(self) -> None:
        """Bring the updated values into the model's parameter; in stage 3, into the part it is gathered from."""
        part = self.master_or_shard.detach()
        if self.has_master:
            part = part.astype(self.parameter.dtype)
        if self._is_stored_in_parts:
            if self.has_master and not self.is_empty:
                self._stored.copy_(part, True)
        elif self._parts > 1:
            local_value(self.parameter).copy_(self._join(part), True)
        elif self.has_master:
            local_value(self.parameter).copy_(part, True)

    @paddle.no_grad()
    def gather(self) -> None:
        """In stage 3: bring the parameter together. Every rank of the sharding axis calls it."""
        if self._is_stored_in_parts and not self.parameter._is_initialized():
            whole = self._join(self._stored)
            if self.parameter.is_dist():
                whole = dtensor_from_local(whole, self._mesh.tensor, self.parameter.placements)
            # into the tensor that autograd has saved references to, so that a backward pass finds it filled again
            self.parameter.get_tensor()._share_data_with(whole.get_tensor())

    def free(self) -> None:
        """In stage 3: give the memory of the gathered parameter back."""
        if self._is_stored_in_parts:
            self.parameter.get_tensor()._clear()

    def gather_parameter(self) -> Tensor:
        """The whole parameter. Every rank of the run calls it."""
        return self._whole(self._join(self._stored) if self._is_stored_in_parts else local_value(self.parameter))

    def gather_part(self, part: Tensor) -> Tensor:
        """The whole of a tensor that is cut as what this rank owns. Every rank of the run calls it."""
        return self._whole(self._join(part) if self._parts > 1 else part)

    def own_part(self, local: np.ndarray) -> np.ndarray:
        """What this rank owns of a tensor that is cut over tp already."""
        return local.reshape(-1)[self._range] if self._parts > 1 else local

    # gradients

    @property
    def copies(self) -> int:
        """How many ranks of the run hold the same part of a finished gradient."""
        degrees = self._mesh.degrees
        copies = degrees.num_data_ranks // self._parts * (1 if self._dim is not None else degrees.tp)
        return 2 * copies if self._is_tied else copies

    def finish_gradient(self) -> Tensor | None:
        """The gradient of the own part, added up over all data ranks; None when there is none.

        Nothing may be changed in its memory once it was handed on to `set_gradient`.
        """
        own = self.bucket.finish(self)
        if own is None:
            return None
        if self._adds_up_early:
            own = own[: self._range.stop - self._range.start]
        elif self._parts > 1:
            own = own.flatten()[self._range]
        if self._is_tied:
            collective.sum_in_group(own, self._mesh.tied_group)
        if self.is_empty:
            self.drop_gradient()
            return None
        return own

    def set_gradient(self, gradient: Tensor) -> None:
        """Hand a finished gradient to the optimizer, with its memory."""
        self.master_or_shard._set_grad_ivar(paddle.zeros([1], gradient.dtype))  # it would copy the gradient
        self.master_or_shard.grad.get_tensor()._share_data_with(gradient.get_tensor())
        self.drop_gradient()

    def drop_gradient(self) -> None:
        """Free the gradient of the model's parameter."""
        self.parameter.clear_gradient(False)  # by keyword it is set to zero nevertheless (Paddle 3.3.1)

    @paddle.no_grad()
    def _pass_ended(self) -> None:
        """Called when a backward pass has made the parameter's gradient: nothing in this pass needs either any more.

        On all ranks of a group backward passes run through the same operations, so they come here in the same order.
        """
        # entering the context costs more than all else that is done here of a small parameter
        with paddle.amp.auto_cast(enable=False) if paddle.is_autocast_enabled() else contextlib.nullcontext():
            if self._reduce_in_backward:
                self._collect()
            if self.is_last_pass and not self._adds_up_early:  # what was cut has little left to be sent
                self.bucket.add(self, self.take_gradient())

    def _collect(self) -> None:
        own = self._local_gradient()
        if own is None:
            return
        if self._adds_up_early:
            own = own.flatten()  # of a distributed one, what is not flattened would be emptied too
        self.drop_gradient()
        self.free()
        if self._adds_up_early:
            self.bucket.scatter(self, own)
        else:
            self.add_part(own)

    # what a bucket asks for

    @property
    def is_sent(self) -> bool:
        """Whether there is a gradient, and other ranks to add it up with."""
        return not self.parameter.stop_gradient and self._mesh.degrees.num_data_ranks > 1

    @property
    def sum_bytes(self) -> int:
        """Of the gradient as it is added up, in float32."""
        return 4 * (self._parts * self.part_size if self._adds_up_early else self._size)

    @property
    def scatter_group(self) -> Any:
        """Ranks that a gradient is cut over as a pass has made it."""
        return self._mesh.sharding_group

    @property
    def sum_group(self) -> Any:
        """Ranks that it is added up over once a step; None when there is one."""
        return self._mesh.dp_group if self._adds_up_early else self._mesh.data_group

    def in_parts(self, gradient: Tensor) -> Tensor:
        """A flat gradient with the piece of each rank of the sharding axis in a row."""
        return self._padded(gradient, self._parts).reshape([self._parts, self.part_size])

    def add_part(self, own: Tensor) -> None:
        """Take what a pass has made of the gradient, of a cut one the own part."""
        if self._sum is None:
            self._sum = own
        else:
            self._sum.add_(own)

    def take_gradient(self) -> Tensor | None:
        """What this rank has collected, or what its backward passes have left."""
        if self._reduce_in_backward:
            own, self._sum = self._sum, None
            return own
        return self._local_gradient()

    def _local_gradient(self) -> Tensor | None:
        """The parameter's gradient on this rank, a 16-bit one as float32, added up over tp."""
        gradient = self.parameter.grad
        if gradient is None or not gradient._is_initialized():  # a distributed one is emptied, not taken away
            return None
        local = local_value(gradient)
        if self.has_master:
            local = local.astype("float32")
        if gradient.is_dist() and gradient.placements != self.parameter.placements:
            # under sequence parallel each rank has seen its part of the sequence only
            mesh, placements = self._mesh.tensor, self.parameter.placements
            local = local_value(reshard(dtensor_from_local(local, mesh, gradient.placements), self._mesh, placements))
            self.drop_gradient()  # the sum has memory of its own
        return local

    # parts

    def _join(self, part: Tensor) -> Tensor:
        """The parts of all ranks of the sharding axis, as what lies here without sharding."""
        flat = collective.all_gather(self._padded(part), self._mesh.sharding_group)
        return (flat if flat.shape[0] == self._size else flat[: self._size]).reshape(self.local_shape)

    def _padded(self, flat: Tensor, num_parts: int = 1) -> Tensor:
        """With zeros behind, so that the parts of all ranks have one size."""
        missing = num_parts * self.part_size - flat.shape[0]
        return paddle.concat([flat, paddle.zeros([missing], flat.dtype)]) if missing else flat

    def _whole(self, local: Tensor) -> Tensor:
        if self._dim is not None:
            local = collective.all_gather(local, self._mesh.tensor_group, self._dim)
        return collective.all_gather(local, self._mesh.expert_group)


def _leaf(name: str, value: Tensor) -> EagerParamBase:
    """A leaf with the memory of a tensor, for an optimizer to update."""
    result = EagerParamBase(shape=value.shape, dtype=value.dtype, name=name, trainable=True)
    result.get_tensor()._share_data_with(value.get_tensor())
    return result
