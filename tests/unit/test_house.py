"""The plan of the house: which room may import which, and how large anything in it may be.

`ruff check` limits how complicated a function may be; see pyproject.toml.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.paths import ROOT

LAYERS = (
    (
        "shown",
        "errors",
        "threads",
        "locks",
        "cache",
        "extras",
        "resources",
        "regular",
        "strict_json",
        "files",
        "python_files",
        "progress",
        "typing",
    ),  # of the root
    ("hub", "web"),
    ("devices",),
    ("models",),
    ("schema",),
    ("specs",),
    ("plugins",),
    ("launch",),
    ("checkpoint",),
    ("convert",),
    ("data",),
    ("recipe",),
    ("parallel",),
    ("planning",),
    ("observe",),
    ("align",),
    ("inference",),
    ("rl",),
    ("train",),
    ("stages",),
    ("serving", "studio"),
    ("builtin",),
    ("cli",),
    ("api",),
    ("testing",),
)
"""Rooms, lowest first. A room imports itself, its own layer and the layers below, be it inside a function or for types
only."""
MAX_FILE, MAX_FUNCTION = 400, 80
SHORTER = {"train_step": 60}
"""Functions everybody reads, and how many lines they may have."""

Trees = Mapping[str, ast.Module]
"""Modules by their dotted names."""


def parse(package: Path) -> Trees:
    """Every module below a package."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


@functools.cache
def house() -> Trees:
    return parse(ROOT / "llmsuite")


def imports(trees: Trees) -> Iterator[tuple[str, str, int]]:
    """Each import of one of these modules by another: both names, and the line."""
    for name, tree in trees.items():
        for node in ast.walk(tree):
            targets: list[str] = []
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                members = [f"{node.module}.{alias.name}" for alias in node.names]
                targets = [member if member in trees else node.module for member in members]
            yield from ((name, target, node.lineno) for target in targets if target in trees and target != name)


def room_of(module: str) -> str | None:
    """The room a module is in; None for the package itself and `__main__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] != "__main__" else None


def arrows_upward(trees: Trees) -> list[str]:
    """Imports that no layer allows."""
    layer = {room: height for height, rooms in enumerate(LAYERS) for room in rooms}
    found = []
    for module, target, line in imports(trees):
        room, other = room_of(module), room_of(target)
        if room is not None and other is not None and layer[other] > layer[room]:
            found.append(f"{module}:{line} imports {target}")
    return found


def cycles(trees: Trees) -> list[list[str]]:
    """Modules that import each other, by Tarjan's strongly connected components."""
    graph: dict[str, list[str]] = {name: [] for name in trees}
    for module, target, _ in imports(trees):
        graph[module].append(target)
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        numbers[module] = lowest[module] = len(numbers)
        stack.append(module)
        for target in graph[module]:
            if target not in numbers:
                visit(target)
            if target in stack:
                lowest[module] = min(lowest[module], lowest[target])
        if lowest[module] == numbers[module]:
            at = stack.index(module)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1:
                found.append(sorted(component))

    for module in graph:
        if module not in numbers:
            visit(module)
    return found


def docstrings(trees: Trees) -> Iterator[tuple[str, int, str]]:
    """Module, line and text of every docstring: of modules, classes, functions and attributes."""
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield name, node.lineno, node.value.value


def asked_by_methods(trees: Trees) -> list[str]:
    """Calls of `Path.exists` and its like, which raise OSError for names that no file can have."""
    found = []
    for name, tree in trees.items():
        for node in ast.walk(tree):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args
            if is_call and node.func.attr in ("exists", "is_file", "is_dir"):  # type: ignore[attr-defined]
                found.append(f"{name}:{node.lineno}")  # type: ignore[attr-defined]
    return found


def too_long(trees: Trees) -> list[str]:
    """Functions with more lines than they may have."""
    found = []
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > SHORTER.get(node.name, MAX_FUNCTION):
                    found.append(f"{name}.{node.name}: {lines} lines")
    return found


def test_every_room_has_a_layer() -> None:
    rooms = {room for module in house() if (room := room_of(module)) is not None}
    assert rooms == {room for layer in LAYERS for room in layer}


def test_imports_go_down() -> None:
    assert arrows_upward(house()) == []


def test_no_modules_import_each_other() -> None:
    assert cycles(house()) == []


HTTP = ("urllib.request", "http.client", "urllib3", "requests", "httpx", "aiohttp", "fsspec")
"""What asks other machines over HTTP."""
MAY_ASK = {
    "llmsuite.web.client": {"urllib.request", "http.client"},
    "llmsuite.web.connection": {"urllib.request", "http.client"},
    "llmsuite.data.remote": {"fsspec"},  # for what is not HTTP
    "llmsuite.hub.huggingface": {"requests", "httpx"},  # for errors that the library of the hub raises
    "llmsuite.hub.modelscope": {"requests"},
}


def test_one_client_asks_other_machines() -> None:
    found: dict[str, set[str]] = {}
    for name, tree in house().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                targets = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for target in targets:
                found.setdefault(name, set()).update(h for h in HTTP if f"{target}.".startswith(f"{h}."))
    assert {name: asks for name, asks in found.items() if asks} == MAY_ASK


def test_conversions_of_suites_do_not_know_each_other() -> None:
    """What they share is in llmsuite.recipe.conversion."""
    rooms = ("llmsuite.recipe.paddlenlp", "llmsuite.recipe.suites", "llmsuite.recipe.conversion")
    crossing = [
        f"{module}:{line} imports {target}"
        for module, target, line in imports(house())
        if module.startswith(rooms) and target.startswith(rooms[:2])
        if module.split(".")[2] != target.split(".")[2]
    ]
    assert crossing == []


def test_docstrings_name_their_thing_first() -> None:
    assert [
        f"{module}:{line}: {text[:60]}" for module, line, text in docstrings(house()) if text.startswith("Of ")
    ] == []


def test_functions_fit_on_a_screen() -> None:
    assert too_long(house()) == []


def test_the_file_system_is_asked_in_one_place() -> None:
    """In llmsuite.regular; but for members of an archive, and what is deleted."""
    others = ("llmsuite.data.archives", "llmsuite.locks")
    assert [place for place in asked_by_methods(house()) if place.partition(":")[0] not in others] == []


def test_files_are_short() -> None:
    lengths = {p: len(p.read_text(encoding="utf-8").splitlines()) for p in (ROOT / "llmsuite").rglob("*.py")}
    assert {str(path.relative_to(ROOT)): lines for path, lines in lengths.items() if lines > MAX_FILE} == {}


@pytest.fixture
def crooked(tmp_path: Path) -> Trees:
    """A house that breaks each rule once."""
    files = {
        "errors.py": "def deep():\n    from llmsuite.train import step\n",
        "train/__init__.py": "",
        "train/step.py": '"""Of a step."""\nfrom llmsuite.train.loop import fit\n'
        + "def train_step():\n"
        + "    pass\n" * 60,
        "train/loop.py": (
            "from typing import TYPE_CHECKING\nimport llmsuite.errors\n"
            "if TYPE_CHECKING:\n    from llmsuite.train import step\nlimit = 1\n'''Of it.'''\nlimit.exists()\n"
        ),
    }
    for name, text in files.items():
        path = tmp_path / "llmsuite" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return parse(tmp_path / "llmsuite")


def test_what_breaks_a_rule_is_found(crooked: Trees) -> None:
    assert arrows_upward(crooked) == ["llmsuite.errors:2 imports llmsuite.train.step"]
    assert cycles(crooked) == [["llmsuite.errors", "llmsuite.train.loop", "llmsuite.train.step"]]
    assert [text for _, _, text in docstrings(crooked)] == ["Of it.", "Of a step."]
    assert asked_by_methods(crooked) == ["llmsuite.train.loop:7"]
    assert too_long(crooked) == ["llmsuite.train.step.train_step: 61 lines"]
