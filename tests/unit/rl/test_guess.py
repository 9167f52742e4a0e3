"""The environments that come with llmsuite, and the values of expressions."""

from __future__ import annotations

import json
import pickle
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmsuite.contract.specs import Environment, Reply, Turn
from llmsuite.data.turns import parse_tools
from llmsuite.rl.arithmetic import numbers_in, shown, value
from llmsuite.rl.calculator import Calculator
from llmsuite.rl.environment_sections import BUILTIN, CalculatorSection, GuessSection, VerifiersSection
from llmsuite.rl.guess import Guess

MESSAGES = [{"role": "user", "content": "Go."}]


def turn_of(text: str, finish_reason: Any = "stop") -> Turn:
    return Turn(text=text, ids=[1], finish_reason=finish_reason)


def started(environment: Environment, seed: int = 0, **columns: Any) -> Any:
    assert environment.begin({"messages": MESSAGES, **columns}, seed) == MESSAGES
    return pickle.loads(pickle.dumps(environment))


@given(st.integers(0, 2**63 - 1), st.integers(-50, 50), st.integers(0, 100))
def test_halving_finds_the_number(seed: int, lowest: int, size: int) -> None:
    game: Guess = started(Guess(GuessSection()), seed, lowest=lowest, highest=lowest + size)
    low = lowest
    high = lowest + size
    turns = 0
    while True:
        middle = (low + high) // 2
        turns = turns + 1
        reply = game.step(turn_of(f" {middle}\n"))
        if reply.done:
            break
        (message,) = reply.messages
        assert (message["role"], reply.reward) == ("user", 0.0)
        low, high = (middle + 1, high) if message["content"] == "higher" else (low, middle - 1)
        assert low <= high
    assert reply == Reply(done=True, reward=1.0)
    assert turns <= (size + 1).bit_length()


def test_numbers_to_guess_are_a_function_of_the_seed() -> None:
    secrets = [started(Guess(GuessSection(lowest=3, highest=12)), seed)._secret for seed in range(200)]
    assert secrets == [started(Guess(GuessSection(lowest=3, highest=12)), seed)._secret for seed in range(200)]
    assert set(secrets) == set(range(3, 13))


@pytest.mark.parametrize("text", ["", "five", "5 or 6", "9" * 30, "٣"])
def test_a_turn_that_is_not_a_number_ends_the_game(text: str) -> None:
    reply = started(Guess(GuessSection())).step(turn_of(text))
    assert reply == Reply(done=True)


def test_a_tool_answers_calls_and_the_rest_is_the_answer() -> None:
    tool = started(Calculator(CalculatorSection()), answer=42)
    assert tool.step(turn_of("so <calc>6*\n7</calc> and <calc>1</calc>")) == Reply(
        messages=[{"role": "tool", "content": "error: no expression"}], reward={"score": 0.0, "calls": 1.0}
    )
    assert tool.step(turn_of("so <calc>6*7</calc> and <calc>1</calc>")).messages == [{"role": "tool", "content": "42"}]
    assert tool.step(turn_of(" 42\n")) == Reply(done=True, reward={"score": 1.0, "calls": 0.0})
    for turn in (turn_of("43"), turn_of("42", "length"), turn_of("<calc>42")):
        assert tool.step(turn) == Reply(done=True, reward={"score": 0.0, "calls": 0.0})
    reply = tool.step(turn_of(f"<calc>{'1e300*' * 2}1e300/7</calc>"))
    assert reply.messages == [{"role": "tool", "content": "error: integer division result too large for a float"}]
    with pytest.raises(ValueError, match=r"environment.calculator.column"):
        Calculator(CalculatorSection()).begin({"messages": MESSAGES}, 0)


def test_the_tool_is_a_function_that_templates_are_given() -> None:
    tool = started(Calculator(CalculatorSection(as_tool=True)), answer=42)
    (function,) = json.loads(parse_tools({"tools": tool.tools}))
    assert function["function"]["name"] == "calculate"

    def response(text: str) -> str:
        (message,) = tool.step(turn_of(text)).messages
        assert message["role"] == "tool"
        return str(message["content"])

    call = {"name": "calculate", "arguments": {"expression": "6*7"}}
    assert response(f"<tool_call>\n{json.dumps(call)}\n</tool_call>") == "42"
    assert response("<tool_call>6*7</tool_call>") == "error: the call is no JSON"
    assert response("<tool_call>[]</tool_call>") == "error: there is one function: calculate"
    for arguments in ("{}", "[]", '{"expression": 42}'):
        found = response(f'<tool_call>{{"name": "calculate", "arguments": {arguments}}}</tool_call>')
        assert found == "error: arguments: expression is missing"
    assert tool.step(turn_of("<calc>6*7</calc>")).done
    assert tool.step(turn_of("42")) == Reply(done=True, reward={"score": 1.0, "calls": 0.0})


@given(st.recursive(st.integers(0, 99), lambda part: st.tuples(part, st.sampled_from("+-*"), part), max_leaves=8))
def test_values_are_those_of_python(tree: Any) -> None:
    def written(tree: Any) -> str:
        return str(tree) if isinstance(tree, int) else f"({written(tree[0])}{tree[1]}{written(tree[2])})"

    assert value(written(tree)) == eval(written(tree))


def test_values_are_exact_and_nothing_else_runs() -> None:
    assert value(" 1/3 + 0.1 ") == Fraction(13, 30)
    assert [shown(value(text)) for text in ("8/2", "-7", "1/3", "0.5")] == ["4", "-7", "0.333333333333", "0.5"]
    for text in ("2**9", "a", "f(1)", "True", "'1'", "1;2", "1" * 300, "", "1/0", "(" * 190, "1 if 1 else 2", "1j"):
        with pytest.raises(ValueError, match=r"."):
            value(text)


def test_the_numbers_of_an_expression() -> None:
    assert numbers_in(" (12+3)*-4/12 ") == [-4, 3, 12, 12]
    assert numbers_in("-(1.5-2)") == [Fraction(3, 2), 2]
    for text in ("2**9", "a+1", "f(1)", "1;2", ""):
        with pytest.raises(ValueError, match=r"."):
            numbers_in(text)


def test_their_keys_are_checked() -> None:
    problems = {spec.name: spec.config_cls for spec in BUILTIN}
    assert problems == {"guess": GuessSection, "calculator": CalculatorSection, "verifiers": VerifiersSection}
    assert [key for key, _ in GuessSection(lowest=3, highest=2).problems()] == ["lowest"]
    assert [key for key, _ in CalculatorSection(as_tool=True, pattern="(a)").problems()] == ["pattern"]
    for pattern in ("(", "a", "(a)(b)"):
        assert [key for key, _ in CalculatorSection(pattern=pattern).problems()] == ["pattern"]
    for spec, options in zip(BUILTIN, (GuessSection(), CalculatorSection())):
        assert callable(pickle.loads(pickle.dumps(spec.factory))(options).step)
