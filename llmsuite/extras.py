"""The extras of pyproject.toml: packages that only some of llmsuite needs."""

from __future__ import annotations

import importlib.metadata
import re
import shlex


def install_command(extra: str, without: str = "") -> str:
    """What installs the packages of an extra, in the versions that were tested.

    It names these packages rather than `llmsuite[EXTRA]`: so it works whether llmsuite came from an index, a wheel or a
    clone, and installs nobody else's package of that name.

    Args:
        extra: its name.
        without: a package of it that is there already.
    """
    try:
        required = importlib.metadata.requires("llmsuite") or []
    except importlib.metadata.PackageNotFoundError:  # run out of a clone that is not installed
        required = []
    of_extra = re.compile(rf"extra\s*==\s*['\"]{re.escape(extra)}['\"]")
    parted = (text.partition(";") for text in required)
    packages = [package.strip() for package, _, marker in parted if of_extra.search(marker)]
    packages = [package for package in packages if not without or not package.startswith(without)]
    return shlex.join(["pip", "install", *packages]) if packages else f"pip install -e '.[{extra}]'"
