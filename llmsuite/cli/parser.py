"""Errors of the command line in plain words: options as they are typed, and what would be right."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Mapping
from typing import Any, Literal, NoReturn, get_args, get_origin

from jsonargparse import ArgumentParser
from jsonargparse.typing import restricted_number_type

from llmsuite.cli.help import PlainHelp
from llmsuite.errors import UserError

# what jsonargparse 4.53 says
_MISSING = re.compile(r"the following arguments are required: (.*)")
_UNKNOWN = re.compile(r"unrecognized arguments: (.*)")
_WRONG_KEY = re.compile(r'Parser key "([^"]+)":')
_FOUND = re.compile(r"(?:Got value: (.*)|Given value: (.*)|: '(.*)'|: (\S+) does not conform.*)$")
_NO_VALUE = re.compile(r"argument (\S+): expected (?:one|at least one) argument")
_NO_COMMAND = 'expected "command" to be one of'
_KINDS = {
    "int": "a whole number",
    "PositiveInt": "a whole number above 0",
    "NonNegativeInt": "a whole number of at least 0",
    "float": "a number",
    "PositiveFloat": "a number above 0",
    "NonNegativeFloat": "a number of at least 0",
    "ClosedUnitInterval": "a number from 0 to 1",
    "bool": "true or false",
    "Port": "a number of a port, 0 to 65535",
}
Port: Any = restricted_number_type("Port", int, [(">=", 0), ("<=", 65535)])


class CommandParser(ArgumentParser):
    """jsonargparse's, whose errors are `UserError`."""

    def __init__(self, **settings: Any):
        super().__init__(**settings, formatter_class=PlainHelp)
        self.commands: dict[str, ArgumentParser] = {}
        """Parsers of the commands, by name."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise what the library has found.

        Raises:
            UserError: always.
        """
        parser = getattr(ex, "subcommand_parser", None) or self
        raise UserError(_in_plain_words(message, parser, self.commands)) from ex


def _in_plain_words(message: str, parser: ArgumentParser, commands: Mapping[str, ArgumentParser]) -> str:
    """What jsonargparse says of a command line; of `parser`, or of one of `commands` that it names."""
    if message.startswith(_NO_COMMAND):
        return f"give a command, one of {', '.join(sorted(commands))}; llmsuite --help tells what each does"
    if missing := _MISSING.search(message):
        return _without(missing[1].split(", "), commands)
    found = message
    if unknown := _UNKNOWN.search(message):
        found = _unknown(unknown[1].split(), parser)
    elif without := _NO_VALUE.search(message):
        found = f"{without[1]}: is without a value"
    elif (wrong := _WRONG_KEY.search(message)) and (value := _FOUND.search(message)):
        action = _action(parser, wrong[1])
        expected = None if action is None else _expected(getattr(action, "_typehint", None) or action.type)
        if action is not None and expected is not None:
            given = next(text for text in value.groups() if text is not None)
            found = f"{_name(action)}: expected {expected}, found {given!r}"
    return f"{found}{'' if found.endswith('?') else '.'} {parser.prog.replace(' [options]', '')} --help tells more"


def _without(keys: list[str], commands: Mapping[str, ArgumentParser]) -> str:
    """What a command line lacks, given as keys such as `merge.output`."""
    command = keys[0].partition(".")[0]
    found = [_action(commands[command], key.removeprefix(f"{command}.")) for key in keys]
    # the library lists lists too, which may be empty
    actions = [action for action in found if action is not None and action.nargs != "*"]
    names = [_name(action) for action in actions]
    head = f"{command}: {' and '.join(names)} {'is' if len(names) == 1 else 'are'} missing"
    helps = [f"  {name}: {action.help}" for name, action in zip(names, actions, strict=True)]
    return "\n".join([f"{head}. llmsuite {command} --help tells more", *helps])


def _unknown(words: list[str], parser: ArgumentParser) -> str:
    options = {option for action in parser._actions for option in action.option_strings}
    option = next((word for word in words if word.startswith("-")), None)
    if option is None:
        return f"{' '.join(words)}: this command takes no further words"
    near = difflib.get_close_matches(option.partition("=")[0], options, n=1, cutoff=0.7)
    return f"{option}: this command has no such option" + (f"; did you mean {near[0]}?" if near else "")


def _action(parser: ArgumentParser, key: str) -> argparse.Action | None:
    return next((action for action in parser._actions if action.dest == key), None)


def _name(action: argparse.Action) -> str:
    """An option as it is typed, or the name of a word in a usage line."""
    longest = max(action.option_strings, key=len, default=None)
    return longest or action.dest.upper()


def _expected(kind: Any) -> str | None:
    """What an argument of a type may be; None where there are no plain words for it."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    parts = [part for part in get_args(kind) if part is not type(None)]
    return _expected(parts[0]) if len(parts) == 1 else _KINDS.get(getattr(kind, "__name__", ""))
