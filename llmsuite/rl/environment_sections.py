"""The built-in environments and their recipe keys, `environment.NAME`. Imports no NumPy."""

from __future__ import annotations

import dataclasses
import functools
import pkgutil
from collections.abc import Iterator
from typing import Any, ClassVar

from llmsuite.contract.schema.section import Section
from llmsuite.contract.specs import Environment, EnvironmentSpec
from llmsuite.rl import arithmetic


@dataclasses.dataclass(kw_only=True)
class GuessSection(Section):
    """A game: the model guesses a number, and the environment answers "higher" or "lower" until the guess is right,
    with the reward 1. A turn that is not a number ends the episode with 0. The row's prompt explains the task."""

    lowest: int = 0
    """The smallest possible number, for a row without a column "lowest"."""
    highest: int = 9
    """The largest possible number, for a row without a column "highest"."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.lowest > self.highest:
            yield "lowest", f"is {self.lowest}, more than highest = {self.highest}"


@dataclasses.dataclass(kw_only=True)
class CalculatorSection(Section):
    """A tool: for each turn with a call such as "<calc>12*(3+4)</calc>", the value follows in a turn of the tool. A
    turn without a call is the answer: its reward is 1 if it equals the row's answer, else 0."""

    pattern: str = "<calc>(.*?)</calc>"
    """A regular expression of Python for a call, with one group: the expression. Only the first call of a turn
    counts."""
    as_tool: bool = False
    """Offer the chat template a function `calculate` with the parameter `expression`, and read calls in the
    format of Qwen's and other templates: <tool_call>{"name": "calculate", "arguments": {"expression":
    "12*7"}}</tool_call>. The key pattern then has no effect."""
    needs_columns: ClassVar[tuple[str, ...]] = ("column",)
    column: str = "answer"
    """The column with the answer."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.as_tool and self.pattern != type(self).__dataclass_fields__["pattern"].default:
            yield "pattern", "has no effect with as_tool; remove one of them"
        yield from arithmetic.pattern_problems(self.pattern)


@dataclasses.dataclass(kw_only=True)
class VerifiersSection(Section):
    """An environment of the package verifiers 0.1, such as those of the Environments Hub: any MultiTurnEnv, also with
    tools. The reward is that of its rubric."""

    id: str | None = None
    """The name of its package, as in `verifiers.load_environment`, or a Python file with `load_environment`.
    Required."""
    args: dict[str, bool | int | float | str | list[bool | int | float | str] | None] = dataclasses.field(
        default_factory=dict
    )
    """Keyword arguments of `load_environment`."""


def _made(address: str, section: Any) -> Environment:
    """A new instance of the environment class at an address."""
    environment: Environment = pkgutil.resolve_name(address)(section)
    return environment


def _spec(name: str, help: str, section: type[Section], factory: str, parts: tuple[str, ...] = ()) -> EnvironmentSpec:
    """A spec whose environment class, in this package, is imported on first use."""
    address = f"llmsuite.rl.{factory}"
    make = functools.partial(_made, address)
    return EnvironmentSpec(name=name, help=help, config_cls=section, factory=make, parts=parts)


BUILTIN = [
    _spec("guess", "a game: guess a number from the answers higher and lower", GuessSection, "guess:Guess"),
    _spec(
        "calculator",
        "a tool that evaluates arithmetic expressions",
        CalculatorSection,
        "calculator:Calculator",
        ("calls",),
    ),
    _spec(
        "verifiers", "environments of the package verifiers", VerifiersSection, "verifiers_environment:VerifiersEpisode"
    ),
]
