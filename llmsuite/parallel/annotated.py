"""Models that place their parameters themselves, with `dist.shard_tensor` and `dist.reshard`.

Such a model says in its own code which ranks hold what, on meshes of its own: along one axis of a mesh rows are cut,
along another one matrices, and from one mesh to the next a pipeline goes on. Paddle's rules compute with that. All
ranks of the run call it with the same samples, as one group. What the engine adds is what it adds to every model: the
ledger of the loss, gradients that are complete, their norm, the update of what a rank holds, and whole tensors to save.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import paddle
import paddle.distributed as dist

from llmsuite.errors import UserError
from llmsuite.launch import calls
from llmsuite.parallel import collective
from llmsuite.parallel.loss_ledger import LossTerms
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.own_meshes import check_ranks, op_by_op
from llmsuite.parallel.pipeline import PipelineStage
from llmsuite.parallel.schedule import Action
from llmsuite.parallel.sharding import ParameterShard
from llmsuite.parallel.tensor import local_value
from llmsuite.typing import Tensor

T = TypeVar("T")
Index = tuple[slice, ...]
"""One slice a dim."""


def held_slices(name: str, shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> dict[int, Index]:
    """The slice of a parameter that each rank of its mesh holds, by rank.

    Args:
        name: of the parameter, for messages.
        shape: of the whole.
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
        dim, parts = placement.get_dim() % len(shape), ranks.shape[axis]
        if dim in axes:
            raise UserError(f"parameter {name!r} is cut twice along dim {dim}; cut it along one axis of the mesh")
        if shape[dim] % parts:
            raise UserError(
                f"parameter {name!r} is {list(shape)}, and {parts} ranks cut it along dim {dim}, which they do not "
                "divide; choose a size that they do"
            )
        axes[dim] = axis
    found = {}
    for place in np.ndindex(*ranks.shape):
        index = []
        for dim, size in enumerate(shape):
            part = size // ranks.shape[axes[dim]] if dim in axes else size
            first = place[axes[dim]] * part if dim in axes else 0
            index.append(slice(first, first + part))
        found[int(ranks[place])] = tuple(index)
    return found


class AnnotatedShard(ParameterShard):
    """A parameter as its model has placed it: this rank's optimizer updates the part that lies here, if one does. One
    that is not placed is whole on every rank."""

    def __init__(self, name: str, parameter: Tensor, mesh: Mesh):
        """
        Args:
            name: full parameter name.
            parameter: the model's, with its initial values.
            mesh: this rank's place among the ranks of the run.

        Raises:
            UserError: as `held_slices`, or the values are not float32.
        """
        if parameter.dtype != paddle.float32:
            raise UserError(
                f"parameter {name!r} is {parameter.dtype}; models with meshes of their own train in float32"
            )
        self._is_placed, whole = bool(parameter.is_dist()), tuple(slice(0, size) for size in parameter.shape)
        everywhere = dict.fromkeys(range(mesh.degrees.num_ranks), whole)
        self._slices = everywhere
        if self._is_placed:
            check_ranks(f"parameter {name!r} is placed", parameter.process_mesh.process_ids, mesh.degrees.num_ranks)
            self._slices = held_slices(name, parameter.shape, parameter.process_mesh, parameter.placements)
        self._own = self._slices.get(mesh.rank)
        super().__init__(name, parameter, mesh, None, 0, is_frozen=bool(parameter.stop_gradient))

    @property
    def is_held(self) -> bool:
        """Whether this rank has a part of it."""
        return self._own is not None

    @property
    def part_shape(self) -> list[int]:
        """Shape of the part that a rank has."""
        return [part.stop - part.start for part in self._slices[self._first]]

    def _local(self) -> Tensor:
        return paddle.zeros([0]) if self._own is None else local_value(self.parameter)

    def own_shard(self, local: np.ndarray) -> np.ndarray:
        """As `ParameterShard.own_shard`: of the whole tensor, as nothing else cuts it."""
        return np.zeros([0], "float32") if self._own is None else np.ascontiguousarray(local[self._own])

    @paddle.no_grad()
    def load(self, values: np.ndarray | Tensor) -> None:
        """Take over the whole parameter's values: what of them this rank holds."""
        if self._own is not None:
            self._local().copy_(paddle.to_tensor(self.own_shard(np.asarray(values)).astype("float32")), True)

    @paddle.no_grad()
    def stored_form(self, values: np.ndarray) -> Tensor:
        """As `ParameterShard.stored_form`."""
        return paddle.to_tensor(self.own_shard(values).astype("float32"))

    def gather_parameter(self) -> Tensor:
        """The whole parameter. Every rank of the run calls it."""
        return self._whole(self._local())

    def gather_shard(self, shard: Tensor) -> Tensor:
        """The whole of a tensor that lies as the parameter does. Every rank of the run calls it."""
        return self._whole(shard)

    def gather_number(self, number: Tensor) -> Tensor:
        """A number [1] that the ranks with a part of the parameter have, from the first of them."""
        return collective.all_gather(number, self._mesh.tensor_group)[self._first].reshape([1])

    @property
    def _first(self) -> int:
        return min(self._slices)

    @paddle.no_grad()
    def _whole(self, local: Tensor) -> Tensor:
        if not self._is_placed or len(self._slices) == self._mesh.degrees.num_ranks == 1:
            return local
        part = paddle.zeros(self.part_shape) if self._own is None else local.detach()
        parts = collective.all_gather(part.unsqueeze(0), self._mesh.tensor_group).numpy()
        whole = np.empty(self.shape, "float32")
        for rank, index in self._slices.items():
            whole[index] = parts[rank]
        return paddle.to_tensor(whole)

    # gradients

    @property
    def replica_count(self) -> int:
        """How many ranks of the run hold the same part of a finished gradient."""
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
        mesh, placements = gradient.process_mesh, [dist.Replicate() for _ in gradient.placements]
        if self._is_placed:
            mesh, placements = self.parameter.process_mesh, self.parameter.placements
        elif len(set(mesh.process_ids)) < self._mesh.degrees.num_ranks:
            raise UserError(
                f"parameter {self.name!r} is not placed, and only ranks {sorted(mesh.process_ids)} compute with it; "
                "place it on their mesh with dist.shard_tensor"
            )
        if self._own is None or not gradient._is_initialized():  # a cleared distributed gradient is empty, not None
            return None
        if gradient.placements == placements:
            return local_value(gradient)
        with calls.made("reshard", gradient, mesh, mesh.process_ids):
            local = local_value(dist.reshard(gradient, mesh, placements))
        self.drop_gradient()  # the sum has memory of its own
        return local


class AnnotatedModel(PipelineStage):
    """A model with meshes of its own, called like others. What it has beside its forward pass, such as
    `hidden_states` and `token_nll`, a stage's loss can call as well."""

    def __init__(self, model: Any, mesh: Mesh):
        """`mesh`: this rank's place among the ranks of the run."""
        super().__init__([model], mesh, 0, [], None)
        self._totals: dict[int, Tensor] = {}
        """Losses that wait for their backward pass, by micro-batch."""

    def __getattr__(self, name: str) -> Any:
        if name == "chunks":  # not yet
            raise AttributeError(name)
        return getattr(self.model, name)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The forward pass of the model."""
        return self.model(*inputs, **named)

    def hidden_states(self, input_ids: Tensor, document_starts: Tensor | None = None) -> tuple[Tensor, list[Any]]:
        """As the model's own."""
        starts = {} if document_starts is None else {"document_starts": document_starts}
        hidden, _ = self.model.hidden_states(input_ids, **starts)
        return hidden, []

    def logits(self, hidden: Tensor) -> Tensor:
        """As the model's own."""
        return self.model.logits(hidden)

    def scores(self, hidden: Tensor) -> Tensor:
        """As the model's own."""
        return self.model.scores(hidden)

    def forward(self, action: Action, loss: Callable[[], T] | None, lengths: Any = None) -> T | None:
        """As `PipelineStage.forward`. The numbers of a loss are made known to all ranks: they lie on those of the mesh
        that the model ends on."""
        assert loss is not None, "every rank reads data"
        with op_by_op():
            result: Any = loss()
        if not isinstance(result, LossTerms):  # sums of a pre-pass
            return cast("T", self._told(result))
        total = _complete(result.total)
        if paddle.is_grad_enabled():
            self._totals[action.micro_batch] = total
        told = self._told({"loss": (total, result.weight), **result.sums})
        number, weight = told.pop("loss")
        number.stop_gradient = total.stop_gradient  # the caller asks whether there is anything to learn
        return cast("T", LossTerms(number, weight, told))

    def backward(self, action: Action, scale: float = 1.0) -> None:
        """The backward pass of `scale` times the loss, on all ranks: each does what its meshes say."""
        total = self._totals.pop(action.micro_batch)
        (total if scale == 1.0 else total * scale).backward()

    @paddle.no_grad()
    def _told(self, sums: Any) -> dict[str, tuple[Any, float]]:
        """The same sums, as tensors of no mesh that every rank has."""
        tensors = {
            name: _complete(value.detach()) for name, (value, _) in sums.items() if isinstance(value, paddle.Tensor)
        }
        if not tensors:
            return dict(sums)
        whole = collective.sum_on_device([self._own_number(value) for value in tensors.values()])
        found = {name: whole[i] for i, name in enumerate(tensors)}
        return {name: (found.get(name, value), weight) for name, (value, weight) in sums.items()}

    def _own_number(self, value: Tensor) -> Any:
        """A number on the one rank that tells it, on others 0."""
        teller = min(value.process_mesh.process_ids) if value.is_dist() else 0
        return local_value(value) if teller == self._mesh.rank else 0.0


def _complete(value: Tensor) -> Tensor:
    """A scalar that is no part of a sum on any rank."""
    if not value.is_dist() or all(placement.is_replicated() for placement in value.placements):
        return value
    mesh = value.process_mesh
    with calls.made("reshard", value, mesh, mesh.process_ids):
        return dist.reshard(value, mesh, [dist.Replicate() for _ in mesh.shape])
