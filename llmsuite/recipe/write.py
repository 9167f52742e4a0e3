"""Recipes as JSON text: one line per section where it fits, else one line per key."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmsuite.base.files import os_errors
from llmsuite.base.redaction import SECRETS

_WIDTH = 120


def recipe_text(data: Mapping[str, Any]) -> str:
    """Return a recipe as JSON text, in the style of the bundled recipes."""
    lines = [f"  {json.dumps(key)}: {_value(key, value)}" for key, value in data.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write_recipe(data: Mapping[str, Any], path: Path) -> None:
    """Write a recipe to a file and create its directory if needed. Raises UserError if that fails."""
    with os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(recipe_text(data), encoding="utf-8")


def output_recipe(data: Mapping[str, Any], output: str | None) -> None:
    """Write a recipe to a file and report it, or print the recipe without secrets. Raises UserError if writing
    fails."""
    if output is not None:
        write_recipe(data, Path(output))
        print(f"wrote {output}")
        return
    text = recipe_text(data)
    print(text, end="")
    if SECRETS.redact(text) != text:
        print("note: secrets are not printed; write the recipe to a file with --output to keep them", file=sys.stderr)


def _value(key: str, value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict) or len(key) + len(text) + len('  "": ,') <= _WIDTH:
        return _shorter_numbers(text)
    lines = [f"    {json.dumps(k)}: {_shorter_numbers(json.dumps(v, ensure_ascii=False))}" for k, v in value.items()]
    return "{\n" + ",\n".join(lines) + "\n  }"


_EXPONENT = re.compile(r'"(?:[^"\\]|\\.)*"|(?<=e-)0(?=\d)')


def _shorter_numbers(text: str) -> str:
    """Write 3e-05 as 3e-5, outside of strings."""
    return _EXPONENT.sub(lambda match: match[0] if match[0] != "0" else "", text)
