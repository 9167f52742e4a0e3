"""The line of `llmsuite --version`."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path

import pytest

from llmsuite import __version__
from llmsuite.base.version import find_commit, version_line


def git(*words: str, cwd: Path) -> str:
    own = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    return subprocess.run(["git", *own, *words], cwd=cwd, capture_output=True, text=True, check=True).stdout


def test_a_checkout_is_at_a_commit(tmp_path: Path) -> None:
    package = tmp_path / "llmsuite"
    package.mkdir()
    assert find_commit(package) == ""
    git("init", "-q", cwd=tmp_path)
    git("commit", "-q", "--allow-empty", "-m", "Begin", cwd=tmp_path)
    commit = find_commit(package)
    assert len(commit) == 8
    assert git("rev-parse", "HEAD", cwd=tmp_path).startswith(commit)


def test_a_package_records_its_commit(tmp_path: Path) -> None:
    (tmp_path / "_bundled").mkdir()
    (tmp_path / "_bundled" / "commit").write_text("0123abcd\n")
    (tmp_path.parent / ".git").mkdir(exist_ok=True)  # the checkout around it is another's
    assert find_commit(tmp_path) == "0123abcd"


def test_the_line_names_paddle(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"paddlepaddle-gpu": "3.3.1"}

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    line = version_line()
    assert line.startswith(f"llmsuite {__version__}, ")
    assert line.endswith(", Paddle 3.3.1 (paddlepaddle-gpu)")
    installed.clear()
    assert version_line().endswith(", without Paddle")
