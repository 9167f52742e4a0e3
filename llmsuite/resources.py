"""Finds the recipes and data that come with llmsuite: in the wheel, or in the repository around the package."""

from __future__ import annotations

from pathlib import Path

from llmsuite.errors import UserError
from llmsuite.regular import exists, is_dir, name_fault

_PACKAGE = Path(__file__).resolve().parent


def bundled(name: str) -> Path:
    """Directory `data` or `recipes` of this installation."""
    packed = _PACKAGE / "_bundled" / name
    return packed if is_dir(packed) else _PACKAGE.parent / name


def find(path: str) -> Path:
    """A file that a recipe names: from the working directory, else among the bundled files."""
    try:
        direct = Path(path).expanduser()
    except RuntimeError as error:  # no such user
        raise UserError(f"{path!r} is not a path: {error}") from error
    if fault := name_fault(direct):
        raise UserError(f"{path!r} is not a path: {fault}")
    if not exists(direct) and not direct.is_absolute():
        top, _, rest = path.partition("/")
        if top in ("data", "recipes") and exists(bundled(top) / rest):
            return bundled(top) / rest
    return direct
