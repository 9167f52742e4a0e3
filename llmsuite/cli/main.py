"""The entry point `llmsuite COMMAND …`: selects the command, separates its options from overrides, and runs it."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmsuite.base.errors import UserError
from llmsuite.base.exits import exit_code
from llmsuite.base.python_files import code_allowed
from llmsuite.base.version import version_line
from llmsuite.cli import completion
from llmsuite.contract.given import add_files, plugin_files
from llmsuite.contract.registry import BUILTIN, BUNDLED, NO_PLUGINS, Registry, load_plugins
from llmsuite.contract.specs import Command

if TYPE_CHECKING:
    from llmsuite.cli.parser import CommandParser

_DESCRIPTION = "Pretrain, fine-tune, align and deploy large language models on PaddlePaddle: one JSON recipe per run."
_NO_PLUGINS = "--no-plugins"
_PLUGIN = "--plugin"
_ALLOW_CODE = "--allow-code"
_OF_LLMSUITE = ("-h", "--help", "--version")
"""Words before a command that are answered without it."""
_RECIPE = "recipe"
"""The command to which plugins add subcommands."""
_ASK_BY_KIND = ("list",)
"""Commands that ask the registry for the few kinds that they need; all others get it complete."""


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
            return _run(words)

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


def _run(words: list[str]) -> int:
    registry = add_files(load_plugins(complete=False))
    for command in list(registry.commands.values()):
        if registry.owner("command", command.name).distribution not in (BUILTIN, BUNDLED):
            _make_parser("command", command, "", registry)  # one that fails is withdrawn, whichever command is called
    if completion.VARIABLE in os.environ:
        completion.complete(registry)
    at = next((number for number, word in enumerate(words) if not word.startswith("-")), len(words))
    if at == len(words) or any(word in _OF_LLMSUITE for word in words[:at]):
        return _without_command(words[:at], registry)
    name = words.pop(at)
    if name not in registry.commands:
        raise UserError(registry.unknown("command", name))
    further = None
    if name == _RECIPE:
        further = _pop_recipe_command(words, registry)
    if further is not None:
        return _run_command("recipe command", further, f"llmsuite {name} {further.name}", words, registry)
    return _run_command("command", registry.commands[name], f"llmsuite {name}", words, registry)


def _run_command(kind: str, command: Command, prog: str, words: list[str], registry: Registry) -> int:
    """Parse the words of a command and run it. Returns the exit code."""
    parser = _make_parser(kind, command, prog, registry)
    if parser is None:
        raise UserError(registry.unknown(kind, command.name))
    if (kind, command.name) == ("command", _RECIPE):
        from llmsuite.cli.recipe import add_actions

        add_actions(parser, registry)
    overrides: list[str] = []
    if command.takes_overrides:
        options = {option for action in parser._actions for option in action.option_strings}
        words, overrides = split_overrides(words, options)
    arguments = parser.parse_args(words)
    arguments.overrides = overrides
    if command.name not in _ASK_BY_KIND:
        registry.complete()
    return command.run(arguments, registry)


def _make_parser(kind: str, command: Command, prog: str, registry: Registry) -> CommandParser | None:
    """Return a parser with the arguments of a command; None for a plugin's command that fails, which is withdrawn."""
    from llmsuite.cli.parser import CommandParser

    parser = CommandParser(prog=prog, description=command.help)
    try:
        command.add_arguments(parser)
    except Exception as error:  # a plugin's code: it may raise anything
        registry.disable(kind, command.name, error)
        return None
    return parser


def _without_command(words: list[str], registry: Registry) -> int:
    """Print what is asked for without a command: the help or the version. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="llmsuite", usage="%(prog)s [options] COMMAND …", description=_DESCRIPTION)
    help_version = "print the version of llmsuite, its commit, and the version of Paddle"
    parser.add_argument("--version", action="store_true", help=help_version)
    parser.add_argument(_NO_PLUGINS, action="store_true", help="load no plugins, neither bundled nor installed ones")
    help_plugin = "load a Python file as a plugin; works with any command, repeatable"
    parser.add_argument(_PLUGIN, metavar="FILE", help=help_plugin)
    help_code = "also run Python files named by a recipe that are outside its directory and the working directory"
    parser.add_argument(_ALLOW_CODE, action="store_true", help=help_code)
    commands = parser.add_subparsers(
        title="commands", metavar="", description="llmsuite COMMAND --help describes the arguments of a command."
    )
    for command in registry.commands.values():
        commands.add_parser(command.name, help=command.help.replace("%", "%%"), add_help=False)
    found, unknown = parser.parse_known_args(words)  # ends the process for --help
    if found.version:
        print(version_line())
        return 0
    if unknown:
        raise UserError(f"{unknown[0]}: llmsuite has no such option. For help: llmsuite --help")
    names = ", ".join(sorted(registry.commands))
    raise UserError(f"give a command, one of {names}; llmsuite --help describes each")


def _pop_recipe_command(words: list[str], registry: Registry) -> Command | None:
    """Remove the name of a plugin's subcommand of `llmsuite recipe` from the words after `recipe`, in place. Returns
    the subcommand; None where the words name none."""
    at = next((number for number, word in enumerate(words) if not word.startswith("-")), None)
    if at is None or words[at] not in registry.recipe_commands:
        return None
    return registry.recipe_commands[words.pop(at)]


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
                raise UserError(
                    f"{word}: unknown option. To set a key of the recipe, give its value too: --train.max_steps=3"
                )
            overrides.append(f"{word}={value}")
    return own, overrides
