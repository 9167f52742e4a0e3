"""The entry point `llmsuite COMMAND …`: selects the command, separates its options from overrides, and runs it."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from collections.abc import Sequence

from llmsuite import __version__
from llmsuite.base.errors import UserError
from llmsuite.base.exits import exit_code
from llmsuite.base.python_files import code_allowed
from llmsuite.cli import completion, recipe
from llmsuite.cli.parser import CommandParser
from llmsuite.contract.given import add_files, plugin_files
from llmsuite.contract.registry import BUILTIN, BUNDLED, NO_PLUGINS, Registry, load_plugins
from llmsuite.contract.specs import Command

_DESCRIPTION = "Pretrain, fine-tune, align and deploy large language models on PaddlePaddle: one JSON recipe per run."
_NO_PLUGINS = "--no-plugins"
_PLUGIN = "--plugin"
_ALLOW_CODE = "--allow-code"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if _NO_PLUGINS in words:
        words.remove(_NO_PLUGINS)
        os.environ[NO_PLUGINS] = "1"  # the ranks of a run inherit it

    allowed = code_allowed if _ALLOW_CODE in words else contextlib.nullcontext
    words = [word for word in words if word != _ALLOW_CODE]

    def work() -> int:
        with allowed(), plugin_files(pop_plugin_files(words)):
            return _run(words, add_files(load_plugins()))

    return exit_code(work)


def pop_plugin_files(words: list[str]) -> list[str]:
    """Remove `--plugin FILE` from the words of a command line, in place. Returns the files.

    Raises:
        UserError: the last word is `--plugin`.
    """
    files = []
    while (at := next((i for i, word in enumerate(words) if word.partition("=")[0] == _PLUGIN), None)) is not None:
        word = words.pop(at)
        if "=" not in word and at == len(words):
            raise UserError(f"{_PLUGIN}: is the last word; give the Python file after it")
        files.append(word.partition("=")[2] if "=" in word else words.pop(at))
    return files


def _run(words: list[str], registry: Registry) -> int:
    parser = CommandParser(prog="llmsuite", description=_DESCRIPTION, version=__version__)
    parser.add_argument(_NO_PLUGINS, action="store_true", help="load no plugins, neither bundled nor installed ones")
    parser.add_argument(_PLUGIN, type=str, help="load a Python file as a plugin; works with any command, repeatable")
    help_code = "also run Python files named by a recipe that are outside its directory and the working directory"
    parser.add_argument(_ALLOW_CODE, action="store_true", help=help_code)
    subcommands = parser.add_subcommands(required=True, dest="command", title="commands")
    options: dict[str, set[str]] = {}
    chosen = next((word for word in words if not word.startswith("-")), None)
    of_recipe = pop_recipe_command(words, registry) if chosen == recipe.COMMAND.name else None
    completes = completion.COMPLETION_VARIABLE in os.environ
    for command in list(registry.commands.values()):
        subparser = CommandParser(description=command.help)
        is_ours = registry.owner("command", command.name).distribution in (BUILTIN, BUNDLED)
        # to set up the arguments of all commands of ours takes longer than many a command itself
        if completes or command.name == chosen or not is_ours:
            try:
                (of_recipe if command is recipe.COMMAND and of_recipe else command).add_arguments(subparser)
            except Exception as error:  # a plugin's code: it may raise anything
                if command is recipe.COMMAND and of_recipe:
                    registry.disable("recipe command", of_recipe.name, error)
                    raise UserError(registry.unknown("recipe command", of_recipe.name)) from error
                registry.disable("command", command.name, error)
                continue
        subcommands.add_subcommand(command.name, subparser, help=command.help)
        options[command.name] = {option for action in subparser._actions for option in action.option_strings}
        parser.commands[command.name] = subparser
    if chosen == recipe.COMMAND.name:
        recipe.describe(parser.commands[chosen], of_recipe, registry)
    if completes:
        completion.complete(parser.commands, registry)
    if chosen is not None and chosen not in registry.commands:
        raise UserError(registry.unknown("command", chosen))
    overrides: list[str] = []
    selected = of_recipe or (None if chosen is None else registry.commands[chosen])
    if chosen is not None and selected is not None and selected.takes_overrides:
        words, overrides = split_overrides(words, options[chosen])
    arguments = parser.parse_args(words)
    assert selected is not None, "a command is required"
    namespace = arguments[arguments.command]
    namespace.overrides = overrides
    return selected.run(namespace, registry)


def pop_recipe_command(words: list[str], registry: Registry) -> Command | None:
    """Remove the name of a plugin's subcommand of `llmsuite recipe` from the words of a command line, in place. Returns
    the subcommand; None where the words name none."""
    at = [number for number, word in enumerate(words) if not word.startswith("-")]
    if len(at) < 2 or words[at[1]] not in registry.recipe_commands:
        return None
    return registry.recipe_commands[words.pop(at[1])]


def split_overrides(words: Sequence[str], options: set[str]) -> tuple[list[str], list[str]]:
    """Split the words of a command line into those of the command and `--key=value` overrides of the recipe.

    `--key value` is taken as `--key=value`.

    Raises:
        UserError: an override has no value, or is an option misspelt.
    """
    own: list[str] = []
    overrides: list[str] = []
    rest = iter(words)
    for word in rest:
        if not word.startswith("--") or word.partition("=")[0] in options:
            own.append(word)
        elif "=" in word:
            overrides.append(word)
        elif near := difflib.get_close_matches(word, options, n=1, cutoff=0.8):
            raise UserError(f"{word}: this command has no such option; did you mean {near[0]}?")
        else:
            value = next(rest, None)
            if value is None or value.startswith("--"):
                raise UserError(f"{word}: is neither an option of this command nor an override with a value")
            overrides.append(f"{word}={value}")
    return own, overrides
