"""A plan of a run in numbers, put together from memory, traffic, schedule and cost."""

from __future__ import annotations

import dataclasses
import math

from llmsuite.errors import UserError
from llmsuite.models.anatomy import Anatomy
from llmsuite.planning.activations import Pass
from llmsuite.planning.layout import Layout
from llmsuite.planning.memory import StageMemory, full_pass, memory
from llmsuite.recipe.resolve import RunPlan


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a run will take."""

    plan: RunPlan
    layout: Layout
    anatomy: Anatomy
    batch: Pass
    """Of a micro-batch."""
    num_micro_batches: int
    """Of a step, on one rank."""
    stages: list[StageMemory]

    @property
    def peak(self) -> float:
        """Of the rank that has most, in bytes."""
        return max(stage.peak for stage in self.stages)


def estimate(plan: RunPlan, layout: Layout | None = None) -> Estimate:
    """Of a run whose micro-batches are full.

    Raises:
        UserError: the family does not say what it is made of.
    """
    layout = layout or Layout(plan)
    anatomy = anatomy_of(plan)
    batch = full_pass(plan)
    count = micro_batches(plan, batch)
    return Estimate(plan, layout, anatomy, batch, count, memory(layout, anatomy, batch, count))


def anatomy_of(plan: RunPlan) -> Anatomy:
    """Of the run's model. Raises UserError when its family does not say."""
    if plan.family.anatomy is None:
        raise UserError(
            f"model.family: {plan.family.name} has no `anatomy`, without which nothing can be planned; see "
            "docs/plugins.md"
        )
    return plan.family.anatomy(plan.model_config)


def micro_batches(plan: RunPlan, batch: Pass) -> int:
    """Of a step, on one rank; where they are made by tokens, as many as full ones are."""
    if plan.accumulate_steps is not None:
        return plan.accumulate_steps
    samples = max(1, batch.rows // plan.stage.rows_per_sample)
    return math.ceil(plan.recipe.train.global_batch_size / (samples * plan.degrees.num_data_ranks))
