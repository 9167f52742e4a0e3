"""Texts name what there is: programs in tests, tools and pages what can be imported, docstrings parameters and errors.
No linter follows into them."""

from __future__ import annotations

import ast
import builtins
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import ROOT

IMPORT = re.compile(
    r"^[ \t>]*(?:from (?P<module>(?:llmsuite|tests)(?:\.\w+)*) import (?P<names>\([\w\s,]*\)|[\w, ]+)"
    r"|import (?P<whole>(?:llmsuite|tests)(?:\.\w+)+))",
    re.MULTILINE,
)
TEXTS = ("tests", "benchmarks", "docs", "examples", "recipes", "README.md", "README.zh.md", "CONTRIBUTING.md")
PLANTED = ("test_names_in_texts.py", "test_house.py", "test_public.py")
"""Tests of rules, with modules that are made up."""
SECTION = r"^{}:\n((?:    .*\n?|\n)+)"
ENTRY = re.compile(r"^    (\*{0,2}\w[\w.]*(?:, \*{0,2}\w[\w.]*)*):", re.MULTILINE)
"""The names that begin an entry of a docstring's section."""


@functools.cache
def names_of(module: str, root: Path = ROOT) -> frozenset[str] | None:
    """What can be imported from a module: what it binds, anywhere, and the modules in it; None if there is no such
    module."""
    place = root.joinpath(*module.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    found = {path.stem for path in place.iterdir()} if place.is_dir() else set()
    if not file.is_file():
        return frozenset(found) if place.is_dir() else None
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and file.name == "__init__.py":
            found.update([node.value] if node.value.isidentifier() else [])  # imported when somebody asks for it
    return frozenset(found)


def stale(text: str, root: Path = ROOT) -> Iterator[str]:
    """Names that a text imports and that there are not."""
    for match in IMPORT.finditer(text):
        module = match["module"] or match["whole"]
        there = names_of(module, root)
        if there is None:
            yield module
            continue
        words = re.sub(r"[()]", "", match["names"] or "").split(",")
        names = [word.split()[0] for word in words if word.strip()]
        yield from (f"{module}.{name}" for name in names if name not in there)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The texts of a file with the line that each begins in: strings of Python code, cells of a notebook, or all."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text, str(path))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.lineno, node.value
            elif isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
                yield node.lineno, "".join(map(str, parts))
    elif path.suffix == ".ipynb":
        for number, cell in enumerate(json.loads(text)["cells"]):
            yield number, "".join(cell["source"])
    else:
        yield 1, text


def files() -> Iterator[Path]:
    for name in TEXTS:
        place = ROOT / name
        kinds = ("*.py", "*.md", "*.ipynb")
        yield from [place] if place.is_file() else sorted(path for kind in kinds for path in place.rglob(kind))


def test_programs_in_texts_import_what_there_is() -> None:
    found = {
        f"{path.relative_to(ROOT).as_posix()}:{line} {name}"
        for path in files()
        if path.name not in PLANTED
        for line, text in texts(path)
        for name in stale(text)
    }
    assert sorted(found) == []


def entries(docstring: str, section: str) -> list[str]:
    """Names that a section of a docstring, such as Args, describes."""
    found = re.search(SECTION.format(section), docstring, re.MULTILINE)
    return [name.strip("* ") for names in ENTRY.findall(found[1] if found else "") for name in names.split(",")]


def wrong_entries(tree: ast.Module, errors: frozenset[str]) -> Iterator[str]:
    """Entries of the docstrings of a module that are neither parameters of their function nor classes of errors."""
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        text = ast.get_docstring(node) or ""
        parts = node.args
        given = [*parts.posonlyargs, *parts.args, *parts.kwonlyargs, parts.vararg, parts.kwarg]
        parameters = {argument.arg for argument in given if argument is not None}
        yield from (f"{node.name}: {name}" for name in entries(text, "Args") if name not in parameters)
        for error in entries(text, "Raises"):
            name = error.partition(".")[0]
            if not (name in errors or name in imported or hasattr(builtins, name)):
                yield f"{node.name}: {error}"


def test_docstrings_name_parameters_and_errors() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "llmsuite").rglob("*.py")}
    classes = frozenset(
        node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )
    found = [
        f"{path.relative_to(ROOT).as_posix()} {wrong}"
        for path, tree in trees.items()
        for wrong in wrong_entries(tree, classes)
    ]
    assert sorted(found) == []


def test_a_wrong_entry_of_a_docstring_is_found() -> None:
    tree = ast.parse(
        """
import http.client
def f(a, b, *rest, key=None, **options):
    \'\'\'Do it.

    Args:
        a, c: numbers. One of them: the first.
        rest, options: others.
            more: of them.
        kee: gone.

    Raises:
        ValueError: a is none.
        Lost, http.client.Other, client.Gone: b is none.
    \'\'\'
"""
    )
    assert [*wrong_entries(tree, frozenset(["Lost"]))] == ["f: c", "f: kee", "f: client.Gone"]


def test_what_is_not_there_is_found(tmp_path: Path) -> None:
    (tmp_path / "llmsuite" / "room").mkdir(parents=True)
    (tmp_path / "llmsuite" / "__init__.py").write_text("def __getattr__(name):\n    return {'train': 1}[name]\n")
    (tmp_path / "llmsuite" / "room" / "there.py").write_text("import json\nLIMIT: int = 1\n\nclass A:\n    pass\n")
    program = """
        import llmsuite
        import llmsuite.room.there as t
        import llmsuite.room.gone
        from llmsuite import train, room, run
        from llmsuite.room import there, elsewhere
        from llmsuite.room.there import (
            LIMIT, A as B,
            C,
        )
        from llmsuite.rooms.there import LIMIT
    """
    assert list(stale(program, tmp_path)) == [
        "llmsuite.room.gone",
        "llmsuite.run",
        "llmsuite.room.elsewhere",
        "llmsuite.room.there.C",
        "llmsuite.rooms.there",
    ]
