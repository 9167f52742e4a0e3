"""Rewards that are the functions of TRL and ms-swift with these names, for recipes made of their files."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import re
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

from llmsuite.base.errors import UserError
from llmsuite.base.extras import install_command
from llmsuite.contract.hookspecs import RewardSpec
from llmsuite.contract.schema.section import Section

_SWIFT_FORMAT = r"^<think>.*?</think>\s*<answer>.*?</answer>(?![\s\S])"
_TRL_FORMAT = r"^<think>(?!.*<think>)(.*?)</think>.*$"
_VERIFYING = 5
"""Seconds for comparing, and in ms-swift for parsing a text."""
_TRL_PARSING = 10
"""Seconds for parsing a text in TRL."""
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclasses.dataclass(kw_only=True)
class SolutionSection(Section):
    """1 for a completion that math-verify finds equal to the solution of its row, else 0, also where the solution
    cannot be parsed or this takes too long."""

    needs_columns: ClassVar[tuple[str, ...]] = ("column",)
    column: str = "solution"
    """The column with the solution."""


def _verifier(name: str) -> tuple[Any, Any]:
    """Return the modules math_verify and latex2sympy2_extended. Raises UserError if they are missing."""
    try:
        found = importlib.import_module("math_verify"), importlib.import_module("latex2sympy2_extended")
    except ImportError as error:
        raise UserError(
            f"reward.functions: {name} needs the package math-verify ({error}); install it with: "
            f"{install_command('math')}"
        ) from error
    # it warns where its own time limits are off
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return found


def _seconds(limit: int) -> int | None:
    """Return a time limit of math-verify, after which a reward is 0; None outside of the main thread, where it has
    none."""
    return limit if threading.current_thread() is threading.main_thread() else None


def _solution_of(completion: Any, name: str, column: str) -> str:
    found = completion.columns.get(column)
    if not isinstance(found, str):
        raise ValueError(f"the row has no text {column!r} (reward.{name}.column)")
    return found


def swift_accuracy(section: SolutionSection) -> Any:
    """`accuracy` of ms-swift: an answer in <answer> counts alone, and has to be in LaTeX otherwise."""
    verifier, latex = _verifier("swift_accuracy")
    settings = latex.NormalizationConfig(
        nits=False, malformed_operators=False, basic_latex=True, boxed=True, units=True
    )
    strict = verifier.LatexExtractionConfig(
        normalization_config=settings, boxed_match_priority=0, try_extract_without_anchor=False
    )

    def score_one(completion: Any) -> float:
        solution = _solution_of(completion, "swift_accuracy", section.column)
        found = _ANSWER.search(solution)
        gold = _parsed(verifier, found[1].strip() if found else solution, _VERIFYING)
        if not gold:
            return 0.0
        tagged = _ANSWER.search(completion.text)
        if tagged:
            answer = _parsed(verifier, tagged[1].strip(), _VERIFYING)
        else:
            answer = _parsed(verifier, completion.text, _VERIFYING, extraction_config=[strict])
        return _is_equal(verifier, gold, answer)

    return lambda completions: [score_one(completion) for completion in completions]


def trl_accuracy(section: SolutionSection) -> Any:
    """`accuracy_reward` of TRL: the answer has to be in LaTeX."""
    verifier, latex = _verifier("trl_accuracy")
    strict = verifier.LatexExtractionConfig(
        normalization_config=latex.NormalizationConfig(units=True),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )

    def score_one(completion: Any) -> float:
        solution = _solution_of(completion, "trl_accuracy", section.column)
        gold = verifier.parse(solution, parsing_timeout=_seconds(_TRL_PARSING))
        if not gold:  # TRL leaves it out of the sum of rewards, which is to add 0
            return 0.0
        answer = _parsed(verifier, completion.text, _TRL_PARSING, extraction_config=[strict])
        return _is_equal(verifier, gold, answer)

    return lambda completions: [score_one(completion) for completion in completions]


def _parsed(verifier: Any, text: str, limit: int, **options: Any) -> list[Any]:
    seconds = _seconds(limit)
    found: list[Any] = verifier.parse(text, extraction_mode="first_match", parsing_timeout=seconds, **options)
    return found


def _is_equal(verifier: Any, gold: Any, answer: Any) -> float:
    try:
        return float(verifier.verify(gold, answer, timeout_seconds=_seconds(_VERIFYING)))
    except Exception:  # of sympy, on an expression that the model wrote
        return 0.0


def swift_format(section: None) -> Any:
    """`format` of ms-swift."""
    return _matches(_SWIFT_FORMAT)


def trl_think_format(section: None) -> Any:
    """`think_format_reward` of TRL."""
    return _matches(_TRL_FORMAT)


def _matches(pattern: str) -> Any:
    compiled = re.compile(pattern, re.DOTALL | re.MULTILINE)

    def score(completions: Sequence[Any]) -> list[float]:
        return [float(compiled.match(completion.text) is not None) for completion in completions]

    return score


REWARDS = [
    RewardSpec(
        name="swift_accuracy",
        help="1 for equality with the solution, as `accuracy` of ms-swift",
        factory=swift_accuracy,
        config_cls=SolutionSection,
    ),
    RewardSpec(
        name="swift_format",
        help="1 for a thought in <think> and an answer in <answer>, as `format` of ms-swift",
        factory=swift_format,
    ),
    RewardSpec(
        name="trl_accuracy",
        help="1 for equality with the solution, as `accuracy_reward` of TRL",
        factory=trl_accuracy,
        config_cls=SolutionSection,
    ),
    RewardSpec(
        name="trl_think_format",
        help="1 for a thought in <think> in front of an answer, as `think_format_reward` of TRL",
        factory=trl_think_format,
    ),
]
