"""A rule: a combination of keys that makes no run, why, and how it is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from llmsuite.models.shard_plan import ShardPlan

if TYPE_CHECKING:
    from llmsuite.plugins.hookspecs import StageSpec
    from llmsuite.recipe.degrees import Degrees
    from llmsuite.recipe.schema import Recipe

Broken = Iterator[tuple[str, str]]
"""(key, message) of each key that breaks a rule."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """A combination that is refused."""

    combination: str
    reason: str
    example: tuple[str, ...]
    """Overrides that make recipes/llama/dpo.json break the rule; none when no override does."""
    check: Callable[[Any], Broken]


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the rules between sections look at."""

    recipe: Recipe
    degrees: Degrees
    config: Any
    """Shape of the model; None when that is wrong itself."""
    cuts: ShardPlan
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
