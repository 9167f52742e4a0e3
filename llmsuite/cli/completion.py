"""The command `llmsuite completion SHELL`: completion of commands when Tab is pressed in a shell.

The shell then runs `llmsuite` itself, which answers through argcomplete: commands, options and files, and for commands
that take overrides the keys of the recipe and the values they may have. It answers at each press of Tab, so this module
imports what a line needs only.
"""

from __future__ import annotations

import argparse
import os
import shlex
import typing
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

from llmsuite.base.errors import UserError
from llmsuite.contract.registry import Registry

VARIABLE = "_ARGCOMPLETE"
"""Environment variable that the shell sets for a request for completions."""
_LINE = "COMP_LINE"
_SHELL = "_ARGCOMPLETE_SHELL"
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


class _Options(argparse.ArgumentParser):
    """A parser of argparse that takes the arguments of a command, whose types are those of jsonargparse, and gives each
    its completer. jsonargparse takes long to import, and with its parsers (4.53) argcomplete completes the words of a
    subcommand as if they were the complete line."""

    actions: Sequence[str] = ()
    """Values of the argument `action` besides those of its type."""

    def add_argument(self, *names: Any, type: Any = None, **settings: Any) -> argparse.Action:
        added: Any = super().add_argument(*names, **settings)
        if added.nargs == 0:  # an option without a value
            return added
        values = [value for value in _values(type) if value != "null"]
        is_recipe = not added.option_strings and added.dest in ("recipe", "recipes")
        if added.dest == "action":
            values.extend(self.actions)
        added.completer = _recipes if is_recipe else _Values(values)
        return added


def complete(registry: Registry) -> NoReturn:
    """Print the possible continuations of the line for the shell, and end the process.

    Args:
        registry: with the commands, and the stages and families, whose keys a recipe may have.
    """
    import argcomplete

    parser = argparse.ArgumentParser(prog="llmsuite")
    commands = parser.add_subparsers(parser_class=_Options)
    words = _words(os.environ.get(_LINE, ""))
    named = next((word for word in words if word in registry.commands), None)
    for name, command in registry.commands.items():
        own = commands.add_parser(name, help=command.help.replace("%", "%%"))
        if name != named:
            continue
        if name == "recipe":
            further = next((word for word in words[1:] if word in registry.recipe_commands), None)
            if further is not None:
                command = registry.recipe_commands[further]
                own.add_argument("command")
            else:
                from llmsuite.cli.recipe import actions

                own.actions = actions(registry)
        command.add_arguments(own)
        if command.takes_overrides:
            _add_keys(own, words, registry)
    argcomplete.autocomplete(parser)
    raise SystemExit  # argcomplete has ended the process


def _add_keys(own: _Options, words: Sequence[str], registry: Registry) -> None:
    """Add the keys of the recipe among the words, as options that override them."""
    from llmsuite.contract.schema.keys import walk
    from llmsuite.recipe.recipe_class import recipe_type

    cls, _ = recipe_type(_tree(words), registry)
    found = {f"--{info.dotted}": info for info in walk(cls)}
    sections = {option.rpartition(".")[0] for option in found}  # such as model.config, whose keys are listed
    taken = {option for action in own._actions for option in action.option_strings}
    is_described = os.environ.get(_SHELL) in ("zsh", "fish")  # to read the docstrings takes as long as all the rest
    for option, info in found.items():
        if option not in taken and option not in sections:
            added: Any = own.add_argument(option, help=info.doc.replace("%", "%%") if is_described else "")
            added.completer = _Values(_values(info.annotation))


def _words(line: str) -> list[str]:
    """The words after `llmsuite` on a command line that is not finished."""
    try:
        return shlex.split(line)[1:]
    except ValueError:  # an open quote
        return line.split()[1:]


def _tree(words: Sequence[str]) -> dict[str, Any]:
    """The stage and the model of the recipe among the words; none where it cannot be read."""
    from llmsuite.recipe.document import read_document

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

    from llmsuite.base.resources import bundled

    root = bundled("recipes")
    known = [f"recipes/{path.relative_to(root)}" for path in sorted(root.glob("*/*.json"))]
    return [*FilesCompleter()(prefix, **others), *(name for name in known if name.startswith(prefix))]
