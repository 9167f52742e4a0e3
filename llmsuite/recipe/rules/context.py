"""The input of the rules between sections."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from typing import Any

from llmsuite.models.shard_plan import ShardPlan
from llmsuite.schema.degrees import Degrees
from llmsuite.schema.recipe import Recipe
from llmsuite.specs import ModelFamily, StageSpec


@dataclasses.dataclass(frozen=True)
class RuleContext:
    """A recipe with the model shape, device and stage that it names."""

    recipe: Recipe
    degrees: Degrees
    config: Any
    """The shape of the model; None if it has problems of its own."""
    shard_plan: ShardPlan
    precisions: Sequence[str] | None
    """The precisions of the device; None when there is no such device."""
    product_precisions: Sequence[str]
    """Those of them in which the device computes products, and nothing else: `DeviceBackend.training_precisions`."""
    stage: StageSpec
    family: ModelFamily
    given: Set[tuple[str, ...]]
    """The keys that the recipe or the command line sets, by their parts."""

    @property
    def num_devices(self) -> int:
        return self.recipe.launch.num_devices * self.recipe.launch.nnodes

    @property
    def evaluates(self) -> bool:
        """Whether there is anything to evaluate on."""
        # a stage with a key `split` takes its evaluation data from data.train
        split = getattr(getattr(self.recipe, self.recipe.stage, None), "split", None)
        return bool(self.recipe.data.eval or split)

    @property
    def fixed(self) -> int:
        """The product of the degrees that the recipe sets; the data parallel degree follows from it."""
        p = self.recipe.parallel
        return p.tensor_parallel_degree * p.pipeline_parallel_degree * p.sharding_parallel_degree
