"""Interventions on hidden states under tensor parallel.

Every rank has their parameters whole, and computes with its own tokens: with all of them, or under sequence parallel
with a part of each row. Then the gradients of the parameters are sums over the ranks; in programs of whole steps Paddle
adds them up.
"""

from __future__ import annotations

from typing import Any

import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local, dtensor_to_local

from llmsuite.devices.local_parts import in_whole_step
from llmsuite.models.reft import Intervention, chosen, intervene
from llmsuite.parallel.gradients import SumGradients
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.tensor import between_layers, reshard
from llmsuite.typing import Tensor


def share_interventions(model: Any, mesh: Mesh, sequence_parallel: bool) -> None:
    """Let the interventions of a model compute with activations as they lie between its layers."""
    if mesh.tensor is None:
        return
    found: list[Any] = [module for module in model.sublayers() if isinstance(module, Intervention)]
    for module in found:
        module.forward = SharedIntervention(module, mesh, sequence_parallel).forward


class SharedIntervention:
    """`Intervention.forward` for distributed tensors; every rank of the group calls it."""

    def __init__(self, module: Intervention, mesh: Mesh, sequence_parallel: bool):
        self._module, self._mesh, self._is_cut = module, mesh, sequence_parallel
        self._placements = between_layers(sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, D] to [B, L, D], as activations lie between layers."""
        if in_whole_step():
            x = reshard(x, self._mesh, self._placements)
            # while it is integers, as Paddle 3.3.1 places no 16 bits like that
            return intervene(x, dist.reshard(chosen(), x.process_mesh, x.placements), *self._module.parts())
        tensor = self._mesh.tensor
        here = dtensor_to_local(reshard(x, self._mesh, self._placements), tensor, self._placements)
        parts = [dtensor_to_local(part, tensor, [dist.Replicate()]) for part in self._module.parts()]
        is_chosen = chosen()
        if self._is_cut:
            parts = [SumGradients.apply(part, self._mesh.tensor_group) for part in parts]
            length, at = here.shape[1], self._mesh.coordinate["tp"]
            is_chosen = is_chosen[:, at * length : (at + 1) * length]
        return dtensor_from_local(intervene(here, is_chosen, *parts), tensor, self._placements)
