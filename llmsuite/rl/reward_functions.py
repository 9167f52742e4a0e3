"""The rewards that come with llmsuite: each factory gets the section of its keys and returns what scores."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from llmsuite.errors import UserError
from llmsuite.extras import install_command
from llmsuite.rl.arithmetic import numbers_in, value
from llmsuite.rl.columns import value_of
from llmsuite.rl.completion import Completion
from llmsuite.rl.reward_sections import CountdownSection, ExactSection, FormatSection, LengthSection, MathSection
from llmsuite.specs import Score


def answer_of(completion: Completion, reward: str, column: str, key: str = "column") -> Any:
    """What a row has in the column that `reward.REWARD.KEY` names. Raises ValueError without one."""
    return value_of(completion.columns, column, f"reward.{reward}.{key}")


def exact(section: ExactSection) -> Score:
    """1 where the text is the answer of the row."""
    column, ended = section.column, section.ended

    def score_one(completion: Completion) -> float | ValueError:
        try:
            answer = str(answer_of(completion, "exact", column))
        except ValueError as error:  # in its place: the other rows, of the same call, have theirs
            return error
        return float(completion.text.strip() == answer.strip() and not (ended and completion.truncated))

    return lambda completions: [score_one(c) for c in completions]


def form(section: FormatSection) -> Score:
    """1 where the text has the form of a pattern."""
    if section.pattern is None:
        raise UserError("reward.format.pattern: is required with the reward format; set it to a regular expression")
    pattern = re.compile(section.pattern, re.DOTALL)

    def score(completions: Sequence[Completion]) -> list[float]:
        return [float(pattern.fullmatch(c.text.strip()) is not None) for c in completions]

    return score


def length(section: LengthSection) -> Score:
    """How far the number of tokens is from the target."""
    target, only_longer = section.target, section.only_longer
    if target is None:
        raise UserError("reward.length.target: is required with the reward length; set it to a number of tokens")

    def score(completions: Sequence[Completion]) -> list[float]:
        over = [len(c.ids) - target for c in completions]
        return [-min(1.0, (max(o, 0) if only_longer else abs(o)) / target) for o in over]

    return score


def countdown(section: CountdownSection) -> Score:
    """1 where the row's numbers are combined to its target."""
    columns, pattern = (section.numbers, section.target), section.pattern

    def score_one(completion: Completion) -> float:
        numbers = answer_of(completion, "countdown", columns[0], "numbers")
        target = Fraction(str(answer_of(completion, "countdown", columns[1], "target")))
        if not isinstance(numbers, list) or not numbers:
            raise ValueError(f"{columns[0]!r} is {numbers!r:.100}, not a list of numbers (reward.countdown.numbers)")
        given = sorted(Fraction(str(number)) for number in numbers)
        found = [completion.text] if pattern is None else re.findall(pattern, completion.text, re.DOTALL)
        if completion.truncated or not found:
            return 0.0
        try:
            return float(numbers_in(found[-1]) == given and value(found[-1]) == target)
        except ValueError:  # no expression
            return 0.0

    return lambda completions: [score_one(c) for c in completions]


def environment(section: None) -> Score:
    """What the environment gave in all turns of the episode."""

    def score(completions: Sequence[Completion]) -> list[Mapping[str, float] | Exception]:
        return [RuntimeError(c.failure) if c.episode_scores is None else c.episode_scores for c in completions]

    return score


def _is_bare(text: str) -> bool:
    """Whether a text is one expression without what LaTeX puts around: no words, in one line."""
    text = text.strip()
    is_marked = re.search(r"\$|\\boxed|\\\(|\\\[|\n", text)
    return bool(text) and not is_marked and not re.search(r"[^\W\d_]{2}", re.sub(r"\\[A-Za-z]+", "", text))


def mathematical(section: MathSection) -> Score:
    """1 where the last expression of the text equals the answer."""
    column = section.column
    try:
        verifier = importlib.import_module("math_verify")
    except ImportError as error:
        raise UserError(
            f"reward.functions: math needs the package math-verify ({error}); install it with: "
            f"{install_command('math')}"
        ) from error

    # it warns at every call that nothing limits its time here, which the pool does
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def parsed(text: str) -> list[Any]:
        found: list[Any] = verifier.parse(text, parsing_timeout=None)
        return found

    def readings(text: str) -> list[list[Any]]:
        """A bare expression as such first: of plain text only the last number is taken, 2 of (1, 2) and of 2x."""
        return [parsed(way) for way in ([f"${text}$", text] if _is_bare(text) else [text])]

    def score_one(completion: Completion) -> float | None:
        answer = str(answer_of(completion, "math", column))
        gold = next(filter(None, readings(answer)), []) or (parsed(f"${answer}$") if "\\" in answer else [])
        if not gold:
            raise ValueError(f"the answer {answer!r} is no mathematical expression; write it as LaTeX or as a number")
        return float(any(verifier.verify(gold, found, timeout_seconds=None) for found in readings(completion.text)))

    return lambda completions: [score_one(c) for c in completions]
