"""The environment `calculator`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmsuite.contract.specs import Reply, Turn
from llmsuite.rl.arithmetic import shown, value
from llmsuite.rl.columns import value_of
from llmsuite.rl.environment_sections import CalculatorSection

TOOL_CALL = "<tool_call>(.*?)</tool_call>"
CALCULATE: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Compute the value of numbers with + - * / and brackets.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "such as 12*(3+4)"}},
            "required": ["expression"],
        },
    },
}
"""The function that the chat template offers to the model."""


class Calculator:
    """An episode with a calculator as a tool; `CalculatorSection` describes the rules."""

    def __init__(self, section: CalculatorSection):
        self._pattern = TOOL_CALL if section.as_tool else section.pattern
        self._column = section.column
        self._answer = ""
        self.tools = [CALCULATE] if section.as_tool else []

    def begin(self, row: Mapping[str, Any], seed: int) -> Sequence[Mapping[str, str]]:
        columns = {name: value for name, value in row.items() if name != "messages"}
        self._answer = str(value_of(columns, self._column, "environment.calculator.column")).strip()
        found: Sequence[Mapping[str, str]] = row["messages"]
        return found

    def step(self, turn: Turn) -> Reply:
        call = re.search(self._pattern, turn.text, re.DOTALL)
        if call is None:
            right = turn.finish_reason == "stop" and turn.text.strip() == self._answer
            return Reply(done=True, reward={"score": float(right), "calls": 0.0})
        expression = call[1]
        try:
            if self.tools:
                expression = _expression(expression)
            content = shown(value(expression))
        except (ValueError, OverflowError) as error:  # OverflowError: the result is no float
            content = f"error: {error}"
        return Reply(messages=[{"role": "tool", "content": content}], reward={"score": 0.0, "calls": 1.0})


def _expression(call: str) -> str:
    """The expression of a call in JSON. Raises ValueError when it is no call of `calculate`."""
    try:
        found = json.loads(call)
    except (ValueError, RecursionError):
        raise ValueError("the call is no JSON") from None
    if not isinstance(found, dict) or found.get("name") != "calculate":
        raise ValueError("there is one function: calculate")
    arguments = found.get("arguments")
    expression = None
    if isinstance(arguments, dict):
        expression = arguments.get("expression")
    if not isinstance(expression, str):
        raise ValueError("arguments: expression is missing")
    return expression
