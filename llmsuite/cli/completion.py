"""`llmsuite completion SHELL`: what a shell asks when Tab is pressed.

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

from llmsuite.errors import UserError
from llmsuite.plugins.manager import Registry
from llmsuite.recipe.document import read_document
from llmsuite.recipe.load import recipe_type
from llmsuite.resources import bundled
from llmsuite.schema.keys import KeyInfo, walk
from llmsuite.specs import Command

COMPLETES = "_ARGCOMPLETE"
"""The variable that is set where a shell asks."""
_LINE = "COMP_LINE"
_Shell = Literal["bash", "zsh", "fish"]


def add_arguments(parser: Any) -> None:
    parser.add_argument("shell", type=_Shell, help="the shell that the script is for")
    parser.epilog = (
        'bash and zsh (there behind compinit): eval "$(llmsuite completion bash)" in ~/.bashrc or ~/.zshrc. '
        "fish: llmsuite completion fish > ~/.config/fish/completions/llmsuite.fish"
    )


def run(args: Any, registry: Registry) -> int:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["llmsuite"], shell=args.shell))
    return 0


def answer(parsers: Mapping[str, Any], registry: Registry) -> None:
    """Tell the shell what the line may go on with, and end the process.

    argparse's own parsers are asked: jsonargparse 4.53 has argcomplete complete the words of a subcommand as if they
    were the whole line.

    Args:
        parsers: of the commands, by name.
        registry: with the commands, and the stages and families, whose keys a recipe may have.
    """
    import argcomplete

    parser = argparse.ArgumentParser(prog="llmsuite")
    commands, words = parser.add_subparsers(), _words(os.environ.get(_LINE, ""))
    named = next((word for word in words if word in parsers), None)
    for name, given in parsers.items():
        command = registry.commands[name]
        own = commands.add_parser(name, help=command.help.replace("%", "%%"))
        if name == named:
            _copy(given, own)
            if command.takes_overrides:
                _add_keys(own, words, registry)
    argcomplete.autocomplete(parser)


def _copy(given: Any, own: argparse.ArgumentParser) -> None:
    """Add the arguments of a parser of jsonargparse to one of argparse, each with what completes it."""
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
        added.completer = _recipes if is_recipe else _Values(values)


def _add_keys(own: argparse.ArgumentParser, words: Sequence[str], registry: Registry) -> None:
    """Add the keys of the recipe among the words, as options that override them."""
    taken = {option for action in own._actions for option in action.option_strings}
    for option, info in _keys(words, registry).items():
        if option not in taken:
            added: Any = own.add_argument(option, help=info.doc.replace("%", "%%"))
            added.completer = _Values(_values(info.annotation))


def _words(line: str) -> list[str]:
    """The words behind `llmsuite` on a line that somebody types."""
    try:
        return shlex.split(line)[1:]
    except ValueError:  # a quote that is open
        return line.split()[1:]


def _keys(words: Sequence[str], registry: Registry) -> dict[str, KeyInfo]:
    """The keys of the recipe among the words, by the options that override them."""
    cls, _ = recipe_type(_tree(words), registry)
    found = {f"--{info.dotted}": info for info in walk(cls)}
    outer = {option.rpartition(".")[0] for option in found}  # such as model.config, whose keys are there too
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
    """Completes what a key may be; a file where it may be anything."""

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
