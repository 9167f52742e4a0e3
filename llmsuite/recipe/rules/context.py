"""Input of the rules between sections."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any

from llmsuite.contract.schema.degrees import Degrees
from llmsuite.contract.schema.environment import EnvironmentSection
from llmsuite.contract.schema.recipe import Recipe, environment_of, reward_of, rollout_of
from llmsuite.contract.schema.reward import RewardSection
from llmsuite.contract.schema.rollout import RolloutSection
from llmsuite.contract.schema.section import value_at
from llmsuite.contract.schema.stage_keys import HasSplit
from llmsuite.contract.specs import JobSpec, ModelFamily, StageProfile, StageSpec
from llmsuite.models.shard_plan import UNSHARDED, ShardPlan

if TYPE_CHECKING:
    from llmsuite.devices.base import DeviceBackend


@dataclasses.dataclass(frozen=True)
class RuleContext:
    """A recipe with its model config, device and stage."""

    recipe: Recipe
    degrees: Degrees
    config: Any
    """Config of the model; None if it could not be determined."""
    stage: StageSpec | JobSpec
    family: ModelFamily
    backend: DeviceBackend | None
    """Backend of the device; None for an unknown device."""
    given: Set[tuple[str, ...]]
    """Keys that the recipe or the command line sets."""

    @property
    def section(self) -> Any:
        """Section of the stage."""
        return value_at(self.recipe, self.stage.section_name)

    @property
    def rollout(self) -> RolloutSection | None:
        """Section `rollout`; None for a stage without rollouts."""
        if self.profile.updates:
            return rollout_of(self.recipe)
        return None

    @property
    def reward(self) -> RewardSection | None:
        """Section `reward`; None for a stage without rewards."""
        return reward_of(self.recipe)

    @property
    def environment(self) -> EnvironmentSection | None:
        """Section `environment`; None for a stage without environments."""
        return environment_of(self.recipe)

    @property
    def profile(self) -> StageProfile:
        """Profile of the stage for this recipe; without any entries for a job."""
        if isinstance(self.stage, StageSpec):
            return self.stage.profile(self.section)
        return StageProfile()

    @property
    def shard_plan(self) -> ShardPlan:
        """Shard plan of the family; `UNSHARDED` if it has none."""
        return self.family.shard_plan or UNSHARDED

    @property
    def precisions(self) -> Sequence[str] | None:
        """Precisions that the device supports for the stage; None for an unknown device."""
        if self.backend is None:
            return None
        return self.backend.precisions_of(self.stage.trains)

    @property
    def matmul_precisions(self) -> Sequence[str]:
        """Precisions that the device uses for matrix products only, with float32 parameters."""
        if self.backend is None:
            return ()
        return self.backend.training_precisions

    @property
    def num_devices(self) -> int:
        """Number of devices of all machines."""
        return self.recipe.launch.num_devices * self.recipe.launch.nnodes

    @property
    def evaluates(self) -> bool:
        """True where the recipe has evaluation data."""
        # a stage with a key `split` takes its evaluation data from data.train
        splits = isinstance(self.section, HasSplit) and self.section.split
        data = self.recipe.data
        return bool(data.eval or data.holdout is not None or splits)

    @property
    def ranks_per_replica(self) -> int:
        """Product of the degrees that the recipe sets; the data parallel degree is the number of devices divided by
        it."""
        p = self.recipe.parallel
        return p.tensor_parallel_degree * p.pipeline_parallel_degree * p.sharding_parallel_degree
