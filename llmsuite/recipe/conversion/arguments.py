"""The arguments of a run of another suite: a JSON file, or the command line in a shell script."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import string
from pathlib import Path
from typing import Any

from llmsuite.errors import UserError
from llmsuite.recipe.source import parse_json

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
