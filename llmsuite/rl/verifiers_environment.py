"""The environment `verifiers`: plays environments that are written for the package verifiers (0.1).

Its `MultiTurnEnv.rollout` is a loop that asks a model and then the environment. An episode here is that loop, cut where
the model is asked: the methods it calls are called in its order, and what the suite has drawn takes the place of the
model's response.
"""

from __future__ import annotations

import functools
import json
import logging
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmsuite.errors import UserError
from llmsuite.extras import install_command
from llmsuite.python_files import import_file
from llmsuite.rl.calculator import TOOL_CALL
from llmsuite.rl.environment_sections import VerifiersSection
from llmsuite.rl.worker import finished
from llmsuite.specs import Reply, Turn

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
    """See `VerifiersSection`."""

    def __init__(self, section: VerifiersSection):
        if section.id is None:
            raise UserError("environment.verifiers.id: is required: the name of a package, or a Python file")
        self._id, self._args = section.id, json.dumps(section.args, sort_keys=True)
        self._environment()  # what cannot be loaded is told before the first episode
        self.tools: list[dict[str, Any]] = []
        self._state: Any = None
        self._usage: Mapping[str, float] = {}
        self._prompt: Sequence[Any] = ()
        self._seed = self._num_turns = 0

    def begin(self, row: Mapping[str, Any], seed: int) -> Sequence[Mapping[str, str]]:
        """The prompt, after the environment has prepared its state. Raises what the environment raises."""
        self._seed = seed
        given = {"example_id": 0, **row, "prompt": row["messages"]}
        del given["messages"]
        self._draw_anew()
        messages = finished(self._begun(given))
        if messages is None:
            raise ValueError(f"it had ended before the first turn ({self._state['stop_condition']})")
        self.tools = [
            {"type": "function", "function": tool.model_dump(exclude={"strict"})} for tool in self._state["tool_defs"]
        ]
        return [_plain(message) for message in messages]

    def step(self, turn: Turn) -> Reply:
        """What follows on a turn. Raises what the environment or its rubric raise."""
        self._num_turns += 1
        self._draw_anew()
        reply: Reply = finished(self._answer(turn))
        return reply

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to a process: the client, and the counter of tokens, of which the numbers stay."""
        state = self._state
        if state is not None:
            self._usage = dict(state["usage"])
            state = type(state)({k: v for k, v in state.items() if k not in ("client", "usage", "usage_tracker")})
        return {**self.__dict__, "_state": state}

    def _environment(self) -> Any:
        return _loaded(self._id, self._args)

    def _draw_anew(self) -> None:
        """What the environment draws by Python's or NumPy's global generator is a function of the seed and the turn."""
        number = (self._seed + self._num_turns) % 2**32
        random.seed(number)
        np.random.seed(number)

    async def _begun(self, row: Mapping[str, Any]) -> Sequence[Any] | None:
        environment = self._environment()
        self._state = await environment.init_state(row, _Nobody(None), _MODEL, {})
        await environment.setup_state(self._state)
        return await self._next()

    async def _next(self) -> Sequence[Any] | None:
        """All turns that the model is to go on from; None when the episode has ended."""
        environment, state = self._environment(), self._state
        while not await environment.is_completed(state):
            messages = await environment.get_prompt_messages(state)
            if state.get("final_env_response") is None:
                self._prompt = verifiers.utils.message_utils.normalize_messages(messages, field_name="prompt")
                return self._prompt
        return None

    async def _answer(self, turn: Turn) -> Reply:
        environment, state = self._environment(), self._state
        if "client" not in state:  # it has travelled
            state["client"] = _Nobody(None)
            environment.increment_state_usage(state, self._usage["input_tokens"], self._usage["output_tokens"])
        response = _response(turn, self._num_turns, bool(self.tools))
        environment.increment_state_usage_from_response(state, response)
        await environment.add_model_response(state, self._prompt, response)
        known = [*self._prompt, *state["trajectory"][-1]["completion"]]
        messages = await self._next()
        if messages is None:
            return Reply(done=True, reward=await self._score())
        if list(messages[: len(known)]) != known:
            raise ValueError("it has changed earlier turns, which the model has read and written as they were")
        return Reply(messages=[_plain(message) for message in messages[len(known) :]])

    async def _score(self) -> float:
        """What its rubric gives for the whole episode. A function of the rubric that raises is 0 there, and told to the
        log; here it raises ValueError."""
        environment, state = self._environment(), self._state
        await environment.cleanup(state)
        errors, log = _Errors(), logging.getLogger("verifiers")
        log.addHandler(errors)
        try:
            await environment.rubric.score_rollout(state)
        finally:
            log.removeHandler(errors)
            await environment.rubric.cleanup(state)
        if errors.said:
            raise ValueError(errors.said[0])
        return float(state["reward"])


class _Nobody(Client):
    """The client of an environment that has to wait until it is asked: it answers nothing."""

    def _refuse(self, *given: Any, **more: Any) -> Any:
        raise RuntimeError("the environment asks a model of its own accord, not between turns; llmsuite has none")

    setup_client = to_native_tool = to_native_prompt = get_native_response = get_response = _refuse
    raise_from_native_response = from_native_response = close = _refuse


class _Errors(logging.Handler):
    """Keeps what is logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@functools.cache
def _loaded(name: str, args: str) -> Any:
    """The environment of a package or file; every episode of this process shares it. Raises UserError when it is none
    that can be played."""
    keys = json.loads(args)
    if name.endswith(".py"):
        found = import_file(Path(name).resolve()).load_environment(**keys)
    else:
        found = verifiers.load_environment(name, **keys)
    if not isinstance(found, verifiers.MultiTurnEnv):
        raise UserError(f"environment.verifiers.id: {name} is a {type(found).__name__}, not a MultiTurnEnv")
    if found.rubric.has_group_rewards:
        raise UserError(
            f"environment.verifiers.id: the rubric of {name} scores the completions of a prompt together; an "
            "environment scores each by itself"
        )
    return found


def _response(turn: Turn, number: int, has_tools: bool) -> Any:
    """A turn as verifiers has the response of a model."""
    calls, content = list[Any](), turn.text
    if has_tools:
        calls, content = _tool_calls(turn.text, number)
    is_truncated = turn.finish_reason == "length"
    message = ResponseMessage(
        content=content,
        tool_calls=calls or None,
        finish_reason="length" if is_truncated else "tool_calls" if calls else "stop",
        is_truncated=is_truncated,
    )
    count = len(turn.ids)
    usage = Usage(prompt_tokens=0, reasoning_tokens=0, completion_tokens=count, total_tokens=count)
    return Response(id=f"turn-{number}", created=0, model=_MODEL, usage=usage, message=message)


def _tool_calls(text: str, number: int) -> tuple[list[Any], str]:
    """The calls in a turn, and what stands in front of them. A turn of which one is no JSON with a name has none."""
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
    return calls, text.split("<tool_call>")[0].strip() if calls else text


def _plain(message: Any) -> dict[str, str]:
    """A message as llmsuite has them. Raises ValueError for pictures and sounds."""
    content = message.content
    if not isinstance(content, str):
        parts = [part.model_dump() if hasattr(part, "model_dump") else part for part in content or ()]
        others = sorted({str(part.get("type")) for part in parts} - {"text"})
        if others:
            raise ValueError(f"a message has content of type {', '.join(others)}; there is text only")
        content = "".join(part["text"] for part in parts)
    return {"role": message.role, "content": content}
