"""Resolution of a loaded recipe to the plan of a run: rules between sections, derived numbers and files.

All checks of a recipe happen here or before; later code relies on a valid plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from llmsuite.base.errors import Problem, RecipeError, UserError
from llmsuite.base.hub.names import hub_name
from llmsuite.base.python_files import python_function, static_fault
from llmsuite.base.redaction import Url
from llmsuite.base.safe_files import exists, is_dir, is_file, listed
from llmsuite.contract.registry import BUILTIN, Registry
from llmsuite.contract.schema.degrees import Degrees, accumulate_steps, degrees_of
from llmsuite.contract.schema.recipe import Recipe, environment_of, reward_of, rollout_of
from llmsuite.contract.schema.rule import Violation
from llmsuite.contract.schema.section import value_at
from llmsuite.contract.specs import DeviceSpec, JobSpec, ModelFamily, StageSpec
from llmsuite.data.read import data_files
from llmsuite.data.remote import is_remote
from llmsuite.devices.base import DeviceBackend
from llmsuite.models.plain import reads_tokens
from llmsuite.models.protocols import REQUIRED_FUNCTIONS
from llmsuite.models.shard_plan import UNSHARDED
from llmsuite.recipe.code import code_problems, rewards_and_environments
from llmsuite.recipe.document import read_document
from llmsuite.recipe.load import LoadedRecipe, load
from llmsuite.recipe.pins import apply_pins, mixed_data
from llmsuite.recipe.plans import DataPlan, ModelPlan, ParallelPlan, TrainPlan, data_file, evaluation_data
from llmsuite.recipe.problems import sorted_problems
from llmsuite.recipe.rules import INFERENCE_RULES, RULES, RuleContext
from llmsuite.recipe.shape import base_of_adapter, local_weights, missing_model, model_config, tokenizer_of, weights_of
from llmsuite.recipe.smoke import SMOKE_LENGTH, smoke_layer
from llmsuite.recipe.teacher import TeacherPlan, teacher_of


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """A valid recipe with everything that can be derived from it without Paddle, for whoever starts a run: components
    get the plans they use."""

    loaded: LoadedRecipe
    model: ModelPlan
    data: DataPlan
    parallel: ParallelPlan
    train: TrainPlan
    output_dir: Path

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe

    @property
    def smoke_of(self) -> Degrees | None:
        return self.loaded.smoke_of

    def check_files(self, loads_data: bool = True, loads_model: bool = True) -> None:
        """Raise RecipeError with every missing file that this process needs, and how to get it.

        Names on hubs are not checked: `llmsuite.recipe.fetch` downloads them before a run.

        Args:
            loads_data: True on ranks that load data.
            loads_model: True on ranks that load the weights.
        """
        problems = []
        data = self.data.files() if loads_data else ()
        for key, given, path in data:
            fault = None
            if isinstance(path, Path) and not is_remote(given):
                fault = data_fault(path)
            if fault is not None:
                problems.append(self.loaded.problem(key, fault))
        weights = self.model.weights
        if weights is not None and not self.train.stage.trains:
            weights = base_of_adapter(weights)
        if loads_model and weights is not None and not is_file(weights / "config.json") and not _on_hub(weights):
            problems.append(self.loaded.problem("model.weights", missing_model(weights)))
        if loads_model:
            problems += self._missing_models()
        if (
            self.model.tokenizer is not None
            and loads_data
            and not (loads_model and self.model.tokenizer == self.model.weights)
            and not is_dir(self.model.tokenizer)
            and not _on_hub(self.model.tokenizer)
        ):
            key = "model.weights"
            if self.model.section.tokenizer is not None:
                key = "model.tokenizer"
            problems.append(self.loaded.problem(key, missing_model(self.model.tokenizer, key)))
        if problems:
            raise RecipeError(problems)

    def _missing_models(self) -> Iterator[Problem]:
        """Yield a problem for each missing model directory of a reference, a critic or a reward model."""
        profile = self.train.profile
        named = {f"{self.train.stage.section_name}.reference": profile.reference}
        critic = profile.critic
        if critic is not None:
            named[f"{critic.key}.weights"] = critic.weights
        reward: Any = self.train.reward  # has the keys of its rewards
        if reward is not None and "model" in reward.functions:
            named["reward.model.weights"] = reward.model.weights
        for key, given in named.items():
            if given is not None and not is_file(local_weights(given) / "config.json"):
                message = f"{given} is not a directory with a model (working directory: {Path.cwd()})"
                hint = f"; download one from a hub with `llmsuite import {given} -o DIR`"
                yield self.loaded.problem(key, message + hint)
        teacher = self.train.teacher
        if teacher is None or teacher.weights is None or _on_hub(teacher.weights):
            return
        if not is_file(teacher.weights / "config.json"):
            yield self.loaded.problem(teacher.key, missing_model(teacher.weights, teacher.key))

    def fetched(self, report: Callable[[str], None]) -> RunPlan:
        """Return the plan with remote data downloaded to local files. Raises UserError if a download fails."""
        return dataclasses.replace(self, data=self.data.fetched(report))

    def check_trains(self, command: str) -> None:
        """Raise UserError if the stage does not train; for commands about training."""
        if not self.train.stage.trains:
            raise UserError(
                f"{command}: {self.loaded.name} has stage {self.train.stage.name}, which does not train; name another "
                "recipe"
            )

    def check_output(self) -> None:
        """Raise RecipeError if the output directory has results or checkpoints of an earlier run."""
        result = ""
        if isinstance(self.train.stage, JobSpec):
            result = self.train.stage.result
        if result and exists(self.output_dir / result):
            message = f"{self.output_dir} holds {result}; add --resume to continue it, or choose another"
            raise RecipeError([self.loaded.problem("output_dir", message)])
        if listed(self.output_dir / "checkpoints", "step-*"):
            message = (
                f"{self.output_dir} holds checkpoints; add --resume to continue from the last one, or choose another"
            )
            raise RecipeError([self.loaded.problem("output_dir", message)])


def _on_hub(path: Path) -> bool:
    return hub_name(str(path)) is not None


def data_fault(path: Path) -> str | None:
    """Return the reason why a path has no data; None for a file, or a directory with data files."""
    if is_dir(path):
        try:
            data_files(path)
        except UserError as error:
            return str(error)
        return None
    if is_file(path):
        return None
    return f"{path} is not a file (working directory: {Path.cwd()})"


def resolve(loaded: LoadedRecipe, registry: Registry) -> RunPlan:
    """Check the rules between sections and derive the plan of the run.

    Raises:
        RecipeError: with every violated rule, each with the position of the key.
    """
    recipe = loaded.recipe
    family = registry.models[recipe.model.family]
    try:
        weights = weights_of(recipe.model)
        shaped = weights
        if weights is not None and not registry.stages[recipe.stage].trains:
            shaped = base_of_adapter(weights, fetches_config=recipe.model.preset is None)
    except UserError as error:
        hint = ""
        if hub_name(str(recipe.model.weights)):
            hint = "; or set model.preset to check the recipe without weights"
        raise RecipeError([loaded.problem("model.weights", f"{error}{hint}")]) from error
    stage = registry.stages[recipe.stage]
    backend = _backend_of(loaded, registry)
    config, violations = model_config(recipe, family, shaped, stage)
    if not violations:
        violations += _model_type(config, family, registry)
    violations += _names_problems(family, registry)
    violations += _registered_names(recipe, registry)
    violations += code_problems(loaded)
    degrees = degrees_of(recipe, (family.shard_plan or UNSHARDED).is_auto_parallel)
    context = RuleContext(recipe, degrees, config, stage, family, backend, loaded.given)
    rules = RULES if stage.trains else INFERENCE_RULES
    for rule in rules:
        violations += rule.check(context)
    teacher, found = teacher_of(context.profile.teacher, recipe, family, config, registry.models, context.precisions)
    violations += found
    if violations:
        raise RecipeError(sorted_problems([loaded.problem(key, message) for key, message in violations]))
    return RunPlan(
        loaded=loaded,
        model=ModelPlan(
            section=recipe.model,
            family=family,
            config=config,
            weights=weights,
            tokenizer=tokenizer_of(recipe.model, weights) if reads_tokens(config) else None,
            lora=recipe.lora,
            reft=recipe.reft,
            prefix=recipe.prefix,
            qat=recipe.qat,
            seed=recipe.seed,
        ),
        data=_data_plan(recipe, stage),
        parallel=parallel_plan_of(recipe, stage, registry.device(recipe.device), degrees),
        train=_train_plan(recipe, stage, registry, teacher),
        output_dir=Path(recipe.output_dir),
    )


def _data_plan(recipe: Recipe, stage: StageSpec | JobSpec) -> DataPlan:
    data = recipe.data
    key: Literal["train", "prompts"] = "prompts"
    eval_files = dict[str, Path | Url]()
    if stage.trains:
        key = "train"
        eval_files = {name: data_file(given) for name, given in evaluation_data(data).items()}
    return DataPlan(
        section=data,
        key=key,
        train_file=data_file(value_at(data, key)),
        eval_files=eval_files,
        mixed=tuple(mixed_data(recipe)),
        seed=recipe.seed,
    )


def parallel_plan_of(recipe: Recipe, stage: StageSpec | JobSpec, device: DeviceSpec, degrees: Degrees) -> ParallelPlan:
    """Derive the plan of the parallelism of a recipe whose rules hold."""
    return ParallelPlan(
        section=recipe.parallel,
        engine=recipe.engine,
        device=device,
        degrees=degrees,
        schedule=recipe.parallel.pipeline_schedule,
        num_chunks=recipe.parallel.num_chunks,
        accumulate_steps=accumulate_steps(recipe.train, degrees) if stage.trains else None,
        devices_per_machine=recipe.launch.num_devices,
        num_machines=recipe.launch.nnodes,
        master_weights=not stage.trains or recipe.train.master_weights,
        fuses_projections=stage.trains and _fuses_projections(recipe, device, degrees),
    )


def _fuses_projections(recipe: Recipe, device: DeviceSpec, degrees: Degrees) -> bool:
    """`parallel.fuse_projections` of a recipe that trains. Without it, true where no rule would refuse it, on a device
    that sends while it computes: on others nothing but the sums themselves is saved."""
    chosen = recipe.parallel.fuse_projections
    if chosen is not None:
        return chosen
    is_supported = (
        recipe.engine.mode == "dynamic"
        and not recipe.freezes_model
        and recipe.qat.weight_bits is None
        and not degrees.auto_parallel
    )
    return degrees.tp > 1 and is_supported and device.factory().overlaps_communication


def _train_plan(
    recipe: Recipe, stage: StageSpec | JobSpec, registry: Registry, teacher: TeacherPlan | None
) -> TrainPlan:
    section = value_at(recipe, stage.section_name)
    rollout = None
    if isinstance(stage, StageSpec) and stage.profile(section).updates:
        rollout = rollout_of(recipe)
    return TrainPlan(
        section=recipe.train,
        stage=stage,
        stage_section=section,
        sections={name: value_at(recipe, name) for name in stage.sections},
        rollout=rollout,
        rollout_engine=None if rollout is None else registry.rollout_engines.get(rollout.engine),
        reward=reward_of(recipe),
        generation=recipe.generation,
        checkpoint=recipe.checkpoint,
        seed=recipe.seed,
        teacher=teacher,
    )


def _model_type(config: Any, family: ModelFamily, registry: Registry) -> Iterator[Violation]:
    """Yield a violation if a family does not read the `model_type` that it writes to config.json: another family would
    then load its checkpoints into another network. A family that reads `model_type` of another declares them equal."""
    kind = config.to_hf().get("model_type")
    if kind not in family.hf_model_types:
        found = next((other.name for other in registry.models.values() if kind in other.hf_model_types), None)
        reader = "no family reads"
        if found is not None:
            reader = f"family {found!r} reads"
        yield (
            "model.family",
            f"checkpoints of {family.name!r} would have the model_type {kind!r}, which {reader}; `to_hf` of its "
            "config_cls has to return a model_type that is in its hf_model_types",
        )


def _registered_names(recipe: Recipe, registry: Registry) -> Iterator[Violation]:
    device = registry.find_device(recipe.device)
    if device is None:
        yield "device", registry.unknown("device", recipe.device)
    elif recipe.launch.devices is not None and not device.factory().visible_devices:
        yield "launch.devices", f"{recipe.device} has no numbered devices; set launch.num_devices instead"
    elif recipe.engine.deterministic and device.factory().deterministic_flags is None:
        message = f"{recipe.device} cannot be made deterministic to the last bit; set it to false"
        yield "engine.deterministic", message
    yield from _format_problems(recipe, registry)
    yield from _collator_problems(recipe.data.collator)
    for name in recipe.loggers:
        if name not in registry.loggers:
            yield "loggers", registry.unknown("logger", name)
    for kind, key, name in rewards_and_environments(recipe):
        if python_function(name) is not None:
            parameters = ("completions",) if kind == "reward" else ()
            fault = static_fault(name, parameters)
            if fault:
                yield key, fault
        elif name not in registry.specs(kind):
            what = "a class: FILE.py:CLASS"
            if kind == "reward":
                what = "a function: FILE.py:FUNCTION"
            yield key, f"{registry.unknown(kind, name)}; or name {what}"
    yield from _engine_problems(recipe, registry)


def _format_problems(recipe: Recipe, registry: Registry) -> Iterator[Violation]:
    """Yield a violation for a data format whose rows are not of the stage's kind. A stage without `row_kind` checks the
    format when it reads rows."""
    stage = registry.stages[recipe.stage]
    if not isinstance(stage, StageSpec):
        return
    given = recipe.data.format
    fitting = [f.name for f in registry.data_formats.values() if f.kind == stage.row_kind]
    for name in dict.fromkeys([given] if isinstance(given, str) else given.values()):
        if name != "auto" and name not in registry.data_formats:
            yield "data.format", registry.unknown("data format", name)
        elif stage.row_kind and not fitting:
            kinds = ", ".join(sorted({f.kind for f in registry.data_formats.values()}))
            yield (
                "stage",
                f"{stage.name} trains on {stage.row_kind} rows, but no data format has such rows; known kinds: {kinds}",
            )
        elif stage.row_kind and name != "auto" and name not in fitting:
            kind = registry.data_formats[name].kind
            message = f"{name} has {kind} rows, but stage {stage.name} trains on {stage.row_kind} rows"
            yield "data.format", f"{message}; choose auto or one of: {', '.join(fitting)}"


def _names_problems(family: ModelFamily, registry: Registry) -> Iterator[Violation]:
    """Yield a violation if the module of parameter names lacks a required function. Modules of built-in families are
    not imported for this check: tests cover them."""
    if registry.owner("model", family.name).distribution == BUILTIN:
        return
    names = family.names()
    missing = [name for name in REQUIRED_FUNCTIONS if not callable(getattr(names, name, None))]
    if missing:
        yield (
            "model.family",
            f"`names` of {family.name!r} returned {names!r}, which has no function {', '.join(missing)}",
        )


def _backend_of(loaded: LoadedRecipe, registry: Registry) -> DeviceBackend | None:
    """Return the backend of the device; None for an unknown device. Raises RecipeError if the factory returns another
    type."""
    device = registry.find_device(loaded.recipe.device)
    if device is None:
        return None
    backend = device.factory()
    if isinstance(backend, DeviceBackend):
        return backend
    base = f"{DeviceBackend.__module__}.{DeviceBackend.__name__}"
    message = f"the factory of {device.name!r} returned {backend!r}; it has to return an object derived from {base}"
    raise RecipeError([loaded.problem("device", message)])


def _collator_problems(collator: str | None) -> Iterator[Violation]:
    if collator is None:
        return
    if python_function(collator) is None:
        yield "data.collator", f"is {collator!r}; name a function: FILE.py:FUNCTION"
        return
    fault = static_fault(collator, ("samples", "collate"))
    if fault:
        yield "data.collator", fault


def _engine_problems(recipe: Recipe, registry: Registry) -> Iterator[Violation]:
    """Yield the settings that the rollout engine does not support, or the stage not with this engine."""
    rollout = rollout_of(recipe)
    stage = registry.stages[recipe.stage]
    if rollout is None or not isinstance(stage, StageSpec):
        return
    if not stage.profile(value_at(recipe, stage.section_name)).updates:
        return
    name = rollout.engine
    if name not in registry.rollout_engines:
        hint = ""
        if name == "vllm":
            hint = "; for a vLLM server use engine openai with rollout.openai.dialect vllm"
        yield "rollout.engine", registry.unknown("rollout engine", name) + hint
        return
    environment = environment_of(recipe)
    if registry.rollout_engines[name].remote and environment is not None and environment.name is not None:
        message = f"is {name}, which samples single-turn completions and does not support environments"
        yield "rollout.engine", f"{message}; set it to local, or environment.name to null"
    lag = rollout.max_staleness
    if lag and not registry.rollout_engines[name].remote:
        message = f"is {lag}, but engine {name} samples in the training process, between two steps; set it to 0"
        yield "rollout.max_staleness", message
    elif lag and "async_rollout" not in stage.capabilities:
        yield (
            "rollout.max_staleness",
            f"is {lag}, but stage {stage.name} does not support asynchronous rollouts; set it to 0",
        )


def plan_run(
    path: str | Path,
    overrides: Sequence[str],
    registry: Registry,
    smoke: bool = False,
    layers: Sequence[tuple[str, dict[str, Any]]] = (),
) -> RunPlan:
    """Load, check and resolve a recipe; with `smoke`, as a small run for a laptop.

    Args:
        path: JSON, JSONC or YAML file.
        overrides: `--a.b=c` words of the command line.
        registry: registered stages, model families, devices …
        smoke: True for a small run, as with `--smoke`.
        layers: as in `load`, applied after those of `smoke`.

    Raises:
        UserError: with every problem found.
    """
    if not smoke:
        loaded = load(path, overrides, registry, layers)
        apply_pins(loaded)
        return resolve(loaded, registry)
    # SMOKE_LENGTH is needed already for the first load: otherwise --train.max_steps=3 would contradict a recipe with
    # num_epochs, which --smoke removes
    written = read_document(path).value
    trains = isinstance(written, dict) and written.get("train")
    lengths = [("--smoke", SMOKE_LENGTH)] if trains else []
    loaded = load(path, overrides, registry, layers=[*lengths, *layers])
    small = load(path, overrides, registry, layers=[("--smoke", smoke_layer(loaded, registry)), *layers])
    apply_pins(small)
    small.smoke_of = degrees_of(loaded.recipe)
    return resolve(small, registry)
