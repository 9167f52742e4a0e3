"""What a run needs of the host: memory while a model is loaded and saved, disk space for its checkpoints."""

from __future__ import annotations

import dataclasses
import math

from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.partition import local_slice
from llmsuite.planning.layout import Layout, element_bytes, num_moments


@dataclasses.dataclass(frozen=True)
class Storage:
    """Bytes on disk and in host memory."""

    checkpoint: float
    """The files of one checkpoint: parameters in their dtype, moments and masters in float32."""
    on_disk: float
    """All checkpoints that are kept, and the one being written."""
    loading: float
    """Peak host memory of a rank while it loads the model: its slice of one tensor, as stored and as float32."""
    saving: float
    """Peak host memory of a rank while it saves a checkpoint: a copy of its share, or without `async_save` of one
    tensor."""


def storage(layout: Layout) -> Storage:
    """The storage a run needs."""
    plan = layout.plan
    recipe, width = plan.recipe, element_bytes(plan)
    state = 4 * num_moments(recipe.train.optimizer)
    state += 4 if width < 4 else 0
    sizes = {name: math.prod(shape) for name, shape in layout.shapes.items() if name in layout.trained}
    checkpoint = sum(sizes.values()) * (width + state)
    largest = max((math.prod(shape) for shape in layout.shapes.values()), default=0)
    mesh = Mesh(plan.degrees, 0)
    slices = [local_slice(name, shape, layout.shard_plan, mesh) for name, shape in layout.shapes.items()]
    largest_slice = max(math.prod(s.stop - s.start for s in each) for each in slices)
    share = checkpoint / plan.degrees.num_ranks
    kept = recipe.checkpoint.keep_last + 1 + (recipe.checkpoint.best_metric is not None)
    saving = max(share, 4.0 * largest) if recipe.checkpoint.async_save else 4.0 * largest
    return Storage(float(checkpoint), float(checkpoint * kept), float(largest_slice * (width + 4)), saving)
