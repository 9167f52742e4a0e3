"""The commands for tests, which leave some to other commands, leave none out."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.further import ALIKE_FILES, FURTHER_FILES, SAMPLED_FILES, files, part_of, sample
from tests.support.paths import ROOT


def test_parity_runs_the_cases_that_are_left_out() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    listed = re.search(r"^ON_ALL_MESHES = \$\(patsubst %,tests/multi/test_%\.py,([\w\s]+)\)$", text, re.MULTILINE)
    assert listed
    tests = (ROOT / "tests" / "multi").glob("test_*.py")
    cut = {path.stem.removeprefix("test_") for path in tests if re.search(r"\bfew\(", path.read_text(encoding="utf-8"))}
    assert {*listed[1].split()} >= cut


def test_parity_runs_the_files_with_many_similar_cases() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    listed = re.search(r"^ALIKE = (.+)$", text, re.MULTILINE)
    assert listed
    assert {*listed[1].split()} == {*ALIKE_FILES}


def test_what_make_test_leaves_out_is_there() -> None:
    listed = [*files(), *ALIKE_FILES]
    assert [path for path in listed if not (ROOT / path).is_file()] == []
    assert [path for path in listed if path in FURTHER_FILES and path in SAMPLED_FILES] == []


def test_parts_have_each_file_once() -> None:
    for n in (1, 2, 3, 5):
        parts = [part_of(files(), f"{number}/{n}") for number in range(1, n + 1)]
        assert sorted(path for part in parts for path in part) == files()
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("part", ["0/3", "4/3", "1", "one/3", "1/0"])
def test_a_part_that_is_none_is_refused(part: str) -> None:
    with pytest.raises(ValueError, match="K from 1 to N"):
        part_of(files(), part)


CASES = [
    {"recipe": f"{family}/{stage}.json", "layout": layout}
    for family in ("llama", "qwen", "gpt")
    for stage in ("sft", "dpo", "rm", "kto")
    for layout in ("hf", ["several", "files"])
]


def test_a_sample_has_every_value_that_many_cases_share() -> None:
    for n in (1, 2, 3, 6):
        chosen = [CASES[index] for index in sorted(sample(CASES, n))]
        assert len(chosen) >= len(CASES) / n
        assert {case["recipe"].partition("/")[0] for case in chosen} == {"llama", "qwen", "gpt"}
        assert {case["recipe"].partition("/")[2] for case in chosen} == {"sft.json", "dpo.json", "rm.json", "kto.json"}
        assert {str(case["layout"]) for case in chosen} == {"hf", "['several', 'files']"}
    assert len(sample(CASES, 1)) == len(CASES)
    assert len(sample(CASES, 6)) == 4, "one for each stage, which have every family and layout between them"


def test_a_sample_of_cases_that_share_nothing_is_every_nth() -> None:
    assert sample([{"words": [number]} for number in range(10)], 3) == {0, 3, 6, 9}
    assert sample([{"words": [number]} for number in range(5)], 3) == {0, 1, 2, 3, 4}, "too few to leave any out"
    assert sample([], 3) == set()


def test_the_page_of_faults_names_what_is_run() -> None:
    """The page has the same words in the same order."""
    rule = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nfaults:")[2].partition("\n\n")[0]
    run = re.findall(r"-m tests\.tools\.(.+)$", rule, re.MULTILINE)
    page = (ROOT / "docs" / "notes" / "faults.md").read_text(encoding="utf-8")
    tools, found = page.split("\nLast found, ")
    assert re.findall(r"^\| `(.+?)` \|", tools, re.MULTILINE) == run
    assert {*re.findall(r"^\| `(.+?)`", found, re.MULTILINE)} <= {*run}


def test_a_newer_environment_leaves_the_model_of_the_demo(tmp_path: Path) -> None:
    """`llmsuite import` refuses to replace it, so `make demo` would fail after an update."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    model = "models/smollm2-135m-instruct"

    def commands() -> str:
        words = ["make", "--dry-run", model]
        return subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    assert "llmsuite import" in commands()
    (tmp_path / model).mkdir(parents=True)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "demo").touch()  # newer than the model
    assert "llmsuite import" not in commands()
