"""Style of the package: words of docs/glossary.md, docstrings that begin with their thing, and plain statements."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

import pytest

from tests.support.paths import ROOT

VAGUE = re.compile(r"(What|Whether|As|See|Those|Of|The same|That)\b")
"""Beginnings of a docstring after which a reader does not know yet what it is about."""
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@functools.cache
def sources() -> dict[str, str]:
    """Text of each module by its path from the root."""
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "llmsuite").rglob("*.py"))
    }


def retired() -> list[str]:
    """Words of the last column of the glossary's tables."""
    rows = [line.split("|") for line in (ROOT / "docs/glossary.md").read_text(encoding="utf-8").splitlines()]
    return [word for row in rows if len(row) == 5 for word in re.findall("`([^`]+)`", row[3])]


def retired_words_in(text: str, words: list[str]) -> list[int]:
    """Numbers of lines with one of the words, alone or as a part of a name."""
    pattern = re.compile(rf"(?<![a-z])({'|'.join(words)})(?![a-z])")
    return [number for number, line in enumerate(text.lower().splitlines(), start=1) if pattern.search(line)]


def vague_docstrings(text: str) -> list[int]:
    """Lines of docstrings that begin with something else than their thing; those of attributes too."""
    found = []
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str) and VAGUE.match(node.value.value):  # type: ignore[attr-defined]
            found.append(node.lineno)  # type: ignore[attr-defined]
    return sorted(found)


def packed_assignments(text: str) -> list[int]:
    """Lines that assign values of their own to several names: `a, b = x, y`. A swap is one act and may stay."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        target = node.targets[0]
        if isinstance(target, ast.Tuple) and not _names(target) & _names(node.value):
            found.append(node.lineno)
    return sorted(found)


def _names(node: ast.AST) -> set[str]:
    """Names and attributes below a node."""
    return {ast.unparse(n) for n in ast.walk(node) if isinstance(n, (ast.Name, ast.Attribute))}


def nested_comprehensions(text: str) -> list[int]:
    """Lines of comprehensions that hold another one."""
    return sorted({n.lineno for n in _within(text, COMPREHENSIONS, COMPREHENSIONS)})


def nested_conditions(text: str) -> list[int]:
    """Lines of conditional expressions that hold another one."""
    return sorted({n.lineno for n in _within(text, (ast.IfExp,), (ast.IfExp,))})


def assignments_in_and(text: str) -> list[int]:
    """Lines of an `and` in which a name is assigned (`:=`): whether it was is hard to see."""
    found = _within(text, (ast.BoolOp,), (ast.NamedExpr,))
    return sorted({n.lineno for n in found if isinstance(n.op, ast.And)})  # type: ignore[attr-defined]


def _within(text: str, outer: tuple[type[ast.expr], ...], inner: tuple[type[ast.expr], ...]) -> Iterator[ast.expr]:
    """Nodes of one kind that hold a node of another."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, outer) and any(isinstance(n, inner) and n is not node for n in ast.walk(node)):
            yield node


RULES = (vague_docstrings, packed_assignments, nested_comprehensions, nested_conditions, assignments_in_and)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_to(rule: functools.partial[list[int]]) -> None:
    found = [f"{path}:{line}" for path, text in sources().items() for line in rule(text)]
    assert found == []


def test_words_that_were_retired_do_not_come_back() -> None:
    words = retired()
    assert len(words) > 10
    assert [f"{path}:{line}" for path, text in sources().items() for line in retired_words_in(text, words)] == []


def test_what_breaks_a_rule_is_found() -> None:
    crooked = '''"""What it gives."""
left, right = 1, 2
left, right = right, left
pairs = [[x for x in row] for row in rows]
sign = 1 if x > 0 else -1 if x < 0 else 0
if rows and (first := rows[0]):
    num_drawn = 1
size = 1
"""Whether it fits."""
'''
    assert [rule(crooked) for rule in RULES] == [[1, 9], [2], [4], [5], [6]]
    assert retired_words_in(crooked, ["drawn", "old"]) == [7]
