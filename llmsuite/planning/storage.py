"""Host resources of a run: memory while a model is loaded and saved, disk space for its checkpoints."""

from __future__ import annotations

import dataclasses
import math

from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.partition import local_slice
from llmsuite.planning.layout import Layout, element_bytes, state_bytes
from llmsuite.recipe.plans import TrainPlan


@dataclasses.dataclass(frozen=True)
class Storage:
    """Bytes on disk and in host memory."""

    checkpoint: float
    """Size of one checkpoint: parameters in their dtype, masters in float32, and moments."""
    on_disk: float
    """Size of all checkpoints that are kept, and the one being written."""
    loading: float
    """Peak host memory of a rank while it loads the model: its slice of one tensor, as stored and as float32."""
    saving: float
    """Peak host memory of a rank while it saves a checkpoint: a copy of its shard, or without `async_save` of one
    tensor."""


def storage(layout: Layout, train_plan: TrainPlan) -> Storage:
    """The storage a run needs."""
    degrees = layout.parallel_plan.degrees
    section = train_plan.checkpoint
    width = element_bytes(layout.parallel_plan)
    if width < 4 and train_plan.section.master_weights:
        width += 4
    trained = {name: shape for name, shape in layout.shapes.items() if name in layout.trained}
    moments = sum(state_bytes(train_plan.section, name, shape) for name, shape in trained.items())
    checkpoint = sum(map(math.prod, trained.values())) * width + moments
    largest = max((math.prod(shape) for shape in layout.shapes.values()), default=0)
    mesh = Mesh(degrees, 0)
    slices = [local_slice(name, shape, layout.shard_plan, mesh) for name, shape in layout.shapes.items()]
    largest_slice = 0
    for index in slices:
        largest_slice = max(largest_slice, math.prod(part.stop - part.start for part in index))
    share = checkpoint / degrees.num_ranks
    kept = section.keep_last + 1 + (section.best_metric is not None)
    saving = max(share, 4.0 * largest) if section.async_save else 4.0 * largest
    return Storage(float(checkpoint), float(checkpoint * kept), float(largest_slice * (width + 4)), saving)
