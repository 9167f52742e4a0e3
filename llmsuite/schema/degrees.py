"""The number of ranks a recipe asks for, and the size of each mesh axis."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmsuite.schema.recipe import Recipe, TrainSection


@dataclasses.dataclass(frozen=True)
class Degrees:
    """Size of each mesh axis. Their product is the number of ranks."""

    pp: int
    dp: int
    sharding: int
    tp: int
    ep: int = 1
    """Neighbouring data ranks that share the routed experts; not an axis of its own."""
    own_meshes: bool = False
    """Whether the model has meshes of its own over all ranks. They get the same samples: to the engine they are one
    tensor parallel group."""

    @property
    def num_ranks(self) -> int:
        return self.pp * self.dp * self.sharding * self.tp

    @property
    def num_data_ranks(self) -> int:
        """Ranks that see different samples."""
        return self.dp * self.sharding

    def __str__(self) -> str:
        if self.own_meshes:
            return f"meshes of the model over {self.num_ranks} ranks"
        experts = f" ep{self.ep}" if self.ep > 1 else ""
        return f"pp{self.pp} dp{self.dp} sharding{self.sharding} tp{self.tp}{experts}"


PER_MACHINE = 8
"""Devices of a machine, where nothing says how many."""


def launch_of(num_devices: int) -> dict[str, int]:
    """The keys of section `launch` for so many devices: whole machines if they divide, else one."""
    machines = num_devices // PER_MACHINE if num_devices % PER_MACHINE == 0 else 1
    return {"num_devices": num_devices // machines, **({"nnodes": machines} if machines > 1 else {})}


def degrees_of(recipe: Recipe, own_meshes: bool = False) -> Degrees:
    """The sizes of the mesh axes that a recipe asks for. `own_meshes`: whether the model has its own."""
    p = recipe.parallel
    world = recipe.launch.num_devices * recipe.launch.nnodes
    if own_meshes:
        return Degrees(1, 1, 1, world, own_meshes=True)
    sharding = p.sharding_parallel_degree
    dp = max(1, world // (p.tensor_parallel_degree * p.pipeline_parallel_degree * sharding))
    if p.sharding != "none" and sharding == 1:
        sharding, dp = dp, 1  # sharding without a degree of its own uses all data ranks
    return Degrees(p.pipeline_parallel_degree, dp, sharding, p.tensor_parallel_degree, p.expert_parallel_degree)


def accumulate_steps(train: TrainSection, degrees: Degrees) -> int | None:
    """Micro-batches of a step on one rank; None where that depends on their lengths."""
    if train.micro_batch_tokens is not None:
        return None
    return train.global_batch_size // (train.micro_batch_size * degrees.num_data_ranks)
