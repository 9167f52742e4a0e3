"""requirements/cpu.lock: what continuous integration installs, and whoever wants to know what is installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT
from tests.support.toml import tomllib

LOCK = ROOT / "requirements" / "cpu.lock"
MOST_BYTES = 1_000_000
OTHER_INDEX = ("gpu", "xpu")
"""Extras whose wheels come from Paddle's own index."""


def requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [texts for name, texts in project["optional-dependencies"].items() if name not in OTHER_INDEX]
    return [Requirement(text) for texts in (project["dependencies"], *extras) for text in texts]


def locked(path: Path) -> dict[str, list[tuple[str, int]]]:
    """Versions of each package with the numbers of their hashes."""
    found: dict[str, list[tuple[str, int]]] = {}
    for entry in re.split(r"^(?=[A-Za-z0-9])", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        match = re.match(r"([\w.-]+)==([^\s;\\]+)", entry)
        assert match, entry
        found.setdefault(canonicalize_name(match[1]), []).append((match[2], entry.count("--hash=sha256:")))
    return found


@pytest.mark.parametrize("wanted", requirements(), ids=str)
def test_it_covers_what_pyproject_asks_for(wanted: Requirement) -> None:
    versions = locked(LOCK).get(canonicalize_name(wanted.name), [])
    assert versions, "run: make lock"
    fits = [wanted.specifier.contains(version, prereleases=True) for version, _ in versions]
    assert any(fits) if wanted.marker else all(fits), "run: make lock"  # with a marker, of some versions of Python


def test_every_package_has_hashes() -> None:
    assert all(count for versions in locked(LOCK).values() for _, count in versions)
    assert LOCK.stat().st_size < MOST_BYTES
    assert "://" not in LOCK.read_text(encoding="utf-8"), "packages come from the index that is asked"


def test_the_page_of_licences_has_nothing_else() -> None:
    page = (ROOT / "docs" / "reference" / "licences.md").read_text(encoding="utf-8")
    named = {canonicalize_name(name) for name in re.findall(r"^\| ([\w.-]+) \|", page, re.MULTILINE)} - {"package"}
    assert named - locked(LOCK).keys() <= {canonicalize_name("---")}
    assert {canonicalize_name(wanted.name) for wanted in requirements()} <= named
