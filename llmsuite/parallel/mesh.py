"""The ranks of a run as a grid: pipeline stage, data (dp x sharding), tensor.

Dynamic mode keeps the two kinds of axes apart. Along `tp` tensors are distributed tensors and Paddle's SPMD rules
insert the communication; along the data axes every rank computes on samples of its own, and the engine sums gradients
and ledgers once a step. So a stage's code sees plain batches of its own length, and with tp = 1 plain tensors.

Expert parallel takes no ranks of its own: neighbours on the data axes share the experts. For those parameters the same
ranks form another grid, `Mesh.of_experts`, whose data axes are that much shorter.

The grid needs no Paddle; groups, which do, are made when they are asked for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmsuite.schema.degrees import Degrees

AXES = ("pp", "dp", "sharding", "ep", "tp")


@dataclasses.dataclass(frozen=True)
class Mesh:
    """This rank's place in the grid, and the groups of ranks it talks to."""

    degrees: Degrees
    rank: int
    expert_parts: int = 1
    """Size of the axis ep: above 1 in a grid of experts only."""
    groups: dict[Any, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    """The groups made so far, by all their ranks: the mesh of experts shares those that are equal."""

    @functools.cached_property
    def grid(self) -> np.ndarray:
        """[pp, dp, sharding, ep, tp]: the rank at each coordinate. Along tp they are neighbours on the machine."""
        d = self.degrees
        return np.arange(d.num_ranks * self.expert_parts).reshape(d.pp, d.dp, d.sharding, self.expert_parts, d.tp)

    @functools.cached_property
    def of_experts(self) -> Mesh:
        """The mesh of routed experts: along ep ranks have different ones, along dp and sharding the same."""
        d, ep = self.degrees, self.degrees.ep
        if ep == 1:
            return self
        sharding = max(1, d.sharding // ep)
        degrees = dataclasses.replace(d, dp=d.num_data_ranks // (ep * sharding), sharding=sharding, ep=1)
        return Mesh(degrees, self.rank, ep, self.groups)

    @functools.cached_property
    def coordinate(self) -> dict[str, int]:
        """This rank's position on each axis."""
        position = np.argwhere(self.grid == self.rank)[0]
        return dict(zip(AXES, (int(i) for i in position)))

    @property
    def data_rank(self) -> int:
        """Number of the part of a batch that this rank sees."""
        return self.coordinate["dp"] * self.degrees.sharding + self.coordinate["sharding"]

    @property
    def counts_losses(self) -> bool:
        """Whether this rank books losses: one of each tensor parallel group of the last pipeline stage."""
        return self.coordinate["tp"] == 0 and self.coordinate["pp"] == self.degrees.pp - 1

    @functools.cached_property
    def tensor(self) -> Any:
        """One-dimensional ProcessMesh of this rank's tensor parallel group; None when tp is 1."""
        if self.degrees.tp == 1:
            return None
        import paddle.distributed as dist

        c = self.coordinate
        ranks = self.grid[c["pp"], c["dp"], c["sharding"], c["ep"]]
        return dist.ProcessMesh([int(r) for r in ranks], dim_names=["tp"])

    @functools.cached_property
    def tensor_group(self) -> Any:
        """The same ranks as a group; None when there is one."""
        return self._group("tp")

    @functools.cached_property
    def data_group(self) -> Any:
        """Ranks that hold the same parameters and see other samples; None when there is one."""
        return self._group("dp", "sharding")

    @functools.cached_property
    def dp_group(self) -> Any:
        """Ranks of the data group that own the same shard of a parameter; None when there is one."""
        return self._group("dp")

    @functools.cached_property
    def sharding_group(self) -> Any:
        """Ranks that parameters and optimizer states are sharded over; None when there is one."""
        return self._group("sharding")

    @functools.cached_property
    def expert_group(self) -> Any:
        """In a mesh of experts: the ranks that have all experts together; None when each has all."""
        return self._group("ep")

    @property
    def reads_data(self) -> bool:
        """Whether this rank reads data: the first pipeline stage needs ids, the last one targets."""
        return self.coordinate["pp"] in (0, self.degrees.pp - 1)

    @functools.cached_property
    def readers(self) -> list[int]:
        """The ranks that read data, in order."""
        return sorted({int(rank) for rank in self.grid[[0, -1]].flat})

    @property
    def has_middle(self) -> bool:
        """Whether there are ranks that read no data."""
        return self.degrees.pp > 2

    @functools.cached_property
    def reading_group(self) -> Any:
        """The ranks that read data; None in the middle of a pipeline, and when all do."""
        return _own_group(self.grid[[0, -1]].reshape(1, -1), self.rank) if self.has_middle else None

    def pipeline_lines(self) -> list[list[int]]:
        """Ranks that differ in their pipeline stage only, in the order of the stages; none without a pipeline."""
        if self.degrees.pp == 1:
            return []
        return [[int(r) for r in line] for line in self.grid.reshape(self.degrees.pp, -1).T]

    @functools.cached_property
    def pipeline_group(self) -> Any:
        """The ranks of this rank's pipeline; None without one."""
        return self._group("pp")

    @functools.cached_property
    def tied_group(self) -> Any:
        """First and last stage of this rank's line, for weights both have; None elsewhere and without a pipeline."""
        lines = [[line[0], line[-1]] for line in self.pipeline_lines()]
        return _own_group(np.array(lines), self.rank) if lines else None

    @functools.cached_property
    def model_group(self) -> Any:
        """Ranks that compute with parts of one model for the same samples; None when there is one. Made only for
        parameters that all of them have, see `prefix_shapes.is_in_every_part`."""
        return self._group("pp", "tp")

    def make_groups(self) -> None:
        """Make every group now: all ranks have to make all groups, in the same order."""
        _ = self.tensor, self.tensor_group, self.data_group, self.dp_group, self.sharding_group
        _ = self.pipeline_group, self.tied_group, self.reading_group
        experts = self.of_experts
        _ = experts.expert_group, experts.tensor_group, experts.data_group, experts.dp_group, experts.sharding_group

    def rows(self, *axes: str) -> np.ndarray:
        """All ranks, those that differ in these axes only in one row, in the order of their coordinates."""
        moved = [AXES.index(axis) for axis in axes]
        size = int(np.prod([self.grid.shape[axis] for axis in moved]))
        return np.moveaxis(self.grid, moved, range(-len(moved), 0)).reshape(-1, size)

    def group_of(self, ranks: Sequence[int]) -> Any:
        """A group of these ranks, which every rank of the run makes; None on others, and of one rank."""
        return _own_group(np.array([ranks]), self.rank)

    def _group(self, *axes: str) -> Any:
        """The group of ranks that differ from this one in these axes only."""
        rows = self.rows(*axes)
        key = rows.shape, rows.tobytes()
        if key not in self.groups:
            self.groups[key] = _own_group(rows, self.rank)
        return self.groups[key]


def _own_group(rows: np.ndarray, rank: int) -> Any:
    """Make one group a row; returns the one this rank is in, None when rows have one member."""
    if rows.shape[1] == 1:
        return None
    import paddle.distributed as dist

    own = None
    for row in rows:
        group = dist.new_group([int(r) for r in row])
        if rank in row:
            own = group
    return own
