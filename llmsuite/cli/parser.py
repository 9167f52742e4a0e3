"""Help and errors of the command line in plain words: errors name options as typed, and say how to correct them."""

from __future__ import annotations

import argparse
import re
from typing import Any, Literal, NoReturn, get_args, get_origin

from jsonargparse import ArgumentParser, DefaultHelpFormatter

from llmsuite.base.errors import UserError
from llmsuite.base.suggestions import final_suggestion

# what jsonargparse 4.53 says
_MISSING = re.compile(r"the following arguments are required: (.*)")
_UNKNOWN = re.compile(r"unrecognized arguments: (.*)")
_WRONG_KEY = re.compile(r'Parser key "([^"]+)":')
_FOUND = re.compile(r"(?:Got value: (.*)|Given value: (.*)|: '(.*)'|: (\S+) does not conform.*)$")
_NO_VALUE = re.compile(r"argument (\S+): expected (?:one|at least one) argument")
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


class PlainHelp(DefaultHelpFormatter):
    """jsonargparse's formatter, without types and without trivial defaults (None, False)."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if not action.option_strings or action.default in (None, False, argparse.SUPPRESS) or "%(default)" in text:
            return text
        # such a text names its default in words already
        return text if "default" in text else f"{text} (default: %(default)s)"


class CommandParser(ArgumentParser):
    """jsonargparse's parser, with errors raised as `UserError`."""

    def __init__(self, **settings: Any):
        super().__init__(**settings, formatter_class=PlainHelp)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise an error that the library has found.

        Raises:
            UserError: always.
        """
        raise UserError(_plain_message(message, self)) from ex


def _plain_message(message: str, parser: ArgumentParser) -> str:
    """A message of jsonargparse in plain words."""
    if missing := _MISSING.search(message):
        return _missing_arguments(missing[1].split(", "), parser)
    found = message
    if unknown := _UNKNOWN.search(message):
        found = _unknown_option(unknown[1].split(), parser)
    elif without := _NO_VALUE.search(message):
        found = f"{without[1]}: is without a value"
    else:
        wrong = _WRONG_KEY.search(message)
        value = _FOUND.search(message)
        action = None
        if wrong is not None:
            action = _action(parser, wrong[1])
        expected = None
        if action is not None:
            expected = _expected(getattr(action, "_typehint", None) or action.type)
        if value is not None and action is not None and expected is not None:
            given = next(text for text in value.groups() if text is not None)
            found = f"{_option_name(action)}: expected {expected}, found {given!r}"
    end = "" if found.endswith("?") else "."
    return f"{found}{end} For help: {parser.prog} --help"


def _missing_arguments(keys: list[str], parser: ArgumentParser) -> str:
    """The message about missing arguments, given as keys such as `output`."""
    found = [_action(parser, key) for key in keys]
    # the library also reports arguments that are lists, which may be empty
    actions = [action for action in found if action is not None and action.nargs != "*"]
    names = [_option_name(action) for action in actions]
    verb = "is" if len(names) == 1 else "are"
    command = parser.prog.removeprefix("llmsuite ")
    head = f"{command}: {' and '.join(names)} {verb} missing"
    helps = [f"  {name}: {action.help}" for name, action in zip(names, actions, strict=True)]
    return "\n".join([f"{head}. For help: {parser.prog} --help", *helps])


def _unknown_option(words: list[str], parser: ArgumentParser) -> str:
    options = {option for action in parser._actions for option in action.option_strings}
    option = next((word for word in words if word.startswith("-")), None)
    if option is None:
        return f"{' '.join(words)}: this command takes no more arguments"
    hint = final_suggestion(option.partition("=")[0], options, cutoff=0.7, quotes=False)
    return f"{option}: this command has no such option{hint}"


def _action(parser: ArgumentParser, key: str) -> argparse.Action | None:
    return next((action for action in parser._actions if action.dest == key), None)


def _option_name(action: argparse.Action) -> str:
    """The name of an argument as typed: its longest option, else its name in a usage line."""
    longest = max(action.option_strings, key=len, default=None)
    return longest or action.dest.upper()


def _expected(kind: Any) -> str | None:
    """The expected values of an argument of a type, in plain words; None where there are none."""
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    parts = [part for part in get_args(kind) if part is not type(None)]
    if len(parts) == 1:
        return _expected(parts[0])
    return _KINDS.get(getattr(kind, "__name__", ""))
