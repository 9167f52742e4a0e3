"""Layout of models that place their parameters themselves, see `parallel.auto_parallel`.

Such a model has meshes of its own. Every rank builds the program of the full model, for the same rows; Paddle keeps on
each rank the operations of the meshes that it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from llmsuite.base.errors import UserError
from llmsuite.base.typing import Tensor
from llmsuite.devices.tensors import array_of, tensor_of
from llmsuite.parallel import collective
from llmsuite.parallel.auto_parallel import AutoParallelShard
from llmsuite.parallel.auto_parallel_patches import checked_eager, checked_static
from llmsuite.parallel.program.layout import Inputs, Layout, Loss, Placed
from llmsuite.parallel.sharding import ParameterShard
from llmsuite.parallel.tensor import local_value


class AutoParallelLayout(Layout):
    """Layout of a model that calls `dist.shard_tensor`: its own meshes and placements."""

    def __init__(self, model: Any, shards: Sequence[ParameterShard]):
        """`shards` of the parameters of `model`, of the type `AutoParallelShard`."""
        self.full_model = model
        self.own_parameters = dict(model.named_parameters())
        self._shards = {shard.name: shard for shard in shards if isinstance(shard, AutoParallelShard)}
        self._common_mesh: Any = None
        """Mesh of the parameters that the model has not placed."""
        self._source = -1
        """The rank whose numbers of a step are broadcast."""

    def updates(self, name: str) -> bool:
        return self._shards[name].is_held

    def place(self, name: str, parameter: Tensor, kept: Tensor | None, dtype: Any) -> Placed:
        local = paddle.empty(self._shards[name].part_shape) if kept is None else local_value(kept).detach()
        if parameter.is_dist():
            return Placed(local, parameter.process_mesh, parameter.placements)
        return Placed(local, self._common_mesh, [dist.Replicate()] * self._common_mesh.ndim)

    @paddle.no_grad()
    def find_meshes(self, loss: Loss, inputs: Inputs) -> None:
        """Find the one mesh that the model computes on, for parameters that are not placed: a program needs their mesh
        before it has the operations that use them. So the model runs eagerly once."""
        if self._common_mesh is not None:
            return
        unplaced = [name for name, parameter in self.own_parameters.items() if not parameter.is_dist()]
        meshes = [parameter.process_mesh for parameter in self.own_parameters.values() if parameter.is_dist()]
        if unplaced:
            with checked_eager() as named:
                loss(self.full_model, {name: tensor_of(array) for name, array in inputs.items()})
            meshes = meshes + named
        if not meshes:
            meshes = [dist.ProcessMesh([*range(collective.num_ranks())], dim_names=["ranks"])]
        if unplaced and any(mesh != meshes[0] for mesh in meshes):
            raise UserError(
                f"parameter {unplaced[0]!r} is not placed, and the model has several meshes; with engine.program step "
                "place it on the one that computes with it, with dist.shard_tensor"
            )
        self._common_mesh = meshes[0]

    def loss_context(self) -> AbstractContextManager[None]:
        return checked_static()  # not around the optimizer, which places its state with the same functions

    def input_spec(self, name: str, array: np.ndarray, num_micro_batches: int) -> Any:
        shape = [len(array) // num_micro_batches, *array.shape[1:]]
        return paddle.static.InputSpec(shape, array.dtype.name, name=name)

    def place_input(self, name: str, rows: Tensor) -> Tensor:
        return rows

    def replicate(self, number: Tensor) -> Tensor:
        mesh = number.process_mesh
        self._source = min(mesh.process_ids)
        return dist.reshard(number, mesh, [dist.Replicate() for _ in mesh.shape])

    def synchronise(self, own: np.ndarray | None, norm: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        is_source = collective.rank() == self._source
        assert own is not None or not is_source
        numbers = [*own, *norm] if is_source and own is not None else [0.0] * (count + len(norm))
        # a broadcast as a sum over all ranks: the numbers lie on the loss's mesh, and every rank needs them
        outputs = array_of(collective.sum_on_device([float(number) for number in numbers]))
        return outputs[:count], outputs[count:]
