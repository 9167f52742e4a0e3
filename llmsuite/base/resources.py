"""Finds the bundled recipes and data: in the wheel, or in the repository that contains the package."""

from __future__ import annotations

from pathlib import Path

from llmsuite.base.errors import UserError
from llmsuite.base.safe_files import exists, is_dir, path_name_error

_PACKAGE = Path(__file__).resolve().parents[1]


def bundled(name: str) -> Path:
    """The directory `data` or `recipes` of this installation."""
    packed = _PACKAGE / "_bundled" / name
    return packed if is_dir(packed) else _PACKAGE.parent / name


def find(path: str) -> Path:
    """The path of a file that a recipe names: in the working directory, else among the bundled files."""
    try:
        direct = Path(path).expanduser()
    except RuntimeError as error:  # no such user
        raise UserError(f"{path!r} is not a path: {error}") from error
    if fault := path_name_error(direct):
        raise UserError(f"{path!r} is not a path: {fault}")
    if not exists(direct) and not direct.is_absolute():
        top, _, rest = path.partition("/")
        if top in ("data", "recipes") and exists(bundled(top) / rest):
            return bundled(top) / rest
    return direct
