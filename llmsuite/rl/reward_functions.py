"""The built-in rewards: each factory gets the section of its keys and returns a function that scores completions."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.extras import install_command
from llmsuite.contract.specs import Score
from llmsuite.rl.arithmetic import numbers_in, value
from llmsuite.rl.columns import value_of
from llmsuite.rl.completion import Completion
from llmsuite.rl.reward_sections import CountdownSection, ExactSection, FormatSection, LengthSection, MathSection


def answer_of(completion: Completion, reward: str, column: str, key: str = "column") -> Any:
    """The value of a row in the column that `reward.REWARD.KEY` names. Raises ValueError when the row has none."""
    return value_of(completion.columns, column, f"reward.{reward}.{key}")


def exact(section: ExactSection) -> Score:
    """1 for a text that equals the answer of the row."""
    column = section.column
    ended = section.ended

    def score_one(completion: Completion) -> float | ValueError:
        try:
            answer = str(answer_of(completion, "exact", column))
        except ValueError as error:  # returned, not raised: the other rows of the call keep their rewards
            return error
        return float(completion.text.strip() == answer.strip() and not (ended and completion.truncated))

    return lambda completions: [score_one(c) for c in completions]


def form(section: FormatSection) -> Score:
    """1 for a text that matches the pattern."""
    if section.pattern is None:
        raise UserError("reward.format.pattern: is required with the reward format; set it to a regular expression")
    pattern = re.compile(section.pattern, re.DOTALL)

    def score(completions: Sequence[Completion]) -> list[float]:
        return [float(pattern.fullmatch(c.text.strip()) is not None) for c in completions]

    return score


def length(section: LengthSection) -> Score:
    """Minus the relative distance of the number of tokens from the target."""
    target = section.target
    only_longer = section.only_longer
    if target is None:
        raise UserError("reward.length.target: is required with the reward length; set it to a number of tokens")

    def score(completions: Sequence[Completion]) -> list[float]:
        distances = [len(c.ids) - target for c in completions]
        distances = [max(d, 0) if only_longer else abs(d) for d in distances]
        return [-min(1.0, d / target) for d in distances]

    return score


def countdown(section: CountdownSection) -> Score:
    """1 for an expression of the row's numbers whose value is its target."""
    columns = (section.numbers, section.target)
    pattern = section.pattern

    def score_one(completion: Completion) -> float:
        numbers = answer_of(completion, "countdown", columns[0], "numbers")
        target = Fraction(str(answer_of(completion, "countdown", columns[1], "target")))
        if not isinstance(numbers, list) or not numbers:
            raise ValueError(f"{columns[0]!r} is {numbers!r:.100}, not a list of numbers (reward.countdown.numbers)")
        given = sorted(Fraction(str(number)) for number in numbers)
        found = [completion.text]
        if pattern is not None:
            found = re.findall(pattern, completion.text, re.DOTALL)
        if completion.truncated or not found:
            return 0.0
        try:
            return float(numbers_in(found[-1]) == given and value(found[-1]) == target)
        except ValueError:  # no expression
            return 0.0

    return lambda completions: [score_one(c) for c in completions]


def environment(section: None) -> Score:
    """The reward of the environment, summed over all turns of the episode."""

    def score(completions: Sequence[Completion]) -> list[Mapping[str, float] | Exception]:
        return [RuntimeError(c.failure) if c.episode_scores is None else c.episode_scores for c in completions]

    return score


def _is_bare(text: str) -> bool:
    """Return True if a text is one expression without LaTeX delimiters: no words, in one line."""
    text = text.strip()
    is_marked = re.search(r"\$|\\boxed|\\\(|\\\[|\n", text)
    return bool(text) and not is_marked and not re.search(r"[^\W\d_]{2}", re.sub(r"\\[A-Za-z]+", "", text))


def mathematical(section: MathSection) -> Score:
    """1 for a text whose last mathematical expression equals the answer."""
    column = section.column
    try:
        verifier = importlib.import_module("math_verify")
    except ImportError as error:
        raise UserError(
            f"reward.functions: math needs the package math-verify ({error}); install it with: "
            f"{install_command('math')}"
        ) from error

    # it warns at every call that its own time limit is off; the worker pool has one
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def parsed(text: str) -> list[Any]:
        found: list[Any] = verifier.parse(text, parsing_timeout=None)
        return found

    def readings(text: str) -> list[list[Any]]:
        """Parse a text. For a bare expression also as LaTeX, and that first: of plain text math-verify takes only the
        last number, such as 2 of (1, 2)."""
        ways = [f"${text}$", text] if _is_bare(text) else [text]
        return [parsed(way) for way in ways]

    def score_one(completion: Completion) -> float | None:
        answer = str(answer_of(completion, "math", column))
        gold = next(filter(None, readings(answer)), [])
        if not gold and "\\" in answer:
            gold = parsed(f"${answer}$")
        if not gold:
            raise ValueError(
                f"the answer {answer!r} is not a mathematical expression; write it as LaTeX or as a number"
            )
        return float(any(verifier.verify(gold, found, timeout_seconds=None) for found in readings(completion.text)))

    return lambda completions: [score_one(c) for c in completions]
