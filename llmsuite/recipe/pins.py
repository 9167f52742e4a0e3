"""The keys of a recipe that may name something on a hub, and the commits it was pinned to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llmsuite.hub.here import pinned
from llmsuite.hub.listing import Kind, Want
from llmsuite.hub.names import hub_name
from llmsuite.schema.recipe import Recipe

_KEYS: tuple[tuple[str, str, Want, Kind], ...] = (
    ("model", "weights", Want.MODEL, "model"),
    ("model", "tokenizer", Want.TOKENIZER, "model"),
    ("data", "train", Want.ROWS, "dataset"),
    ("data", "eval", Want.ROWS, "dataset"),
    ("data", "prompts", Want.ROWS, "dataset"),
)
"""The keys that may name something on a hub, and what a run needs of it."""


def apply_pins(recipe: Recipe) -> None:
    """Write the commits that the launcher has found into the recipe of a rank."""
    for section, key, _, kind in hub_names(recipe):
        section.__dict__[key.partition(".")[2]] = pinned(value_of(section, key), kind)


def hub_names(recipe: Recipe) -> Iterator[tuple[Any, str, Want, Kind]]:
    """The section, dotted key, need and kind of what a recipe names on a hub."""
    for section_name, key, want, kind in _KEYS:
        section = recipe.__dict__[section_name]
        value = section.__dict__.get(key)
        if isinstance(value, str) and hub_name(pinned(value, kind)) is not None:
            yield section, f"{section_name}.{key}", want, kind


def value_of(section: Any, dotted: str) -> str:
    """The value of a key, without counting as reading it."""
    return str(section.__dict__[dotted.partition(".")[2]])
