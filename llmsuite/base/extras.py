"""The extras of pyproject.toml: packages that only parts of llmsuite need."""

from __future__ import annotations

import importlib.metadata
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from llmsuite.base.errors import UserError
from llmsuite.base.safe_files import is_dir

if TYPE_CHECKING:
    from packaging.markers import Marker


def install_command(extra: str, alone: str = "") -> str:
    """The command that installs the packages of an extra, in the versions that were tested.

    It names these packages rather than `llmsuite[EXTRA]`: so it works for an llmsuite from an index, a wheel or a
    clone, and cannot install an unrelated package of that name.

    Args:
        extra: its name.
        alone: the only package of it to install, without those that it asks for; empty for all.
    """
    from packaging.requirements import Requirement  # slow to import, and rarely needed

    try:
        required = importlib.metadata.requires("llmsuite") or []
    except importlib.metadata.PackageNotFoundError:  # run from a clone that is not installed
        required = []
    of_extra = [package for package in map(Requirement, required) if package.marker and _is_of(package.marker, extra)]
    packages = {package.name: f"{package.name}{_bracketed(package.extras)}{package.specifier}" for package in of_extra}
    if alone in packages:
        return shlex.join(["pip", "install", "--no-deps", packages[alone]])
    if packages:
        return shlex.join(["pip", "install", *packages.values()])
    return f"pip install -e '.[{extra}]'"


def _is_of(marker: Marker, extra: str) -> bool:
    """True where a package is needed here only because of this extra."""
    return marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def _bracketed(extras: Collection[str]) -> str:
    if extras:
        return f"[{','.join(sorted(extras))}]"
    return ""


def check_plot(path: Path) -> None:
    """Raise UserError for a file of `--plot` that cannot be written; to be called before its data are computed."""
    if path.suffix not in (".png", ".svg"):
        raise UserError(f"--plot: {path} has to end in .png or .svg")
    if not is_dir(path.absolute().parent):
        raise UserError(f"--plot: {path} cannot be written: {path.parent} is no directory")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UserError("--plot: needs the package matplotlib; install it with: pip install matplotlib") from error
