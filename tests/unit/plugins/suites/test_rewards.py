"""The rewards of ms-swift and TRL, on completions whose reward there follows from their text."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest

from llmsuite.contract.registry import Registry
from llmsuite.plugins.suites.rewards import (
    REWARDS,
    SolutionSection,
    swift_accuracy,
    swift_format,
    trl_accuracy,
    trl_think_format,
)

HALF = r"The answer is \boxed{\frac{1}{2}}."


def score(make: Callable[..., Any], text: str, solution: Any = None, section: Any = None) -> Any:
    completion = types.SimpleNamespace(text=text, columns={"solution": solution})
    return make(section)([completion])[0]


@pytest.mark.parametrize(
    ("make", "text", "solution", "expected"),
    [
        (swift_accuracy, HALF, r"$\frac{2}{4}$", 1.0),
        (swift_accuracy, HALF, r"$\frac{1}{3}$", 0.0),
        (swift_accuracy, "It is 0.5", r"$\frac{1}{2}$", 0.0),  # no LaTeX
        (swift_accuracy, "<answer>0.5</answer>", r"<answer>$\frac{1}{2}$</answer>", 1.0),  # in a tag it need not be
        (swift_accuracy, r"<answer>3</answer> \boxed{\frac{1}{2}}", r"$\frac{1}{2}$", 0.0),  # the tag alone counts
        (swift_accuracy, HALF, "no number", 0.0),
        (trl_accuracy, HALF, r"$\frac{1}{2}$", 1.0),
        (trl_accuracy, r"<answer>3</answer> \boxed{\frac{1}{2}}", r"$\frac{1}{2}$", 1.0),
        (trl_accuracy, "It is 0.5", "0.5", 0.0),
        (trl_accuracy, HALF, "no number", 0.0),
    ],
)
def test_accuracy_scores_a_completion(make: Callable[..., Any], text: str, solution: str, expected: float) -> None:
    assert score(make, text, solution, SolutionSection()) == expected


@pytest.mark.parametrize(("make", "parsing"), [(swift_accuracy, 5), (trl_accuracy, 10)])
def test_time_limits_of_math_verify(make: Callable[..., Any], parsing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the suites, after which the reward is 0; it has none in other threads."""
    limits: list[int | None] = []

    def parse(text: str, parsing_timeout: int | None, **options: Any) -> list[str]:
        limits.append(parsing_timeout)
        return [text]

    def verify(gold: Any, answer: Any, timeout_seconds: int | None) -> bool:
        limits.append(timeout_seconds)
        return False

    options = types.SimpleNamespace(NormalizationConfig=dict)
    verifier = types.SimpleNamespace(parse=parse, verify=verify, LatexExtractionConfig=dict)
    monkeypatch.setitem(sys.modules, "math_verify", verifier)
    monkeypatch.setitem(sys.modules, "latex2sympy2_extended", options)
    assert score(make, HALF, "1", SolutionSection()) == 0.0
    assert limits == [parsing, parsing, 5]
    thread = threading.Thread(target=score, args=(make, HALF, "1", SolutionSection()))
    thread.start()
    thread.join()
    assert limits[3:] == [None, None, None]


def test_a_row_without_a_solution_has_no_reward() -> None:
    with pytest.raises(ValueError, match=r"no text 'solution' \(reward\.swift_accuracy\.column\)"):
        score(swift_accuracy, HALF, None, SolutionSection())


@pytest.mark.parametrize(
    ("make", "text", "expected"),
    [
        (swift_format, "<think>a\nb</think>\n<answer>c</answer>", 1.0),
        (swift_format, "<think>a</think><answer>c</answer>\n", 0.0),  # nothing may follow
        (swift_format, " <think>a</think><answer>c</answer>", 0.0),
        (trl_think_format, "<think>\na\n</think>\nb", 1.0),
        (trl_think_format, "<think>a<think></think>b", 0.0),
        (trl_think_format, "<think>a", 0.0),
    ],
)
def test_formats_score_the_form_of_completions(make: Callable[..., Any], text: str, expected: float) -> None:
    assert score(make, text) == expected


def test_they_are_registered(registry: Registry) -> None:
    assert {spec.name for spec in REWARDS} <= set(registry.rewards)
