"""Recipes as JSON, JSONC or YAML: the name of the file says which."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmsuite.recipe.source import Source, parse_json, read_text

YAML, JSONC = (".yaml", ".yml"), (".jsonc",)


def read_document(path: str | Path) -> Source:
    """Read a recipe; a relative path is looked up among the bundled files too.

    Args:
        path: .yaml or .yml is YAML, .jsonc is JSON with comments and trailing commas, anything else strict JSON.

    Raises:
        UserError: the file cannot be read.
        RecipeError: it is not what its name says; carries every problem found, each with line and column.
    """
    text, suffix = read_text(path), Path(path).suffix.lower()
    if suffix in YAML:
        from llmsuite.recipe.yaml_source import parse_yaml  # takes 20 ms to import

        return parse_yaml(text, str(path))
    return parse_json(text, str(path), comments=suffix in JSONC)


def of_another_suite(value: Mapping[str, Any]) -> str | None:
    """What to do with the arguments of another suite, where a document has these instead of sections; None for a
    recipe."""
    if any(isinstance(value.get(section), dict) for section in ("model", "data", "train")):
        return None
    if not any(isinstance(value.get(name), str) for name in ("model_name_or_path", "base_model", "model")):
        return None
    return (
        "has arguments of another suite, not the sections of a recipe; `llmsuite recipe from-llamafactory FILE -o "
        "recipe.json` makes a recipe of LLaMA-Factory's, and from-paddlenlp, from-paddleformers, from-trl, from-swift "
        "and from-axolotl of theirs"
    )
