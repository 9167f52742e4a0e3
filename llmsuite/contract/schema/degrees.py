"""The size of each mesh axis and the number of ranks, derived from a recipe."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmsuite.contract.schema.recipe import Recipe, TrainSection


@dataclasses.dataclass(frozen=True)
class Degrees:
    """The size of each mesh axis; the product of pp, dp, sharding and tp is the number of ranks."""

    pp: int
    dp: int
    sharding: int
    tp: int
    ep: int = 1
    """Number of neighbouring data ranks that split the routed experts; not a separate axis of the mesh."""
    auto_parallel: bool = False
    """True where an auto-parallel model places its parameters itself. All ranks then get the same samples, as one
    tensor parallel group of the engine."""

    @property
    def num_ranks(self) -> int:
        return self.pp * self.dp * self.sharding * self.tp

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks that get different samples."""
        return self.dp * self.sharding

    def __str__(self) -> str:
        if self.auto_parallel:
            return f"meshes of the model over {self.num_ranks} ranks"
        experts = f" ep{self.ep}" if self.ep > 1 else ""
        return f"pp{self.pp} dp{self.dp} sharding{self.sharding} tp{self.tp}{experts}"


DEVICES_PER_MACHINE = 8
"""Devices of a machine where nothing specifies the number."""


def launch_section(num_devices: int) -> dict[str, int]:
    """Return section `launch` for a number of devices: machines of 8 if 8 divides it, else one machine."""
    machines = 1
    if num_devices % DEVICES_PER_MACHINE == 0:
        machines = num_devices // DEVICES_PER_MACHINE
    section = {"num_devices": num_devices // machines}
    if machines > 1:
        section["nnodes"] = machines
    return section


def degrees_of(recipe: Recipe, auto_parallel: bool = False) -> Degrees:
    """Return the size of each mesh axis for a recipe; `auto_parallel` is that of `Degrees`."""
    p = recipe.parallel
    world = recipe.launch.num_devices * recipe.launch.nnodes
    if auto_parallel:
        return Degrees(1, 1, 1, world, auto_parallel=True)
    sharding = p.sharding_parallel_degree
    dp = max(1, world // (p.tensor_parallel_degree * p.pipeline_parallel_degree * sharding))
    if p.sharding != "none" and sharding == 1:
        sharding = dp  # sharding without a degree of its own uses all data ranks
        dp = 1
    return Degrees(p.pipeline_parallel_degree, dp, sharding, p.tensor_parallel_degree, p.expert_parallel_degree)


def accumulate_steps(train: TrainSection, degrees: Degrees) -> int | None:
    """Return the number of micro-batches of a step on one rank; None where it depends on their lengths."""
    if train.micro_batch_tokens is not None:
        return None
    return train.global_batch_size // (train.micro_batch_size * degrees.num_data_ranks)
