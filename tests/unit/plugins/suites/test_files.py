"""Every example of another suite that trains: the same job, valid, or refused with the reason.

The lists have names, digests and what becomes of each file, not their text. A variable for each suite names a checkout
at the commit of its list. Where the files of a list are of various commits, each has its own, and the variable names a
directory with each file as it is there. "model.weights" is the same job too, of a model whose sizes are in its
config.json only. `python -m tests.tools.same_jobs` writes the lists.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmsuite.contract.registry import Registry
from llmsuite.plugins.suites.known import SUITES
from tests.support.paths import ROOT
from tests.support.suite_files import LISTS, digest, listed, load, outcome, table


def test_every_suite_has_a_list_of_files() -> None:
    assert {load(path)["action"] for path in LISTS} == set(SUITES)


def test_the_documentation_has_the_counts() -> None:
    text = (ROOT / "docs/guide/from-other-suites.md").read_text(encoding="utf-8")
    lines = text.splitlines()
    rows = table({path.stem: load(path) for path in LISTS})
    first = lines.index(rows[0])
    assert sorted(lines[first : first + len(rows)]) == sorted(rows)


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_files_of_the_suite_are_converted(
    path: Path, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = load(path)
    variable = f"LLMSUITE_{path.stem.upper()}"
    if variable not in os.environ:
        pytest.skip(f"{variable} names no checkout")
    root = Path(os.environ[variable]).resolve()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # no hub: some models' sizes are known, others' not
    monkeypatch.setenv("LLMSUITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(root)  # where their commands are run: data/dataset_info.json is read
    files = found["files"]
    assert listed(root, found) == set(files)
    others = [name for name in files if digest(found["action"], root / name) != files[name]["sha256"]]
    assert {name: files[name].get("commit", found.get("commit")) for name in others} == {}
    results = {name: outcome(found["action"], root / name, registry, tmp_path / "recipe.json").text for name in files}
    wrong = {name: result for name, result in results.items() if files[name]["becomes"] not in result}
    assert wrong == {}
