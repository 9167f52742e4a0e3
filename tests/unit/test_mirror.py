"""`tests/unit` mirrors the package: who looks for the tests of a module finds them in the directory of its room."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from tests.support.paths import ROOT

TESTS = ROOT / "tests"
UNIT = TESTS / "unit"
OF_THE_REPOSITORY = {"benchmarks", "docs"}
"""Directories with tests of a directory of the repository, which is no part of the package."""
NOT_TESTS = {"__init__.py", "conftest.py"}


def modules(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*.py") if "__pycache__" not in path.parts)


@functools.cache
def imported(path: Path) -> list[tuple[str, int]]:
    """Modules that a file imports, and members that may be modules, with the line."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, node.lineno))
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def file_of(module: str) -> Path | None:
    """The file of a module of the tests."""
    path = ROOT / (module.replace(".", "/") + ".py")
    return path if module.startswith("tests.") and path.is_file() else None


def imports_of_tests(paths: list[Path], root: Path = ROOT) -> list[str]:
    """Where a file imports a test module."""
    return [
        f"{path.relative_to(root).as_posix()}:{line} imports {module}"
        for path in paths
        for module, line in imported(path)
        if (target := file_of(module)) is not None and target.name.startswith("test_")
    ]


def reading(path: Path) -> str:
    """The text of a test, and of what tests share that it uses: fixtures of its directories, helpers, and what programs
    import that are text in it."""
    read: dict[Path, str] = {}
    left = [path, *(directory / "conftest.py" for directory in path.parents if UNIT in (directory, *directory.parents))]
    while left:
        file = left.pop()
        if file in read or not file.is_file():
            continue
        read[file] = file.read_text(encoding="utf-8")
        names = {*(module for module, _ in imported(file)), *re.findall(r"\btests\.[\w.]+\w", read[file])}
        left += [found for name in names if (found := file_of(name)) is not None]
    return "\n".join(read.values())


COMMANDS = ("llmsuite.cli.main", '"-m", "llmsuite"')
OF_OTHERS = {
    "parallel/program/test_messages.py",  # the order of Paddle's own schedule
}
"""Tests of something that they do not name."""


def misplaced(paths: list[Path], package: Path) -> list[str]:
    """Tests in a directory that is no room of the package, or that name nothing in that room: in an import, in a
    program that is text, or in a helper that they use. Any room may be tested by commands."""
    found = []
    for path in paths:
        room = path.relative_to(UNIT).parts[0]
        if path.parent == UNIT or room in OF_THE_REPOSITORY:
            continue
        text = reading(path)
        is_named = re.search(rf"\bllmsuite\.{room}\b", text) or any(words in text for words in COMMANDS)
        if not (package / room).is_dir() or not is_named:
            found.append(path.relative_to(UNIT).as_posix())
    return found


def test_no_file_imports_a_test_module() -> None:
    """What tests share is in tests/support, or in a conftest.py."""
    assert imports_of_tests([*modules(TESTS), *modules(ROOT / "benchmarks"), *modules(ROOT / "docs")]) == []


def test_the_directories_hold_nothing_but_tests() -> None:
    others = [path for path in modules(UNIT) if not path.name.startswith("test_") and path.name not in NOT_TESTS]
    assert [str(path.relative_to(ROOT)) for path in others] == []


def test_every_test_is_in_the_room_of_what_it_tests() -> None:
    """Those of the repository as a whole are in tests/unit itself."""
    tests = [path for path in modules(UNIT) if path.name.startswith("test_")]
    assert {*misplaced(tests, ROOT / "llmsuite")} == OF_OTHERS


def test_what_is_in_the_wrong_place_is_found(tmp_path: Path) -> None:
    importing = tmp_path / "test_a.py"
    importing.write_text("from tests.unit import test_mirror\n\ndef f():\n    import tests.unit.test_words as words\n")
    assert [line.rpartition("/")[2] for line in imports_of_tests([importing], tmp_path)] == [
        "test_a.py:1 imports tests.unit.test_mirror",
        "test_a.py:4 imports tests.unit.test_words",
    ]
    assert misplaced([UNIT / "base" / "test_threads.py"], tmp_path) == ["base/test_threads.py"]
