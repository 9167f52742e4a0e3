"""Where the recipes and data that come with llmsuite lie: in the wheel, or in the repository around the package."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def bundled(name: str) -> Path:
    """Directory `data` or `recipes` of this installation."""
    packed = _PACKAGE / "_bundled" / name
    return packed if packed.is_dir() else _PACKAGE.parent / name


def find(path: str) -> Path:
    """A file as a recipe names it: from the working directory, else among the bundled ones."""
    direct = Path(path).expanduser()
    if not direct.exists() and not direct.is_absolute():
        top, _, rest = path.partition("/")
        if top in ("data", "recipes") and (bundled(top) / rest).exists():
            return bundled(top) / rest
    return direct
