"""The arguments of a run of another suite: a JSON file, or the command line in a shell script."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shlex
import string
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from llmsuite.errors import UserError
from llmsuite.recipe.source import parse_json, read_text

_QUOTIENT = re.compile(r"\$\(\(?\s*(?:expr\s+)?(\d+)\s*/\s*(\d+)\s*\)\)?")
_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(.*)$")
_DEVICES = {"gpus": "gpu", "xpus": "xpu", "devices": None}


@dataclasses.dataclass
class Arguments:
    """What was written."""

    values: dict[str, Any]
    """Arguments of the script: name -> value, numbers and true or false as such."""
    script: str = ""
    """The Python file that is started; empty for a JSON file."""
    num_devices: int | None = None
    """As the launcher is told, for each machine."""
    nnodes: int | None = None
    device: str | None = None


def read_arguments(path: Path) -> Arguments:
    """Read a file.

    Raises:
        UserError: it cannot be read, is not JSON, or has no command line that starts a Python file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not text.lstrip().startswith("{"):
        return _shell(text, path)
    values = parse_json(text, str(path)).value
    return Arguments({str(key): value for key, value in values.items()})


def _shell(text: str, path: Path) -> Arguments:
    names: dict[str, str] = {}
    found: list[list[str]] = []
    for line in re.sub(r"\\\n", " ", text).splitlines():
        words = _words(line, path)
        assigned = _ASSIGNMENT.match(line) if len(words) == 1 else None
        if assigned:
            value = _words(assigned[2], path)
            names[assigned[1]] = string.Template(value[0] if value else "").safe_substitute(names)
        elif any(word.endswith(".py") for word in words):
            found.append([string.Template(word).safe_substitute(names) for word in words])
    if len(found) != 1:
        many = f"{len(found)} lines start" if found else "no line starts"
        raise UserError(f"{path}: is no JSON object, and as a shell script {many} a Python file; give one run")
    (words,) = found
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    if words[at + 1 : at + 2] and words[at + 1].endswith(".json"):
        raise UserError(f"{path}: the arguments are those of {words[at + 1]}; give that file")
    return Arguments(_flags(words[at + 1 :]), Path(words[at]).name, **_launcher(_flags(words[:at])))


def read_command(
    path: Path, begins: Callable[[list[str]], tuple[int, str] | None], environment: Sequence[str] = ()
) -> dict[str, Any]:
    """The arguments of the one command in a shell script that `begins` knows.

    Args:
        path: the script. Variables that it sets are put in, and quotients of whole numbers are computed.
        begins: for the words of a line, where the arguments of a known command begin and its name; else None.
        environment: variables that count as arguments.

    Returns:
        The arguments by name, with "command", its name.

    Raises:
        UserError: the file cannot be read, there is no such command, or there are several.
    """
    names: dict[str, str] = {}
    found: list[tuple[str, list[str], int]] = []
    for line in _whole_lines(read_text(path)):
        line = _QUOTIENT.sub(_divide, string.Template(line).safe_substitute(names))
        words = _unquoted(line, path)
        assigned = [match for word in words if (match := _ASSIGNMENT.match(word)) is not None]
        if (start := begins(words)) is not None:
            found.append((start[1], words, start[0]))
        elif len(assigned) == len([word for word in words if word != "export"]):
            names |= {match[1]: match[2] for match in assigned}
    if len(found) != 1:
        many = f"{len(found)} commands that train" if found else "no command that trains"
        raise UserError(f"{path}: has {many}; give a script with one, or a file of arguments")
    command, words, at = found[0]
    if words[at : at + 1] and words[at].endswith((".yaml", ".yml", ".json")):
        raise UserError(f"{path}: the arguments are those of {words[at]}; give that file")
    set_here = names | {match[1]: match[2] for word in words[:at] if (match := _ASSIGNMENT.match(word)) is not None}
    told = {name: _plain(set_here[name]) for name in environment if name in set_here}
    launcher = _flags(words[: at - 1])
    if "nproc_per_node" in launcher and "NPROC_PER_NODE" in environment:
        told["NPROC_PER_NODE"] = launcher["nproc_per_node"]
    return {"command": command, **told, **_flags(words[at:])}


def _whole_lines(text: str) -> Iterator[str]:
    """Lines of a script without comments, put together where they go on or a quotation does."""
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
    """The words of a line up to a comment; a # within a word is text, as in a shell."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UserError(f"{path}: {error} in: {line.strip()[:80]}") from error
    return list(itertools.takewhile(lambda word: not word.startswith("#"), words))


def _divide(found: re.Match[str]) -> str:
    by = int(found[2])
    return str(int(found[1]) // by) if by else found[0]


def _words(line: str, path: Path) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise UserError(f"{path}: {error} in: {line.strip()}") from error


def _flags(words: list[str]) -> dict[str, Any]:
    """`--key value`, `--key=value`, and `--key` alone, which is true; of more values, a text of all."""
    flags: dict[str, Any] = {}
    key = None
    for word in words:
        if word.startswith("--"):
            key, has_value, value = word[2:].partition("=")
            flags[key] = _plain(value) if has_value else True
        elif key is not None and word not in ("|", "&", "&&", ">", "2>&1"):
            flags[key] = _plain(word) if flags[key] is True else f"{flags[key]} {word}"
        elif key is not None:
            break
    return flags


def _plain(text: str) -> Any:
    """Numbers and truth values as such; a text of anything else."""
    if text in ("True", "False"):
        return text == "True"
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, (bool, int, float)) else text


def _launcher(flags: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for flag, device in _DEVICES.items():
        if flag in flags:
            told["num_devices"] = len(str(flags[flag]).split(","))
            told["device"] = device
    if isinstance(flags.get("nnodes"), int):
        told["nnodes"] = flags["nnodes"]
    return told
