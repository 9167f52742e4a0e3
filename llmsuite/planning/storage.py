"""What a run puts on the host: memory while a model is read and saved, files of its checkpoints."""

from __future__ import annotations

import dataclasses
import math

from llmsuite.planning.layout import BYTES, Layout


@dataclasses.dataclass(frozen=True)
class Storage:
    """In bytes."""

    checkpoint: float
    """Files of one: parameters as they are, moments and masters as float32."""
    on_disk: float
    """Of all that are kept, with the one that is being written."""
    loading: float
    """Host memory of a rank at most, while the model is read: a slice of one tensor, as it is stored and as float32."""
    saving: float
    """Host memory of a rank at most, while a checkpoint is saved: its share, copied before it is written, or without
    `async_save` one tensor."""


def storage(layout: Layout) -> Storage:
    """Of a run."""
    plan = layout.plan
    recipe, width = plan.recipe, BYTES[plan.recipe.engine.precision]
    state = 8 if recipe.train.optimizer == "adamw" else 0
    state += 4 if width < 4 else 0
    sizes = {name: math.prod(shape) for name, shape in layout.shapes.items() if name in layout.trained}
    checkpoint = sum(sizes.values()) * (width + state)
    largest = max((math.prod(shape) for shape in layout.shapes.values()), default=0)
    ep, tp = plan.degrees.ep, plan.degrees.tp
    parts = [
        math.prod(shape) / ((tp if layout.cuts.dim(n) is not None else 1) * (ep if layout.cuts.is_expert(n) else 1))
        for n, shape in layout.shapes.items()
    ]
    share = checkpoint / plan.degrees.num_ranks
    kept = recipe.checkpoint.keep_last + 1 + (recipe.checkpoint.best_metric is not None)
    saving = max(share, 4.0 * largest) if recipe.checkpoint.async_save else 4.0 * largest
    return Storage(float(checkpoint), float(checkpoint * kept), max(parts) * (width + 4), saving)
