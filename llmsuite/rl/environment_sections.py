"""The environments that come with llmsuite, and their recipe keys, `environment.NAME`. Imports no NumPy."""

from __future__ import annotations

import dataclasses
import functools
import pkgutil
import re
from collections.abc import Iterator
from typing import Any, ClassVar

from llmsuite.schema.section import Section
from llmsuite.specs import Environment, EnvironmentSpec


@dataclasses.dataclass(kw_only=True)
class GuessSection(Section):
    """A game: the model guesses a number, and is told "higher" or "lower" until it is right. Its reward is 1 then; a
    turn that is no number ends the episode with 0. The row's prompt says what is to be done."""

    lowest: int = 0
    """The least number there is to guess, where the row has no column "lowest"."""
    highest: int = 9
    """The greatest one, where the row has no column "highest"."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.lowest > self.highest:
            yield "lowest", f"is {self.lowest}, more than highest = {self.highest}"


@dataclasses.dataclass(kw_only=True)
class CalculatorSection(Section):
    """A tool: the value of each turn that asks for one, such as "<calc>12*(3+4)</calc>", is told in a turn of the tool.
    A turn without a call is the answer: its reward is 1 if it is that of the row, else 0."""

    pattern: str = "<calc>(.*?)</calc>"
    """A regular expression of Python for a call, with one group: the expression. Of several calls the first counts."""
    as_tool: bool = False
    """Offer the chat template a function `calculate` with the parameter `expression`, and read calls as Qwen's and
    other templates ask for them: <tool_call>{"name": "calculate", "arguments": {"expression": "12*7"}}</tool_call>. The
    key pattern counts for nothing then."""
    needs_columns: ClassVar[tuple[str, ...]] = ("column",)
    column: str = "answer"
    """The column with the answer."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.as_tool and self.pattern != type(self).__dataclass_fields__["pattern"].default:
            yield "pattern", "has no effect with as_tool; remove one of them"
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            yield "pattern", f"is no regular expression: {error}"
        else:
            if groups != 1:
                yield "pattern", f"has {groups} groups; it needs one, around the expression"


@dataclasses.dataclass(kw_only=True)
class VerifiersSection(Section):
    """An environment that is written for the package verifiers 0.1, such as those of the
    Environments Hub: any MultiTurnEnv, with tools too. The reward is that of its rubric."""

    id: str | None = None
    """The name of its package, as `verifiers.load_environment` has it, or a Python file with `load_environment`. Is
    required."""
    args: dict[str, bool | int | float | str | list[bool | int | float | str] | None] = dataclasses.field(
        default_factory=dict
    )
    """What `load_environment` is called with."""


def _made(address: str, section: Any) -> Environment:
    """A new environment of the class at an address."""
    environment: Environment = pkgutil.resolve_name(address)(section)
    return environment


def _spec(name: str, help: str, section: type[Section], factory: str, parts: tuple[str, ...] = ()) -> EnvironmentSpec:
    """An environment whose class, in this package, is imported when it is needed."""
    address = f"llmsuite.rl.{factory}"
    make = functools.partial(_made, address)
    return EnvironmentSpec(name=name, help=help, config_cls=section, factory=make, parts=parts)


BUILTIN = [
    _spec("guess", "a game: guess a number, told higher or lower", GuessSection, "games:Guess"),
    _spec(
        "calculator", "a tool that computes what turns ask for", CalculatorSection, "calculator:Calculator", ("calls",)
    ),
    _spec(
        "verifiers", "environments of the package verifiers", VerifiersSection, "verifiers_environment:VerifiersEpisode"
    ),
]
