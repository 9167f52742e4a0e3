"""From a loaded recipe to the plan of a run: derived numbers, rules between sections, files.

No code after this module checks whether a recipe makes sense.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from llmsuite.data.read import data_files
from llmsuite.data.remote import fetch, is_remote
from llmsuite.errors import Problem, RecipeError, UserError
from llmsuite.hub.names import hub_name
from llmsuite.models.plain import reads_tokens
from llmsuite.models.shard_plan import WHOLE
from llmsuite.plugins.manager import Registry
from llmsuite.python_files import fault_of, python_function
from llmsuite.recipe.code import code_problems, rewards_and_environments
from llmsuite.recipe.document import read_document
from llmsuite.recipe.load import LoadedRecipe, load
from llmsuite.recipe.pins import apply_pins, mixed_names
from llmsuite.recipe.problems import in_order
from llmsuite.recipe.registered import backend_of, format_problems, names_problems
from llmsuite.recipe.rules import RULES, UNTRAINED_RULES, RuleContext
from llmsuite.recipe.shape import base_of_adapter, local_weights, missing_model, model_config, tokenizer_of, weights_of
from llmsuite.recipe.smoke import SMOKE_LENGTH, smoke_layer
from llmsuite.regular import exists, is_dir, is_file, listed
from llmsuite.resources import find
from llmsuite.schema.degrees import Degrees, accumulate_steps, degrees_of
from llmsuite.schema.recipe import Recipe
from llmsuite.schema.reward import RewardSection
from llmsuite.schema.rule import Violation
from llmsuite.shown import Url
from llmsuite.specs import DeviceSpec, ModelFamily, RolloutEngineSpec, StageProfile, StageSpec


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """A recipe with everything that can be derived from it without Paddle."""

    loaded: LoadedRecipe
    stage: StageSpec
    family: ModelFamily
    model_config: Any
    device: DeviceSpec
    degrees: Degrees
    schedule: Literal["FThenB", "1F1B", "interleaved"]
    """Order of the passes when pp > 1."""
    num_chunks: int
    """Parts of the model on one rank."""
    accumulate_steps: int | None
    """Micro-batches of one optimizer step on one rank; None where that depends on their lengths."""
    weights: Path | None
    """Directory of the initial weights; None to initialise from the seed. May not exist yet: see `check_files`."""
    tokenizer: Path | None
    train_file: Path | Url
    """The training data; the prompts, for a stage that does not train. An address until it is `fetched`."""
    eval_file: Path | Url | None
    output_dir: Path
    rollout_engine: RolloutEngineSpec | None = None
    """What draws completions; None for a stage without rollouts."""
    smoke_of: Degrees | None = None
    """The degrees of the recipe itself, in a run made by `--smoke`."""

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe

    @property
    def train_path(self) -> Path:
        """The `train_file` of a plan whose data is `fetched`."""
        assert isinstance(self.train_file, Path), f"{self.train_file} is not fetched"
        return self.train_file

    @property
    def eval_path(self) -> Path | None:
        """The `eval_file` of a plan whose data is `fetched`."""
        assert not isinstance(self.eval_file, Url), f"{self.eval_file} is not fetched"
        return self.eval_file

    @property
    def section(self) -> Any:
        """The stage's own part of the recipe."""
        return getattr(self.recipe, self.stage.section_name)

    @property
    def profile(self) -> StageProfile:
        """Metrics and pre-passes of the stage."""
        profile = self.stage.profile(self.section)
        if self.stage.trains and self.recipe.train.mtp_loss_weight:
            return dataclasses.replace(profile, sums=(*profile.sums, "mtp_loss"))
        return profile

    @property
    def rows_per_sample(self) -> int:
        """Sequences that a sample has in a micro-batch: where there are rollouts, the completions of a prompt."""
        rollout = getattr(self.recipe, "rollout", None) if self.stage.trains and self.profile.updates else None
        if rollout is not None and self.profile.completions is not None:
            return self.profile.completions
        return self.stage.rows_per_sample * (rollout.num_generations if rollout is not None else 1)

    @property
    def gradient_bucket_bytes(self) -> int:
        """The size of gradient buckets: from the recipe, else from the device."""
        chosen = self.recipe.parallel.gradient_bucket_bytes
        return self.device.factory().gradient_bucket_bytes if chosen is None else chosen

    @property
    def narrows_frozen(self) -> bool:
        """Whether the frozen matrices of the decoder layers are kept in bfloat16 where parameters are float32, because
        nothing but products reads them, which round them: beside low-rank adapters that begin at zero."""
        lora, precision = self.recipe.lora, self.recipe.engine.precision
        is_plain = lora.rank is not None and lora.method == "lora" and lora.init == "default"
        is_wide = precision == "bf16" and self.device.factory().parameter_dtype(precision) == "float32"
        return is_plain and is_wide and lora.base_dtype is None

    def data_files(self) -> Iterator[tuple[str, str, Path | Url]]:
        """The data that the recipe names: its key, the name, and the file or directory, for what is here. Looking at
        it does not count as reading the keys."""
        data = self.recipe.__dict__["data"].__dict__
        first = "train" if self.stage.trains else "prompts"
        yield f"data.{first}", data[first], self.train_file
        if self.eval_file is not None:
            yield "data.eval", data["eval"], self.eval_file
        for section in ("data", "pretrain"):
            of_section = getattr(self.recipe.__dict__.get(section), "__dict__", {})
            for name in of_section.get("mix") or ():
                yield f"{section}.mix", name, _data_file(name)

    def check_files(self, reads_data: bool = True, loads_model: bool = True) -> None:
        """Raises RecipeError naming every file this process needs that is not there, and how to get it.

        What has a name on a hub is fetched before a run: see `llmsuite.recipe.fetch`.
        """
        problems = []
        for key, given, path in self.data_files() if reads_data else ():
            if isinstance(path, Path) and not is_remote(given) and (fault := data_fault(path)) is not None:
                problems.append(self.loaded.problem(key, fault))
        weights = self.weights if self.stage.trains or self.weights is None else base_of_adapter(self.weights)
        if loads_model and weights is not None and not is_file(weights / "config.json") and not _on_hub(weights):
            problems.append(self.loaded.problem("model.weights", missing_model(weights)))
        if loads_model:
            problems += self._missing_models()
        if (
            self.tokenizer is not None
            and reads_data
            and not (loads_model and self.tokenizer == self.weights)
            and not is_dir(self.tokenizer)
            and not _on_hub(self.tokenizer)
        ):
            key = "model.tokenizer" if self.recipe.model.tokenizer is not None else "model.weights"
            problems.append(self.loaded.problem(key, missing_model(self.tokenizer, key)))
        if problems:
            raise RecipeError(problems)

    def _missing_models(self) -> Iterator[Problem]:
        """Models beside the one that is trained, which are not there."""
        reference = self.profile.reference if self.stage.trains else None
        named = {f"{self.stage.section_name}.reference": reference}
        critic = self.profile.critic if self.stage.trains else None
        if critic is not None:
            named[f"{critic.key}.weights"] = critic.weights
        reward = getattr(self.recipe, "reward", None)
        if isinstance(reward, RewardSection) and "model" in reward.functions:
            section: Any = reward  # with the keys of its rewards
            named["reward.model.weights"] = section.model.weights
        for key, given in named.items():
            if given is not None and not is_file(local_weights(given) / "config.json"):
                message = f"{given} is not a directory with a model (working directory: {Path.cwd()})"
                hint = f"; fetch one from a hub with `llmsuite import {given} -o DIR`"
                yield self.loaded.problem(key, message + hint)

    def fetched(self, report: Callable[[str], None]) -> RunPlan:
        """The plan with remote data fetched to local files. Raises UserError when that fails."""
        if not self.stage.trains:
            prompts = self.recipe.data.prompts
            return dataclasses.replace(self, train_file=fetch(prompts, report)) if is_remote(prompts) else self
        train, evaluation = self.recipe.data.train, self.recipe.data.eval
        for name in mixed_names(self.recipe):
            if is_remote(name):
                fetch(name, report)
        return dataclasses.replace(
            self,
            train_file=fetch(train, report) if is_remote(train) else self.train_file,
            eval_file=fetch(evaluation, report) if evaluation and is_remote(evaluation) else self.eval_file,
        )

    def check_trains(self, command: str) -> None:
        """Raises UserError where a command is about training and the stage does not train."""
        if not self.stage.trains:
            raise UserError(
                f"{command}: {self.loaded.name} has stage {self.stage.name}, which does not train; name another recipe"
            )

    def check_output(self) -> None:
        """Raises RecipeError when a new run would be mixed with the checkpoints of an old one."""
        if self.stage.result and exists(self.output_dir / self.stage.result):
            message = f"{self.output_dir} holds {self.stage.result}; add --resume to continue it, or choose another"
            raise RecipeError([self.loaded.problem("output_dir", message)])
        if listed(self.output_dir / "checkpoints", "step-*"):
            message = (
                f"{self.output_dir} holds checkpoints; add --resume to continue from the last one, or choose another"
            )
            raise RecipeError([self.loaded.problem("output_dir", message)])


def _on_hub(path: Path) -> bool:
    return hub_name(str(path)) is not None


def data_fault(path: Path) -> str | None:
    """Why there is no data at a path; None where there is a file, or a directory with some."""
    if is_dir(path):
        try:
            data_files(path)
        except UserError as error:
            return str(error)
        return None
    return None if is_file(path) else f"{path} is not a file (working directory: {Path.cwd()})"


def resolve(loaded: LoadedRecipe, registry: Registry) -> RunPlan:
    """Check the rules between sections and derive the plan of the run.

    Raises:
        RecipeError: with every violated rule, at the position of the key that violates it.
    """
    recipe = loaded.recipe
    family = registry.models[recipe.model.family]
    try:
        weights = weights_of(recipe.model)
        shaped = weights
        if weights is not None and not registry.stages[recipe.stage].trains:
            shaped = base_of_adapter(weights, fetches_config=recipe.model.preset is None)
    except UserError as error:
        hint = (
            "; or set model.preset to check the recipe without weights" if hub_name(str(recipe.model.weights)) else ""
        )
        raise RecipeError([loaded.problem("model.weights", f"{error}{hint}")]) from error
    stage = registry.stages[recipe.stage]
    backend = backend_of(loaded, registry)
    config, violations = model_config(recipe, family, shaped, stage)
    violations += [] if violations else _model_type(config, family, registry)
    violations += names_problems(family, registry)
    violations += _registered_names(recipe, registry)
    violations += code_problems(loaded)
    degrees = degrees_of(recipe, (family.shard_plan or WHOLE).is_annotated)
    context = RuleContext(recipe, degrees, config, stage, family, backend, loaded.given)
    for rule in RULES if stage.trains else UNTRAINED_RULES:
        violations += rule.check(context)
    if violations:
        raise RecipeError(in_order([loaded.problem(key, message) for key, message in violations]))
    return RunPlan(
        loaded=loaded,
        stage=stage,
        family=family,
        model_config=config,
        device=registry.devices[recipe.device],
        degrees=degrees,
        schedule=recipe.parallel.pipeline_schedule,
        num_chunks=recipe.parallel.num_chunks,
        accumulate_steps=accumulate_steps(recipe.train, degrees) if stage.trains else None,
        weights=weights,
        tokenizer=tokenizer_of(recipe.model, weights) if reads_tokens(config) else None,
        train_file=_data_file(recipe.data.train if stage.trains else recipe.data.prompts),
        eval_file=_data_file(recipe.data.eval) if stage.trains and recipe.data.eval else None,
        output_dir=Path(recipe.output_dir),
        rollout_engine=registry.rollout_engines.get(getattr(getattr(recipe, "rollout", None), "engine", "")),
    )


def _model_type(config: Any, family: ModelFamily, registry: Registry) -> Iterator[Violation]:
    """What a checkpoint is called in config.json has to be read by its family, or the network of another one would give
    other numbers. A family that reads the checkpoints of another says that they are alike."""
    kind = config.to_hf().get("model_type")
    if kind not in family.hf_model_types:
        found = next((other.name for other in registry.models.values() if kind in other.hf_model_types), None)
        reader = "no family reads" if found is None else f"family {found!r} reads"
        yield (
            "model.family",
            f"checkpoints of {family.name!r} would have the model_type {kind!r}, which {reader}; `to_hf` of its "
            "config_cls has to give one of its own, which is in its hf_model_types",
        )


def _data_file(given: str) -> Path | Url:
    """A data file, or its address; the index, for a corpus that is named by its prefix."""
    if "://" in given:
        return Url(given)
    path = find(given)
    return index if not exists(path) and is_file(index := find(f"{given}.idx")) else path


def _registered_names(recipe: Recipe, registry: Registry) -> Iterator[Violation]:
    if recipe.device not in registry.devices:
        yield "device", registry.unknown("device", recipe.device)
    elif recipe.launch.devices is not None and not registry.devices[recipe.device].factory().visible_devices:
        yield "launch.devices", f"{recipe.device} has no numbered devices; set launch.num_devices instead"
    elif recipe.engine.deterministic and registry.devices[recipe.device].factory().deterministic_flags is None:
        message = f"nothing makes the sums of {recipe.device} repeat themselves to the last bit; set it to false"
        yield "engine.deterministic", message
    yield from format_problems(recipe, registry)
    yield from _collator_problems(getattr(recipe.data, "collator", None))  # stage infer has none
    for name in recipe.loggers:
        if name not in registry.loggers:
            yield "loggers", registry.unknown("logger", name)
    for kind, key, name in rewards_and_environments(recipe):
        if python_function(name) is not None:
            if fault := fault_of(name, ("completions",) if kind == "reward" else ()):
                yield key, fault
        elif name not in registry.specs(kind):
            what = "a function: FILE.py:FUNCTION" if kind == "reward" else "a class: FILE.py:CLASS"
            yield key, f"{registry.unknown(kind, name)}; or name {what}"
    yield from _engine_problems(recipe, registry)


def _collator_problems(collator: str | None) -> Iterator[Violation]:
    if collator is None:
        return
    if python_function(collator) is None:
        yield "data.collator", f"is {collator!r}; name a function: FILE.py:FUNCTION"
    elif fault := fault_of(collator, ("samples", "collate")):
        yield "data.collator", fault


def _engine_problems(recipe: Recipe, registry: Registry) -> Iterator[Violation]:
    """What the rollout engine cannot do, or the stage not with it."""
    rollout: Any = getattr(recipe, "rollout", None)
    name, stage = getattr(rollout, "engine", None), registry.stages[recipe.stage]
    if name is None:
        return
    if name not in registry.rollout_engines:
        is_server = "; servers of vLLM are engine openai, with rollout.openai.dialect vllm" if name == "vllm" else ""
        yield "rollout.engine", registry.unknown("rollout engine", name) + is_server
        return
    if registry.rollout_engines[name].remote and getattr(getattr(recipe, "environment", None), "name", None):
        message = f"is {name}, which draws whole completions, not the turns of an environment"
        yield "rollout.engine", f"{message}; set it to local, or environment.name to null"
    lag = rollout.max_staleness
    if lag and not registry.rollout_engines[name].remote:
        message = f"is {lag}, but engine {name} draws in the process that trains, between two steps; set it to 0"
        yield "rollout.max_staleness", message
    elif lag and not stage.draws_ahead:
        yield "rollout.max_staleness", f"is {lag}, but stage {stage.name} draws what it trains on at once; set it to 0"


def plan_run(
    path: str | Path,
    overrides: Sequence[str],
    registry: Registry,
    smoke: bool = False,
    layers: Sequence[tuple[str, dict[str, Any]]] = (),
) -> RunPlan:
    """Load, check and resolve a recipe; with `smoke`, as a small run for a laptop.

    Args:
        path: the JSON, JSONC or YAML file.
        overrides: `--a.b=c` words.
        registry: the known stages, model families, devices …
        smoke: whether to make it small.
        layers: as `load` takes them, over those of `smoke`.

    Raises:
        UserError: with everything that is wrong.
    """
    if not smoke:
        loaded = load(path, overrides, registry, layers)
        apply_pins(loaded)
        return resolve(loaded, registry)
    # without this, --train.max_steps=3 would contradict a recipe with num_epochs before --smoke takes that away
    written = read_document(path).value
    trains = isinstance(written, dict) and written.get("train")
    loaded = load(path, overrides, registry, layers=[*([("--smoke", SMOKE_LENGTH)] if trains else ()), *layers])
    small = load(path, overrides, registry, layers=[("--smoke", smoke_layer(loaded, registry)), *layers])
    apply_pins(small)
    return dataclasses.replace(resolve(small, registry), smoke_of=degrees_of(loaded.recipe))
