"""Arguments of a run of another suite, read from a JSON file or from the command line in a shell script."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import re
import shlex
import string
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from llmsuite.base.errors import UserError, reason_of
from llmsuite.base.safe_files import open_at_once
from llmsuite.recipe.source import parse_json, read_text

_QUOTIENT = re.compile(r"\$\(\(?\s*(?:expr\s+)?(\d+(?:\s*/\s*\d+)+)\s*\)\)?")
_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(.*)$")
_DEVICES = {"gpus": "gpu", "xpus": "xpu", "devices": None}


@dataclasses.dataclass
class Arguments:
    """The arguments of a run of another suite."""

    values: dict[str, Any]
    """Arguments of the script by name; numbers and booleans are parsed."""
    script: str = ""
    """The Python file that the command line starts; empty for a JSON file."""
    num_devices: int | None = None
    """Devices per machine, from the launcher; None if it names none."""
    nnodes: int | None = None
    device: str | None = None


def read_arguments(path: Path) -> Arguments:
    """Read the arguments in a JSON file or a shell script.

    Raises:
        UserError: the file cannot be read, is not valid JSON, or has no command line that starts a Python file.
    """
    try:
        with io.TextIOWrapper(open_at_once(path), encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {reason_of(error)}") from error
    if not text.lstrip().startswith("{"):
        return _shell(text, path)
    values = parse_json(text, str(path)).value
    return Arguments({str(key): value for key, value in values.items()})


def _shell(text: str, path: Path) -> Arguments:
    names: dict[str, str] = {}
    found: list[list[str]] = []
    for line in re.sub(r"\\\n", " ", text).splitlines():
        words = _words(line, path)
        assigned = None
        if len(words) == 1:
            assigned = _ASSIGNMENT.match(line)
        if assigned:
            value = _words(assigned[2], path)
            names[assigned[1]] = string.Template(value[0] if value else "").safe_substitute(names)
        elif any(word.endswith(".py") for word in words):
            found.append([string.Template(word).safe_substitute(names) for word in words])
    if len(found) != 1:
        many = "no line starts"
        if found:
            many = f"{len(found)} lines start"
        raise UserError(f"{path}: is not a JSON object, and as a shell script {many} a Python file; pass one run")
    (words,) = found
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    if words[at + 1 : at + 2] and words[at + 1].endswith(".json"):
        raise UserError(f"{path}: the arguments are in {words[at + 1]}; pass that file")
    return Arguments(_flags(words[at + 1 :]), Path(words[at]).name, **_launcher(_flags(words[:at])))


def read_command(
    path: Path, find_command: Callable[[list[str]], tuple[int, str] | None], environment: Sequence[str] = ()
) -> dict[str, Any]:
    """Read the arguments of the one training command in a shell script.

    Args:
        path: the script. Its variables are expanded, and quotients of integers are computed.
        find_command: returns, for the words of a line, the index of the first argument and the name of a known command;
            None for any other line.
        environment: environment variables that count as arguments.

    Returns:
        The arguments by name, with the name of the command as "command".

    Raises:
        UserError: the file cannot be read, or does not have exactly one such command.
    """
    names: dict[str, str] = {}
    found: list[tuple[str, list[str], int]] = []
    for line in _logical_lines(read_text(path)):
        line = _QUOTIENT.sub(_divide, string.Template(line).safe_substitute(names))
        words = _unquoted(line, path)
        assigned = _assignments(words)
        start = find_command(words)
        if start is not None:
            found.append((start[1], words, start[0]))
        elif len(assigned) == len([word for word in words if word != "export"]):
            names |= {match[1]: match[2] for match in assigned}
    if len(found) != 1:
        many = "no command that trains"
        if found:
            many = f"{len(found)} commands that train"
        raise UserError(f"{path}: has {many}; pass a script with one, or a file of arguments")
    command, words, at = found[0]
    if words[at : at + 1] and words[at].endswith((".yaml", ".yml", ".json")):
        raise UserError(f"{path}: the arguments are in {words[at]}; pass that file")
    variables = names | {match[1]: match[2] for match in _assignments(words[:at])}
    given = {name: _parsed(variables[name]) for name in environment if name in variables}
    launcher = _flags(words[: at - 1])
    if "nproc_per_node" in launcher and "NPROC_PER_NODE" in environment:
        given["NPROC_PER_NODE"] = launcher["nproc_per_node"]
    return {"command": command, **given, **_flags(words[at:])}


def _assignments(words: Sequence[str]) -> list[re.Match[str]]:
    """Return the matches of the words that assign a variable."""
    matches = [_ASSIGNMENT.match(word) for word in words]
    return [match for match in matches if match is not None]


def _logical_lines(text: str) -> Iterator[str]:
    """Yield the lines of a script without comments; continued lines and multi-line quotations are joined."""
    held = ""
    for line in re.sub(r"\\[ \t]*\n", " ", text).splitlines():
        held = f"{held}\n{line}" if held else line
        if not held.lstrip().startswith("#") and _is_open(held):
            continue
        if held.strip() and not held.lstrip().startswith("#"):
            yield held
        held = ""
    if held:
        yield held


def _is_open(line: str) -> bool:
    try:
        shlex.split(line)
    except ValueError:
        return True
    return False


def _unquoted(line: str, path: Path) -> list[str]:
    """Return the words of a line up to a comment; a # inside a word is text, as in a shell."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UserError(f"{path}: {error} in: {line.strip()[:80]}") from error
    return list(itertools.takewhile(lambda word: not word.startswith("#"), words))


def _divide(found: re.Match[str]) -> str:
    """Return the quotient of integers, from left to right as a shell computes it; the text if a divisor is 0."""
    number, *divisors = map(int, found[1].split("/"))
    for by in divisors:
        if not by:
            return found[0]
        number //= by
    return str(number)


def _words(line: str, path: Path) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise UserError(f"{path}: {error} in: {line.strip()}") from error


def _flags(words: list[str]) -> dict[str, Any]:
    """Parse `--key value`, `--key=value`, and `--key` without a value as true; several values become one text."""
    flags: dict[str, Any] = {}
    key = None
    for word in words:
        if word.startswith("--"):
            key, has_value, value = word[2:].partition("=")
            flags[key] = _parsed(value) if has_value else True
        elif key is not None and word not in ("|", "&", "&&", ">", "2>&1"):
            flags[key] = _parsed(word) if flags[key] is True else f"{flags[key]} {word}"
        elif key is not None:
            break
    return flags


def _parsed(text: str) -> Any:
    """Return a number or a boolean as such, anything else as text."""
    if text in ("True", "False"):
        return text == "True"
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, (bool, int, float)) else text


def _launcher(flags: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for flag, device in _DEVICES.items():
        if flag in flags:
            found["num_devices"] = len(str(flags[flag]).split(","))
            found["device"] = device
    if isinstance(flags.get("nnodes"), int):
        found["nnodes"] = flags["nnodes"]
    return found
