"""Finds the recipes and data that come with llmsuite: in the wheel, or in the repository around the package."""

from __future__ import annotations

from pathlib import Path

from llmsuite.errors import UserError

_PACKAGE = Path(__file__).resolve().parent


def bundled(name: str) -> Path:
    """Directory `data` or `recipes` of this installation."""
    packed = _PACKAGE / "_bundled" / name
    return packed if packed.is_dir() else _PACKAGE.parent / name


def find(path: str) -> Path:
    """A file that a recipe names: from the working directory, else among the bundled files."""
    try:
        direct = Path(path).expanduser()
        exists = direct.exists()
    except (RuntimeError, OSError, ValueError) as error:  # no such user, a name too long, a NUL
        raise UserError(f"{path!r} is not a path: {error}") from error
    if not exists and not direct.is_absolute():
        top, _, rest = path.partition("/")
        if top in ("data", "recipes") and (bundled(top) / rest).exists():
            return bundled(top) / rest
    return direct
