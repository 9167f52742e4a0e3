"""AGENTS.md is true: the paths and targets that it names exist. test_docs.py checks its links, commands and options."""

from __future__ import annotations

import re

import pytest

from tests.support.paths import ROOT

TEXT = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
PATHS = sorted(set(re.findall(r"(?<![\w./-])((?:docs|llmsuite|recipes|tests)/[\w./-]*\w)", TEXT)))
TO_FILL_IN = {"llmsuite/ROOM/NAME.py", "tests/unit/ROOM"}
"""Paths with a part that depends on the change."""


def test_paths_are_found() -> None:
    assert set(PATHS) > TO_FILL_IN
    assert len(PATHS) > 20


@pytest.mark.parametrize("path", sorted(set(PATHS) - TO_FILL_IN))
def test_a_path_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_targets_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?:^|`)make ([\w./-]+)", TEXT, re.MULTILINE))
    assert {"check", "test", "docs", ".venv/test"} <= targets
    for target in targets:
        assert re.search(rf"^{re.escape(target.replace('.venv', '$(VENV)'))}:", makefile, re.MULTILINE), target


def test_the_programs_of_its_commands_are_those_of_the_environment() -> None:
    blocks = re.findall(r"```\n(.*?)```", TEXT, re.DOTALL)
    programs = {line.split()[0] for block in blocks for line in block.splitlines()}
    assert programs == {"make", ".venv/bin/llmsuite", ".venv/bin/python"}


def test_the_rules_about_imports_are_those_of_the_house() -> None:
    """No module of these packages imports Paddle at its top."""
    for room in ("cli", "recipe", "contract"):
        assert f"`llmsuite/{room}`" in TEXT
        for path in sorted((ROOT / "llmsuite" / room).rglob("*.py")):
            found = re.findall(r"^(?:import|from) paddle\b.*", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert found == [], path
