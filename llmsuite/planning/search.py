"""A search for strategies that fit a number of devices and their memory, each checked as `llmsuite run` would."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from llmsuite.models.anatomy import Anatomy
from llmsuite.models.mtp import num_layers
from llmsuite.planning.cost import Hardware
from llmsuite.planning.estimate import Estimate, anatomy_of, busiest, estimate_of, memory_of
from llmsuite.planning.layout import Layout, ModelParameters
from llmsuite.planning.memory import StageMemory
from llmsuite.recipe.resolve import RunPlan
from llmsuite.recipe.rules import RULES, RuleContext
from llmsuite.schema.degrees import accumulate_steps, degrees_of
from llmsuite.schema.parallel import ParallelSection


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A candidate: the degrees, sharding stage and recompute to try."""

    tp: int
    pp: int
    sharding: str
    ep: int
    recompute: str

    def __str__(self) -> str:
        words = [f"tp{self.tp}", f"pp{self.pp}", f"sharding {self.sharding}"]
        words += [f"ep{self.ep}"] if self.ep > 1 else []
        return ", ".join([*words, f"recompute {self.recompute}"])

    @property
    def overrides(self) -> str:
        """The command-line options that choose it."""
        parallel = [f'"tensor_parallel_degree": {self.tp}', f'"pipeline_parallel_degree": {self.pp}']
        parallel += [f'"sharding": "{self.sharding}"'] if self.sharding != "none" else []
        parallel += [f'"expert_parallel_degree": {self.ep}'] if self.ep > 1 else []
        parallel += ['"sequence_parallel": true'] if self.tp > 1 else []
        return f"--parallel='{{{', '.join(parallel)}}}' --engine.recompute={self.recompute}"


@dataclasses.dataclass(frozen=True)
class Fitting:
    """A strategy that fits."""

    strategy: Strategy
    estimate: Estimate
    seconds: tuple[float, float]
    """The shortest and the longest likely time of a step."""


@dataclasses.dataclass(frozen=True)
class Rejected:
    """A strategy that does not fit, with the reason."""

    strategy: Strategy
    reason: str


def search(plan: RunPlan, limit: float, device: Hardware) -> tuple[list[Fitting], list[Rejected]]:
    """Try degrees of every axis, sharding stages and kinds of recompute, with the recipe's own batch.

    For each strategy, the cheapest kind of recompute that fits is taken.

    Args:
        plan: of the recipe, with the devices to use.
        limit: bytes of memory of a device.
        device: figures from which times are computed.

    Returns:
        The strategies that fit, the fastest first, and those that do not.
    """
    fitting: list[Fitting] = []
    rejected: list[Rejected] = []
    model, anatomy = ModelParameters(plan), anatomy_of(plan)
    for strategy in strategies(plan):
        found = _try(plan, strategy, model, anatomy, limit, device)
        if isinstance(found, Fitting):
            fitting.append(found)
        else:
            rejected.append(found)
    return sorted(fitting, key=lambda f: f.seconds), rejected


def _try(
    plan: RunPlan, strategy: Strategy, model: ModelParameters, anatomy: Anatomy, limit: float, device: Hardware
) -> Fitting | Rejected:
    # a family that names no layers computes nothing again
    for least in ("full", "none"):
        smallest = dataclasses.replace(strategy, recompute=least)
        first = with_strategy(plan, smallest)
        if not (reasons := violations(first)):
            break
    else:
        return Rejected(strategy, reasons[0])
    layout, meshes = Layout(first, model), busiest(first)
    # a strategy that does not fit where most is computed again does not fit at all
    most = memory_of(first, layout, anatomy, meshes)
    if reason := _too_much(most, limit):
        return Rejected(smallest, reason)
    for recompute in ("none", "selective") if least == "full" else ():
        tried = dataclasses.replace(strategy, recompute=recompute)
        layout.plan = with_strategy(plan, tried)
        if not violations(layout.plan):
            stages = memory_of(layout.plan, layout, anatomy, meshes)
            if not _too_much(stages, limit):
                break
    else:
        tried, layout.plan, stages = smallest, first, most
    found = estimate_of(layout.plan, layout, anatomy, meshes, stages)
    return Fitting(tried, found, found.step_seconds(device))


def _too_much(stages: Sequence[StageMemory], limit: float) -> str:
    """Why these stages do not fit in `limit` bytes; empty when they do."""
    worst = max(stages, key=lambda stage: stage.peak)
    if worst.peak <= limit:
        return ""
    gib = 2.0**30
    return f"takes {worst.peak / gib:.1f} GiB on pipeline stage {worst.stage}, more than {limit / gib:.1f} GiB"


def violations(plan: RunPlan) -> list[str]:
    """The violated rules, as `llmsuite validate` would report them."""
    recipe = plan.recipe
    found = [f"parallel.{key}: {message}" for key, message in recipe.parallel.problems()]
    found += [f"engine.{key}: {message}" for key, message in recipe.engine.problems()]
    backend = plan.device.factory()
    context = RuleContext(recipe, plan.degrees, plan.model_config, plan.stage, plan.family, backend, plan.loaded.given)
    return found + [f"{key}: {message}" for rule in RULES for key, message in rule.check(context)]


def with_strategy(plan: RunPlan, strategy: Strategy) -> RunPlan:
    """The plan of the same recipe with another strategy."""
    parallel = ParallelSection(
        tensor_parallel_degree=strategy.tp,
        pipeline_parallel_degree=strategy.pp,
        sharding=strategy.sharding,  # type: ignore[arg-type]
        expert_parallel_degree=strategy.ep,
        sequence_parallel=strategy.tp > 1,
    )
    engine = dataclasses.replace(
        plan.recipe.engine,
        recompute=strategy.recompute,  # type: ignore[arg-type]
        recompute_every=1,
    )
    recipe = dataclasses.replace(plan.recipe, parallel=parallel, engine=engine)
    degrees = degrees_of(recipe)
    return dataclasses.replace(
        plan,
        loaded=dataclasses.replace(plan.loaded, recipe=recipe),
        degrees=degrees,
        schedule=parallel.pipeline_schedule,
        num_chunks=parallel.num_chunks,
        accumulate_steps=accumulate_steps(recipe.train, degrees),
    )


def strategies(plan: RunPlan) -> Iterator[Strategy]:
    """Powers of two for each degree: tp within a machine, pp up to the number of layers; ep 1, 8 or 64."""
    launch, layers = plan.recipe.launch, num_layers(plan.model_config)
    devices = launch.num_devices * launch.nnodes
    experts = bool(plan.family.shard_plan and plan.family.shard_plan.experts)
    for tp, pp in itertools.product(_powers(min(launch.num_devices, 16)), _powers(min(devices, layers))):
        if tp * pp > devices:
            continue
        data = devices // (tp * pp)
        for sharding in ("none", "stage1", "stage2", "stage3") if data > 1 else ("none",):
            for ep in sorted({1, *(e for e in (8, 64) if e <= data)}) if experts else (1,):
                yield Strategy(tp, pp, sharding, ep, "none")


def _powers(most: int) -> list[int]:
    return [1 << k for k in range(most.bit_length()) if 1 << k <= most]
