"""The keys of a recipe that may name something on a hub, and the commits it was pinned to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from llmsuite.errors import RecipeError, UserError
from llmsuite.hub.here import pinned
from llmsuite.hub.listing import Kind, Want
from llmsuite.hub.names import hub_name
from llmsuite.recipe.load import LoadedRecipe
from llmsuite.schema.recipe import Recipe

_KEYS: tuple[tuple[str, str, Want, Kind], ...] = (
    ("model", "weights", Want.MODEL, "model"),
    ("model", "tokenizer", Want.TOKENIZER, "model"),
    ("data", "train", Want.ROWS, "dataset"),
    ("data", "eval", Want.ROWS, "dataset"),
    ("data", "prompts", Want.ROWS, "dataset"),
    ("data", "mix", Want.ROWS, "dataset"),
    ("pretrain", "mix", Want.ROWS, "dataset"),
)
"""The keys that may name something on a hub, and what a run needs of it. A mix has a name in each of its keys."""


@dataclasses.dataclass
class Named:
    """Something that a recipe names on a hub."""

    section: Any
    key: str
    """Dotted, as in messages."""
    name: str
    """What stands in the recipe; reading it here does not count as reading the key."""
    want: Want
    kind: Kind

    def recorded(self, value: Any) -> str | None:
        """The name in the same place of another value of this key; None where there is none."""
        now = self.section.__dict__[self.key.partition(".")[2]]
        if isinstance(value, dict) and isinstance(now, dict) and len(value) == len(now):
            return str(list(value)[list(now).index(self.name)])
        return value if isinstance(value, str) and isinstance(now, str) else None


def apply_pins(loaded: LoadedRecipe) -> None:
    """Write the commits that the launcher has found into the recipe of a rank.

    Raises:
        RecipeError: two names of a mix are the same.
    """
    for named in hub_names(loaded.recipe):
        rename(loaded, named, pinned(named.name, named.kind))


def rename(loaded: LoadedRecipe, named: Named, name: str) -> None:
    """Write another name for it into the recipe, in the same place.

    Raises:
        RecipeError: the name stands in the same mix already.
    """
    field = named.key.partition(".")[2]
    value = named.section.__dict__[field]
    if isinstance(value, str):
        named.section.__dict__[field] = name
    elif name != named.name:
        if name in value:
            message = f"{named.name} is {name}, which is there already; name it once, with one weight"
            raise RecipeError([loaded.problem(named.key, message)])
        named.section.__dict__[field] = {name if k == named.name else k: weight for k, weight in value.items()}
    named.name = name


def hub_names(recipe: Recipe) -> list[Named]:
    """What a recipe names on a hub. Raises UserError for a name that begins with a hub and goes on wrongly."""
    return list(_hub_names(recipe))


def _hub_names(recipe: Recipe) -> Iterator[Named]:
    for section_name, key, want, kind in _KEYS:
        section = recipe.__dict__.get(section_name)
        value = None if section is None else section.__dict__.get(key)
        for name in [value] if isinstance(value, str) else value or ():
            try:
                is_one = hub_name(pinned(name, kind)) is not None
            except UserError as error:
                raise UserError(f"{section_name}.{key}: {error}") from error
            if is_one:
                yield Named(section, f"{section_name}.{key}", name, want, kind)


def mixed_names(recipe: Recipe) -> list[str]:
    """The files of mixes, without counting as reading the keys."""
    sections = (recipe.__dict__.get(name) for name in ("data", "pretrain"))
    return [name for section in sections if section is not None for name in section.__dict__.get("mix") or ()]
