"""What is wrong with keys of a recipe that nothing reads."""

from __future__ import annotations

import dataclasses
import json
import shlex

from typing_extensions import is_typeddict

from llmsuite.errors import Problem
from llmsuite.recipe.load import LoadedRecipe
from llmsuite.schema.keys import walk


def unread_keys(loaded: LoadedRecipe) -> list[Problem]:
    """A problem for each key that was given and that nothing has read. A command line can take away no key of a file,
    but one with its default counts as not given."""
    known = walk(type(loaded.recipe))
    defaults = {info.dotted: info.default for info in known if not is_typeddict(info.declared_in)}
    found = []
    for key in loaded.unread():
        default, hint = defaults.get(key, dataclasses.MISSING), ""
        if default is not dataclasses.MISSING:
            text = default if isinstance(default, str) else json.dumps(default)
            hint = f", or set it to its default: {shlex.quote(f'--{key}={text}')}"
        found.append(loaded.problem(key, f"nothing in this run reads it; remove it{hint}"))
    return found
