"""Prefixes (prefix tuning) on several ranks: each rank of a tensor parallel group has the prefixes of its key-value
heads, and prepends them to the keys and values of these heads. Nothing is sent.

In step programs the mesh is [data, tp]: each data rank prepends the prefixes to its own rows, and has a partial sum of
their gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local, dtensor_to_local

from llmsuite.adapters.layers.prefix import PrefixedCore, extended, without_prefix
from llmsuite.base.typing import Tensor
from llmsuite.devices.local_parts import is_tracing_step_program
from llmsuite.models.blocks import WithCore
from llmsuite.parallel.mesh import Mesh

_HEADS = [dist.Shard(2)]
"""Placements over tp of queries, keys and values, [B, L, H, K]."""


def parallelize_prefixes(model: Any, mesh: Mesh) -> None:
    """Make attention with a prefix compute with heads, and in step programs with rows, that are split over ranks."""
    shards = _PrefixShards(mesh)  # one object for all layers: compiled layers have to be alike
    local = shards.local
    extend = shards.extend
    remove = shards.remove
    for module in model.sublayers():
        if isinstance(module, WithCore) and isinstance(module.core, PrefixedCore):
            module.core.local = local
            module.core.extend = extend
            module.core.remove = remove


class _PrefixShards:
    """Replacements of the methods of `PrefixedCore` for tensors that are split over ranks."""

    def __init__(self, mesh: Mesh):
        self._tensor = mesh.tensor

    def local(self, parameter: Tensor) -> Tensor:
        """This rank's shard of a parameter. The gradient of a replicated parameter comes from the rank's heads only: in
        a program it is a partial sum, otherwise `ParameterShard` sums it."""
        if not parameter.is_dist():
            return parameter
        if not is_tracing_step_program():
            return dtensor_to_local(parameter, self._tensor, parameter.placements)
        mesh = parameter.process_mesh
        over_tp = parameter.placements[-1]
        return dtensor_to_local(parameter, mesh, [dist.Partial(), over_tp if over_tp.is_shard() else dist.Partial()])

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, interleaved: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values with the prefix prepended, see `prefix.extended`."""
        mesh, placements = self._layout(q)
        if mesh is None:
            return extended(q, k, v, keys, values, interleaved)
        q, k, v = (dtensor_to_local(tensor, mesh, placements) for tensor in (q, k, v))
        extended_q, extended_k, extended_v = (
            dtensor_from_local(part, mesh, placements) for part in extended(q, k, v, keys, values, interleaved)
        )
        return extended_q, extended_k, extended_v

    def remove(self, output: Tensor, count: int) -> Tensor:
        """The output without the positions of the prefix, see `prefix.without_prefix`."""
        mesh, placements = self._layout(output)
        if mesh is None:
            return without_prefix(output, count)
        return dtensor_from_local(without_prefix(dtensor_to_local(output, mesh, placements), count), mesh, placements)

    def _layout(self, x: Tensor) -> tuple[Any, Sequence[Any]]:
        """Mesh and placements of a tensor with heads; the mesh is None where the tensor is on this rank only."""
        if is_tracing_step_program():
            return x.process_mesh, x.placements
        return self._tensor, _HEADS
