"""The modules of the package, parsed."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.paths import ROOT

Trees = Mapping[str, ast.Module]
"""Modules by their dotted names."""

LIGHT = ("base", "cli", "contract", "data", "launch", "planning", "recipe")
"""Rooms that commands use before, or without, Paddle, which takes two seconds to import."""


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


def first_imports(tree: ast.Module) -> Iterator[str]:
    """Names that a module imports when it is imported itself: not those of functions, nor those for type checkers.
    Of `from a import b` both `a` and `a.b`."""
    waiting: list[ast.stmt] = [*tree.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            waiting += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


def importers(trees: Trees, packages: frozenset[str]) -> Mapping[str, str]:
    """Modules that import one of these packages when they are imported, and the import that leads there."""
    imported = {name: [*first_imports(tree)] for name, tree in trees.items()}
    found: dict[str, str] = {}
    while True:
        more = {
            name: target
            for name, targets in imported.items()
            for target in targets
            if name not in found and (target in found or target.partition(".")[0] in packages)
        }
        if not more:
            return found
        found |= more
