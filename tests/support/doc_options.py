"""Options that commands have."""

from __future__ import annotations

import re

from jsonargparse import ArgumentParser

from llmsuite.contract.registry import Registry
from llmsuite.contract.specs import Command
from tests.support.paths import ROOT


def _options(command: Command) -> set[str]:
    parser = ArgumentParser()
    command.add_arguments(parser)
    return {option for action in parser._actions for option in action.option_strings}


def options_of(registry: Registry) -> dict[str, set[str]]:
    """Of each command its options, and keys of a recipe where it takes them."""
    reference = (ROOT / "docs" / "reference" / "keys.md").read_text("utf-8")
    keys = {"--parallel", *(f"--{key}" for key in re.findall(r"^\| `([\w.]+)` \|", reference, re.MULTILINE))}
    found = {
        name: _options(c) | {"--plugin"} | (keys if c.takes_overrides else set())
        for name, c in registry.commands.items()
    }
    for further in registry.recipe_commands.values():
        found["recipe"] |= _options(further)
    return found
