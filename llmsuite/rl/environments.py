"""Environments as a process without Paddle loads and calls them, see `llmsuite.rl.worker`.

An environment travels: each call gets it as bytes and gives it back so. A process that is killed takes no other
episode with it, and any process can answer any turn.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmsuite.data.rows import Message
from llmsuite.data.turns import tools_at, turn_at
from llmsuite.errors import UserError
from llmsuite.python_files import from_file, python_function
from llmsuite.rl.checks import number_of, number_or_none, shown
from llmsuite.rl.worker import describe, finished
from llmsuite.schema.environment import EnvironmentSection
from llmsuite.specs import Environment, EnvironmentSpec, Reply, Turn


@dataclasses.dataclass(frozen=True)
class Begin:
    """The call that begins an episode."""

    row: Mapping[str, Any]
    seed: int


@dataclasses.dataclass(frozen=True)
class Step:
    """The call that answers a turn."""

    state: bytes
    turn: Turn


@dataclasses.dataclass(frozen=True)
class Answer:
    """The result of a call."""

    state: bytes
    """The environment, pickled; empty when the episode is done."""
    messages: tuple[Message, ...]
    tools: str = ""
    """The functions that it offers when an episode begins, as in `llmsuite.data.rows.Conversation`."""
    done: bool = False
    scores: tuple[float, ...] = ()
    """The reward of the turn, and its parts."""


@dataclasses.dataclass(frozen=True)
class EnvironmentSource:
    """Where an environment comes from, such that another process can load it."""

    key: str
    """As in the recipe's `environment.name`."""
    factory: bytes = b""
    """The pickled factory and section of a registered environment; empty for a class in a file."""
    parts: tuple[str, ...] = ()
    here: bool = False

    def serve(self) -> Callable[[Begin | Step], tuple[Answer | None, str]]:
        """What a call does. Raises UserError when the environment cannot be loaded."""
        try:
            if self.factory:
                factory, section = pickle.loads(self.factory)
                make: Callable[[], Environment] = functools.partial(factory, section)
            else:
                make = from_file(self.key, "environment")
            made = make()
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # it is somebody else's code
            raise UserError(f"environment {self.key}: cannot be loaded: {describe(error)}") from error
        missing = [name for name in ("begin", "step") if not callable(getattr(made, name, None))]
        if missing:
            raise UserError(f"environment {self.key}: has no method {' and no method '.join(missing)}")
        return functools.partial(answered, make, self.parts)

    def nothing(self, payload: Begin | Step) -> None:
        """The result of a call that has failed."""


def environment_source(section: EnvironmentSection, registered: Mapping[str, EnvironmentSpec]) -> EnvironmentSource:
    """The environment of a recipe, which has one. The environment's own keys are read here.

    Raises:
        UserError: it cannot be sent to another process.
    """
    name = section.name
    assert name is not None
    if python_function(name) is not None:
        return EnvironmentSource(name)
    spec = registered[name]
    options = getattr(section, name) if spec.config_cls is not None else None
    for field in dataclasses.fields(options) if options is not None else ():
        getattr(options, field.name)
    try:
        factory = pickle.dumps((spec.factory, options))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"environment {name}: its factory cannot be sent to another process ({error}); make it a function of a "
            "module, or a class"
        ) from error
    return EnvironmentSource(name, factory, spec.parts)


def answered(make: Callable[[], Environment], parts: Sequence[str], call: Begin | Step) -> tuple[Answer | None, str]:
    """The answer of an environment, None with the reason where there is none."""
    try:
        if isinstance(call, Begin):
            environment = make()
            messages = _messages(finished(environment.begin(call.row, call.seed)), "begin returned")
            return Answer(_pickled(environment), messages, _tools(environment)), ""
        environment = pickle.loads(call.state)
        return _answer(environment, finished(environment.step(call.turn)), parts), ""
    except Exception as error:  # it is somebody else's code
        return None, describe(error)


def _answer(environment: Environment, reply: Any, parts: Sequence[str]) -> Answer:
    if not isinstance(reply, Reply):
        raise TypeError(f"step returned {shown(reply)}, which is no llmsuite.plugins.hookspecs.Reply")
    scores = _scores(reply.reward, parts)
    if reply.done:
        return Answer(b"", (), done=True, scores=scores)
    return Answer(_pickled(environment), _messages(reply.messages, "its messages are"), scores=scores)


def _pickled(environment: Environment) -> bytes:
    try:
        return pickle.dumps(environment)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"it cannot be pickled between its turns: {error}") from error


def _tools(environment: Environment) -> str:
    given = getattr(environment, "tools", ())
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Sequence):
        raise TypeError(f"its tools are {shown(given)}, not a list of functions")
    return tools_at({"tools": list(given)})


def _messages(given: Any, what: str) -> tuple[Message, ...]:
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Sequence) or not given:
        raise TypeError(f"{what} {shown(given)}, not a list with at least one message")
    found = []
    for i, message in enumerate(given):
        try:
            turn = turn_at(message, f"messages[{i}]")
        except ValueError as error:
            raise ValueError(f"{what} {shown(message)}: {error}") from error
        if turn.role == "assistant" and i == len(given) - 1:
            raise ValueError(f"messages[{i}] is {shown(message)}; the last one has to be of the user or a tool")
        found.append(turn)
    return tuple(found)


def _scores(reward: Any, parts: Sequence[str]) -> tuple[float, ...]:
    """The reward of a turn and its parts; parts that a plain number leaves out are 0."""
    given = reward if isinstance(reward, Mapping) else {"score": reward, **dict.fromkeys(parts, 0.0)}
    if given.keys() != {"score", *parts}:
        raise ValueError(f"its reward has the keys {sorted(map(str, given))}, not {sorted(['score', *parts])}")
    try:
        numbers = [number_of(given["score"]), *(number_or_none(given[part]) for part in parts)]
    except (TypeError, ValueError) as error:
        raise type(error)(f"its reward is {error}") from error
    return tuple(math.nan if number is None else number for number in numbers)
