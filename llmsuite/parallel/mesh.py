"""The ranks of a run as a grid: pipeline stage, data (dp x sharding), tensor.

Dynamic mode treats the two kinds of axes differently. Along `tp` tensors are distributed tensors and Paddle's SPMD
rules insert the communication; along the data axes every rank computes on samples of its own, and the engine sums
gradients and ledgers once a step. So a stage's code sees plain batches of its own length, and with tp = 1 plain
tensors.

Expert parallel takes no ranks of its own: neighbours on the data axes split the experts. For those parameters the same
ranks form another grid, `Mesh.expert_mesh`, whose data axes are shorter by that factor.

The grid needs no Paddle. Groups, which do, are made when they are first used.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmsuite.contract.schema.degrees import Degrees

AXES = ("pp", "dp", "sharding", "ep", "tp")
TENSOR = "tp"
DATA = "data"
SHARDING = "sharding"
DP = "dp"
EXPERT = "ep"
MODEL = "model"
TIED = "tied"
"""First and last pipeline stage, which both hold a tied embedding."""
RUN = "run"
"""All ranks."""
LOADER_RANKS = "loaders"
"""The ranks that load data."""
GROUP_AXES: Mapping[str, Sequence[str]] = {
    TENSOR: ("tp",),
    DATA: ("dp", "sharding"),
    SHARDING: ("sharding",),
    DP: ("dp",),
    EXPERT: ("ep",),
    MODEL: ("pp", "tp"),
}
"""The kinds of groups along axes, and the axes along which the ranks of a group of each kind differ."""


@dataclasses.dataclass(frozen=True)
class Mesh:
    """This rank's coordinates in the grid, and the process groups it belongs to."""

    degrees: Degrees
    rank: int
    ep_size: int = 1
    """Size of the axis ep; above 1 in an expert mesh only."""
    groups: dict[Any, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    """The groups made so far, by all their ranks, and by their kind. The expert mesh reuses groups of equal ranks."""

    @functools.cached_property
    def grid(self) -> np.ndarray:
        """[pp, dp, sharding, ep, tp]: the rank at each coordinate. Ranks along tp are neighbours on a machine, because
        they communicate most."""
        d = self.degrees
        return np.arange(d.num_ranks * self.ep_size).reshape(d.pp, d.dp, d.sharding, self.ep_size, d.tp)

    @functools.cached_property
    def expert_mesh(self) -> Mesh:
        """The mesh of routed experts: ranks along ep have different experts, ranks along dp and sharding the same."""
        d = self.degrees
        ep = self.degrees.ep
        if ep == 1:
            return self
        sharding = max(1, d.sharding // ep)
        degrees = dataclasses.replace(d, dp=d.num_data_ranks // (ep * sharding), sharding=sharding, ep=1)
        return Mesh(degrees, self.rank, ep, self.groups)

    @functools.cached_property
    def coordinate(self) -> dict[str, int]:
        """This rank's coordinate on each axis."""
        position = np.argwhere(self.grid == self.rank)[0]
        return dict(zip(AXES, (int(i) for i in position)))

    @property
    def data_rank(self) -> int:
        """Number of the part of a batch that this rank computes with."""
        return self.coordinate["dp"] * self.degrees.sharding + self.coordinate["sharding"]

    @property
    def counts_losses(self) -> bool:
        """True on ranks that book losses: one of each tensor parallel group of the last pipeline stage."""
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
        """This rank's tensor parallel group; None when tp is 1."""
        return self.group(TENSOR)

    @functools.cached_property
    def data_group(self) -> Any:
        """Ranks that hold the same parameters and compute with other samples; None when there is one rank."""
        return self.group(DATA)

    @functools.cached_property
    def dp_group(self) -> Any:
        """Ranks of the data group that own the same shard of a parameter; None when there is one rank."""
        return self.group(DP)

    @functools.cached_property
    def sharding_group(self) -> Any:
        """Ranks that parameters and optimizer states are sharded over; None when there is one rank."""
        return self.group(SHARDING)

    @functools.cached_property
    def expert_group(self) -> Any:
        """In an expert mesh: the ranks that together have all experts; None when each rank has all."""
        return self.group(EXPERT)

    @property
    def expert_part(self) -> int:
        """Number of this rank's part of a stack of experts, which ep cuts, and tp again: consecutive experts each."""
        return self.expert_mesh.coordinate["ep"] * self.degrees.tp + self.coordinate["tp"]

    @property
    def loads_data(self) -> bool:
        """True on ranks that load data: the first pipeline stage needs ids, the last one targets."""
        return self.coordinate["pp"] in (0, self.degrees.pp - 1)

    @property
    def loaders(self) -> str:
        """The kind of the group of the ranks that load data."""
        return LOADER_RANKS if self.has_middle_stages else RUN

    @functools.cached_property
    def loader_ranks(self) -> list[int]:
        """The ranks that load data, in ascending order."""
        return sorted({int(rank) for rank in self.grid[[0, -1]].flat})

    @property
    def has_middle_stages(self) -> bool:
        """True where the pipeline has stages between the first and the last: their ranks load no data."""
        return self.degrees.pp > 2

    @functools.cached_property
    def loader_group(self) -> Any:
        """The group of the ranks that load data; None in the middle of a pipeline, and when all ranks load data."""
        return _own_group(self.grid[[0, -1]].reshape(1, -1), self.rank) if self.has_middle_stages else None

    def pipelines(self) -> list[list[int]]:
        """The ranks of every pipeline, which differ in their stage only, in the order of the stages; none where pp is
        1."""
        if self.degrees.pp == 1:
            return []
        return self.grid.reshape(self.degrees.pp, -1).T.tolist()

    @functools.cached_property
    def pipeline_group(self) -> Any:
        """The ranks of this rank's pipeline; None without one."""
        return self._group("pp")

    @functools.cached_property
    def tied_group(self) -> Any:
        """First and last stage of this rank's pipeline, for tied weights that both have; None on other stages and
        without a pipeline."""
        ends = [[ranks[0], ranks[-1]] for ranks in self.pipelines()]
        return _own_group(np.array(ends), self.rank) if ends else None

    @functools.cached_property
    def model_group(self) -> Any:
        """Ranks that compute with parts of one model for the same samples; None when there is one rank. It is made only
        for parameters that all of them have (`prefix_shapes.is_shared_by_all_ranks`)."""
        return self.group(MODEL)

    def make_groups(self) -> None:
        """Make every group now. Making a group is a collective call: all ranks must make all groups, in the same
        order."""
        _ = self.tensor, self.tensor_group, self.data_group, self.dp_group, self.sharding_group
        _ = self.pipeline_group, self.tied_group, self.loader_group
        experts = self.expert_mesh
        _ = experts.expert_group, experts.tensor_group, experts.data_group, experts.dp_group, experts.sharding_group

    def group(self, kind: str) -> Any:
        """This rank's group of a kind of `GROUP_AXES`, or `TIED`; None when there is one rank."""
        if kind == TIED:
            return self.tied_group
        key = self.ep_size, kind
        if key not in self.groups:
            self.groups[key] = self._group(*GROUP_AXES[kind])
        return self.groups[key]

    def group_size(self, kind: str) -> int:
        """Number of ranks in a group of a kind of `GROUP_AXES`."""
        degrees = self.degrees
        sizes = {
            "pp": degrees.pp,
            "dp": degrees.dp,
            "sharding": degrees.sharding,
            "ep": self.ep_size,
            "tp": degrees.tp,
        }
        return math.prod(sizes[axis] for axis in GROUP_AXES[kind])

    def rows(self, *axes: str) -> np.ndarray:
        """All ranks [groups, members]: a row has the ranks that differ in `axes` only, in the order of their
        coordinates."""
        moved = [AXES.index(axis) for axis in axes]
        size = int(np.prod([self.grid.shape[axis] for axis in moved]))
        return np.moveaxis(self.grid, moved, range(-len(moved), 0)).reshape(-1, size)

    def group_of(self, ranks: Sequence[int]) -> Any:
        """A group of these ranks. Every rank of the run calls it; None on other ranks, and for one rank."""
        return _own_group(np.array([ranks]), self.rank)

    def _group(self, *axes: str) -> Any:
        """The group of ranks that differ from this one in `axes` only."""
        rows = self.rows(*axes)
        key = rows.shape, rows.tobytes()  # the same key on all ranks, so all of them find or make the group
        if key not in self.groups:
            self.groups[key] = _own_group(rows, self.rank)
        return self.groups[key]


def _own_group(rows: np.ndarray, rank: int) -> Any:
    """Make a group of each row; returns the group of this rank, None when rows have one member."""
    if rows.shape[1] == 1:
        return None
    import paddle.distributed as dist

    own = None
    for row in rows:  # also groups without this rank: `new_group` is collective over the run
        group = dist.new_group([int(r) for r in row])
        if rank in row:
            own = group
    return own
