"""Models that place their parameters themselves, with `dist.shard_tensor` and `dist.reshard`.

The code of such an auto-parallel model names the ranks that hold each tensor, on process meshes of its own: one axis of
a mesh shards rows, another one matrices, and successive meshes make a pipeline. Paddle's SPMD rules compute with that.
All ranks of the run call the model with the same samples, as one group. The engine adds what it adds to every model:
the ledger of the loss, complete gradients, their norm, the update of the shards of a rank, and full tensors to save.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import paddle
import paddle.distributed as dist

from llmsuite.base.errors import UserError
from llmsuite.base.typing import Tensor
from llmsuite.devices.tensors import array_of, tensor_of
from llmsuite.launch import calls
from llmsuite.parallel import collective
from llmsuite.parallel.auto_parallel_patches import check_ranks, checked_eager
from llmsuite.parallel.loss_ledger import LossTerms
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.pipeline import PipelineStage
from llmsuite.parallel.schedule import Action
from llmsuite.parallel.sharding import ParameterShard, ShardOptions
from llmsuite.parallel.tensor import local_value

T = TypeVar("T")
Index = tuple[slice, ...]
"""One slice for each dim."""


def held_slices(name: str, shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> dict[int, Index]:
    """Slice of a parameter that each rank of its mesh holds, by rank.

    Args:
        name: of the parameter, for messages.
        shape: of the full parameter.
        mesh: a ProcessMesh.
        placements: one for each of its axes.

    Raises:
        UserError: the parameter cannot be saved and restored as it is placed.
    """
    ranks = np.array(mesh.process_ids).reshape(mesh.shape)
    axes: dict[int, int] = {}
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            raise UserError(f"parameter {name!r} is placed as Partial; place it as Shard or Replicate")
        if not placement.is_shard():
            continue
        dim = placement.get_dim() % len(shape)
        parts = ranks.shape[axis]
        if dim in axes:
            raise UserError(f"parameter {name!r} is cut twice along dim {dim}; cut it along one axis of the mesh")
        if shape[dim] % parts:
            raise UserError(
                f"parameter {name!r} is {list(shape)}, and {parts} ranks cut it along dim {dim}, which they do not "
                "divide; choose a size that they do"
            )
        axes[dim] = axis
    found = {}
    for coordinates in np.ndindex(*ranks.shape):
        index = []
        for dim, size in enumerate(shape):
            part = size // ranks.shape[axes[dim]] if dim in axes else size
            first = coordinates[axes[dim]] * part if dim in axes else 0
            index.append(slice(first, first + part))
        found[int(ranks[coordinates])] = tuple(index)
    return found


class AutoParallelShard(ParameterShard):
    """A parameter as its model has placed it: this rank's optimizer updates the part on this rank, if there is one. A
    parameter that is not placed is replicated on every rank."""

    def __init__(self, name: str, parameter: Tensor, mesh: Mesh):
        """
        Args:
            name: full parameter name.
            parameter: the model's, with its initial values.
            mesh: of the run, with this rank's coordinates.

        Raises:
            UserError: the parameter cannot be saved as it is placed (see `held_slices`), or it is not float32.
        """
        if parameter.dtype != paddle.float32:
            raise UserError(
                f"parameter {name!r} is {parameter.dtype}; models with meshes of their own train in float32"
            )
        self._is_placed = bool(parameter.is_dist())
        full = tuple(slice(0, size) for size in parameter.shape)
        self._slices = dict.fromkeys(range(mesh.degrees.num_ranks), full)
        if self._is_placed:
            check_ranks(f"parameter {name!r} is placed", parameter.process_mesh.process_ids, mesh.degrees.num_ranks)
            self._slices = held_slices(name, parameter.shape, parameter.process_mesh, parameter.placements)
        self._own = self._slices.get(mesh.rank)
        super().__init__(name, parameter, mesh, None, 0, ShardOptions(is_frozen=bool(parameter.stop_gradient)))

    @property
    def is_held(self) -> bool:
        """True where this rank has a part of it."""
        return self._own is not None

    @property
    def part_shape(self) -> list[int]:
        """Shape of the part that a rank has."""
        return [part.stop - part.start for part in self._slices[self._first]]

    def _local(self) -> Tensor:
        return paddle.zeros([0]) if self._own is None else local_value(self.parameter)

    def own_shard(self, local: np.ndarray) -> np.ndarray:
        """This rank's part of the full tensor; without elements where it has none."""
        return np.zeros([0], "float32") if self._own is None else np.ascontiguousarray(local[self._own])

    @paddle.no_grad()
    def load(self, values: np.ndarray | Tensor) -> None:
        """Copy this rank's part of the full parameter's values into the model."""
        if self._own is not None:
            self._local().copy_(tensor_of(self.own_shard(np.asarray(values)).astype("float32")), False)

    @paddle.no_grad()
    def stored_form(self, values: np.ndarray) -> Tensor:
        """This rank's part of the full values, as a float32 tensor."""
        return tensor_of(self.own_shard(values).astype("float32"))

    def gather_parameter(self) -> Tensor:
        """The full parameter. Every rank of the run calls it."""
        return self._gather(self._local())

    def gather_shard(self, shard: Tensor) -> Tensor:
        """The full tensor of one that is placed as the parameter is. Every rank of the run calls it."""
        return self._gather(shard)

    def gather_number(self, number: Tensor) -> Tensor:
        """Number [1] of the first rank that has a part of the parameter, on every rank."""
        # gathered from all ranks, as one group: also those without a part of the parameter write the checkpoint
        return collective.all_gather(number, self._mesh.tensor_group)[self._first].reshape([1])

    @property
    def _first(self) -> int:
        return min(self._slices)

    @paddle.no_grad()
    def _gather(self, local: Tensor) -> Tensor:
        if not self._is_placed or len(self._slices) == self._mesh.degrees.num_ranks == 1:
            return local
        # an all-gather over all ranks, as the engine has one group for them; ranks without a part add zeros, as all
        # parts must have one shape
        part = paddle.zeros(self.part_shape) if self._own is None else local.detach()
        parts = array_of(collective.all_gather(part.unsqueeze(0), self._mesh.tensor_group))
        full = np.empty(self.shape, "float32")
        for rank, index in self._slices.items():
            full[index] = parts[rank]
        return tensor_of(full)

    # gradients

    @property
    def replica_count(self) -> int:
        """Number of ranks of the run that hold the same part of a finished gradient."""
        index = self._slices[self._first]
        parts = math.prod(size // (part.stop - part.start) for size, part in zip(self.shape, index) if size)
        return len(self._slices) // parts

    def _local_gradient(self) -> Tensor | None:
        """The parameter's gradient on this rank, summed over the axes of the mesh that have parts of it."""
        gradient = self.parameter.grad
        if gradient is None:
            return None
        if not gradient.is_dist():
            return gradient
        mesh = gradient.process_mesh
        placements = [dist.Replicate() for _ in gradient.placements]
        if self._is_placed:
            mesh = self.parameter.process_mesh
            placements = self.parameter.placements
        elif len(set(mesh.process_ids)) < self._mesh.degrees.num_ranks:
            raise UserError(
                f"parameter {self.name!r} is not placed, and only ranks {sorted(mesh.process_ids)} compute with it; "
                "place it on their mesh with dist.shard_tensor"
            )
        if self._own is None or not gradient._is_initialized():  # a cleared distributed gradient is empty, not None
            return None
        if gradient.placements == placements:
            return local_value(gradient)
        # partial sums over axes of the parameter's own mesh: an all-reduce or reduce-scatter, as the placements require
        with calls.recorded("reshard", gradient, mesh, mesh.process_ids):
            local = local_value(dist.reshard(gradient, mesh, placements))
        self.drop_gradient()  # the sum has memory of its own
        return local


class AutoParallelModel(PipelineStage):
    """A model with meshes of its own, called like other models. A stage's loss can also call its other methods, such as
    `hidden_states` and `token_nll`."""

    def __init__(self, model: Any, mesh: Mesh):
        """`mesh` is that of the run, with this rank's coordinates."""
        super().__init__([model], mesh, 0, [], None)
        self._totals: dict[int, Tensor] = {}
        """Losses that wait for their backward pass, by micro-batch."""

    def __getattr__(self, name: str) -> Any:
        if name == "chunks":  # not set yet: `model` reads it, so this would not end
            raise AttributeError(name)
        return getattr(self.model, name)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The forward pass of the model."""
        return self.model(*inputs, **named)

    def hidden_states(self, input_ids: Tensor, document_starts: Tensor | None = None) -> tuple[Tensor, list[Any]]:
        """Hidden states [B, L, D] of the model's own method, and no caches."""
        self.recorder.see_tokens(input_ids, document_starts)
        starts = {} if document_starts is None else {"document_starts": document_starts}
        hidden, _ = self.model.hidden_states(input_ids, **starts)
        return hidden, []

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the model's own method."""
        return self.model.logits(hidden)

    def scores(self, hidden: Tensor) -> Tensor:
        """Scores of the model's own method."""
        return self.model.scores(hidden)

    def forward(self, action: Action, loss: Callable[[], T] | None, lengths: Any = None) -> T | None:
        """Run the forward pass of one micro-batch. The numbers of the loss, which lie on the ranks of the model's last
        mesh, are sent to all ranks."""
        assert loss is not None, "every rank loads data"
        has_gradient = paddle.is_grad_enabled()
        with self.recorder.in_pass(action.micro_batch if has_gradient else None, lengths), checked_eager():
            result: Any = loss()
        if not isinstance(result, LossTerms):  # sums of a pre-pass
            return cast("T", self._on_all_ranks(result))
        total = _complete(result.total)
        if has_gradient:
            self._totals[action.micro_batch] = total
        sums = self._on_all_ranks({"loss": (total, result.weight), **result.sums})
        number, weight = sums.pop("loss")
        number.stop_gradient = total.stop_gradient  # the caller checks whether the loss has a gradient
        return cast("T", LossTerms(number, weight, sums))

    def backward(self, action: Action, scale: float = 1.0) -> None:
        """Run the backward pass of `scale` times the loss, on all ranks: each computes the part on its meshes."""
        total = self._totals.pop(action.micro_batch)
        with self.recorder.in_pass(action.micro_batch):  # recompute runs layers again
            (total if scale == 1.0 else total * scale).backward()

    @paddle.no_grad()
    def _on_all_ranks(self, sums: Any) -> dict[str, tuple[Any, float]]:
        """Sums as plain tensors that every rank has."""
        tensors = {
            name: _complete(value.detach()) for name, (value, _) in sums.items() if isinstance(value, paddle.Tensor)
        }
        if not tensors:
            return dict(sums)
        # a broadcast as a sum over the run: one call for all numbers, though each may lie on a mesh of its own
        reduced = collective.sum_on_device([self._own_number(value) for value in tensors.values()])
        found = {name: reduced[i] for i, name in enumerate(tensors)}
        return {name: (found.get(name, value), weight) for name, (value, weight) in sums.items()}

    def _own_number(self, value: Tensor) -> Any:
        """The number on the first rank of its mesh, 0 on other ranks."""
        source = min(value.process_mesh.process_ids) if value.is_dist() else 0
        return local_value(value) if source == self._mesh.rank else 0.0


def _complete(value: Tensor) -> Tensor:
    """A scalar whose partial sums over its own mesh are reduced, so that every rank of the mesh has the total."""
    if not value.is_dist() or all(placement.is_replicated() for placement in value.placements):
        return value
    mesh = value.process_mesh
    with calls.recorded("reshard", value, mesh, mesh.process_ids):
        return dist.reshard(value, mesh, [dist.Replicate() for _ in mesh.shape])
