"""Environments in worker processes without Paddle (`llmsuite.rl.worker`): how they are loaded and called.

The state of an environment is sent with each call as bytes and returned with the result. So any process can answer any
turn, and a process that is killed affects no other episode.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmsuite.base.errors import UserError
from llmsuite.base.python_files import from_file, python_function
from llmsuite.contract.schema.environment import EnvironmentSection
from llmsuite.contract.schema.section import value_at
from llmsuite.contract.specs import Environment, EnvironmentSpec, Reply, ToolEnvironment, Turn
from llmsuite.data.rows import Message
from llmsuite.data.turns import parse_message, parse_tools
from llmsuite.rl.checks import number_of, number_or_none, shown
from llmsuite.rl.worker import describe, finished


@dataclasses.dataclass(frozen=True)
class Begin:
    """The call that starts an episode."""

    row: Mapping[str, Any]
    seed: int


@dataclasses.dataclass(frozen=True)
class Step:
    """The call with a turn of the model."""

    state: bytes
    """The environment, pickled."""
    turn: Turn


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The result of a call."""

    state: bytes
    """The environment, pickled; empty when the episode is done."""
    messages: tuple[Message, ...]
    tools: str = ""
    """The functions that the environment offers at the start of an episode, as in `llmsuite.data.rows.Conversation`."""
    done: bool = False
    scores: tuple[float, ...] = ()
    """The reward of the turn, followed by its parts."""


@dataclasses.dataclass(frozen=True)
class EnvironmentSource:
    """The source of an environment, in a form that another process can load."""

    key: str
    """The value of `environment.name` in the recipe."""
    factory: bytes = b""
    """The pickled factory and section of a registered environment; empty for a class in a file."""
    parts: tuple[str, ...] = ()
    in_main: bool = False

    def make_handler(self) -> Callable[[Begin | Step], tuple[StepResult | None, str]]:
        """Load the environment and return the function that handles its calls. Raises UserError when it cannot be
        loaded."""
        try:
            if self.factory:
                factory, section = pickle.loads(self.factory)
                make: Callable[[], Environment] = functools.partial(factory, section)
            else:
                make = from_file(self.key, "environment")
            made = make()
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # user code may raise anything
            raise UserError(f"environment {self.key}: cannot be loaded: {describe(error)}") from error
        missing = [name for name in ("begin", "step") if not callable(getattr(made, name, None))]
        if missing:
            raise UserError(f"environment {self.key}: has no method {' and no method '.join(missing)}")
        return functools.partial(handle_call, make, self.parts)

    def failed_result(self, payload: Begin | Step) -> None:
        """Return the result of a call that has failed, which is None."""


def environment_source(section: EnvironmentSection, registered: Mapping[str, EnvironmentSpec]) -> EnvironmentSource:
    """The source of the recipe's environment.

    Raises:
        UserError: it cannot be sent to another process.
    """
    name = section.name
    assert name is not None
    if python_function(name) is not None:
        return EnvironmentSource(name)
    spec = registered[name]
    options = None
    if spec.config_cls is not None:
        options = value_at(section, name)
    try:
        factory = pickle.dumps((spec.factory, options))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"environment {name}: its factory cannot be sent to another process ({error}); make it a function of a "
            "module, or a class"
        ) from error
    return EnvironmentSource(name, factory, spec.parts)


def handle_call(
    make: Callable[[], Environment], parts: Sequence[str], call: Begin | Step
) -> tuple[StepResult | None, str]:
    """Call an environment. Returns its result and "", or None and the error message when it has failed.

    Args:
        make: makes a new environment.
        parts: names of the parts of its reward.
        call: the call.
    """
    try:
        if isinstance(call, Begin):
            environment = make()
            messages = _messages(finished(environment.begin(call.row, call.seed)), "begin returned")
            return StepResult(_pickled(environment), messages, _tools(environment)), ""
        environment = pickle.loads(call.state)
        return _step_result(environment, finished(environment.step(call.turn)), parts), ""
    except Exception as error:  # user code may raise anything
        return None, describe(error)


def _step_result(environment: Environment, reply: Any, parts: Sequence[str]) -> StepResult:
    if not isinstance(reply, Reply):
        raise TypeError(f"step returned {shown(reply)}, not a llmsuite.contract.hookspecs.Reply")
    scores = _scores(reply.reward, parts)
    if reply.done:
        return StepResult(b"", (), done=True, scores=scores)
    return StepResult(_pickled(environment), _messages(reply.messages, "its messages are"), scores=scores)


def _pickled(environment: Environment) -> bytes:
    try:
        return pickle.dumps(environment)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"it cannot be pickled between its turns: {error}") from error


def _tools(environment: Environment) -> str:
    given = environment.tools if isinstance(environment, ToolEnvironment) else ()
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Sequence):
        raise TypeError(f"its tools are {shown(given)}, not a list of functions")
    return parse_tools({"tools": list(given)})


def _messages(given: Any, what: str) -> tuple[Message, ...]:
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Sequence) or not given:
        raise TypeError(f"{what} {shown(given)}, not a list with at least one message")
    turns = []
    for i, message in enumerate(given):
        try:
            turn = parse_message(message, f"messages[{i}]")
        except ValueError as error:
            raise ValueError(f"{what} {shown(message)}: {error}") from error
        if turn.role == "assistant" and i == len(given) - 1:
            raise ValueError(f"messages[{i}] is {shown(message)}; the last one must have the role user or tool")
        turns.append(turn)
    return tuple(turns)


def _scores(reward: Any, parts: Sequence[str]) -> tuple[float, ...]:
    """The reward of a turn, followed by its parts; the parts are 0 where the reward is a plain number."""
    given = reward
    if not isinstance(reward, Mapping):
        given = {"score": reward, **dict.fromkeys(parts, 0.0)}
    if given.keys() != {"score", *parts}:
        raise ValueError(f"its reward has the keys {sorted(map(str, given))}, not {sorted(['score', *parts])}")
    try:
        numbers = [number_of(given["score"]), *(number_or_none(given[part]) for part in parts)]
    except (TypeError, ValueError) as error:
        raise type(error)(f"its reward is {error}") from error
    return tuple(math.nan if number is None else number for number in numbers)
