"""The environment `calculator`, and the value of an expression."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from llmsuite.rl.environment_sections import CalculatorSection
from llmsuite.specs import Reply, Turn

_LONGEST = 200
"""Characters of an expression, and digits of a number in it."""
_OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Calculator:
    """See `CalculatorSection`."""

    def __init__(self, section: CalculatorSection):
        self._pattern, self._column = section.pattern, section.column
        self._answer = ""

    def begin(self, row: Mapping[str, Any], seed: int) -> Sequence[Mapping[str, str]]:
        if row.get(self._column) is None:
            raise ValueError(f"the row has no {self._column!r} (environment.calculator.column)")
        self._answer = str(row[self._column]).strip()
        found: Sequence[Mapping[str, str]] = row["messages"]
        return found

    def step(self, turn: Turn) -> Reply:
        call = re.search(self._pattern, turn.text, re.DOTALL)
        if call is None:
            right = turn.finish_reason == "stop" and turn.text.strip() == self._answer
            return Reply(done=True, reward={"score": float(right), "calls": 0.0})
        try:
            content = shown(value(call[1]))
        except ValueError as error:
            content = f"error: {error}"
        return Reply(messages=[{"role": "tool", "content": content}], reward={"score": 0.0, "calls": 1.0})


def value(expression: str) -> Fraction:
    """The value of numbers with + - * / and brackets, exactly. Raises ValueError when it is none."""
    if len(expression) > _LONGEST:
        raise ValueError("too long")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("no expression") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    raise ValueError("only numbers, + - * / and brackets")


def shown(number: Fraction) -> str:
    """A number in decimals, to twelve digits if it has more."""
    return str(number.numerator) if number.denominator == 1 else f"{float(number):.12g}"
