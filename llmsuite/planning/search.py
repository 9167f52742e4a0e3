"""A search for strategies that fit a number of devices and their memory, each checked as `llmsuite run` would."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from llmsuite.base.errors import UserError
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.degrees import degrees_of, launch_section
from llmsuite.contract.schema.engine import EngineSection
from llmsuite.contract.schema.parallel import ParallelSection
from llmsuite.contract.schema.recipe import Recipe, TrainSection
from llmsuite.contract.schema.section import violations
from llmsuite.contract.schema.stage_keys import mean_of_micro_batches
from llmsuite.models.mtp import num_layers
from llmsuite.models.shape_spec import ShapeSpec
from llmsuite.planning.cost import HOST_LINK, Hardware
from llmsuite.planning.estimate import Estimate, busiest, estimate_of, memory_of, shape_spec_of
from llmsuite.planning.layout import Layout, ModelParameters
from llmsuite.planning.memory import StageMemory
from llmsuite.recipe.load import LoadedRecipe, load
from llmsuite.recipe.plans import DataPlan, ModelPlan, ParallelPlan, TrainPlan
from llmsuite.recipe.resolve import RunPlan, parallel_plan_of, plan_run
from llmsuite.recipe.rules import RULES, RuleContext


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A candidate: the degrees, sharding stage and recompute to try, and what `refine` changes."""

    tp: int
    pp: int
    sharding: str
    ep: int
    recompute: str
    chunks: int = 1
    """Chunks of layers of a pipeline stage; above 1 interleaved."""
    micro_batch: int | None = None
    """Samples of a micro-batch; None for the recipe's own."""
    offload: bool | None = None
    """True to keep the optimizer's state in host memory; None as in the recipe."""

    def __str__(self) -> str:
        words = [f"tp{self.tp}", f"pp{self.pp}", f"sharding {self.sharding}"]
        if self.ep > 1:
            words += [f"ep{self.ep}"]
        if self.chunks > 1:
            words += [f"{self.chunks} chunks"]
        if self.micro_batch is not None:
            words += [f"micro-batch {self.micro_batch}"]
        if self.offload:
            words += ["offload"]
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

    @property
    def rank_key(self) -> tuple[float, int, float]:
        """Sorts the best first: by time, within 1% by the number of micro-batches, which the host has to launch, and
        then by memory."""
        return math.floor(math.log(self.seconds[0]) * 100), self.estimate.num_micro_batches, self.estimate.peak


@dataclasses.dataclass(frozen=True)
class Rejected:
    """A strategy that does not fit, with the reason."""

    strategy: Strategy
    reason: str
    peak: float = math.inf
    """Bytes that it takes; infinite where a rule refuses it."""


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
    candidates = candidates_of(loaded, model_plan, data_plan, parallel_plan, train_plan, limit, device)
    return search_all(candidates)


def candidates_of(
    loaded: LoadedRecipe,
    model_plan: ModelPlan,
    data_plan: DataPlan,
    parallel_plan: ParallelPlan,
    train_plan: TrainPlan,
    limit: float,
    device: Hardware,
) -> Candidates:
    """The recipe, model and device that all strategies of a search have in common, from the arguments of `search`."""
    return Candidates(
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


def search_all(candidates: Candidates) -> tuple[list[Fitting], list[Rejected]]:
    """Try all of `strategies`; returns those that fit, the fastest first, and those that do not."""
    fitting: list[Fitting] = []
    rejected: list[Rejected] = []
    for strategy in strategies(candidates.model_plan, candidates.own_parallel_plan):
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
        train_plan = self.train_plan_of(strategy)
        # a family that names no layers recomputes nothing
        for least in ("full", "none"):
            smallest = dataclasses.replace(strategy, recompute=least)
            first = self.parallel_plan(smallest)
            reasons = self.violations(first, train_plan.section)
            if not reasons:
                break
        else:
            return Rejected(strategy, reasons[0])
        data_plan = self.data_plan
        layout = Layout(self.model_plan, first, self.parameters)
        meshes = busiest(first.degrees)
        # a strategy that does not fit with the most recompute does not fit at all
        most = memory_of(layout, data_plan, train_plan, self.shape_spec, meshes)
        reason = _too_much(most, self.limit)
        if reason:
            return Rejected(smallest, reason, max(stage.peak for stage in most))
        for recompute in ("none", "selective") if least == "full" else ():
            tried = dataclasses.replace(strategy, recompute=recompute)
            layout.parallel_plan = self.parallel_plan(tried)
            if not self.violations(layout.parallel_plan, train_plan.section):
                stages = memory_of(layout, data_plan, train_plan, self.shape_spec, meshes)
                if not _too_much(stages, self.limit):
                    break
        else:
            tried = smallest
            layout.parallel_plan = first
            stages = most
        return self._fitting(tried, estimate_of(layout, data_plan, train_plan, self.shape_spec, meshes, stages))

    def try_exactly(self, strategy: Strategy) -> Fitting | Rejected:
        """Estimate the run with a strategy and its own kind of recompute."""
        train_plan = self.train_plan_of(strategy)
        parallel_plan = self.parallel_plan(strategy)
        reasons = self.violations(parallel_plan, train_plan.section)
        if reasons:
            return Rejected(strategy, reasons[0])
        layout = Layout(self.model_plan, parallel_plan, self.parameters)
        meshes = busiest(parallel_plan.degrees)
        stages = memory_of(layout, self.data_plan, train_plan, self.shape_spec, meshes)
        reason = _too_much(stages, self.limit)
        if reason:
            return Rejected(strategy, reason, max(stage.peak for stage in stages))
        return self._fitting(strategy, estimate_of(layout, self.data_plan, train_plan, self.shape_spec, meshes, stages))

    def judge(self, strategy: Strategy, found: Estimate) -> Fitting | Rejected:
        """The strategy of an estimate that was made elsewhere, such as that of a recipe as it is."""
        reason = _too_much(found.stages, self.limit)
        return Rejected(strategy, reason, found.peak) if reason else self._fitting(strategy, found)

    def _fitting(self, strategy: Strategy, found: Estimate) -> Fitting:
        # the state of the optimizer passes the link to the host twice
        offloaded = 2 * max(stage.host for stage in found.stages) / HOST_LINK
        fast, slow = found.step_seconds(self.device)
        return Fitting(strategy, found, (fast + offloaded, slow + offloaded))

    def train_plan_of(self, strategy: Strategy) -> TrainPlan:
        """The training of the recipe with the micro-batches of a strategy."""
        if strategy.micro_batch is None:
            return self.train_plan
        section = dataclasses.replace(self.train_plan.section, micro_batch_size=strategy.micro_batch)
        return dataclasses.replace(self.train_plan, section=section)

    def _recipe(self, parallel: ParallelSection, engine: EngineSection, train: TrainSection) -> Recipe:
        return dataclasses.replace(self.loaded.recipe, parallel=parallel, engine=engine, train=train)

    def parallel_plan(self, strategy: Strategy) -> ParallelPlan:
        """The plan of the same recipe with another strategy."""
        parallel = ParallelSection(
            tensor_parallel_degree=strategy.tp,
            pipeline_parallel_degree=strategy.pp,
            sharding=strategy.sharding,  # type: ignore[arg-type]
            expert_parallel_degree=strategy.ep,
            sequence_parallel=strategy.tp > 1,
            pipeline_schedule="interleaved" if strategy.chunks > 1 else "1F1B",
            virtual_pipeline_degree=strategy.chunks if strategy.chunks > 1 else None,
        )
        own = self.own_parallel_plan.engine
        engine = dataclasses.replace(
            own,
            offload_optimizer=own.offload_optimizer if strategy.offload is None else strategy.offload,
            recompute=strategy.recompute,  # type: ignore[arg-type]
            recompute_every=1,
        )
        recipe = self._recipe(parallel, engine, self.train_plan_of(strategy).section)
        return parallel_plan_of(recipe, self.train_plan.stage, self.own_parallel_plan.device, degrees_of(recipe))

    def violations(self, parallel_plan: ParallelPlan, train: TrainSection | None = None) -> list[str]:
        """The violated rules, in the words of `llmsuite validate`.

        Args:
            parallel_plan: of the strategy.
            train: of the strategy; None for the recipe's own.
        """
        model_plan = self.model_plan
        section = parallel_plan.section
        engine = parallel_plan.engine
        found = [f"parallel.{key}: {message}" for key, message in violations(section)]
        found += [f"engine.{key}: {message}" for key, message in violations(engine)]
        context = RuleContext(
            self._recipe(section, engine, train or self.train_plan.section),
            parallel_plan.degrees,
            model_plan.config,
            self.train_plan.stage,
            model_plan.family,
            parallel_plan.device.factory(),
            self.loaded.given,
        )
        return found + [f"{key}: {message}" for rule in RULES for key, message in rule.check(context)]


def refine(
    candidates: Candidates, fitting: Sequence[Fitting], rejected: Sequence[Rejected], num_seeds: int = 8
) -> list[Fitting]:
    """Change the micro-batch, the chunks of a pipeline stage and the place of the optimizer's state of the best
    strategies of `search_all`, one at a time, for as long as that helps. Where none fits, those that lack the least
    memory are tried with the optimizer's state in host memory.

    Returns:
        All strategies that fit, the best first.
    """
    known = {found.strategy: found for found in fitting}
    seeds = sorted(fitting, key=lambda found: found.rank_key)[:num_seeds]
    if not seeds:
        nearest = sorted(rejected, key=lambda other: other.peak)[:num_seeds]
        tries = [candidates.try_strategy(dataclasses.replace(other.strategy, offload=True)) for other in nearest]
        seeds = [found for found in tries if isinstance(found, Fitting)]
        known |= {found.strategy: found for found in seeds}
    tried: set[Strategy] = set()
    for best in seeds:
        is_better = True
        while is_better:
            is_better = False
            for strategy in _variants(best.strategy, candidates):
                if strategy in tried:
                    continue
                tried.add(strategy)
                found = candidates.try_strategy(strategy)
                if isinstance(found, Fitting):
                    known[found.strategy] = found
                    if found.rank_key < best.rank_key:
                        best = found
                        is_better = True
    return sorted(known.values(), key=lambda found: found.rank_key)


def _variants(strategy: Strategy, candidates: Candidates) -> Iterator[Strategy]:
    """Strategies that differ in one step. The kind of recompute is chosen when they are tried."""
    train = candidates.train_plan.section
    size = strategy.micro_batch or train.micro_batch_size
    strategy = dataclasses.replace(strategy, recompute="none")
    own = candidates.train_plan.stage_section
    is_averaged = mean_of_micro_batches(own) is not None  # the size then changes the loss
    if train.micro_batch_tokens is None and not is_averaged:
        for other in (2 * size, *([size // 2] if size % 2 == 0 else [])):
            yield dataclasses.replace(strategy, micro_batch=None if other == train.micro_batch_size else other)
    if strategy.pp > 1:
        yield dataclasses.replace(strategy, chunks=2 * strategy.chunks)
        if strategy.chunks > 1:
            yield dataclasses.replace(strategy, chunks=strategy.chunks // 2)
    if not strategy.offload and candidates.own_parallel_plan.device.factory().can_offload:
        yield dataclasses.replace(strategy, offload=True)


def plan_for_search(recipe: str, words: Sequence[str], registry: Registry) -> RunPlan:
    """The plan of a recipe for one device, but with its launch section: the search sets the degrees, so those of the
    recipe need not fit the devices."""
    launch = load(recipe, words, registry).recipe.launch
    plan = plan_run(recipe, [*words, "--parallel={}", "--launch={}"], registry)
    recipe_of_all = dataclasses.replace(plan.recipe, launch=launch)
    return dataclasses.replace(
        plan,
        loaded=dataclasses.replace(plan.loaded, recipe=recipe_of_all),
        parallel=dataclasses.replace(plan.parallel, devices_per_machine=launch.num_devices, num_machines=launch.nnodes),
    )


def device_words(count: int | None) -> list[str]:
    """The overrides that set the number of devices; none for None. Raises UserError for less than one."""
    if count is None:
        return []
    if count < 1:
        raise UserError(f"--devices: is {count}; it has to be 1 or more")
    return [f"--launch.{key}={value}" for key, value in {"nnodes": 1, **launch_section(count)}.items()]


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
