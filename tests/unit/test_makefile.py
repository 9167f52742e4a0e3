"""The Makefile knows all tests of which `make test` runs some cases only."""

from __future__ import annotations

import re

from tests.paths import ROOT


def test_parity_runs_the_cases_that_are_left_out() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    listed = re.search(r"^ON_ALL_MESHES = \$\(patsubst %,tests/multi/test_%\.py,([\w\s]+)\)$", text, re.MULTILINE)
    assert listed
    tests = (ROOT / "tests" / "multi").glob("test_*.py")
    cut = {path.stem.removeprefix("test_") for path in tests if re.search(r"\bfew\(", path.read_text(encoding="utf-8"))}
    assert {*listed[1].split()} >= cut
