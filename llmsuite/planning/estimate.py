"""A plan of a run in numbers, put together from memory, traffic, schedule and cost."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from llmsuite.errors import UserError
from llmsuite.models.anatomy import Anatomy
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.schedule import Kind
from llmsuite.planning.activations import Pass
from llmsuite.planning.communication import Counts, Traffic, model_prepasses
from llmsuite.planning.cost import FAST, SLOW, Hardware, PartCost, Reached, communication_time, part_costs
from llmsuite.planning.layout import Layout, ranks
from llmsuite.planning.memory import StageMemory, full_pass, memory
from llmsuite.planning.schedule import Timeline, length, orders, simulate, turns_of
from llmsuite.planning.storage import Storage, storage
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
    traffic: list[Counts]
    """Of a rank of each pipeline stage, in a step."""
    costs: list[PartCost]

    @functools.cached_property
    def timeline(self) -> Timeline:
        """In units of FLOPs on a rank. Of as many micro-batches as show the schedule: those behind repeat."""
        return simulate(orders(*self._played), *self._flops_of_parts)

    @functools.cached_property
    def storage(self) -> Storage:
        return storage(self.layout)

    @property
    def _flops_of_parts(self) -> tuple[list[float], list[float]]:
        """Of a forward and of a backward pass of each."""
        return [cost.forward for cost in self.costs], [cost.backward for cost in self.costs]

    @property
    def peak(self) -> float:
        """Of the rank that has most, in bytes."""
        return max(stage.peak for stage in self.stages)

    @property
    def tokens(self) -> int:
        """Of a step, over all ranks."""
        return self.batch.tokens * self.num_micro_batches * self.plan.degrees.num_data_ranks

    @property
    def flops(self) -> float:
        """Of a step, over all ranks, with recomputation and pre-passes."""
        each = sum((1 + self._prepass_rows) * cost.forward + cost.backward for cost in self.costs)
        return each * self.num_micro_batches * self.plan.degrees.num_data_ranks

    def step_seconds(self, device: Hardware) -> tuple[float, float]:
        """The shortest and the longest time that a step is likely to take."""
        return self._seconds(device, FAST), self._seconds(device, SLOW)

    def _seconds(self, device: Hardware, reached: Reached) -> float:
        plan, tp = self.plan, self.plan.degrees.tp
        times = [communication_time(self.layout, counts, device, reached) for counts in self.traffic]
        # what a stage sends between products goes to its passes: a third forward, the rest backward
        each = [time.in_passes / (self.num_micro_batches * self._num_chunks) for time in times]
        speed = device.flops * reached.flops * tp
        pp = plan.degrees.pp
        if len(each) < pp:  # those between the ends are alike
            each = [each[0], *each[1:2] * (pp - 2), each[-1]]
        forward = [c.forward / speed + each[i % pp] / 3 for i, c in enumerate(self.costs)]
        backward = [c.backward / speed + each[i % pp] * 2 / 3 for i, c in enumerate(self.costs)]
        transfer = max(time.a_message for time in times)
        played = length(turns_of(*self._played), forward, backward, transfer)
        # pre-passes go forward only: each micro-batch takes as long as on the busiest rank, once the first got there
        busiest = max(sum(forward[stage::pp]) for stage in range(pp))
        prepasses = self._prepass_rows * ((self.num_micro_batches - 1) * busiest + sum(forward))
        return self._length(played, forward, backward) + prepasses + max(time.at_the_end for time in times)

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
        """The schedule that is played, as `orders` takes it."""
        return self.plan.schedule, self.plan.degrees.pp, self._num_played, self._num_chunks

    def _length(self, played: float, forward: Sequence[float], backward: Sequence[float]) -> float:
        """Of all micro-batches: each that was not played takes as long as it keeps the busiest rank."""
        pp = self.plan.degrees.pp
        busiest = max(sum(forward[stage::pp]) + sum(backward[stage::pp]) for stage in range(pp))
        return played + (self.num_micro_batches - self._num_played) * busiest

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in the passes of a step in which they wait."""
        forward, backward = self._flops_of_parts
        whole = self._length(self.timeline.length, forward, backward)
        return 1 - (sum(forward) + sum(backward)) * self.num_micro_batches / (self.plan.degrees.pp * whole)


def estimate(plan: RunPlan) -> Estimate:
    """Of a run whose micro-batches are full.

    Raises:
        UserError: the family does not say what it is made of.
    """
    layout, anatomy, meshes = Layout(plan), anatomy_of(plan), ranks(plan)
    return estimate_of(plan, layout, anatomy, meshes, memory_of(plan, layout, anatomy, meshes))


def memory_of(plan: RunPlan, layout: Layout, anatomy: Anatomy, meshes: Sequence[Mesh]) -> list[StageMemory]:
    """Of some ranks of a run whose micro-batches are full."""
    batch = full_pass(plan)
    return memory(layout, anatomy, [batch] * num_played(plan, micro_batches(plan, batch)), meshes)


def estimate_of(
    plan: RunPlan, layout: Layout, anatomy: Anatomy, meshes: Sequence[Mesh], stages: list[StageMemory]
) -> Estimate:
    """What follows for a run from some of its ranks, whose memory is known."""
    batch = full_pass(plan)
    count = micro_batches(plan, batch)
    own = plan.device.name != "cpu"
    traffic = [Traffic(layout, anatomy, mesh, [batch] * count, own).counts for mesh in meshes]
    return Estimate(plan, layout, anatomy, batch, count, stages, traffic, part_costs(layout, anatomy, batch))


def busiest(plan: RunPlan) -> list[Mesh]:
    """Ranks of the first, the second and the last pipeline stage: where layers are dealt out evenly, a stage between
    has no more of them than the second one, and holds fewer micro-batches."""
    meshes = ranks(plan)
    return [*meshes[:2], *meshes[-1:]] if len(meshes) > 3 else meshes


def num_played(plan: RunPlan, num_micro_batches: int) -> int:
    """How many micro-batches show what a pipeline holds and how it waits. With FThenB that is all of them."""
    if plan.schedule == "FThenB" and plan.degrees.pp > 1:
        return num_micro_batches
    rounds = 4 * plan.degrees.pp
    return min(num_micro_batches, rounds + num_micro_batches % plan.degrees.pp)


def anatomy_of(plan: RunPlan) -> Anatomy:
    """Of the run's model. Raises UserError when its family does not say."""
    if plan.family.anatomy is None:
        raise UserError(
            f"model.family: {plan.family.name} has no `anatomy`, without which nothing can be planned; see "
            "docs/reference/plugins.md"
        )
    return plan.family.anatomy(plan.model_config)


def micro_batches(plan: RunPlan, batch: Pass) -> int:
    """Of a step, on one rank; where they are made by tokens, as many as full ones are."""
    if plan.accumulate_steps is not None:
        return plan.accumulate_steps
    samples = max(1, batch.rows // plan.stage.rows_per_sample)
    return math.ceil(plan.recipe.train.global_batch_size / (samples * plan.degrees.num_data_ranks))
