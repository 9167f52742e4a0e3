"""Cost of `lora.init: lora_ga` before the first step: memory of a rank in addition to that of a step, and FLOPs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from llmsuite.adapters.lora import FIRST_FACTOR, SECOND_FACTOR
from llmsuite.planning.layout import Layout, LocalParameter, element_bytes


def lora_ga_bytes(layout: Layout, held: Sequence[LocalParameter], tokens: int) -> float:
    """Peak of float32 gradients, in bytes. During the passes these are the sums for the matrices of one pass, the
    gradient of one micro-batch and the activations it is computed from; afterwards the sums and two copies of a full
    gradient. 0 for other adapters.

    Args:
        layout: of the run.
        held: parameters of the rank.
        tokens: of the largest micro-batch.
    """
    lora = layout.model_plan.lora
    if lora.rank is None or not lora.adapter_method.needs_gradients:
        return 0.0
    inputs = _sizes_by_module(held, FIRST_FACTOR, 0)
    outputs = _sizes_by_module(held, SECOND_FACTOR, 1)
    if not inputs:  # a part of the pipeline without adapters
        return 0.0
    sizes = [inputs[module] * outputs[module] for module in inputs]
    together = -(-len(sizes) // lora.init_passes)
    sums = max(sum(sizes[at : at + together]) for at in range(0, len(sizes), together))
    is_cast = element_bytes(layout.parallel_plan) != 4
    one = max(inputs[m] * outputs[m] + is_cast * tokens * (inputs[m] + outputs[m]) for m in inputs)
    full = max(math.prod(layout.shapes[f"{module}.weight"]) for module in inputs)
    return 4.0 * (sums + max(one, 2 * full))


def _sizes_by_module(held: Sequence[LocalParameter], factor: str, dim: int) -> dict[str, int]:
    """The size of a dim of the adapters' factors of this name, by module."""
    return {h.name.removesuffix(f".{factor}"): h.local_shape[dim] for h in held if h.name.endswith(f".{factor}")}


def num_lora_ga_steps(layout: Layout) -> int:
    """Number of steps whose passes run before the first one, without an update; 0 for other adapters."""
    lora = layout.model_plan.lora
    if lora.rank is None or not lora.adapter_method.needs_gradients:
        return 0
    return lora.init_batches * lora.init_passes


def lora_ga_gradient_flops(layout: Layout, tokens: int) -> float:
    """FLOPs of the gradients of all adapted matrices, over all ranks, which the backward passes of a step do not
    compute: each once for each batch, however many matrices a pass takes. 0 for other adapters.

    Args:
        layout: of the run.
        tokens: of a step, over all ranks.
    """
    if not num_lora_ga_steps(layout):
        return 0.0
    values = sum(math.prod(layout.shapes[f"{module}.weight"]) for module in layout.adapted)
    return 2.0 * values * tokens * layout.model_plan.lora.init_batches
