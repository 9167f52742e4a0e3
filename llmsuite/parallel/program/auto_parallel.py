"""Step programs of models that place their parameters themselves, see `parallel.auto_parallel`.

Such a model has meshes of its own. Every rank builds the program of the full model, for the same rows; Paddle keeps on
each rank the operations of the meshes that it belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.base.framework import EagerParamBase
from paddle.distributed.auto_parallel.api import dtensor_from_local

from llmsuite.base.errors import UserError
from llmsuite.base.typing import Tensor
from llmsuite.parallel import collective
from llmsuite.parallel.auto_parallel import AutoParallelShard
from llmsuite.parallel.auto_parallel_patches import checked_eager, checked_static
from llmsuite.parallel.program.optimizer import ProgramOptimizer
from llmsuite.parallel.program.programs import Inputs, Loss, Options, Program, StepPrograms
from llmsuite.parallel.tensor import local_value


class AutoParallelPrograms(StepPrograms):
    """The programs of a run whose model has meshes of its own."""

    def __init__(self, model: Any, optimizer: ProgramOptimizer, loss: Loss, options: Options):
        """Arguments are those of `StepPrograms`; the shards of the optimizer are of the type `AutoParallelShard`."""
        self._shards = {shard.name: shard for shard in optimizer.shards if isinstance(shard, AutoParallelShard)}
        self._eager_loss = loss
        super().__init__(model, optimizer, self._loss_in_program, options=options)
        self._common_mesh: Any = None
        """Mesh of the parameters that the model has not placed."""
        self._source = -1
        """The rank whose numbers of a step are broadcast."""

    def _loss_in_program(self, model: Any, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        with checked_static():  # not around the optimizer, which places its state with the same functions
            return self._eager_loss(model, inputs)

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
        """The one mesh that the model computes on, for parameters that are not placed: a program needs their mesh
        before it has the operations that use them. So the model runs eagerly once."""
        unplaced = [name for name, parameter in self._own.items() if not parameter.is_dist()]
        meshes = [parameter.process_mesh for parameter in self._own.values() if parameter.is_dist()]
        if not unplaced:
            return meshes[0]
        with checked_eager() as named:
            self._eager_loss(self._full_model, {name: paddle.to_tensor(array) for name, array in inputs.items()})
        meshes = meshes + named
        if not meshes:
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

    def _replicated_number(self, number: Tensor) -> Tensor:
        mesh = number.process_mesh
        self._source = min(mesh.process_ids)
        return dist.reshard(number, mesh, [dist.Replicate() for _ in mesh.shape])

    def _synchronise(self, own: np.ndarray | None, norm: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        is_source = collective.rank() == self._source
        assert own is not None or not is_source
        numbers = [*own, *norm] if is_source and own is not None else [0.0] * (count + len(norm))
        # a broadcast as a sum over all ranks: the numbers lie on the loss's mesh, and every rank needs them
        outputs = collective.sum_on_device([float(number) for number in numbers]).numpy()
        return outputs[:count], outputs[count:]

    def _placed(self, name: str, parameter: Tensor) -> Tensor:
        shard = self._shards[name]
        mesh = self._common_mesh
        placements = [dist.Replicate()] * self._common_mesh.ndim
        if parameter.is_dist():
            mesh = parameter.process_mesh
            placements = parameter.placements
        local = local_value(parameter).detach() if shard.is_held else paddle.empty(shard.part_shape)
        placed = EagerParamBase(shape=parameter.shape, dtype=local.dtype, name=name, trainable=True)
        placed._set_impl(dtensor_from_local(local, mesh, placements))
        return placed
