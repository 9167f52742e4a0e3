"""The estimate of a run: memory, traffic, schedule and cost put together."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from llmsuite.base.errors import UserError
from llmsuite.contract.schema.degrees import Degrees
from llmsuite.models.shape_spec import ShapeSpec
from llmsuite.parallel.mesh import Mesh
from llmsuite.parallel.schedule import Kind
from llmsuite.parallel.timeline import Timeline, length, orders, simulate, topological_order_of
from llmsuite.planning.activations import MicroBatch
from llmsuite.planning.communication import Counts, Traffic, full_prepasses, model_prepasses
from llmsuite.planning.cost import FAST, SLOW, Efficiency, Hardware, PartCost, communication_time, part_costs
from llmsuite.planning.layout import Layout, ranks
from llmsuite.planning.lora_ga import lora_ga_gradient_flops, num_lora_ga_steps
from llmsuite.planning.memory import StageMemory, full_micro_batch, memory
from llmsuite.planning.rollouts import rollout_seconds
from llmsuite.planning.storage import Storage, storage
from llmsuite.recipe.critic import critic_plans
from llmsuite.recipe.plans import DataPlan, ModelPlan, ParallelPlan, TrainPlan


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Expected memory, traffic and time of a run."""

    layout: Layout
    train_plan: TrainPlan
    max_length: int
    """Length of the longest completion of a rollout with its prompt, in tokens."""
    shape_spec: ShapeSpec
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
    """Messages and FLOPs of the critic, whose passes follow those of the model; None without one."""

    @functools.cached_property
    def timeline(self) -> Timeline:
        """The schedule in time, in FLOPs of a rank, for enough micro-batches to show it: later ones repeat."""
        return simulate(orders(*self._simulated), *self._flops_of_parts)

    @functools.cached_property
    def storage(self) -> Storage:
        return storage(self.layout, self.train_plan)

    @property
    def parallel_plan(self) -> ParallelPlan:
        return self.layout.parallel_plan

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
        return self.batch.tokens * self.num_micro_batches * self.parallel_plan.degrees.num_data_ranks

    @property
    def flops(self) -> float:
        """FLOPs of a step, over all ranks, including recompute and pre-passes."""
        each = sum((1 + self._prepass_rows) * cost.forward + cost.backward for cost in self.costs)
        own = each * self.num_micro_batches * self.parallel_plan.degrees.num_data_ranks
        return own if self.critic is None else own + self.critic.flops

    @property
    def lora_ga_flops(self) -> float:
        """FLOPs of the passes before the first step, over all ranks, which compute gradients of adapted matrices."""
        return num_lora_ga_steps(self.layout) * self.flops + lora_ga_gradient_flops(self.layout, self.tokens)

    def lora_ga_seconds(self, device: Hardware) -> tuple[float, float]:
        """Shortest and longest likely time of these passes; a pass counts as a step with its messages."""
        products = lora_ga_gradient_flops(self.layout, self.tokens) / (
            device.flops * self.parallel_plan.degrees.num_ranks
        )
        count = num_lora_ga_steps(self.layout)
        fast, slow = (
            count * seconds + products / efficiency.flops
            for seconds, efficiency in zip(self.step_seconds(device), (FAST, SLOW))
        )
        return fast, slow

    def step_seconds(self, device: Hardware) -> tuple[float, float]:
        """Shortest and longest likely time of a step, in seconds."""
        return self._seconds(device, FAST), self._seconds(device, SLOW)

    def _seconds(self, device: Hardware, efficiency: Efficiency) -> float:
        degrees = self.parallel_plan.degrees
        times = [communication_time(self.layout, counts, device, efficiency) for counts in self.traffic]
        # messages inside of passes add to their time: a third to the forward pass, the rest to the backward pass
        each = [time.in_passes / (self.num_micro_batches * self._num_chunks) for time in times]
        speed = device.flops * efficiency.flops * degrees.tp
        pp = degrees.pp
        if len(each) < pp:  # the stages between the ends are alike
            each = [each[0], *each[1:2] * (pp - 2), each[-1]]
        forward = [c.forward / speed + each[i % pp] / 3 for i, c in enumerate(self.costs)]
        backward = [c.backward / speed + each[i % pp] * 2 / 3 for i, c in enumerate(self.costs)]
        transfer = max(time.pipeline_message for time in times)
        simulated = length(topological_order_of(*self._simulated), forward, backward, transfer)
        # pre-passes run forward only: each micro-batch takes as long as on the busiest rank, after the first has
        # arrived
        busiest = max(sum(forward[stage::pp]) for stage in range(pp))
        prepasses = self._prepass_rows * ((self.num_micro_batches - 1) * busiest + sum(forward))
        own = self._length(simulated, forward, backward) + prepasses + max(time.at_the_end for time in times)
        if self.critic is None:
            return own
        return own + self.critic._seconds(device, efficiency)

    def rollout_seconds(self, device: Hardware) -> tuple[float, float] | None:
        """Shortest and longest likely time to sample for a step, in seconds, with completions of the maximum length.
        None where servers sample, or the speed of the device's memory is not known."""
        fast, slow = (
            rollout_seconds(self.layout, self.train_plan, self.max_length, self.shape_spec, device, by)
            for by in (FAST, SLOW)
        )
        if fast is None or slow is None:
            return None
        return fast, slow

    @property
    def _prepass_rows(self) -> int:
        """Rows of all forward passes before a step, as a multiple of those of the global batch."""
        return sum(prepass.rows for prepass in model_prepasses(self.train_plan.profile))

    @property
    def _num_chunks(self) -> int:
        if self.parallel_plan.degrees.pp > 1:
            return self.parallel_plan.num_chunks
        return 1

    @property
    def _num_simulated(self) -> int:
        return num_simulated(self.parallel_plan, self.num_micro_batches)

    @property
    def _simulated(self) -> tuple[Kind, int, int, int]:
        """The simulated schedule, as arguments of `orders`."""
        return self.parallel_plan.schedule, self.parallel_plan.degrees.pp, self._num_simulated, self._num_chunks

    def _length(self, simulated: float, forward: Sequence[float], backward: Sequence[float]) -> float:
        """Time of all micro-batches: each one after the simulated ones takes the time of the busiest rank."""
        pp = self.parallel_plan.degrees.pp
        busiest = max(sum(forward[stage::pp]) + sum(backward[stage::pp]) for stage in range(pp))
        return simulated + (self.num_micro_batches - self._num_simulated) * busiest

    @property
    def bubble(self) -> float:
        """The fraction of the ranks' time in which they wait, during the passes of a step."""
        forward, backward = self._flops_of_parts
        duration = self._length(self.timeline.length, forward, backward)
        return 1 - (sum(forward) + sum(backward)) * self.num_micro_batches / (self.parallel_plan.degrees.pp * duration)


def estimate(
    model_plan: ModelPlan, data_plan: DataPlan, parallel_plan: ParallelPlan, train_plan: TrainPlan
) -> Estimate:
    """The estimate of a run whose micro-batches are full.

    Raises:
        UserError: the family has no shape spec.
    """
    layout = Layout(model_plan, parallel_plan)
    shape_spec = shape_spec_of(model_plan)
    meshes = ranks(parallel_plan.degrees)
    stages = memory_of(layout, data_plan, train_plan, shape_spec, meshes)
    return estimate_of(layout, data_plan, train_plan, shape_spec, meshes, stages)


def memory_of(
    layout: Layout, data_plan: DataPlan, train_plan: TrainPlan, shape_spec: ShapeSpec, meshes: Sequence[Mesh]
) -> list[StageMemory]:
    """Memory of the ranks in `meshes`, in a run with full micro-batches."""
    plan = layout.parallel_plan
    batch = full_micro_batch(layout.model_plan, data_plan, plan, train_plan)
    count = num_simulated(plan, micro_batches(plan, train_plan, batch))
    return memory(layout, train_plan, data_plan.section.max_length, shape_spec, [batch] * count, meshes)


def estimate_of(
    layout: Layout,
    data_plan: DataPlan,
    train_plan: TrainPlan,
    shape_spec: ShapeSpec,
    meshes: Sequence[Mesh],
    stages: list[StageMemory],
) -> Estimate:
    """The estimate of a run from the memory and messages of some of its ranks."""
    plan = layout.parallel_plan
    batch = full_micro_batch(layout.model_plan, data_plan, plan, train_plan)
    batches = [batch] * micro_batches(plan, train_plan, batch)
    prepasses = full_prepasses(train_plan.profile, data_plan, batches)
    own = plan.device.factory().collectives != "gloo"
    traffic = [Traffic(layout, train_plan, shape_spec, mesh, batches, prepasses, own).counts for mesh in meshes]
    critic = critic_plans(layout.model_plan, plan, train_plan)
    of_critic = None
    if critic is not None:
        other = Layout(critic.model, critic.parallel)
        of_critic = estimate_of(other, data_plan, critic.train, shape_spec, meshes, [])
    return Estimate(
        layout=layout,
        train_plan=train_plan,
        max_length=data_plan.section.max_length,
        shape_spec=shape_spec,
        batch=batch,
        num_micro_batches=len(batches),
        stages=stages,
        traffic=traffic,
        costs=part_costs(layout, train_plan, shape_spec, batch),
        critic=of_critic,
    )


def busiest(degrees: Degrees) -> list[Mesh]:
    """One rank each of the first, the second and the last pipeline stage.

    Where layers are split evenly, a later stage has no more layers than the second one and holds fewer micro-batches.
    """
    meshes = ranks(degrees)
    return [*meshes[:2], *meshes[-1:]] if len(meshes) > 3 else meshes


def num_simulated(parallel_plan: ParallelPlan, num_micro_batches: int) -> int:
    """Number of micro-batches to simulate for the memory and the bubble of a pipeline; all of them with FThenB."""
    pp = parallel_plan.degrees.pp
    if parallel_plan.schedule == "FThenB" and pp > 1:
        return num_micro_batches
    rounds = 4 * pp
    return min(num_micro_batches, rounds + num_micro_batches % pp)


def shape_spec_of(model_plan: ModelPlan) -> ShapeSpec:
    """The shape spec of the run's model. Raises UserError when its family has none."""
    family = model_plan.family
    if family.shape_spec is None:
        raise UserError(
            f"model.family: {family.name} has no `shape_spec`, without which nothing can be planned; see "
            "docs/reference/plugins.md"
        )
    return family.shape_spec(model_plan.config)


def micro_batches(parallel_plan: ParallelPlan, train_plan: TrainPlan, batch: MicroBatch) -> int:
    """Micro-batches of a step on one rank; with `micro_batch_tokens`, the number of full ones."""
    if parallel_plan.accumulate_steps is not None:
        return parallel_plan.accumulate_steps
    samples = max(1, batch.rows // train_plan.rows_per_sample)
    return math.ceil(train_plan.section.global_batch_size / (samples * parallel_plan.degrees.num_data_ranks))
