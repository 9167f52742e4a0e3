"""What the rules between sections look at."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from llmsuite.models.shard_plan import ShardPlan
from llmsuite.schema.degrees import Degrees
from llmsuite.schema.recipe import Recipe
from llmsuite.specs import StageSpec


@dataclasses.dataclass(frozen=True)
class RuleContext:
    """A resolved recipe with what its names stand for."""

    recipe: Recipe
    degrees: Degrees
    config: Any
    """Shape of the model; None when that is wrong itself."""
    shard_plan: ShardPlan
    precisions: Sequence[str] | None
    """Those of the device; None when there is no such device."""
    stage: StageSpec
    """What the recipe runs."""

    @property
    def num_devices(self) -> int:
        return self.recipe.launch.num_devices * self.recipe.launch.nnodes

    @property
    def fixed(self) -> int:
        """Ranks whose number the recipe gives."""
        p = self.recipe.parallel
        return p.tensor_parallel_degree * p.pipeline_parallel_degree * p.sharding_parallel_degree
