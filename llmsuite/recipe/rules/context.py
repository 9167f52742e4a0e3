"""The input of the rules between sections."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any

from llmsuite.models.shard_plan import WHOLE, ShardPlan
from llmsuite.schema.degrees import Degrees
from llmsuite.schema.recipe import Recipe
from llmsuite.specs import ModelFamily, StageSpec

if TYPE_CHECKING:
    from llmsuite.devices.base import DeviceBackend


@dataclasses.dataclass(frozen=True)
class RuleContext:
    """A recipe with the model shape, device and stage that it names."""

    recipe: Recipe
    degrees: Degrees
    config: Any
    """The shape of the model; None if it has problems of its own."""
    stage: StageSpec
    family: ModelFamily
    backend: DeviceBackend | None
    """The backend of the device; None when there is no such device."""
    given: Set[tuple[str, ...]]
    """The keys that the recipe or the command line sets, by their parts."""

    @property
    def shard_plan(self) -> ShardPlan:
        return self.family.shard_plan or WHOLE

    @property
    def precisions(self) -> Sequence[str] | None:
        """The precisions of the device; None when there is no such device."""
        return None if self.backend is None else self.backend.precisions_of(self.stage.trains)

    @property
    def product_precisions(self) -> Sequence[str]:
        """Those of them in which the device computes products, and nothing else."""
        return () if self.backend is None else self.backend.training_precisions

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
