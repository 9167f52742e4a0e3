"""Parameters that are sharded over data ranks as step programs do it: each rank has one of equal slices along a dim.

`parallel.sharding` cuts the flattened values instead; Paddle's auto-parallel can cut along dims only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import paddle.distributed as dist

from llmsuite.adapters.prefix_shapes import is_shared_by_all_ranks
from llmsuite.base.typing import Tensor
from llmsuite.parallel import collective
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.sharding import TRAINED, ParameterShard, ShardOptions
from llmsuite.parallel.zero3 import program_gathering

Slots = Mapping[str, tuple[dict[str, Any], str]]
"""The slot of each parameter of a model: the parameter table of its module, and the name in that table."""


def slice_dim(shape: Sequence[int], over_tp: Sequence[Any], count: int) -> int | None:
    """The dim along which data ranks cut a parameter or its state: the first that they divide and tensor parallel does
    not cut. None where there is no such dim; then every rank has the full tensor.

    Args:
        shape: of the full parameter, or of a rank's part under tensor parallel.
        over_tp: its placements over the tensor parallel ranks.
        count: number of data ranks.
    """
    tp_dims = {placement.get_dim() for placement in over_tp if placement.is_shard()}
    free = (i for i, size in enumerate(shape) if i not in tp_dims and size % count == 0)
    return next(free, None) if count > 1 else None


def over_tp(parameter: Tensor) -> list[Any]:
    """Placements of a parameter of the model over the tensor parallel ranks."""
    return list(parameter.placements) if parameter.is_dist() else []


class SlicedShard(ParameterShard):
    """A parameter of sharding stage 3 in step programs: between steps a rank has its slice only.

    Not of what no module of a layer gathers (`prefix_shapes.is_shared_by_all_ranks`), nor of a table that two pipeline
    stages
    have: the gradient of its slices would be sent among local operations of the last stage, and what Paddle 3.3.1 takes
    out of the first stage's program with these is what that receives, too.
    """

    def __init__(
        self,
        name: str,
        parameter: Tensor,
        mesh: Mesh,
        tp_dim: int | None,
        options: ShardOptions = TRAINED,
    ):
        """Arguments are those of `ParameterShard`, without the stage."""
        self.dim = None
        if not (is_shared_by_all_ranks(name) or (options.is_tied and mesh.degrees.pp > 1)):
            self.dim = slice_dim(parameter.shape, over_tp(parameter), mesh.degrees.sharding)
        self._slice = mesh.coordinate["sharding"]
        super().__init__(name, parameter, mesh, tp_dim, 0 if self.dim is None else 3, options)
        self.main_param.stop_gradient = True  # the program has a parameter of its own
        if not self.has_master:
            # one tensor for both: a program may put its results into other memory
            self._stored = self.main_param

    @property
    def is_sliced(self) -> bool:
        """True where the ranks have slices; otherwise each has the full parameter."""
        return self.dim is not None

    @property
    def stored(self) -> Tensor:
        """The tensor that this rank keeps between steps: its slice, or the full parameter."""
        return self.main_param if self.is_sliced else self.parameter

    def _own_part(self, local: Any) -> Any:
        if self.dim is None:
            return local
        size = self.local_shape[self.dim] // self.partition.num_shards
        part = slice(self._slice * size, (self._slice + 1) * size)
        index = (slice(None),) * self.dim + (part,)
        return local[index]

    def own_shard(self, local: np.ndarray) -> np.ndarray:
        """This rank's slice of a tensor that is already split over tp."""
        return np.ascontiguousarray(self._own_part(local))

    def _start_gathering(self, shard: Tensor) -> Callable[[], Tensor]:
        assert self.dim is not None
        # over the sharding axis, along the dim of the slices, and in the order of the ranks: so the parts are in order
        return collective.start_all_gather(shard, self._mesh.sharding_group, self.dim)


@contextlib.contextmanager
def gather_where_used(parameter_slots: Slots, compute_dtypes: Mapping[str, Any]) -> Iterator[None]:
    """While active, a program that is being built gathers slices before the modules that compute with them; the
    gradients of the slices are reduce-scattered.

    Args:
        parameter_slots: of the parameters, which are distributed tensors over [data, tp], sliced or replicated.
        compute_dtypes: dtypes that modules compute with, where slices are those of masters. The masters are gathered,
            not the 16-bit copies, so that gradients are summed in float32.
    """
    slices: dict[str, Tensor] = {}

    def gather(names: Sequence[str]) -> None:
        for name in names:
            table, attribute = parameter_slots[name]
            found = table[attribute]
            if found.placements[0].is_shard():
                slices[name] = found
                placements = [dist.Replicate(), *found.placements[1:]]
                # an all-gather over the data ranks, right before the module; its gradient is a reduce-scatter
                full = dist.reshard(found, found.process_mesh, placements)
                table[attribute] = full.astype(compute_dtypes[name]) if name in compute_dtypes else full

    def free(names: Sequence[str]) -> None:
        for name in slices.keys() & {*names}:
            table, attribute = parameter_slots[name]
            table[attribute] = slices.pop(name)

    with program_gathering(gather, free):
        yield
