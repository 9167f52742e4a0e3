"""Parameters and gradients on threads that are ranks."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import paddle

from llmsuite.contract.schema.degrees import Degrees
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.sharding import ParameterShard


@dataclasses.dataclass(frozen=True)
class Case:
    """A parameter and how it lies on a mesh. `shape` is that of the whole; `cut` is the dim that is cut over tp."""

    degrees: Degrees
    stage: int
    shape: tuple[int, ...]
    cut: int | None
    backend: str = "GLOO"
    dtype: str = "float32"

    def values(self, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).standard_normal(self.shape).astype("float32")

    def slice_of(self, whole: np.ndarray, mesh: Mesh) -> np.ndarray:
        """The slice of it on a rank."""
        if self.cut is None:
            return whole
        return np.ascontiguousarray(np.split(whole, mesh.degrees.tp, self.cut)[mesh.coordinate["tp"]])

    def own_part(self, whole: np.ndarray, mesh: Mesh) -> np.ndarray:
        """The part of that slice that the optimizer of a rank owns."""
        local = self.slice_of(whole, mesh)
        parts = mesh.degrees.sharding
        if not self.stage or parts == 1:
            return local
        size = math.ceil(local.size / parts)
        return local.ravel()[mesh.coordinate["sharding"] * size :][:size]

    def shard(self, mesh: Mesh, name: str = "weight", seed: int = 0) -> ParameterShard:
        local = self.slice_of(self.values(seed), mesh)
        zeros = paddle.nn.initializer.Constant(0.0)
        parameter = paddle.create_parameter(list(local.shape), self.dtype, default_initializer=zeros)
        parameter.set_value(paddle.to_tensor(local).astype(self.dtype))
        return ParameterShard(name, parameter, mesh, self.cut, self.stage)

    def give_gradient(self, shard: ParameterShard, mesh: Mesh, seed: int = 0) -> None:
        """A gradient that depends on the samples of the rank; one of whole numbers, whose sums are exact."""
        gradient = self.slice_of(self.gradient(mesh.data_rank, seed), mesh)
        shard.gather()
        (shard.parameter.astype("float32") * paddle.to_tensor(gradient)).sum().backward()

    def gradient(self, data_rank: int, seed: int = 0) -> np.ndarray:
        rng = np.random.default_rng([seed, data_rank])
        return rng.integers(-8, 9, self.shape).astype("float32")

    def sum_of_gradients(self, seed: int = 0) -> np.ndarray:
        return sum(self.gradient(rank, seed) for rank in range(self.degrees.num_data_ranks))
