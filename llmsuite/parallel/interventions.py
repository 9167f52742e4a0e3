"""Interventions on hidden states under tensor parallel.

The parameters of interventions are replicated. Each rank computes with its own tokens: with all of them, or under
sequence parallel with a part of each row. Then the gradients of the parameters are sums over the ranks; in step
programs Paddle adds them up.
"""

from __future__ import annotations

from typing import Any

import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local, dtensor_to_local

from llmsuite.adapters.layers.reft import Edit, Intervention, chosen, intervene
from llmsuite.base.typing import Tensor
from llmsuite.devices.local_parts import is_tracing_step_program
from llmsuite.parallel.gradients import SumGradients
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.tensor import between_layers, reshard


def parallelize_interventions(model: Any, mesh: Mesh, sequence_parallel: bool) -> None:
    """Make the interventions of a model compute with activations in their placements between layers."""
    if mesh.tensor is None:
        return
    found: list[Any] = [module for module in model.sublayers() if isinstance(module, Intervention)]
    edit = ParallelEdit(mesh, sequence_parallel)
    for module in found:
        module.edit = edit


class ParallelEdit(Edit):
    """Edit of distributed tensors; every rank of the group makes it."""

    def __init__(self, mesh: Mesh, sequence_parallel: bool):
        self._mesh = mesh
        self._is_cut = sequence_parallel
        self._placements = between_layers(sequence_parallel)

    def run(self, intervention: Intervention, x: Tensor) -> Tensor:
        """[B, L, D] to [B, L, D], both in the placements of activations between layers."""
        if is_tracing_step_program():
            x = reshard(x, self._mesh, self._placements)
            # placed while its elements are integers: Paddle 3.3.1 cannot place 16-bit tensors this way
            return intervene(x, dist.reshard(chosen(), x.process_mesh, x.placements), *intervention.parts())
        tensor = self._mesh.tensor
        local = dtensor_to_local(reshard(x, self._mesh, self._placements), tensor, self._placements)
        parts = [dtensor_to_local(part, tensor, [dist.Replicate()]) for part in intervention.parts()]
        is_chosen = chosen()
        if self._is_cut:
            # each rank's gradient comes from its part of the sequence only
            parts = [SumGradients.apply(part, self._mesh.tensor_group) for part in parts]
            length = local.shape[1]
            at = self._mesh.coordinate["tp"]
            is_chosen = is_chosen[:, at * length : (at + 1) * length]
        return dtensor_from_local(intervene(local, is_chosen, *parts), tensor, self._placements)
