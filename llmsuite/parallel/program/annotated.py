"""Whole-step programs of models that place their parameters themselves, see `parallel.annotated`.

Such a model is on meshes of its own. Every rank makes the program of all of it, of the same rows; Paddle leaves a rank
the operations of the meshes that it is in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.base.framework import EagerParamBase
from paddle.distributed.auto_parallel.api import dtensor_from_local

from llmsuite.errors import UserError
from llmsuite.parallel import collective
from llmsuite.parallel.annotated import AnnotatedShard
from llmsuite.parallel.own_meshes import in_programs, op_by_op
from llmsuite.parallel.program.optimizer import ProgramOptimizer
from llmsuite.parallel.program.programs import Inputs, Loss, Options, Program, StepPrograms
from llmsuite.parallel.tensor import local_value
from llmsuite.typing import Tensor


class AnnotatedPrograms(StepPrograms):
    """The programs of a run whose model has meshes of its own."""

    def __init__(self, model: Any, optimizer: ProgramOptimizer, loss: Loss, options: Options):
        """As `StepPrograms`; the optimizer is over shards of the kind `AnnotatedShard`."""
        self._shards = {shard.name: shard for shard in optimizer.shards if isinstance(shard, AnnotatedShard)}
        self._loss_op_by_op = loss
        super().__init__(model, optimizer, self._loss_in_program, options=options)
        self._common_mesh: Any = None
        """That of the parameters which the model has not placed."""
        self._teller = -1
        """The rank that tells the numbers of a step."""

    def _loss_in_program(self, model: Any, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        with in_programs():  # not for the optimizer, which places its state by the same means
            return self._loss_op_by_op(model, inputs)

    def _updates(self, name: str) -> bool:
        return self._shards[name].is_held

    def _build(self, inputs: Inputs, num_micro_batches: int) -> Program:
        if self._common_mesh is None:
            self._common_mesh = self._find_mesh(
                {name: array[: len(array) // num_micro_batches] for name, array in inputs.items()}
            )
        return super()._build(inputs, num_micro_batches)

    @paddle.no_grad()
    def _find_mesh(self, inputs: Mapping[str, np.ndarray]) -> Any:
        """The one mesh that the model computes on, for parameters that are on none: a program has to know where they
        are before it knows what computes with them. So the model runs op by op once."""
        unplaced = [name for name, parameter in self._own.items() if not parameter.is_dist()]
        meshes = [parameter.process_mesh for parameter in self._own.values() if parameter.is_dist()]
        if not unplaced:
            return meshes[0]
        with op_by_op() as named:
            self._loss_op_by_op(self._whole, {name: paddle.to_tensor(array) for name, array in inputs.items()})
        if not (meshes := meshes + named):
            return dist.ProcessMesh([*range(collective.num_ranks())], dim_names=["ranks"])
        if any(mesh != meshes[0] for mesh in meshes):
            raise UserError(
                f"parameter {unplaced[0]!r} is not placed, and the model has several meshes; with engine.program step "
                "place it on the one that computes with it, with dist.shard_tensor"
            )
        return meshes[0]

    def _spec(self, name: str, array: np.ndarray, num_micro_batches: int) -> Any:
        shape = [len(array) // num_micro_batches, *array.shape[1:]]
        return paddle.static.InputSpec(shape, array.dtype.name, name=name)

    def _given(self, name: str, rows: Tensor) -> Tensor:
        return rows

    def _whole_number(self, number: Tensor) -> Tensor:
        mesh = number.process_mesh
        self._teller = min(mesh.process_ids)
        return dist.reshard(number, mesh, [dist.Replicate() for _ in mesh.shape])

    def _told(self, own: np.ndarray | None, norm: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        tells = collective.rank() == self._teller
        assert own is not None or not tells
        numbers = [*own, *norm] if tells and own is not None else [0.0] * (count + len(norm))
        told = collective.sum_on_device([float(number) for number in numbers]).numpy()
        return told[:count], told[count:]

    def _placed(self, name: str, parameter: Tensor) -> Tensor:
        shard, mesh, placements = self._shards[name], self._common_mesh, [dist.Replicate()] * self._common_mesh.ndim
        if parameter.is_dist():
            mesh, placements = parameter.process_mesh, parameter.placements
        local = local_value(parameter).detach() if shard.is_held else paddle.empty(shard.part_shape)
        placed = EagerParamBase(shape=parameter.shape, dtype=local.dtype, name=name, trainable=True)
        placed._set_impl(dtensor_from_local(local, mesh, placements))
        return placed
