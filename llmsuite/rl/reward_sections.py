"""The built-in rewards and their recipe keys, `reward.NAME`. Imports no NumPy."""

from __future__ import annotations

import dataclasses
import functools
import pkgutil
import re
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from llmsuite.contract.schema.numbers import NonNegativeInt, PositiveFloat, PositiveInt
from llmsuite.contract.schema.section import Section
from llmsuite.contract.specs import RewardSpec, Score
from llmsuite.rl import arithmetic


@dataclasses.dataclass(kw_only=True)
class ExactSection(Section):
    """1 for a completion that equals the answer of its row, else 0; surrounding whitespace is ignored."""

    needs_columns: ClassVar[tuple[str, ...]] = ("column",)
    column: str = "answer"
    """The column with the answer. For rows that end with a turn of the assistant, that turn is the column "answer",
    unless they have one."""
    ended: bool = True
    """Count only completions with a stop token as right, not truncated ones."""


@dataclasses.dataclass(kw_only=True)
class FormatSection(Section):
    """1 for a completion that matches a pattern, else 0."""

    pattern: str | None = None
    """A regular expression of Python that the full completion has to match, without surrounding whitespace; a dot
    matches newlines too. Such as "<think>.*</think>\\s*<answer>.*</answer>"."""

    def problems(self) -> Iterator[tuple[str, str]]:
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            yield "pattern", f"is not a regular expression: {error}"


@dataclasses.dataclass(kw_only=True)
class LengthSection(Section):
    """Minus the distance of the number of tokens from a target, divided by the target, at least -1 (after LCPO,
    Aggarwal and Welleck 2025, arXiv 2503.04697)."""

    target: PositiveInt | None = None
    """Number of tokens that a completion should have, including its stop token."""
    only_longer: bool = False
    """Do not penalise shorter completions: they get 0."""


@dataclasses.dataclass(kw_only=True)
class MathSection(Section):
    """1 for a completion whose last mathematical expression equals the answer of its row, else 0, by math-verify 0.9.
    The reward is missing where the answer itself cannot be parsed."""

    needs_columns: ClassVar[tuple[str, ...]] = ("column",)
    column: str = "answer"
    """The column with the answer, LaTeX or plain."""


@dataclasses.dataclass(kw_only=True)
class CountdownSection(Section):
    """1 for an expression of + - * / and brackets that uses each number of the row once and whose exact value is the
    row's target, else 0 (the game Countdown, after Pan's TinyZero, https://github.com/Jiayi-Pan/TinyZero)."""

    needs_columns: ClassVar[tuple[str, ...]] = ("numbers", "target")
    numbers: str = "numbers"
    """The column with the numbers, a list."""
    target: str = "target"
    """The column with the number to reach."""
    pattern: str | None = None
    """A regular expression of Python with one group, the expression, such as "<answer>(.*?)</answer>"; the last match
    counts. null: the full completion is the expression."""

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from arithmetic.pattern_problems(self.pattern or "()")


@dataclasses.dataclass(kw_only=True)
class HttpSection(Section):
    """Scores by a server, such as a reward model or a sandbox that runs code; one request for each prompt."""

    url: str | None = None
    """The address for POST requests, such as "http://localhost:8731/"."""
    dialect: Literal["paddlenlp", "openrlhf"] = "paddlenlp"
    """paddlenlp: {"src", "tgt", "response"} and an answer {"error_code", "score"}. openrlhf: {"query", "prompts",
    "labels"}, where a query is prompt and completion, and an answer {"rewards"}. All are lists with an item for each
    completion."""
    column: str = "answer"
    """The column for "tgt" or "labels"; an empty text for a row without it."""
    timeout: PositiveFloat = 5.0
    """Seconds within which the full response has to arrive. All tries together must also fit into reward.time_limit."""
    retries: NonNegativeInt = 1
    """Retries when the server cannot be reached, is busy (429) or fails (5xx)."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.url is not None and not re.match(r"https?://[^/\s]+", self.url):
            yield "url", f"is {self.url!r}; it has to begin with http:// or https://"


@dataclasses.dataclass(kw_only=True)
class ModelRewardSection(Section):
    """The score of a reward model of stage rm. Each rank that samples completions holds a full copy."""

    weights: str | None = None
    """The run of stage rm, or a model directory with a score head. Its tokenizer and chat template have to be those of
    the trained model."""
    batch_size: PositiveInt = 16
    """Completions in one forward pass."""


def _made(address: str, *given: Any) -> Score:
    """The reward that the factory at an address makes for its section, and for the services of the run if it needs
    them."""
    score: Score = pkgutil.resolve_name(address)(*given)
    return score


def _spec(
    name: str, help: str, section: type[Section] | None, factory: str, level: Any = "completion", runs: Any = "pool"
) -> RewardSpec:
    """A spec whose factory, in this package, is imported on first use."""
    address = f"llmsuite.rl.{factory}"
    make = functools.partial(_made, address)
    return RewardSpec(name=name, help=help, config_cls=section, factory=make, level=level, runs=runs)


# exact and length run in the main process: they cannot hang, and cost less than a message to a worker
BUILTIN = [
    _spec("exact", "1 for the answer of the row", ExactSection, "reward_functions:exact", runs="main"),
    _spec("format", "1 for a match of a regular expression", FormatSection, "reward_functions:form"),
    _spec(
        "length", "minus the distance from a number of tokens", LengthSection, "reward_functions:length", runs="main"
    ),
    _spec("countdown", "1 for numbers combined to a target", CountdownSection, "reward_functions:countdown"),
    _spec("math", "1 for mathematical equality with the answer", MathSection, "reward_functions:mathematical"),
    _spec(
        "environment", "the reward of the environment of the episode", None, "reward_functions:environment", runs="main"
    ),
    _spec("http", "scores by a reward server of PaddleNLP or OpenRLHF", HttpSection, "reward_http:http", "group"),
    RewardSpec(
        name="model",
        help="the score of a reward model of stage rm",
        config_cls=ModelRewardSection,
        factory=functools.partial(_made, "llmsuite.rl.reward_model:model"),
        runs="main",
        needs_services=True,
    ),
]
