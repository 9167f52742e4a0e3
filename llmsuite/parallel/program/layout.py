"""Layouts of step programs: the meshes that parameters, inputs and sums lie on, and their placements."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import numpy as np
import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local
from paddle.distributed.auto_parallel.static.dist_input_spec import DistributedInputSpec

from llmsuite.base.typing import Tensor
from llmsuite.parallel.program.clip import over_data
from llmsuite.parallel.program.pipeline import FIRST_INPUTS, Pipeline, StagedModel
from llmsuite.parallel.program.slices import SlicedShard
from llmsuite.parallel.tensor import local_value

Inputs = Mapping[str, np.ndarray]
"""Arrays of this rank's rows of a global batch by name, with micro-batches concatenated along the rows (dim 0)."""
Loss = Callable[[Any, Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Function from the model and the inputs of a micro-batch to sums by name, numbers and vectors. The sum "loss" is
differentiated, and with it `experts.BALANCE_LOSS`."""
ONE_RANK = np.zeros([1, 1], "int64")
ROWS = [dist.Shard(0), dist.Replicate()]
"""Placements of inputs: each data rank has rows of its own."""


@dataclasses.dataclass(frozen=True)
class Placed:
    """A parameter as a program has it."""

    local: Tensor
    """This rank's part; on ranks without a part, a tensor of its shape."""
    mesh: Any
    placements: Sequence[Any]


class Layout(abc.ABC):
    """Placement of a model over the ranks: where its parameters, its inputs and the sums of its loss lie in a program.

    `MeshLayout` places models that are written for one card, as the table of their family says.
    `auto_parallel.AutoParallelLayout` takes the placements of models that call `dist.shard_tensor` themselves.
    """

    full_model: Any
    """The model that programs are traced from, with all parameters."""
    own_parameters: Mapping[str, Tensor]
    """The parameters of this rank's part of the model, in eager mode, by name."""
    pipeline: Pipeline | None = None
    """Split of the model over stages; None where the engine does not split it."""
    data_mesh: Any = None
    """Mesh [data, tp] whose data ranks may share the state of the optimizer; None where each keeps all of its own."""

    # parameters

    @abc.abstractmethod
    def updates(self, name: str) -> bool:
        """True where this rank updates a parameter."""

    def dtype_of(self, name: str, parameter: Tensor) -> Any:
        """Dtype in which the model computes with a parameter, on any rank."""
        return parameter.dtype

    def stored(self, name: str) -> Tensor:
        """The tensor that this rank keeps of a parameter that it updates, between steps."""
        return self.own_parameters[name]

    @abc.abstractmethod
    def place(self, name: str, parameter: Tensor, kept: Tensor | None, dtype: Any) -> Placed:
        """Place a parameter.

        Args:
            name: of the parameter.
            parameter: of `full_model`.
            kept: the tensor whose memory the program updates; None where another rank updates the parameter.
            dtype: of the parameter in the program.
        """

    # the model while it is traced

    def find_meshes(self, loss: Loss, inputs: Inputs) -> None:  # noqa: B027 (most layouts know theirs)
        """Find the meshes that depend on the loss, before a program is built; `inputs` are those of a micro-batch."""

    def model_to_trace(self) -> Any:
        """The model that the loss calls while a program is built."""
        return self.full_model

    def loss_context(self) -> AbstractContextManager[None]:
        """A context around the loss while it is traced."""
        return contextlib.nullcontext()

    # inputs and sums

    @abc.abstractmethod
    def input_spec(self, name: str, array: np.ndarray, num_micro_batches: int) -> Any:
        """The spec of an input of a program, which gets the rows of this rank in micro-batches."""

    @abc.abstractmethod
    def place_input(self, name: str, rows: Tensor) -> Tensor:
        """An input of a step, from the rows of this rank."""

    @abc.abstractmethod
    def replicate(self, number: Tensor) -> Tensor:
        """A sum of the loss, replicated on the mesh of the loss."""

    @abc.abstractmethod
    def synchronise(self, own: np.ndarray | None, norm: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The `count` outputs of a step on every rank, and [2] the norm of its gradient and 1 where it was accepted;
        `own` are the outputs of this rank's program."""

    def update_copies(self, parameters: Mapping[str, Tensor]) -> None:  # noqa: B027 (only pipelines have copies)
        """Copy updated parameters to other ranks that have a copy; `parameters` are those of this rank's model."""


class MeshLayout(Layout):
    """Layout of a model of ours: on one mesh [data, tp], or one for each pipeline stage."""

    def __init__(
        self,
        model: Any,
        ranks: np.ndarray = ONE_RANK,
        slices: Mapping[str, SlicedShard] = MappingProxyType({}),
        pipeline: Pipeline | None = None,
    ):
        """
        Args:
            model: this rank's part of the model in eager mode; in a pipeline, all its chunks.
            ranks: all ranks, [data, tp]: a row has the ranks with the same samples, each with a part of the model.
                Ranks of one pipeline stage come before those of the next.
            slices: shards of the parameters that are sliced over the data ranks, by name; the model does not have them.
            pipeline: split of the model over stages; None where this rank has all of it.
        """
        self.full_model = model if pipeline is None else pipeline.model
        self.own_parameters = dict(model.named_parameters())
        self.pipeline = pipeline
        stages = np.split(ranks, 1 if pipeline is None else pipeline.num_stages)
        self._meshes = [dist.ProcessMesh(of_stage, dim_names=["data", "tp"]) for of_stage in stages]
        self.data_mesh = self._meshes[0]
        self._slices = slices

    def updates(self, name: str) -> bool:
        return self.pipeline is None or self.pipeline.stage_of(name) == self.pipeline.stage

    def dtype_of(self, name: str, parameter: Tensor) -> Any:
        return parameter.dtype if self.pipeline is None else self.pipeline.dtype_of(name, parameter)

    def stored(self, name: str) -> Tensor:
        return self._slices[name].stored if name in self._slices else self.own_parameters[name]

    def place(self, name: str, parameter: Tensor, kept: Tensor | None, dtype: Any) -> Placed:
        mesh = self._meshes[0 if self.pipeline is None else self.pipeline.stage_of(name)]
        if kept is None:
            assert self.pipeline is not None, "without a pipeline every rank updates all parameters"
            local, over_tp, dim = self.pipeline.placeholder(name, parameter.shape, dtype, mesh.shape[1])
        else:
            own = self.own_parameters[name]
            over_tp = own.placements if own.is_dist() else [dist.Replicate()]
            local = local_value(kept).detach()
            dim = self._slices[name].dim if name in self._slices else None
        return Placed(local, mesh, over_data([dist.Replicate(), *over_tp], dim))

    def model_to_trace(self) -> Any:
        return self.full_model if self.pipeline is None else StagedModel(self.pipeline, self._meshes)

    def _mesh_of(self, name: str) -> Any:
        """The mesh of an input: that of the first stage or of the last one, which has the loss."""
        return self._meshes[0 if name in FIRST_INPUTS else -1]

    def input_spec(self, name: str, array: np.ndarray, num_micro_batches: int) -> Any:
        rows = self._meshes[0].shape[0] * len(array) // num_micro_batches
        shape = [rows, *array.shape[1:]]
        mesh = self._mesh_of(name)
        return DistributedInputSpec(shape, array.dtype.name, name=name, mesh=mesh, placements=ROWS)

    def place_input(self, name: str, rows: Tensor) -> Tensor:
        return dtensor_from_local(rows, self._mesh_of(name), ROWS)

    def replicate(self, number: Tensor) -> Tensor:
        # partial sums over data ranks and tp become one number: an all-reduce on the last stage
        return dist.reshard(number, self._meshes[-1], [dist.Replicate()] * 2)

    def synchronise(self, own: np.ndarray | None, norm: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        if self.pipeline is not None:
            own = self.pipeline.broadcast_from_last(own, count)
        assert own is not None
        return own, norm

    def update_copies(self, parameters: Mapping[str, Tensor]) -> None:
        if self.pipeline is not None:
            self.pipeline.update_copies(parameters)
