"""Prefixes on several ranks: each rank of a tensor parallel group has those of its key-value heads, and puts them in
front of the keys and values of these heads. Nothing is sent.

In programs of whole steps the mesh is [data, tp]: each data rank puts them in front of its own rows, and has a part of
the sum that their gradient is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local, dtensor_to_local

from llmsuite.devices.local_parts import in_whole_step
from llmsuite.models.prefix import PrefixedCore, extended, without_prefix
from llmsuite.parallel.mesh import Mesh
from llmsuite.typing import Tensor

_HEADS = [dist.Shard(2)]
"""Placements over tp of queries, keys and values, [B, L, H, K]."""


def share_prefixes(model: Any, mesh: Mesh) -> None:
    """Let attention with a prefix compute with heads, and in programs of whole steps with rows, that are on several
    ranks."""
    on_ranks = _OnRanks(mesh)  # one for all: compiled layers are alike
    local, extend, remove = on_ranks.local, on_ranks.extend, on_ranks.remove
    for module in model.sublayers():
        core = module.__dict__.get("core")
        if isinstance(core, PrefixedCore):
            core.local, core.extend, core.remove = local, extend, remove


class _OnRanks:
    """What `PrefixedCore` asks for."""

    def __init__(self, mesh: Mesh):
        self._tensor = mesh.tensor

    def local(self, parameter: Tensor) -> Tensor:
        """A parameter's part on this rank. The gradient of one that is whole is that of the rank's heads only: in a
        program a part of the sum, else until `ParameterShard` adds them up."""
        if not parameter.is_dist():
            return parameter
        if not in_whole_step():
            return dtensor_to_local(parameter, self._tensor, parameter.placements)
        mesh = parameter.process_mesh
        of_heads = parameter.placements[-1]
        return dtensor_to_local(parameter, mesh, [dist.Partial(), of_heads if of_heads.is_shard() else dist.Partial()])

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, interleaved: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `prefix.extended`."""
        mesh, placements = self._place(q)
        if mesh is None:
            return extended(q, k, v, keys, values, interleaved)
        q, k, v = (dtensor_to_local(tensor, mesh, placements) for tensor in (q, k, v))
        extended_q, extended_k, extended_v = (
            dtensor_from_local(part, mesh, placements) for part in extended(q, k, v, keys, values, interleaved)
        )
        return extended_q, extended_k, extended_v

    def remove(self, output: Tensor, count: int) -> Tensor:
        """As `prefix.without_prefix`."""
        mesh, placements = self._place(output)
        if mesh is None:
            return without_prefix(output, count)
        return dtensor_from_local(without_prefix(dtensor_to_local(output, mesh, placements), count), mesh, placements)

    def _place(self, x: Tensor) -> tuple[Any, Sequence[Any]]:
        """The mesh that something with heads lies on, and its placements there; None where it is on this rank alone."""
        if in_whole_step():
            return x.process_mesh, x.placements
        return self._tensor, _HEADS
