"""AGENTS.md is true: the paths and targets that it names exist. test_docs.py checks its links, commands and options."""

from __future__ import annotations

import re

import pytest

from tests.support.house import LIGHT
from tests.support.paths import ROOT

TEXT = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
PATHS = sorted(set(re.findall(r"(?<![\w./-])((?:docs|llmsuite|recipes|tests)/[\w./-]*\w)", TEXT)))


def test_paths_are_found() -> None:
    assert len(PATHS) > 20


@pytest.mark.parametrize("path", PATHS)
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


def test_packages_without_paddle_are_those_of_the_house() -> None:
    (rule,) = re.findall(r"- Nothing under (.*?) imports Paddle", TEXT, re.DOTALL)
    assert re.findall(r"`llmsuite/(\w+)`", rule) == [*LIGHT]
