"""A chat template of the user's own, in a file that a recipe names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from llmsuite.base.errors import UserError
from llmsuite.base.resources import find
from llmsuite.base.safe_files import is_file
from llmsuite.contract.schema.chat_templates import is_template_file, is_template_text
from llmsuite.contract.schema.recipe import Recipe
from llmsuite.contract.schema.section import value_at
from llmsuite.data.named_templates import read_template


def read_own_template(recipe: Recipe, path: str) -> Iterator[tuple[str, str]]:
    """Replace the path in `data.chat_template`, if it has one, by the text of the file.

    The recipe that a run records then has the text: a run that is resumed with another text differs in this key, and
    all that reads the recipe needs no file.

    Args:
        recipe: with valid keys.
        path: of the recipe. The file is looked up as data is, then next to the recipe.

    Yields:
        Key and message, for a file that is not there, or cannot be read.
    """
    value = value_at(recipe, "data", "chat_template")
    if not isinstance(value, str) or not is_template_file(value):
        return
    try:
        places = [find(value), Path(path).parent / value]
        found = next((place for place in places if is_file(place)), None)
        if found is None:
            yield "data.chat_template", f"{value} is not there; it is looked up in {_named(places)}"
            return
        text = read_template(found)
        if not is_template_text(text):
            yield "data.chat_template", f"{found} has no {{{{ … }}}} and no {{% … %}}, so it is no chat template"
            return
        recipe.data.chat_template = text
    except UserError as error:
        yield "data.chat_template", str(error)


def _named(places: list[Path]) -> str:
    return ", ".join(dict.fromkeys(str(place.absolute().parent) for place in places))
