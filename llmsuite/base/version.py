"""The line of `llmsuite --version`: llmsuite, its commit, and Paddle, which is not imported."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from llmsuite import __version__
from llmsuite.base.safe_files import exists, is_file, real_path

_PACKAGE = real_path(__file__).parents[1]
_PADDLES = ("paddlepaddle", "paddlepaddle-gpu", "paddlepaddle-xpu")
_SECONDS = 5


def version_line() -> str:
    """A line such as "llmsuite 0.2.0, commit 1a2b3c4d, Paddle 3.3.1 (paddlepaddle)"; without the commit where nothing
    records it."""
    parts = [f"llmsuite {__version__}"]
    if commit := find_commit(_PACKAGE):
        parts.append(f"commit {commit}")
    parts.append(_paddle())
    return ", ".join(parts)


def find_commit(package: Path) -> str:
    """The commit that a package was built from, or that its git checkout is at; empty for neither.

    Args:
        package: the directory `llmsuite`, in a checkout or of an installation.
    """
    recorded = package / "_bundled" / "commit"
    if is_file(recorded):
        return recorded.read_text(encoding="utf-8").strip()
    if not exists(package.parent / ".git"):
        return ""
    from llmsuite.base.commands import CommandTimeout, run_command

    command = ["git", "-C", str(package.parent), "rev-parse", "--short=8", "HEAD"]
    try:
        asked = run_command(command, seconds=_SECONDS)
    except (OSError, CommandTimeout):  # no git, or a disk that hangs
        return ""
    if asked.code:
        return ""
    return asked.output.strip()


def _paddle() -> str:
    found = []
    for name in _PADDLES:
        try:
            found.append(f"{importlib.metadata.version(name)} ({name})")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"Paddle {' and '.join(found)}" if found else "without Paddle"
