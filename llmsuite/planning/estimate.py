"""The estimate of a run: memory, traffic, schedule and cost put together."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from llmsuite.errors import UserError
from llmsuite.models.anatomy import Anatomy
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.schedule import Kind
from llmsuite.planning.activations import MicroBatch
from llmsuite.planning.beginning import gradient_flops, num_beginning_steps
from llmsuite.planning.communication import Counts, Traffic, model_prepasses
from llmsuite.planning.cost import FAST, SLOW, Efficiency, Hardware, PartCost, communication_time, part_costs
from llmsuite.planning.layout import Layout, ranks
from llmsuite.planning.memory import StageMemory, full_micro_batch, memory
from llmsuite.planning.rollouts import rollout_seconds
from llmsuite.planning.schedule import Timeline, length, orders, simulate, turns_of
from llmsuite.planning.storage import Storage, storage
from llmsuite.recipe.critic import critic_plan
from llmsuite.recipe.resolve import RunPlan


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The memory, traffic and time a run is expected to take."""

    plan: RunPlan
    layout: Layout
    anatomy: Anatomy
    batch: MicroBatch
    """The shape of a full micro-batch."""
    num_micro_batches: int
    """Micro-batches of a step on one rank."""
    stages: list[StageMemory]
    traffic: list[Counts]
    """Messages in a step, of one rank of each pipeline stage."""
    costs: list[PartCost]
    """FLOPs of each part of the model."""
    critic: Estimate | None = None
    """Messages and FLOPs of the critic, whose passes follow on those of the model; None without one."""

    @functools.cached_property
    def timeline(self) -> Timeline:
        """The schedule in time, in FLOPs of a rank, for as many micro-batches as show it: later ones repeat."""
        return simulate(orders(*self._played), *self._flops_of_parts)

    @functools.cached_property
    def storage(self) -> Storage:
        return storage(self.layout)

    @property
    def _flops_of_parts(self) -> tuple[list[float], list[float]]:
        """FLOPs of a forward pass and of a backward pass, for each part."""
        return [cost.forward for cost in self.costs], [cost.backward for cost in self.costs]

    @property
    def peak(self) -> float:
        """Peak memory of the fullest rank, in bytes."""
        return max(stage.peak for stage in self.stages)

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all ranks."""
        return self.batch.tokens * self.num_micro_batches * self.plan.degrees.num_data_ranks

    @property
    def flops(self) -> float:
        """FLOPs of a step, over all ranks, including recompute and pre-passes."""
        each = sum((1 + self._prepass_rows) * cost.forward + cost.backward for cost in self.costs)
        own = each * self.num_micro_batches * self.plan.degrees.num_data_ranks
        return own if self.critic is None else own + self.critic.flops

    @property
    def beginning_flops(self) -> float:
        """FLOPs before the first step, over all ranks: passes of steps that leave gradients of adapted matrices."""
        return num_beginning_steps(self.layout) * self.flops + gradient_flops(self.layout, self.tokens)

    def beginning_seconds(self, device: Hardware) -> tuple[float, float]:
        """The shortest and the longest time these passes are likely to take; a pass counts as a step with its
        messages."""
        products = gradient_flops(self.layout, self.tokens) / (device.flops * self.plan.degrees.num_ranks)
        count = num_beginning_steps(self.layout)
        fast, slow = (
            count * seconds + products / efficiency.flops
            for seconds, efficiency in zip(self.step_seconds(device), (FAST, SLOW))
        )
        return fast, slow

    def step_seconds(self, device: Hardware) -> tuple[float, float]:
        """The shortest and the longest time a step is likely to take."""
        return self._seconds(device, FAST), self._seconds(device, SLOW)

    def _seconds(self, device: Hardware, efficiency: Efficiency) -> float:
        plan, tp = self.plan, self.plan.degrees.tp
        times = [communication_time(self.layout, counts, device, efficiency) for counts in self.traffic]
        # messages inside of passes count towards them: a third to the forward pass, the rest to the backward pass
        each = [time.in_passes / (self.num_micro_batches * self._num_chunks) for time in times]
        speed = device.flops * efficiency.flops * tp
        pp = plan.degrees.pp
        if len(each) < pp:  # the stages between the ends are alike
            each = [each[0], *each[1:2] * (pp - 2), each[-1]]
        forward = [c.forward / speed + each[i % pp] / 3 for i, c in enumerate(self.costs)]
        backward = [c.backward / speed + each[i % pp] * 2 / 3 for i, c in enumerate(self.costs)]
        transfer = max(time.pipeline_message for time in times)
        played = length(turns_of(*self._played), forward, backward, transfer)
        # pre-passes go forward only: each micro-batch takes as long as on the busiest rank, once the first got there
        busiest = max(sum(forward[stage::pp]) for stage in range(pp))
        prepasses = self._prepass_rows * ((self.num_micro_batches - 1) * busiest + sum(forward))
        own = self._length(played, forward, backward) + prepasses + max(time.at_the_end for time in times)
        return own if self.critic is None else own + self.critic._seconds(device, efficiency)

    def rollout_seconds(self, device: Hardware) -> tuple[float, float] | None:
        """The shortest and the longest time that drawing for a step is likely to take, with completions as long as can
        be. None where others draw, or the speed of the device's memory is not known."""
        fast, slow = (rollout_seconds(self.layout, self.anatomy, device, by) for by in (FAST, SLOW))
        return None if fast is None or slow is None else (fast, slow)

    @property
    def _prepass_rows(self) -> int:
        """Rows of all forward passes before a step, as a multiple of those of the global batch."""
        return sum(prepass.rows for prepass in model_prepasses(self.plan))

    @property
    def _num_chunks(self) -> int:
        return self.plan.num_chunks if self.plan.degrees.pp > 1 else 1

    @property
    def _num_played(self) -> int:
        return num_played(self.plan, self.num_micro_batches)

    @property
    def _played(self) -> tuple[Kind, int, int, int]:
        """The simulated schedule, as arguments of `orders`."""
        return self.plan.schedule, self.plan.degrees.pp, self._num_played, self._num_chunks

    def _length(self, played: float, forward: Sequence[float], backward: Sequence[float]) -> float:
        """Time of all micro-batches: each one beyond the simulated ones takes the time of the busiest rank."""
        pp = self.plan.degrees.pp
        busiest = max(sum(forward[stage::pp]) + sum(backward[stage::pp]) for stage in range(pp))
        return played + (self.num_micro_batches - self._num_played) * busiest

    @property
    def bubble(self) -> float:
        """The fraction of the ranks' time in which they wait, during the passes of a step."""
        forward, backward = self._flops_of_parts
        whole = self._length(self.timeline.length, forward, backward)
        return 1 - (sum(forward) + sum(backward)) * self.num_micro_batches / (self.plan.degrees.pp * whole)


def estimate(plan: RunPlan) -> Estimate:
    """The estimate of a run whose micro-batches are full.

    Raises:
        UserError: the family does not describe its anatomy.
    """
    layout, anatomy, meshes = Layout(plan), anatomy_of(plan), ranks(plan)
    return estimate_of(plan, layout, anatomy, meshes, memory_of(plan, layout, anatomy, meshes))


def memory_of(plan: RunPlan, layout: Layout, anatomy: Anatomy, meshes: Sequence[Mesh]) -> list[StageMemory]:
    """Memory of the ranks in `meshes`, in a run whose micro-batches are full."""
    batch = full_micro_batch(plan)
    return memory(layout, anatomy, [batch] * num_played(plan, micro_batches(plan, batch)), meshes)


def estimate_of(
    plan: RunPlan, layout: Layout, anatomy: Anatomy, meshes: Sequence[Mesh], stages: list[StageMemory]
) -> Estimate:
    """The estimate of a run from the memory and messages of some of its ranks."""
    batch = full_micro_batch(plan)
    count = micro_batches(plan, batch)
    own = plan.device.factory().collectives != "gloo"
    traffic = [Traffic(layout, anatomy, mesh, [batch] * count, own).counts for mesh in meshes]
    critic = None
    if plan.profile.critic is not None:
        other = critic_plan(plan)
        critic = estimate_of(other, Layout(other), anatomy, meshes, [])
    return Estimate(plan, layout, anatomy, batch, count, stages, traffic, part_costs(layout, anatomy, batch), critic)


def busiest(plan: RunPlan) -> list[Mesh]:
    """One rank each of the first, the second and the last pipeline stage.

    Where layers are split evenly, a later stage has no more layers than the second one and holds fewer micro-batches.
    """
    meshes = ranks(plan)
    return [*meshes[:2], *meshes[-1:]] if len(meshes) > 3 else meshes


def num_played(plan: RunPlan, num_micro_batches: int) -> int:
    """How many micro-batches to simulate to see what a pipeline holds and how it waits. With FThenB that is all."""
    if plan.schedule == "FThenB" and plan.degrees.pp > 1:
        return num_micro_batches
    rounds = 4 * plan.degrees.pp
    return min(num_micro_batches, rounds + num_micro_batches % plan.degrees.pp)


def anatomy_of(plan: RunPlan) -> Anatomy:
    """The anatomy of the run's model. Raises UserError when its family does not describe it."""
    if plan.family.anatomy is None:
        raise UserError(
            f"model.family: {plan.family.name} has no `anatomy`, without which nothing can be planned; see "
            "docs/reference/plugins.md"
        )
    return plan.family.anatomy(plan.model_config)


def micro_batches(plan: RunPlan, batch: MicroBatch) -> int:
    """Micro-batches of a step on one rank; with `micro_batch_tokens`, the number of full ones."""
    if plan.accumulate_steps is not None:
        return plan.accumulate_steps
    samples = max(1, batch.rows // plan.rows_per_sample)
    return math.ceil(plan.recipe.train.global_batch_size / (samples * plan.degrees.num_data_ranks))
