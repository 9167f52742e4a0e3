"""Recipes as JSON, JSONC or YAML: the name of the file says which."""

from __future__ import annotations

from pathlib import Path

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
