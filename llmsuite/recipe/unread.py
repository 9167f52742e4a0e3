"""Problems for keys of a recipe that nothing reads."""

from __future__ import annotations

import dataclasses
import json
import shlex

from typing_extensions import is_typeddict

from llmsuite.base.errors import Problem
from llmsuite.contract.schema.keys import walk
from llmsuite.recipe.load import LoadedRecipe


def unread_keys(loaded: LoadedRecipe) -> list[Problem]:
    """Return a problem for each given key that nothing has read. The hint suggests the default value, because the
    command line cannot remove a key of the file, and a key with its default counts as not given."""
    known = walk(type(loaded.recipe))
    defaults = {info.dotted: info.default for info in known if not is_typeddict(info.declared_in)}
    found = []
    for key in loaded.unread():
        default = defaults.get(key, dataclasses.MISSING)
        hint = ""
        if default is not dataclasses.MISSING:
            text = default if isinstance(default, str) else json.dumps(default)
            hint = f", or set it to its default: {shlex.quote(f'--{key}={text}')}"
        found.append(loaded.problem(key, f"nothing in this run reads it; remove it{hint}"))
    return found
