"""What `lora.init: lora_ga` takes before the first step: memory of a rank beside that of a step's passes, and FLOPs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from llmsuite.models.shard_plan import FIRST_FACTOR, SECOND_FACTOR
from llmsuite.planning.layout import Layout, LocalParameter, element_bytes


def beginning_bytes(layout: Layout, held: Sequence[LocalParameter], tokens: int) -> float:
    """The most bytes of float32 gradients at once. During the passes: the sums for the matrices of one pass, beside
    them the gradient of one micro-batch and the activations it is made of. Behind them: those sums and two copies of a
    whole gradient. 0 for other adapters.

    Args:
        layout: of the run.
        held: parameters of the rank.
        tokens: of the largest micro-batch.
    """
    lora = layout.plan.recipe.lora
    if lora.rank is None or lora.init != "lora_ga":
        return 0.0
    inputs, outputs = (
        {h.name.removesuffix(f".{kind}"): h.local_shape[dim] for h in held if h.name.endswith(f".{kind}")}
        for kind, dim in ((FIRST_FACTOR, 0), (SECOND_FACTOR, 1))
    )
    if not inputs:  # a part of the pipeline without adapters
        return 0.0
    sizes = [inputs[module] * outputs[module] for module in inputs]
    together = -(-len(sizes) // lora.init_passes)
    sums = max(sum(sizes[at : at + together]) for at in range(0, len(sizes), together))
    is_cast = element_bytes(layout.plan) != 4
    one = max(inputs[m] * outputs[m] + is_cast * tokens * (inputs[m] + outputs[m]) for m in inputs)
    whole = max(math.prod(layout.shapes[f"{module}.weight"]) for module in inputs)
    return 4.0 * (sums + max(one, 2 * whole))


def num_beginning_steps(layout: Layout) -> int:
    """Steps whose passes are done before the first one, without an update; 0 for other adapters."""
    lora = layout.plan.recipe.lora
    return 0 if lora.rank is None or lora.init != "lora_ga" else lora.init_batches * lora.init_passes


def gradient_flops(layout: Layout, tokens: int) -> float:
    """FLOPs of the gradients of all adapted matrices, over all ranks, which the backward passes of a step do not
    compute: each once for each batch, whatever part of them a pass takes. 0 for other adapters.

    Args:
        layout: of the run.
        tokens: of a step, over all ranks.
    """
    if not num_beginning_steps(layout):
        return 0.0
    values = sum(math.prod(layout.shapes[f"{module}.weight"]) for module in layout.adapted)
    return 2.0 * values * tokens * layout.plan.recipe.lora.init_batches
