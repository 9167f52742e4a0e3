"""The environment `verifiers`: plays environments of the package verifiers (0.1).

Its `MultiTurnEnv.rollout` is a loop that calls a model and then the environment. An episode here is that loop, split at
the calls of the model: the same methods are called in the same order, with the sampled turn instead of the model's
response.
"""

from __future__ import annotations

import functools
import json
import logging
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmsuite.base.errors import UserError
from llmsuite.base.extras import install_command
from llmsuite.base.python_files import import_file
from llmsuite.base.safe_files import real_path
from llmsuite.contract.specs import Reply, Turn
from llmsuite.rl.calculator import TOOL_CALL
from llmsuite.rl.environment_sections import VerifiersSection
from llmsuite.rl.worker import finished

try:
    import verifiers
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage, ToolCall, Usage
except ImportError as missing:
    raise UserError(
        f"environment verifiers: needs the package verifiers 0.1 ({missing}); install it with: "
        f"{install_command('verifiers')}"
    ) from missing

_MODEL = "policy"


class VerifiersEpisode:
    """An episode of an environment of verifiers, which `VerifiersSection` names."""

    def __init__(self, section: VerifiersSection):
        if section.id is None:
            raise UserError("environment.verifiers.id: is required: the name of a package, or a Python file")
        self._id = section.id
        self._args = json.dumps(section.args, sort_keys=True)
        self._environment()  # so that an error of loading is raised before the first episode
        self.tools: list[dict[str, Any]] = []
        self._state: Any = None
        self._usage: Mapping[str, float] = {}
        self._prompt: Sequence[Any] = ()
        self._seed = self._num_turns = 0

    def begin(self, row: Mapping[str, Any], seed: int) -> Sequence[Mapping[str, str]]:
        """Set up the environment's state and return the prompt. Errors of the environment are raised."""
        self._seed = seed
        given = {"example_id": 0, **row, "prompt": row["messages"]}
        del given["messages"]
        self._seed_generators()
        messages = finished(self._start(given))
        if messages is None:
            raise ValueError(f"it has ended before the first turn ({self._state['stop_condition']})")
        self.tools = [
            {"type": "function", "function": tool.model_dump(exclude={"strict"})} for tool in self._state["tool_defs"]
        ]
        return [_plain(message) for message in messages]

    def step(self, turn: Turn) -> Reply:
        """The environment's response to a turn. Errors of the environment or its rubric are raised."""
        self._num_turns += 1
        self._seed_generators()
        reply: Reply = finished(self._answer(turn))
        return reply

    def __getstate__(self) -> dict[str, Any]:
        """The state without objects of the process: the client, and the token counter, whose numbers are kept."""
        state = self._state
        if state is not None:
            self._usage = dict(state["usage"])
            state = type(state)({k: v for k, v in state.items() if k not in ("client", "usage", "usage_tracker")})
        return {**self.__dict__, "_state": state}

    def _environment(self) -> Any:
        return _loaded(self._id, self._args)

    def _seed_generators(self) -> None:
        """Seed the global generators of Python and NumPy, so that the environment's random numbers are a function of
        the seed and the turn, whichever process plays it."""
        number = (self._seed + self._num_turns) % 2**32
        random.seed(number)
        np.random.seed(number)

    async def _start(self, row: Mapping[str, Any]) -> Sequence[Any] | None:
        environment = self._environment()
        self._state = await environment.init_state(row, _NoClient(None), _MODEL, {})
        await environment.setup_state(self._state)
        return await self._next()

    async def _next(self) -> Sequence[Any] | None:
        """The messages before the next turn of the model; None when the episode has ended."""
        environment = self._environment()
        state = self._state
        while not await environment.is_completed(state):
            messages = await environment.get_prompt_messages(state)
            if state.get("final_env_response") is None:
                self._prompt = verifiers.utils.message_utils.normalize_messages(messages, field_name="prompt")
                return self._prompt
        return None

    async def _answer(self, turn: Turn) -> Reply:
        environment = self._environment()
        state = self._state
        if "client" not in state:  # it was unpickled
            state["client"] = _NoClient(None)
            environment.increment_state_usage(state, self._usage["input_tokens"], self._usage["output_tokens"])
        response = _response(turn, self._num_turns, bool(self.tools))
        environment.increment_state_usage_from_response(state, response)
        await environment.add_model_response(state, self._prompt, response)
        expected = [*self._prompt, *state["trajectory"][-1]["completion"]]
        messages = await self._next()
        if messages is None:
            return Reply(done=True, reward=await self._score())
        if list(messages[: len(expected)]) != expected:
            raise ValueError("it has changed earlier turns, whose tokens the model has already read or sampled")
        return Reply(messages=[_plain(message) for message in messages[len(expected) :]])

    async def _score(self) -> float:
        """The rubric's reward for the full episode. verifiers counts a function of the rubric that raises as 0 and logs
        the error; here it raises ValueError."""
        environment = self._environment()
        state = self._state
        await environment.cleanup(state)
        errors = _Errors()
        log = logging.getLogger("verifiers")
        log.addHandler(errors)
        try:
            await environment.rubric.score_rollout(state)
        finally:
            log.removeHandler(errors)
            await environment.rubric.cleanup(state)
        if errors.messages:
            raise ValueError(errors.messages[0])
        return float(state["reward"])


class _NoClient(Client):
    """The client of an environment that may not call a model itself: every request is refused."""

    def _refuse(self, *given: Any, **more: Any) -> Any:
        raise RuntimeError("the environment calls a model itself, not between turns; llmsuite provides none")

    setup_client = to_native_tool = to_native_prompt = get_native_response = get_response = _refuse
    raise_from_native_response = from_native_response = close = _refuse


class _Errors(logging.Handler):
    """Keeps the messages that are logged as errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@functools.cache
def _loaded(name: str, args: str) -> Any:
    """The environment of a package or file, shared by all episodes of this process. Raises UserError when it cannot be
    played."""
    keys = json.loads(args)
    if name.endswith(".py"):
        found = import_file(real_path(name)).load_environment(**keys)
    else:
        found = verifiers.load_environment(name, **keys)
    if not isinstance(found, verifiers.MultiTurnEnv):
        raise UserError(f"environment.verifiers.id: {name} is a {type(found).__name__}, not a MultiTurnEnv")
    if found.rubric.has_group_rewards:
        raise UserError(
            f"environment.verifiers.id: the rubric of {name} scores the completions of a prompt together; an "
            "environment of llmsuite scores each alone"
        )
    return found


def _response(turn: Turn, number: int, has_tools: bool) -> Any:
    """A turn as a model response of verifiers."""
    calls = list[Any]()
    content = turn.text
    if has_tools:
        calls, content = _tool_calls(turn.text, number)
    is_truncated = turn.finish_reason == "length"
    reason = "tool_calls" if calls else "stop"
    if is_truncated:
        reason = "length"
    message = ResponseMessage(
        content=content, tool_calls=calls or None, finish_reason=reason, is_truncated=is_truncated
    )
    count = len(turn.ids)
    usage = Usage(prompt_tokens=0, reasoning_tokens=0, completion_tokens=count, total_tokens=count)
    return Response(id=f"turn-{number}", created=0, model=_MODEL, usage=usage, message=message)


def _tool_calls(text: str, number: int) -> tuple[list[Any], str]:
    """The tool calls of a turn, and the text before them. If one of them is not JSON with a name, the turn has none."""
    calls = []
    for i, written in enumerate(re.findall(TOOL_CALL, text, re.DOTALL)):
        try:
            call = json.loads(written)
        except (ValueError, RecursionError):
            return [], text
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return [], text
        arguments = json.dumps(call.get("arguments", {}))
        calls.append(ToolCall(id=f"call-{number}-{i}", name=call["name"], arguments=arguments))
    if calls:
        text = text.split("<tool_call>")[0].strip()
    return calls, text


def _plain(message: Any) -> dict[str, str]:
    """A message in the form of llmsuite. Raises ValueError for images and audio."""
    content = message.content
    if not isinstance(content, str):
        parts = [part.model_dump() if hasattr(part, "model_dump") else part for part in content or ()]
        others = sorted({str(part.get("type")) for part in parts} - {"text"})
        if others:
            raise ValueError(f"a message has content of type {', '.join(others)}; only text is supported")
        content = "".join(part["text"] for part in parts)
    return {"role": message.role, "content": content}
