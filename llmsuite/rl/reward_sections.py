"""The rewards that come with llmsuite, and their recipe keys, `reward.NAME`. Imports no NumPy."""

from __future__ import annotations

import dataclasses
import functools
import pkgutil
import re
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from llmsuite.schema.numbers import NonNegativeInt, PositiveFloat, PositiveInt
from llmsuite.schema.section import Section
from llmsuite.specs import RewardSpec, Score


@dataclasses.dataclass(kw_only=True)
class ExactSection(Section):
    """1 for a completion that is the answer of its row, else 0; spaces around both do not count."""

    needs_columns: ClassVar[tuple[str, ...]] = ("column",)
    column: str = "answer"
    """The column with the answer. Rows that end with the assistant's turn have it as "answer", if there is no other
    column of this name."""
    ended: bool = True
    """Only completions that ended by themselves are right, not truncated ones."""


@dataclasses.dataclass(kw_only=True)
class FormatSection(Section):
    """1 for a completion that has a form, else 0."""

    pattern: str | None = None
    """A regular expression of Python that the whole completion has to match, spaces around it left out; a dot matches
    newlines too. Such as "<think>.*</think>\\s*<answer>.*</answer>"."""

    def problems(self) -> Iterator[tuple[str, str]]:
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            yield "pattern", f"is no regular expression: {error}"


@dataclasses.dataclass(kw_only=True)
class LengthSection(Section):
    """Minus the distance of the number of tokens from a target, in units of the target, not below -1 (after LCPO,
    Aggarwal and Welleck 2025, arXiv 2503.04697)."""

    target: PositiveInt | None = None
    """Tokens that a completion should have, with its stop token."""
    only_longer: bool = False
    """Completions that are shorter get 0."""


@dataclasses.dataclass(kw_only=True)
class MathSection(Section):
    """1 for a completion whose last mathematical expression equals the answer of its row, else 0, by math-verify
    0.9. Where the answer itself is not understood, the reward is missing."""

    needs_columns: ClassVar[tuple[str, ...]] = ("column",)
    column: str = "answer"
    """The column with the answer, LaTeX or plain."""


@dataclasses.dataclass(kw_only=True)
class CountdownSection(Section):
    """1 for an expression of + - * / and brackets that has each number of the row once, and the row's target as its
    exact value, else 0 (the game Countdown, after Pan's TinyZero, https://github.com/Jiayi-Pan/TinyZero)."""

    needs_columns: ClassVar[tuple[str, ...]] = ("numbers", "target")
    numbers: str = "numbers"
    """The column with the numbers, a list."""
    target: str = "target"
    """The column with the number to reach."""
    pattern: str | None = None
    """A regular expression of Python with one group, the expression, such as "<answer>(.*?)</answer>"; the last match
    counts. null: the whole completion is the expression."""

    def problems(self) -> Iterator[tuple[str, str]]:
        try:
            groups = re.compile(self.pattern or "()").groups
        except re.error as error:
            yield "pattern", f"is no regular expression: {error}"
        else:
            if groups != 1:
                yield "pattern", f"has {groups} groups; it needs one, around the expression"


@dataclasses.dataclass(kw_only=True)
class HttpSection(Section):
    """Scores by a server, such as a reward model or a sandbox that runs code; one request for each prompt."""

    url: str | None = None
    """Where to POST, such as "http://localhost:8731/"."""
    dialect: Literal["paddlenlp", "openrlhf"] = "paddlenlp"
    """paddlenlp: {"src", "tgt", "response"} and an answer {"error_code", "score"}. openrlhf: {"query", "prompts",
    "labels"}, where a query is prompt and completion, and an answer {"rewards"}. All are lists, an item for each
    completion."""
    column: str = "answer"
    """The column for "tgt" or "labels"; an empty text where a row has none."""
    timeout: PositiveFloat = 5.0
    """Seconds in which an answer has to be there as a whole. All tries together also have to fit into
    reward.time_limit."""
    retries: NonNegativeInt = 1
    """Further tries when the server cannot be reached, is busy (429) or fails (5xx)."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.url is not None and not re.match(r"https?://[^/\s]+", self.url):
            yield "url", f"is {self.url!r}; it has to begin with http:// or https://"


@dataclasses.dataclass(kw_only=True)
class ModelRewardSection(Section):
    """The score of a reward model that stage rm has trained. It is whole on each rank that draws completions."""

    weights: str | None = None
    """The run of stage rm, or a model directory with a score head. It has to have the tokenizer and the chat template
    of the model that is trained."""
    batch_size: PositiveInt = 16
    """Completions that are scored in one pass."""


def _made(address: str, *given: Any) -> Score:
    """What the factory at an address makes of its section, and the services of the run if it needs them."""
    score: Score = pkgutil.resolve_name(address)(*given)
    return score


def _spec(
    name: str, help: str, section: type[Section] | None, factory: str, level: Any = "completion", runs: Any = "pool"
) -> RewardSpec:
    """A reward whose factory, in this package, is imported when it is needed."""
    address = f"llmsuite.rl.{factory}"
    make = functools.partial(_made, address)
    return RewardSpec(name=name, help=help, config_cls=section, factory=make, level=level, runs=runs)


# a comparison and a subtraction cannot hang, and cost less than a message to another process and back
BUILTIN = [
    _spec("exact", "1 for the answer of the row", ExactSection, "reward_functions:exact", runs="main"),
    _spec("format", "1 for a form that a regular expression gives", FormatSection, "reward_functions:form"),
    _spec(
        "length", "minus the distance from a number of tokens", LengthSection, "reward_functions:length", runs="main"
    ),
    _spec("countdown", "1 for numbers combined to a target", CountdownSection, "reward_functions:countdown"),
    _spec("math", "1 for what equals the answer as mathematics", MathSection, "reward_functions:mathematical"),
    _spec(
        "environment", "what the environment of the episode gives", None, "reward_functions:environment", runs="main"
    ),
    _spec("http", "scores by a server, as of PaddleNLP or OpenRLHF", HttpSection, "reward_http:http", "group"),
    RewardSpec(
        name="model",
        help="the score of a reward model of stage rm",
        config_cls=ModelRewardSection,
        factory=functools.partial(_made, "llmsuite.rl.reward_model:model"),
        runs="main",
        needs_services=True,
    ),
]
