"""Keys of a recipe that may name a model or data on a hub, and the commits that these names are pinned to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from llmsuite.base.errors import RecipeError, UserError
from llmsuite.base.hub.listing import Kind, Want
from llmsuite.base.hub.local_copies import pinned
from llmsuite.base.hub.names import hub_name
from llmsuite.contract.schema.recipe import Recipe
from llmsuite.contract.schema.section import value_at
from llmsuite.recipe.load import LoadedRecipe

_KEYS: tuple[tuple[str, str, Want, Kind], ...] = (
    ("model", "weights", Want.MODEL, "model"),
    ("model", "tokenizer", Want.TOKENIZER, "model"),
    ("data", "train", Want.ROWS, "dataset"),
    ("data", "eval", Want.ROWS, "dataset"),
    ("data", "prompts", Want.ROWS, "dataset"),
    ("data", "mix", Want.ROWS, "dataset"),
    ("pretrain", "mix", Want.ROWS, "dataset"),
    ("gkd", "teacher", Want.MODEL, "model"),
)
"""(section, key, files that a run needs, kind of repository). The keys of a mix are names themselves."""


@dataclasses.dataclass
class HubReference:
    """A name on a hub in a recipe."""

    section: Any
    key: str
    """Dotted key, as in messages."""
    name: str
    """The name in the recipe."""
    want: Want
    kind: Kind
    entry: str | None = None
    """Key of the name in an object whose values are names, such as that of an evaluation set."""

    @property
    def field(self) -> str:
        """Name of the key in its section."""
        return self.key.split(".")[1]

    def recorded(self, value: Any) -> str | None:
        """Return the name at the same position in another value of this key; None if there is none."""
        now = value_at(self.section, self.field)
        if self.entry is not None:
            return value.get(self.entry) if isinstance(value, dict) else None
        if isinstance(value, dict) and isinstance(now, dict) and len(value) == len(now):
            return str(list(value)[list(now).index(self.name)])
        if isinstance(value, str) and isinstance(now, str):
            return value
        return None


def apply_pins(loaded: LoadedRecipe) -> None:
    """Write the commits that the launcher has resolved into the recipe of a rank.

    Raises:
        RecipeError: two names of a mix are pinned to the same name.
    """
    for named in hub_names(loaded.recipe):
        rename(loaded, named, pinned(named.name, named.kind))


def rename(loaded: LoadedRecipe, named: HubReference, name: str) -> None:
    """Replace a name in the recipe, at the same position.

    Raises:
        RecipeError: the new name is already in the same mix.
    """
    field = named.field
    value = value_at(named.section, field)
    if isinstance(value, str):
        setattr(named.section, field, name)
    elif named.entry is not None:
        setattr(named.section, field, {**value, named.entry: name})
    elif name != named.name:
        if name in value:
            message = f"{named.name} is {name}, which is already in the mix; name it once, with one weight"
            raise RecipeError([loaded.problem(named.key, message)])
        renamed = {named.name: name}
        replaced = {renamed.get(key, key): weight for key, weight in value.items()}
        setattr(named.section, field, replaced)
    named.name = name


def hub_names(recipe: Recipe) -> list[HubReference]:
    """Return the names on hubs in a recipe. Raises UserError for a name that has the prefix of a hub and is
    malformed."""
    return list(_hub_names(recipe))


def _hub_names(recipe: Recipe) -> Iterator[HubReference]:
    for section_name, key, want, kind in _KEYS:
        value = value_at(recipe, section_name, key)
        for dotted, name, entry in _names_at(f"{section_name}.{key}", value):
            try:
                is_one = hub_name(pinned(name, kind)) is not None
            except UserError as error:
                raise UserError(f"{dotted}: {error}") from error
            if is_one:
                yield HubReference(value_at(recipe, section_name), dotted, name, want, kind, entry)


def _names_at(key: str, value: Any) -> Iterator[tuple[str, str, str | None]]:
    """Yield (dotted key, name, `HubReference.entry`) of the names in the value of a key."""
    if isinstance(value, str):
        yield key, value, None
    elif key == "data.eval":
        yield from ((f"{key}.{entry}", name, entry) for entry, name in (value or {}).items())
    else:
        yield from ((key, name, None) for name in value or ())


def mixed_data(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (key, name) of the data of the mixes."""
    for section_name in ("data", "pretrain"):
        for name in value_at(recipe, section_name, "mix") or ():
            yield f"{section_name}.mix", name
