"""Parameters that the data ranks share out as whole-step programs do: each has one of equal slices along a dim.

`parallel.sharding` cuts the flattened values instead; Paddle's auto-parallel knows dims only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import paddle.distributed as dist

from llmsuite.models.prefix_shapes import is_in_every_part
from llmsuite.parallel import collective
from llmsuite.parallel.gathering import in_program
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.sharding import ParameterShard
from llmsuite.typing import Tensor

Places = Mapping[str, tuple[dict[str, Any], str]]
"""Where a model keeps each of its parameters: the table of its module, and the name in there."""


def slice_dim(shape: Sequence[int], over_tp: Sequence[Any], count: int) -> int | None:
    """The dim that data ranks cut a parameter along, or its state: the first that they divide and tensor parallel
    leaves whole. None where there is no such dim: every rank has the whole.

    Args:
        shape: of the parameter, the whole or a rank's part under tensor parallel.
        over_tp: its placements over the tensor parallel ranks.
        count: how many data ranks.
    """
    of_tp = {place.get_dim() for place in over_tp if place.is_shard()}
    free = (i for i, size in enumerate(shape) if i not in of_tp and size % count == 0)
    return next(free, None) if count > 1 else None


def over_tp(parameter: Tensor) -> list[Any]:
    """Placements of a parameter of the model over the tensor parallel ranks."""
    return list(parameter.placements) if parameter.is_dist() else []


class SlicedShard(ParameterShard):
    """A parameter of sharding stage 3 in whole-step programs: between steps a rank has its slice only.

    Not of what no module of a layer gathers (`prefix_shapes.is_in_every_part`), nor of a table that two pipeline stages
    have: the gradient of its slices would be sent among local operations of the last stage, and what Paddle 3.3.1 takes
    out of the first stage's program with these is what that receives, too.
    """

    def __init__(
        self,
        name: str,
        parameter: Tensor,
        mesh: Mesh,
        tp_dim: int | None,
        is_tied: bool = False,
        is_frozen: bool = False,
    ):
        """As `ParameterShard`."""
        stays_whole = is_in_every_part(name) or (is_tied and mesh.degrees.pp > 1)
        self.dim = None if stays_whole else slice_dim(parameter.shape, over_tp(parameter), mesh.degrees.sharding)
        self._slice = mesh.coordinate["sharding"]
        super().__init__(name, parameter, mesh, tp_dim, 0 if self.dim is None else 3, is_tied, is_frozen)
        self.master_or_shard.stop_gradient = True  # the program has a parameter of its own
        if not self.has_master:
            # one tensor for both: a program may leave its results in other memory
            self._stored = self.master_or_shard

    @property
    def is_sliced(self) -> bool:
        """Whether the ranks have slices of it, not each the whole."""
        return self.dim is not None

    @property
    def stored(self) -> Tensor:
        """What this rank keeps between steps: its slice, or the whole."""
        return self.master_or_shard if self.is_sliced else self.parameter

    def _own_part(self, local: Any) -> Any:
        if self.dim is None:
            return local
        size = self.local_shape[self.dim] // self._num_shards
        part = slice(self._slice * size, (self._slice + 1) * size)
        index = (slice(None),) * self.dim + (part,)
        return local[index]

    def own_shard(self, local: np.ndarray) -> np.ndarray:
        """As `ParameterShard.own_shard`."""
        return np.ascontiguousarray(self._own_part(local))

    def _gather_shards(self, shard: Tensor) -> Tensor:
        assert self.dim is not None
        return collective.all_gather(shard, self._mesh.sharding_group, self.dim)


@contextlib.contextmanager
def whole_where_used(places: Places, narrow: Mapping[str, Any]) -> Iterator[None]:
    """While active, a program that is made brings slices together in front of the modules that compute with them; the
    gradients of the slices are summed and cut in one go.

    Args:
        places: of the parameters, which are distributed tensors over [data, tp], in slices or whole.
        narrow: dtypes of what modules compute with, where slices are those of masters. These are brought together,
            so that their gradients are summed in float32.
    """
    slices: dict[str, Tensor] = {}

    def gather(names: Sequence[str]) -> None:
        for name in names:
            table, attribute = places[name]
            found = table[attribute]
            if found.placements[0].is_shard():
                slices[name] = found
                placements = [dist.Replicate(), *found.placements[1:]]
                whole = dist.reshard(found, found.process_mesh, placements)
                table[attribute] = whole.astype(narrow[name]) if name in narrow else whole

    def free(names: Sequence[str]) -> None:
        for name in slices.keys() & {*names}:
            table, attribute = places[name]
            table[attribute] = slices.pop(name)

    with in_program(gather, free):
        yield
