"""`--smoke`: reduces a recipe to a small run on a laptop with the same strategy, loss and schedule."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.degrees import Degrees, degrees_of
from llmsuite.contract.schema.recipe import Recipe, rollout_of
from llmsuite.contract.schema.section import value_at
from llmsuite.contract.specs import ModelFamily, RunSpec, StageProfile, StageSpec
from llmsuite.models.block_quant import LLM_INT8
from llmsuite.models.mtp import num_mtp_layers
from llmsuite.models.protocols import shape_fields, window_of
from llmsuite.recipe.load import REMOVE, LoadedRecipe
from llmsuite.recipe.plans import evaluation_names
from llmsuite.recipe.shape import model_config, weights_of

SMOKE_STEPS = 8
_COMPLETION_LENGTH = 16
"""Tokens of the completions of rollouts."""
SMOKE_LENGTH = {"train.max_steps": SMOKE_STEPS, "train.num_epochs": REMOVE}
"""Keys that set the length of a smoke run."""


def smoke_layer(loaded: LoadedRecipe, registry: Registry) -> dict[str, Any]:
    """Return the keys that `--smoke` changes: a tiny model, bundled data, CPU processes, a few steps.

    Stage, loss, learning-rate schedule and strategy are those of the recipe; degrees are reduced to at most 8 processes
    (`_degrees`).
    """
    recipe = loaded.recipe
    family = registry.models[recipe.model.family]
    stage = registry.stages[recipe.stage]
    small = _degrees(degrees_of(recipe))
    tp = small.tp
    pp = small.pp
    data = small.num_data_ranks
    parts = pp * recipe.parallel.num_chunks if pp > 1 else 1
    shape = _shape(recipe, family, stage, tp, parts)
    if not stage.trains:
        return {
            **_model(shape),
            "parallel": {"tensor_parallel_degree": tp},
            **_launch(recipe, tp),
            **stage.smoke,
            **_reading(loaded, stage),
        }
    degree = 1
    sharding = recipe.parallel.sharding
    if data == 1:
        sharding = "none"
    if sharding != "none" and (small.dp > 1 or recipe.parallel.sharding_parallel_degree > 1):
        degree = small.sharding
    micro = min(recipe.train.micro_batch_size, 4)
    layer = {
        **_model(shape),
        "data.max_length": 256,
        **dict.fromkeys(("data.mix", "data.max_samples", "data.sample", "data.holdout", "data.choice"), REMOVE),
        "parallel": {
            "tensor_parallel_degree": tp,
            "pipeline_parallel_degree": pp,
            **_pipeline(recipe, pp),
            "sequence_parallel": recipe.parallel.sequence_parallel and tp > 1,
            "sharding": sharding,
            "sharding_parallel_degree": degree,
            "expert_parallel_degree": _experts(recipe, data, degree),
        },
        **SMOKE_LENGTH,
        "train.micro_batch_size": micro,
        "train.global_batch_size": 8 * micro,  # the same on every mesh, so that losses can be compared
        "train.learning_rate": 1e-3,
        **_warmup(recipe),
        **_small_sizes(recipe),
        **_teacher(recipe, stage, shape),
        **_rollouts(recipe, stage),
        "train.master_weights": REMOVE,
        "train.eval_steps": REMOVE,
        "train.early_stopping": REMOVE,
        "train.loss_watchdog": REMOVE,
        "train.peak_tflops": REMOVE,
        "train.profile": REMOVE,
        "checkpoint.save_steps": 4,
        **_launch(recipe, tp * pp * data),
        **_of_stage(loaded, stage),
        **_reading(loaded, stage),
    }
    if isinstance(recipe.data.eval, dict) and isinstance(layer.get("data.eval"), str):
        # the names stay, as checkpoint.best_metric may have one
        names = [name for name in evaluation_names(recipe.data) if name]
        layer["data.eval"] = dict.fromkeys(names, layer["data.eval"])
    return layer


def _small_sizes(recipe: Recipe) -> dict[str, Any]:
    """Return the keys with sizes that do not fit the tiny model, where the recipe uses them."""
    keys: dict[str, Any] = {}
    if recipe.generation.max_new_tokens is not None:
        keys |= _ANSWERS
    if recipe.lora.base_dtype not in (None, LLM_INT8):
        keys["lora.base_block"] = _SMALL_BLOCK
    return keys


def _teacher(recipe: Recipe, stage: RunSpec, shape: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a teacher: of the shape of the tiny model, with random values of its own."""
    profile = stage.profile(value_at(recipe, stage.section_name)) if isinstance(stage, StageSpec) else StageProfile()
    teacher = profile.teacher
    if teacher is None:
        return {}
    others = {f"{teacher.key}_{name}": REMOVE for name in ("preset", "precision")}
    return {teacher.key: None, f"{teacher.key}_config": shape, **others}


def _rollouts(recipe: Recipe, stage: RunSpec) -> dict[str, Any]:
    """Return the keys of short completions, where the recipe samples some."""
    rollout = rollout_of(recipe)
    is_sampled = isinstance(stage, StageSpec) and stage.profile(value_at(recipe, stage.section_name)).updates > 0
    if rollout is None or not is_sampled:
        return {}
    return {"rollout.max_completion_length": min(rollout.max_completion_length, _COMPLETION_LENGTH)}


def _of_stage(loaded: LoadedRecipe, stage: RunSpec) -> dict[str, Any]:
    """Return the smoke keys of the stage. Rewards on the command line replace those of the stage; keys of such a reward
    that the recipe does not set, such as a pattern, are those of the stage."""
    keys = copy.deepcopy(dict(stage.smoke))  # a copy: overrides are written into it
    if "reward" not in keys or not overrides_reward(loaded):
        return keys
    recipe: Any = loaded.recipe
    for name in keys["reward"].keys() & recipe.reward.functions.keys():
        for key, value in keys["reward"][name].items():
            if ("reward", name, key) not in loaded.given:
                keys[f"reward.{name}.{key}"] = value
    del keys["reward"]
    return keys


def overrides_data(loaded: LoadedRecipe, stage: RunSpec) -> bool:
    """Return True if the command line names data, or the stage has no bundled rows."""
    first = _first(stage)
    return not _embeds(stage) or loaded.origins.get(("data", first), "").startswith("--data.")


def overrides_reward(loaded: LoadedRecipe) -> bool:
    """Return True if the command line sets rewards; the rest of section `reward` is then that of the recipe."""
    return loaded.origin(("reward", "functions")).startswith("--reward")


def _first(stage: RunSpec) -> str:
    """Return the key of section `data` that names the rows."""
    return "train" if stage.trains else "prompts"


def _embeds(stage: RunSpec) -> bool:
    """Return True if a stage names rows for `--smoke`. A stage of a plugin may not; the rows of the recipe are used
    then."""
    return f"data.{_first(stage)}" in stage.smoke or _first(stage) in stage.smoke.get("data", {})


def _reading(loaded: LoadedRecipe, stage: RunSpec) -> dict[str, Any]:
    """Return the keys for reading rows: bundled rows need no columns; data of the command line is read as in the
    recipe.

    The columns that bundled rows have for other stages are ignored, next to those that the recipe ignores. Bundled
    evaluation data lacks the columns of the recipe; the run is then evaluated on its training data.
    """
    data: Any = loaded.recipe.data
    first = _first(stage)
    if not _embeds(stage):
        return {}
    columns = stage.smoke.get("data.ignore_columns")
    ignored = {"data.ignore_columns": list(dict.fromkeys([*data.ignore_columns, *columns]))} if columns else {}
    if not overrides_data(loaded, stage):
        own = dict.fromkeys(("data.columns", "data.text_template"), REMOVE)
        return {**own, **({"data.format": "auto"} if first == "train" else {}), **ignored}
    # rewards and environments read columns
    reads_columns = data.columns or data.text_template or data.format != "auto" or "reward" in stage.smoke
    if first == "train" and reads_columns:
        return {"data.eval": data.train, **ignored}
    return ignored


_ANSWERS = {"generation.max_new_tokens": 16, "generation.max_samples": 8}
"""Few, short answers at evaluations."""

_SMALL_WINDOW = 24
"""Sliding window of attention, where the model has one: shorter than most sequences."""

_SMALL_BLOCK = 8
"""`lora.base_block`: divides the input dimensions of the tiny shapes, also when they are sharded over 8 ranks."""


def _warmup(recipe: Recipe) -> dict[str, Any]:
    """Return the warm-up steps of the recipe, at most a quarter of all steps."""
    steps = recipe.train.warmup_steps
    if steps is None:
        return {}
    return {"train.warmup_steps": min(steps, SMOKE_STEPS // 4)}


def _model(shape: dict[str, Any]) -> dict[str, Any]:
    return {
        "source": REMOVE,
        "model.weights": REMOVE,
        "model.load": REMOVE,
        "model.preset": REMOVE,
        "model.config": shape,
        "model.tokenizer": "data/tokenizer",
        "data.chat_template": "tokenizer",
        "data.chat_template_kwargs": REMOVE,  # of the model's own template
        "engine.precision": "fp32",
    }


def _launch(recipe: Recipe, num_ranks: int) -> dict[str, Any]:
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


_MAX_RANKS = 8


def _degrees(given: Degrees) -> Degrees:
    """Return degrees for at most 8 ranks: the largest degree is halved until they fit; a degree above 1 stays at least
    2.

    Of equal degrees dp is halved first, then sharding, pp, tp; if all four are 2, dp becomes 1. All but pp are rounded
    down to powers of two, which divide the tiny shapes and their batch.
    """
    degrees = {
        "dp": _power_of_two(given.dp),
        "sharding": _power_of_two(given.sharding),
        "pp": given.pp,
        "tp": _power_of_two(given.tp),
    }
    while math.prod(degrees.values()) > _MAX_RANKS:
        axis = max(degrees, key=lambda name: degrees[name])
        degrees[axis] = max(2, degrees[axis] // 2) if degrees[axis] > 2 else 1
    return Degrees(dp=degrees["dp"], sharding=degrees["sharding"], pp=degrees["pp"], tp=degrees["tp"])


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is at most the number."""
    return 1 << number.bit_length() - 1


def _experts(recipe: Recipe, data: int, sharding: int) -> int:
    """Return the expert parallel degree of the recipe, reduced to the number of data ranks."""
    ep = math.gcd(recipe.parallel.expert_parallel_degree, data)
    if sharding % ep == 0 or ep % sharding == 0:
        return ep
    return 1


def _pipeline(recipe: Recipe, pp: int) -> dict[str, Any]:
    """Return the keys of the pipeline, if there is one. A list of layers is replaced by one layer per part."""
    parallel = recipe.parallel
    if pp == 1:
        return {}
    cut = parallel.pipeline_cut
    if not isinstance(cut, str):
        cut = list(range(1, pp * parallel.num_chunks))
    return {
        "pipeline_schedule": parallel.pipeline_schedule,
        "virtual_pipeline_degree": parallel.virtual_pipeline_degree,
        "pipeline_cut": cut,
    }


def _shape(recipe: Recipe, family: ModelFamily, stage: RunSpec, tp: int, parts: int) -> dict[str, Any]:
    """Return the tiny shape of the family, with enough heads and layers for the degrees and the code paths of the
    recipe."""
    shape = dict(family.smoke)
    config, _ = model_config(recipe, family, weights_of(recipe.model), stage)
    defaults = {field.name: field.default for field in dataclasses.fields(family.config_cls)}
    kept = family.smoke_keeps if config is not None else ()
    for key in kept:
        value = shape_fields(config)[key]
        if key not in shape and value == defaults[key]:
            continue  # the default already has this value
        if value is None or isinstance(value, (str, bool, float)):  # sizes stay tiny: of integers only null is kept
            shape[key] = value
    if window_of(config) is not None:
        shape["sliding_window"] = _SMALL_WINDOW
    if num_mtp_layers(config):
        shape["num_nextn_predict_layers"] = config.num_nextn_predict_layers
    for key, least in (("num_attention_heads", tp), ("num_key_value_heads", tp), ("num_hidden_layers", parts)):
        if key in shape:
            shape[key] = max(shape[key], least)
    return shape
