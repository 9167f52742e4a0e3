"""A recipe as text: one line for each section that fits, else one line for each key."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmsuite.files import os_errors
from llmsuite.shown import SECRETS

_WIDTH = 120


def recipe_text(data: Mapping[str, Any]) -> str:
    """A recipe as JSON text, in the style of the recipes that come with llmsuite."""
    lines = [f"  {json.dumps(key)}: {_value(key, value)}" for key, value in data.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write_recipe(data: Mapping[str, Any], path: Path) -> None:
    """Write a recipe into a file, in a directory that is made if need be. Raises UserError when that cannot be done."""
    with os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(recipe_text(data), encoding="utf-8")


def give_recipe(data: Mapping[str, Any], output: str | None) -> None:
    """Write a recipe into a file, and say so; or print it, without secrets. Raises UserError where it cannot."""
    if output is not None:
        write_recipe(data, Path(output))
        print(f"wrote {output}")
        return
    text = recipe_text(data)
    print(text, end="")
    if SECRETS.hidden(text) != text:
        print("note: secrets are left out of what is printed; write it with --output to keep them", file=sys.stderr)


def _value(key: str, value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict) or len(key) + len(text) + len('  "": ,') <= _WIDTH:
        return _shorter_numbers(text)
    lines = [f"    {json.dumps(k)}: {_shorter_numbers(json.dumps(v, ensure_ascii=False))}" for k, v in value.items()]
    return "{\n" + ",\n".join(lines) + "\n  }"


_EXPONENT = re.compile(r'"(?:[^"\\]|\\.)*"|(?<=e-)0(?=\d)')


def _shorter_numbers(text: str) -> str:
    """Writes 3e-05 as 3e-5, outside of strings."""
    return _EXPONENT.sub(lambda match: match[0] if match[0] != "0" else "", text)
