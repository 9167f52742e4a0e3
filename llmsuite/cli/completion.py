"""The command `llmsuite completion SHELL`: completion of commands when Tab is pressed in a shell.

The shell then runs `llmsuite` itself, whose parser answers through argcomplete: commands, options and files, and for
commands that take overrides the keys of the recipe and the values they may have.
"""

from __future__ import annotations

import argparse
import os
import shlex
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from llmsuite.base.errors import UserError
from llmsuite.base.resources import bundled
from llmsuite.cli import recipe
from llmsuite.cli.parser import CommandParser
from llmsuite.contract.registry import Registry
from llmsuite.contract.schema.keys import KeyInfo, walk
from llmsuite.contract.specs import Command
from llmsuite.recipe.document import read_document
from llmsuite.recipe.load import recipe_type

COMPLETION_VARIABLE = "_ARGCOMPLETE"
"""Environment variable that the shell sets for a request for completions."""
_LINE = "COMP_LINE"
_Shell = Literal["bash", "zsh", "fish"]


def add_arguments(parser: Any) -> None:
    parser.add_argument("shell", type=_Shell, help="the shell that the script is for")
    parser.epilog = (
        'bash and zsh (there after compinit): eval "$(llmsuite completion bash)" in ~/.bashrc or ~/.zshrc. '
        "fish: llmsuite completion fish > ~/.config/fish/completions/llmsuite.fish"
    )


def run(args: Any, registry: Registry) -> int:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["llmsuite"], shell=args.shell))
    return 0


def complete(parsers: Mapping[str, Any], registry: Registry) -> None:
    """Print the possible continuations of the line for the shell, and end the process.

    The completion uses argparse's own parsers: with jsonargparse 4.53, argcomplete completes the words of a subcommand
    as if they were the complete line.

    Args:
        parsers: of the commands, by name.
        registry: with the commands, and the stages and families, whose keys a recipe may have.
    """
    import argcomplete

    parser = argparse.ArgumentParser(prog="llmsuite")
    commands = parser.add_subparsers()
    words = _words(os.environ.get(_LINE, ""))
    named = next((word for word in words if word in parsers), None)
    for name, given in parsers.items():
        command = registry.commands[name]
        own = commands.add_parser(name, help=command.help.replace("%", "%%"))
        if name == named:
            further = next((word for word in words[1:] if word in registry.recipe_commands), None)
            if command is recipe.COMMAND and further is not None:
                command = registry.recipe_commands[further]
                given = CommandParser()
                command.add_arguments(given)
                own.add_argument("action")
            # they depend on the plugins, so no type has them
            actions = recipe.actions(registry) if command is recipe.COMMAND else []
            _copy(given, own, actions)
            if command.takes_overrides:
                _add_keys(own, words, registry)
    argcomplete.autocomplete(parser)


def _copy(given: Any, own: argparse.ArgumentParser, actions: Sequence[str]) -> None:
    """Add the arguments of a parser of jsonargparse to one of argparse, each with its completer; `actions` are values
    of the argument `action` besides those of its type."""
    for action in given._actions:
        if "--help" in action.option_strings:
            continue
        names = action.option_strings or [action.dest]
        if action.nargs == 0:
            own.add_argument(*names, action="store_true", help=action.help)
            continue
        added: Any = own.add_argument(*names, nargs=action.nargs, help=action.help)
        is_recipe = not action.option_strings and action.dest in ("recipe", "recipes")
        values = [value for value in _values(getattr(action, "_typehint", None)) if value != "null"]
        if action.dest == "action":
            values.extend(actions)
        added.completer = _recipes if is_recipe else _Values(values)


def _add_keys(own: argparse.ArgumentParser, words: Sequence[str], registry: Registry) -> None:
    """Add the keys of the recipe among the words, as options that override them."""
    taken = {option for action in own._actions for option in action.option_strings}
    for option, info in _keys(words, registry).items():
        if option not in taken:
            added: Any = own.add_argument(option, help=info.doc.replace("%", "%%"))
            added.completer = _Values(_values(info.annotation))


def _words(line: str) -> list[str]:
    """The words after `llmsuite` on a command line that is not finished."""
    try:
        return shlex.split(line)[1:]
    except ValueError:  # an open quote
        return line.split()[1:]


def _keys(words: Sequence[str], registry: Registry) -> dict[str, KeyInfo]:
    """The keys of the recipe among the words, by the options that override them."""
    cls, _ = recipe_type(_tree(words), registry)
    found = {f"--{info.dotted}": info for info in walk(cls)}
    outer = {option.rpartition(".")[0] for option in found}  # sections such as model.config, whose keys are listed
    return {option: info for option, info in found.items() if option not in outer}


def _tree(words: Sequence[str]) -> dict[str, Any]:
    """The stage and the model of the recipe among the words; none where it cannot be read."""
    for name in words:
        if name.endswith((".json", ".jsonc", ".yaml", ".yml")):
            try:
                tree = read_document(name).value
            except UserError:
                continue
            if isinstance(tree, dict):
                return {key: tree[key] for key in ("stage", "model") if key in tree}
    return {}


class _Values:
    """Completes the values of a key; files where any value is possible."""

    def __init__(self, values: Sequence[str]):
        self._values = values

    def __call__(self, prefix: str, **others: Any) -> list[str]:
        from argcomplete.completers import FilesCompleter

        return list(self._values) or list(FilesCompleter()(prefix, **others))


def _values(annotation: Any) -> list[str]:
    """The words that a type allows, if they are few."""
    if annotation is bool:
        return ["true", "false"]
    if annotation is type(None):
        return ["null"]
    if typing.get_origin(annotation) is Literal:
        return [str(value) for value in typing.get_args(annotation)]
    if typing.get_origin(annotation) in (list, dict):
        return []
    return [value for part in typing.get_args(annotation) for value in _values(part)]


def _recipes(prefix: str, **others: Any) -> list[str]:
    from argcomplete.completers import FilesCompleter

    root = bundled("recipes")
    known = [f"recipes/{path.relative_to(root)}" for path in sorted(root.glob("*/*.json"))]
    return [*FilesCompleter()(prefix, **others), *(name for name in known if name.startswith(prefix))]


COMMAND = Command(
    name="completion", help="print a script that completes commands in a shell", add_arguments=add_arguments, run=run
)
