"""Prefixes under tensor parallel: each rank has those of its key-value heads, and puts them in front of the keys and
values of these heads. Nothing is sent."""

from __future__ import annotations

from typing import Any

import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local, dtensor_to_local

from llmsuite.models.prefix import PrefixedCore, extended, without_prefix
from llmsuite.parallel.mesh import Mesh
from llmsuite.typing import Tensor

_HEADS = [dist.Shard(2)]
"""Placements over tp of queries, keys and values, [B, L, H, K]."""


def share_prefixes(model: Any, mesh: Mesh) -> None:
    """Let attention with a prefix compute with heads that are on several ranks."""
    if mesh.tensor is None:
        return
    local, extend, remove = (
        _local_on(mesh),
        _extend_on(mesh),
        _remove_on(mesh),
    )  # one for all: compiled layers are alike
    for module in model.sublayers():
        core = module.__dict__.get("core")
        if isinstance(core, PrefixedCore):
            core.local, core.extend, core.remove = local, extend, remove


def _local_on(mesh: Mesh) -> Any:
    """A parameter's part on this rank. The gradient of one that is whole is that of the rank's heads only, until
    `ParameterShard` adds them up."""
    return lambda parameter: dtensor_to_local(parameter, mesh.tensor, parameter.placements)


def _extend_on(mesh: Mesh) -> Any:
    def extend(
        q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, interleaved: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (dtensor_to_local(tensor, mesh.tensor, _HEADS) for tensor in (q, k, v))
        extended_q, extended_k, extended_v = (
            dtensor_from_local(part, mesh.tensor, _HEADS) for part in extended(q, k, v, keys, values, interleaved)
        )
        return extended_q, extended_k, extended_v

    return extend


def _remove_on(mesh: Mesh) -> Any:
    def remove(output: Tensor, count: int) -> Tensor:
        here = dtensor_to_local(output, mesh.tensor, _HEADS)
        return dtensor_from_local(without_prefix(here, count), mesh.tensor, _HEADS)

    return remove
