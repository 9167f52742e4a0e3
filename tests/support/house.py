"""The modules of the package, parsed."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.paths import ROOT

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
