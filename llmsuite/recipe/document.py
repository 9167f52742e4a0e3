"""Reading recipes in JSON, JSONC or YAML, by the suffix of the file name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmsuite.recipe.source import Source, parse_json, read_text

YAML = (".yaml", ".yml")
JSONC = (".jsonc",)


def read_document(path: str | Path, yaml_1_1: bool = False) -> Source:
    """Read a recipe; a relative path is also looked up among the bundled files.

    Args:
        path: .yaml or .yml is YAML, .jsonc is JSON with comments and trailing commas, anything else strict JSON.
        yaml_1_1: True to read yes, no, on and off as booleans, like programs that read YAML 1.1; else they are errors.

    Raises:
        UserError: the file cannot be read.
        RecipeError: it is not valid in its format; with every problem found, each with line and column.
    """
    text = read_text(path)
    suffix = Path(path).suffix.lower()
    if suffix in YAML:
        from llmsuite.recipe.yaml_source import parse_yaml  # takes 20 ms to import

        return parse_yaml(text, str(path), yaml_1_1)
    return parse_json(text, str(path), comments=suffix in JSONC)


def other_suite_hint(value: Mapping[str, Any]) -> str | None:
    """Return an error message with a hint if a document has the arguments of another suite; None for a recipe."""
    if any(isinstance(value.get(section), dict) for section in ("model", "data", "train")):
        return None
    if not any(isinstance(value.get(name), str) for name in ("model_name_or_path", "base_model", "model")):
        return None
    return (
        "has arguments of another suite, not the sections of a recipe; `llmsuite recipe from-llamafactory FILE -o "
        "recipe.json` converts those of LLaMA-Factory; from-paddlenlp, from-paddleformers, from-trl, from-swift and "
        "from-axolotl convert those of other suites"
    )
