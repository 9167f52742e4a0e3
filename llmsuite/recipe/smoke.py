"""The small run that `--smoke` makes of a recipe: the same strategy, loss and schedule, on a laptop."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

from llmsuite.models.mtp import num_mtp_layers
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.load import REMOVE, LoadedRecipe
from llmsuite.recipe.shape import model_config, weights_of
from llmsuite.schema.degrees import Degrees, degrees_of
from llmsuite.schema.recipe import Recipe
from llmsuite.specs import ModelFamily, StageSpec

SMOKE_STEPS = 8
SMOKE_LENGTH = {"train.max_steps": SMOKE_STEPS, "train.num_epochs": REMOVE}
"""The length of a small run."""


def smoke_layer(loaded: LoadedRecipe, registry: Registry) -> dict[str, Any]:
    """The keys that `--smoke` changes: a tiny shape, embedded data, CPU processes, a few steps.

    Stage, loss, learning rate schedule and strategy stay as in the recipe; degrees are reduced to 8 processes at most
    (`_degrees`).
    """
    recipe = loaded.recipe
    family, stage = registry.models[recipe.model.family], registry.stages[recipe.stage]
    small = _degrees(degrees_of(recipe))
    tp, pp, data = small.tp, small.pp, small.num_data_ranks
    shape = _shape(recipe, family, stage, tp, pp * (recipe.parallel.num_chunks if pp > 1 else 1))
    if not stage.trains:
        return {
            **_model(shape),
            "parallel": {"tensor_parallel_degree": tp},
            **_place(recipe, tp),
            **stage.smoke,
            **_reading(loaded, stage),
        }
    sharded = recipe.parallel.sharding != "none" and data > 1
    degree = small.sharding if small.dp > 1 or recipe.parallel.sharding_parallel_degree > 1 else 1
    micro = min(recipe.train.micro_batch_size, 4)
    return {
        **_model(shape),
        "data.max_length": 256,
        **dict.fromkeys(("data.mix", "data.max_samples"), REMOVE),
        "parallel": {
            "tensor_parallel_degree": tp,
            "pipeline_parallel_degree": pp,
            **_pipeline(recipe, pp),
            "sequence_parallel": recipe.parallel.sequence_parallel and tp > 1,
            "sharding": recipe.parallel.sharding if sharded else "none",
            "sharding_parallel_degree": degree if sharded else 1,
            "expert_parallel_degree": _experts(recipe, data, degree if sharded else 1),
        },
        **SMOKE_LENGTH,
        "train.micro_batch_size": micro,
        "train.global_batch_size": 8 * micro,  # the same on any mesh, so that meshes can be compared
        "train.learning_rate": 1e-3,
        **_warmup(recipe),
        **({} if recipe.generation.max_new_tokens is None else _ANSWERS),
        **({} if recipe.lora.base_dtype is None else {"lora.base_block": _SMALL_BLOCK}),
        "train.eval_steps": REMOVE,
        "checkpoint.save_steps": 4,
        **_place(recipe, tp * pp * data),
        **_of_stage(loaded, stage),
        **_reading(loaded, stage),
    }


def _of_stage(loaded: LoadedRecipe, stage: StageSpec) -> dict[str, Any]:
    """What the stage asks for. Where the command line names rewards there are these, and of the stage's only the keys
    of rewards that are among them and have none, such as a pattern."""
    keys = copy.deepcopy(dict(stage.smoke))  # overrides are written into it
    if "reward" not in keys or not names_own_reward(loaded):
        return keys
    recipe: Any = loaded.recipe
    for name in keys["reward"].keys() & recipe.reward.functions.keys():
        for key, value in keys["reward"][name].items():
            if ("reward", name, key) not in loaded.given:
                keys[f"reward.{name}.{key}"] = value
    del keys["reward"]
    return keys


def names_own_data(loaded: LoadedRecipe, stage: StageSpec) -> bool:
    """Whether the rows are not the embedded ones: the command line names others, or the stage has none."""
    first = _first(stage)
    return not _embeds(stage) or loaded.origins.get(("data", first), "").startswith("--data.")


def names_own_reward(loaded: LoadedRecipe) -> bool:
    """Whether the command line says what is rewarded: then the rest of the section is that of the recipe."""
    return loaded.origin(("reward", "functions")).startswith("--reward")


def _first(stage: StageSpec) -> str:
    """The key of the section `data` that names the rows."""
    return "train" if stage.trains else "prompts"


def _embeds(stage: StageSpec) -> bool:
    """Whether a stage names rows for `--smoke`; one of a plugin may have none, and reads those of the recipe."""
    return f"data.{_first(stage)}" in stage.smoke or _first(stage) in stage.smoke.get("data", {})


def _reading(loaded: LoadedRecipe, stage: StageSpec) -> dict[str, Any]:
    """How the rows are read: embedded ones as they are, those that the command line names as the recipe says.

    Embedded rows do not have the recipe's columns: evaluations are of the rows that are trained on then.
    """
    data: Any = loaded.recipe.data
    first = _first(stage)
    if not _embeds(stage):
        return {}
    if not names_own_data(loaded, stage):
        return {"data.columns": REMOVE, **({"data.format": "auto"} if first == "train" else {})}
    reads_columns = data.columns or data.format != "auto" or "reward" in stage.smoke  # rewards and environments do
    return {"data.eval": data.train} if first == "train" and reads_columns else {}


_ANSWERS = {"generation.max_new_tokens": 16, "generation.max_samples": 8}
"""Few and short answers at evaluations."""

_SMALL_WINDOW = 24
"""Tokens that a token attends to where attention has a window: fewer than most sequences have."""

_SMALL_BLOCK = 8
"""Inputs that share a scale in a quantised base: the tiny shapes are whole blocks of it, cut eightfold too."""


def _warmup(recipe: Recipe) -> dict[str, Any]:
    """At most a quarter of the steps."""
    steps = recipe.train.warmup_steps
    return {} if steps is None else {"train.warmup_steps": min(steps, SMOKE_STEPS // 4)}


def _model(shape: dict[str, Any]) -> dict[str, Any]:
    return {
        "source": REMOVE,
        "model.weights": REMOVE,
        "model.preset": REMOVE,
        "model.config": shape,
        "model.tokenizer": "data/tokenizer",
        "data.chat_template": "tokenizer",
        "engine.precision": "fp32",
    }


def _place(recipe: Recipe, num_ranks: int) -> dict[str, Any]:
    return {
        "launch.num_devices": num_ranks,
        "launch.devices": REMOVE,
        "launch.log_dir": REMOVE,
        "launch.nnodes": 1,
        "launch.master": REMOVE,
        "launch.node_rank": REMOVE,
        "launch.spares": REMOVE,
        "launch.min_nnodes": REMOVE,
        "launch.rejoin_seconds": REMOVE,
        "loggers": [],
        "device": "cpu",
        "output_dir": f"{recipe.output_dir}-smoke",
    }


_RANKS = 8


def _degrees(given: Degrees) -> Degrees:
    """Degrees for at most 8 ranks: the largest is halved until they fit, and each stays at 2 at least if it was.

    Of equal degrees dp is halved first, then sharding, pp, tp; if all four are 2, dp becomes 1. All but pp are powers
    of two, by which the tiny shapes and their batch can be divided.
    """
    degrees = {axis: 1 << getattr(given, axis).bit_length() - 1 for axis in ("dp", "sharding")}
    degrees |= {"pp": given.pp, "tp": 1 << given.tp.bit_length() - 1}
    while math.prod(degrees.values()) > _RANKS:
        axis = max(degrees, key=lambda name: degrees[name])
        degrees[axis] = max(2, degrees[axis] // 2) if degrees[axis] > 2 else 1
    return Degrees(**degrees)


def _experts(recipe: Recipe, data: int, sharding: int) -> int:
    """The recipe's expert parallel degree, as far as there are data ranks left for it."""
    ep = math.gcd(recipe.parallel.expert_parallel_degree, data)
    return ep if sharding % ep == 0 or ep % sharding == 0 else 1


def _pipeline(recipe: Recipe, pp: int) -> dict[str, Any]:
    """Schedule and split of the pipeline, if there still is one. A list of layers becomes one layer in each part."""
    parallel = recipe.parallel
    if pp == 1:
        return {}
    cut = parallel.pipeline_cut
    return {
        "pipeline_schedule": parallel.pipeline_schedule,
        "virtual_pipeline_degree": parallel.virtual_pipeline_degree,
        "pipeline_cut": cut if isinstance(cut, str) else list(range(1, pp * recipe.parallel.num_chunks)),
    }


def _shape(recipe: Recipe, family: ModelFamily, stage: StageSpec, tp: int, parts: int) -> dict[str, Any]:
    """The family's tiny shape, with enough heads and layers for the degrees, and the recipe's code paths."""
    shape = dict(family.smoke)
    config, _ = model_config(recipe, family, weights_of(recipe.model), stage)
    defaults = {field.name: field.default for field in dataclasses.fields(family.config_cls)}
    for key in family.smoke_keeps if config is not None else ():
        value = getattr(config, key)
        if key not in shape and value == defaults[key]:
            continue  # the run need not say it
        if value is None or isinstance(value, (str, bool)):  # of a size, only keep that it is not set
            shape[key] = value
    if getattr(config, "sliding_window", None) is not None:
        shape["sliding_window"] = _SMALL_WINDOW
    if num_mtp_layers(config):
        shape["num_nextn_predict_layers"] = config.num_nextn_predict_layers
    for key, least in (("num_attention_heads", tp), ("num_key_value_heads", tp), ("num_hidden_layers", parts)):
        if key in shape:
            shape[key] = max(shape[key], least)
    return shape
