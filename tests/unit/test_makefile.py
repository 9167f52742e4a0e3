"""The commands for tests, which leave some to other commands, leave none out."""

from __future__ import annotations

import re

from tests.further import FURTHER_FILES
from tests.paths import ROOT


def test_parity_runs_the_cases_that_are_left_out() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    listed = re.search(r"^ON_ALL_MESHES = \$\(patsubst %,tests/multi/test_%\.py,([\w\s]+)\)$", text, re.MULTILINE)
    assert listed
    tests = (ROOT / "tests" / "multi").glob("test_*.py")
    cut = {path.stem.removeprefix("test_") for path in tests if re.search(r"\bfew\(", path.read_text(encoding="utf-8"))}
    assert {*listed[1].split()} >= cut


def test_what_make_test_leaves_out_is_there() -> None:
    assert [path for path in FURTHER_FILES if not (ROOT / path).is_file()] == []


def test_the_page_of_faults_names_what_is_run() -> None:
    """With the same words, in the same order."""
    rule = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nfaults:")[2].partition("\n\n")[0]
    run = re.findall(r"-m tests\.tools\.(.+)$", rule, re.MULTILINE)
    page = (ROOT / "docs" / "notes" / "faults.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(.+?)` \|", page, re.MULTILINE) == run
