"""Arithmetic expressions in completions: their exact value, without running code."""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction

_MAX_LENGTH = 200
"""Maximum number of characters of an expression."""
_OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def pattern_problems(pattern: str) -> Iterator[tuple[str, str]]:
    """The key and the fault of a recipe's `pattern`, a regular expression that finds expressions in completions."""
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        yield "pattern", f"is not a regular expression: {error}"
        return
    if groups != 1:
        yield "pattern", f"has {groups} groups; it needs one, around the expression"


def value(expression: str) -> Fraction:
    """The exact value of an expression of numbers, + - * / and brackets. Raises ValueError for any other text."""
    try:
        return _value(_parsed(expression))
    except RecursionError:
        raise ValueError("no expression") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None


def numbers_in(expression: str) -> list[Fraction]:
    """The numbers in an expression, ascending; a sign in front of a number belongs to it. Raises ValueError for a text
    that is no expression."""
    try:
        return sorted(_numbers(_parsed(expression)))
    except RecursionError:
        raise ValueError("no expression") from None


def _numbers(node: ast.expr) -> list[Fraction]:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _numbers(node.left) + _numbers(node.right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.BinOp):
        return _numbers(node.operand)
    return [_value(node)]


def _parsed(expression: str) -> ast.expr:
    if len(expression) > _MAX_LENGTH:
        raise ValueError("too long")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns about texts such as "2if"
            return ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("no expression") from None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    raise ValueError("only numbers, + - * / and brackets")


def shown(number: Fraction) -> str:
    """A number as a decimal, rounded to twelve digits."""
    if number.denominator == 1:
        return str(number.numerator)
    return f"{float(number):.12g}"
