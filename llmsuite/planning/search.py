"""A search for strategies that fit a number of devices and their memory, each checked as `llmsuite run` would."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from llmsuite.contract.schema.degrees import degrees_of
from llmsuite.contract.schema.engine import EngineSection
from llmsuite.contract.schema.parallel import ParallelSection
from llmsuite.contract.schema.recipe import Recipe
from llmsuite.contract.schema.section import violations
from llmsuite.models.mtp import num_layers
from llmsuite.models.shape_spec import ShapeSpec
from llmsuite.planning.cost import Hardware
from llmsuite.planning.estimate import Estimate, busiest, estimate_of, memory_of, shape_spec_of
from llmsuite.planning.layout import Layout, ModelParameters
from llmsuite.planning.memory import StageMemory
from llmsuite.recipe.load import LoadedRecipe
from llmsuite.recipe.plans import DataPlan, ModelPlan, ParallelPlan, TrainPlan
from llmsuite.recipe.resolve import parallel_plan_of
from llmsuite.recipe.rules import RULES, RuleContext


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
        if self.ep > 1:
            words += [f"ep{self.ep}"]
        return ", ".join([*words, f"recompute {self.recompute}"])

    @property
    def overrides(self) -> str:
        """The command-line options that choose it."""
        parallel = [f'"tensor_parallel_degree": {self.tp}', f'"pipeline_parallel_degree": {self.pp}']
        if self.sharding != "none":
            parallel += [f'"sharding": "{self.sharding}"']
        if self.ep > 1:
            parallel += [f'"expert_parallel_degree": {self.ep}']
        if self.tp > 1:
            parallel += ['"sequence_parallel": true']
        return f"--parallel='{{{', '.join(parallel)}}}' --engine.recompute={self.recompute}"


@dataclasses.dataclass(frozen=True)
class Fitting:
    """A strategy that fits."""

    strategy: Strategy
    estimate: Estimate
    seconds: tuple[float, float]
    """Shortest and longest likely time of a step."""


@dataclasses.dataclass(frozen=True)
class Rejected:
    """A strategy that does not fit, with the reason."""

    strategy: Strategy
    reason: str


def search(
    loaded: LoadedRecipe,
    model_plan: ModelPlan,
    data_plan: DataPlan,
    parallel_plan: ParallelPlan,
    train_plan: TrainPlan,
    limit: float,
    device: Hardware,
) -> tuple[list[Fitting], list[Rejected]]:
    """Try degrees of every axis, sharding stages and kinds of recompute, with the recipe's own batch.

    For each strategy, the cheapest kind of recompute that fits is taken.

    Args:
        loaded: the recipe.
        model_plan: of the recipe.
        data_plan: of the recipe.
        parallel_plan: of the recipe, with the devices to use.
        train_plan: of the recipe.
        limit: bytes of memory of a device.
        device: figures from which times are computed.

    Returns:
        The strategies that fit, the fastest first, and those that do not.
    """
    fitting: list[Fitting] = []
    rejected: list[Rejected] = []
    candidates = Candidates(
        loaded=loaded,
        model_plan=model_plan,
        data_plan=data_plan,
        own_parallel_plan=parallel_plan,
        train_plan=train_plan,
        parameters=ModelParameters(model_plan, parallel_plan),
        shape_spec=shape_spec_of(model_plan),
        limit=limit,
        device=device,
    )
    for strategy in strategies(model_plan, parallel_plan):
        found = candidates.try_strategy(strategy)
        if isinstance(found, Fitting):
            fitting.append(found)
        else:
            rejected.append(found)
    return sorted(fitting, key=lambda f: f.seconds), rejected


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidates:
    """The recipe, the model and the device that all strategies of a search have in common."""

    loaded: LoadedRecipe
    model_plan: ModelPlan
    data_plan: DataPlan
    own_parallel_plan: ParallelPlan
    """The parallelism of the recipe itself."""
    train_plan: TrainPlan
    parameters: ModelParameters
    shape_spec: ShapeSpec
    limit: float
    device: Hardware

    def try_strategy(self, strategy: Strategy) -> Fitting | Rejected:
        """Estimate the run with a strategy and the cheapest kind of recompute that fits."""
        # a family that names no layers recomputes nothing
        for least in ("full", "none"):
            smallest = dataclasses.replace(strategy, recompute=least)
            first = self.parallel_plan(smallest)
            reasons = self.violations(first)
            if not reasons:
                break
        else:
            return Rejected(strategy, reasons[0])
        data_plan = self.data_plan
        train_plan = self.train_plan
        layout = Layout(self.model_plan, first, self.parameters)
        meshes = busiest(first.degrees)
        # a strategy that does not fit with the most recompute does not fit at all
        most = memory_of(layout, data_plan, train_plan, self.shape_spec, meshes)
        reason = _too_much(most, self.limit)
        if reason:
            return Rejected(smallest, reason)
        for recompute in ("none", "selective") if least == "full" else ():
            tried = dataclasses.replace(strategy, recompute=recompute)
            layout.parallel_plan = self.parallel_plan(tried)
            if not self.violations(layout.parallel_plan):
                stages = memory_of(layout, data_plan, train_plan, self.shape_spec, meshes)
                if not _too_much(stages, self.limit):
                    break
        else:
            tried = smallest
            layout.parallel_plan = first
            stages = most
        found = estimate_of(layout, data_plan, train_plan, self.shape_spec, meshes, stages)
        return Fitting(tried, found, found.step_seconds(self.device))

    def _recipe(self, parallel: ParallelSection, engine: EngineSection) -> Recipe:
        return dataclasses.replace(self.loaded.recipe, parallel=parallel, engine=engine)

    def parallel_plan(self, strategy: Strategy) -> ParallelPlan:
        """The plan of the same recipe with another strategy."""
        parallel = ParallelSection(
            tensor_parallel_degree=strategy.tp,
            pipeline_parallel_degree=strategy.pp,
            sharding=strategy.sharding,  # type: ignore[arg-type]
            expert_parallel_degree=strategy.ep,
            sequence_parallel=strategy.tp > 1,
        )
        engine = dataclasses.replace(
            self.own_parallel_plan.engine,
            recompute=strategy.recompute,  # type: ignore[arg-type]
            recompute_every=1,
        )
        recipe = self._recipe(parallel, engine)
        return parallel_plan_of(recipe, self.train_plan.stage, self.own_parallel_plan.device, degrees_of(recipe))

    def violations(self, parallel_plan: ParallelPlan) -> list[str]:
        """The violated rules, in the words of `llmsuite validate`."""
        model_plan = self.model_plan
        section = parallel_plan.section
        engine = parallel_plan.engine
        found = [f"parallel.{key}: {message}" for key, message in violations(section)]
        found += [f"engine.{key}: {message}" for key, message in violations(engine)]
        context = RuleContext(
            self._recipe(section, engine),
            parallel_plan.degrees,
            model_plan.config,
            self.train_plan.stage,
            model_plan.family,
            parallel_plan.device.factory(),
            self.loaded.given,
        )
        return found + [f"{key}: {message}" for rule in RULES for key, message in rule.check(context)]


def _too_much(stages: Sequence[StageMemory], limit: float) -> str:
    """The reason why these stages do not fit in `limit` bytes; empty when they fit."""
    worst = max(stages, key=lambda stage: stage.peak)
    if worst.peak <= limit:
        return ""
    gib = 2.0**30
    return f"takes {worst.peak / gib:.1f} GiB on pipeline stage {worst.stage}, more than {limit / gib:.1f} GiB"


def strategies(model_plan: ModelPlan, parallel_plan: ParallelPlan) -> Iterator[Strategy]:
    """Powers of two for each degree: tp within a machine, pp up to the number of layers; ep 1, 8 or 64."""
    layers = num_layers(model_plan.config)
    per_machine = parallel_plan.devices_per_machine
    devices = per_machine * parallel_plan.num_machines
    experts = bool(model_plan.shard_plan.experts)
    for tp, pp in itertools.product(_powers(min(per_machine, 16)), _powers(min(devices, layers))):
        if tp * pp > devices:
            continue
        data = devices // (tp * pp)
        for sharding in ("none", "stage1", "stage2", "stage3") if data > 1 else ("none",):
            for ep in sorted({1, *(e for e in (8, 64) if e <= data)}) if experts else (1,):
                yield Strategy(tp, pp, sharding, ep, "none")


def _powers(most: int) -> list[int]:
    return [1 << k for k in range(most.bit_length()) if 1 << k <= most]
