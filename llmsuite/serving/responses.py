"""POST /v1/responses of OpenAI's API: the same answers as those of chats, in its words.

Nothing is kept of a response, so that a conversation is sent whole each time.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from llmsuite.data.rows import ROLES, ToolCall
from llmsuite.data.turns import DEVELOPER, calls_at, joined
from llmsuite.errors import UserError
from llmsuite.inference.batch import Line, TokenLogprob
from llmsuite.inference.sampling import MAX_TEMPERATURE
from llmsuite.inference.text import TextStream
from llmsuite.serving.events import CallReader
from llmsuite.serving.faults import faults
from llmsuite.serving.jobs import Job
from llmsuite.serving.protocol import FIRST_FAULT, MAX_TOOLS, ChatRequest, TopLogprobs, call_id, chat_logprobs
from llmsuite.serving.service import Service
from llmsuite.serving.turns import client_of

PATH = "/v1/responses"
COUNT_PATH = "/v1/responses/input_tokens"
_Short = Annotated[str, Field(max_length=1000)]
_OfTools = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""What can be included of calls that no answer has here."""
_ROLES = (*ROLES, DEVELOPER)
_ECHOED = (
    "instructions",
    "max_output_tokens",
    "temperature",
    "top_p",
    "metadata",
    "user",
    "previous_response_id",
)
"""Parts of a request that its response repeats."""
_OWN_WORDS = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("messages: ", "input: "),
)
"""What a chat calls its parts, and what they are called here."""
_Included = Literal["message.output_text.logprobs", _OfTools]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class FunctionTool(_Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(_Strict):
    """The function that has to be called."""

    type: Literal["function"]
    name: str


class Format(_Strict):
    """What kind of answer there has to be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    answer_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def check(self) -> Format:
        """Raises ValueError unless a schema is where the type is."""
        if (self.type == "json_schema") != (self.name is not None) or (self.name is None and self.answer_schema):
            raise ValueError("name and schema have to be given with type json_schema, and only then")
        return self


class Text(_Strict):
    """How the answer's text is."""

    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class ResponseRequest(_Strict):
    """The body of a request."""

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], FIRST_FAULT] = Field(
        description="a string, or a list of items, each an object"
    )
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool | None = None
    text: Text | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS), FIRST_FAULT] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = Field(
        None, description='"none", "auto", "required" or {"type": "function", "name": NAME}'
    )
    parallel_tool_calls: bool | None = None
    include: Annotated[list[_Included], FIRST_FAULT] | None = None
    top_logprobs: TopLogprobs | None = None
    """At most so many of the most likely tokens, where log-probabilities are included."""
    # these change no answer
    store: bool | None = None
    metadata: Annotated[dict[_Short, _Short], Field(max_length=64)] | None = None
    user: str | None = None
    safety_identifier: _Short | None = None
    service_tier: _Short | None = None
    prompt_cache_key: _Short | None = None
    prompt_cache_retention: _Short | None = None
    prompt_cache_options: dict[str, Any] | None = None
    stream_options: dict[Literal["include_obfuscation"], bool] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """An input without room is refused either way."""
    max_tool_calls: int | None = None
    """Calls of built-in tools, of which there are none here."""
    background: Literal[False] | None = None
    # these would change it; null does not
    previous_response_id: None = None
    conversation: None = None
    reasoning: None = None
    prompt: None = None
    # not in OpenAI's API
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None

    def as_chat(self) -> ChatRequest:
        """The same as a chat. Raises HTTPException naming an item of the input that is not understood."""
        given = self.model_dump(exclude_none=True, by_alias=True)
        keys = ("model", "temperature", "top_p", "seed", "stream", "parallel_tool_calls")
        asked: dict[str, Any] = {key: given[key] for key in keys if key in given}
        asked["messages"] = self._messages()
        if self.max_output_tokens is not None:
            asked["max_completion_tokens"] = self.max_output_tokens
        if "message.output_text.logprobs" in (self.include or ()):
            asked |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        tools = [{key: value for key, value in tool.items() if key != "type"} for tool in given.get("tools", ())]
        if tools:
            asked["tools"] = [{"type": "function", "function": tool} for tool in tools]
        choice = given.get("tool_choice")
        if choice is not None:
            named = isinstance(choice, dict)
            asked["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}} if named else choice
        form = given.get("text", {}).get("format")
        if form is not None:
            schema = {key: value for key, value in form.items() if key != "type"}
            asked["response_format"] = {"type": form["type"], **({"json_schema": schema} if schema else {})}
        try:
            return ChatRequest.model_validate(asked)
        except ValidationError as error:
            raise HTTPException(400, _in_own_words(faults(ChatRequest, error))) from None

    def _messages(self) -> list[dict[str, Any]]:
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*system, {"role": "user", "content": self.input}]
        if not self.input:
            raise HTTPException(400, "input: has to be a text or a list of items, at least one")
        messages: list[dict[str, Any]] = [*system]
        for number, item in enumerate(self.input):
            where, kind = f"input[{number}]", item.get("type", "message")
            if kind == "message":
                if item.get("role") not in _ROLES:
                    raise HTTPException(400, f"{where}: needs role, one of {', '.join(_ROLES)}")
                messages.append({"role": item.get("role"), "content": _text(item.get("content"), f"{where}.content")})
            elif kind == "function_call":
                call = {key: item.get(key) for key in ("name", "arguments")}
                try:
                    calls_at([call], where)
                except ValueError as error:
                    raise HTTPException(400, str(error)) from None
                last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
                if last is None:
                    last = {"role": "assistant", "content": None}
                    messages.append(last)
                entry = {"id": item.get("call_id"), "type": "function", "function": call}
                last.setdefault("tool_calls", []).append(entry)
            elif kind == "function_call_output":
                output = {"tool_call_id": item.get("call_id"), "content": _text(item.get("output"), f"{where}.output")}
                messages.append({"role": "tool", **output})
            else:
                known = "message, function_call and function_call_output"
                raise HTTPException(400, f"{where}: type {str(kind)[:100]!r} is not understood here; {known} are")
        return messages


def _in_own_words(message: str) -> str:
    """What a chat says is wrong, in the words of a response."""
    for theirs, ours in _OWN_WORDS:
        message = message.replace(theirs, ours)
    return message


@contextlib.contextmanager
def _own_words() -> Iterator[None]:
    """Turns what a chat refuses into the words of a response."""
    try:
        yield
    except HTTPException as error:
        raise HTTPException(error.status_code, _in_own_words(error.detail)) from None


def _text(content: Any, where: str) -> str:
    """The text of a turn. Raises HTTPException when there is something else in it."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise HTTPException(400, f"{where}: a text is needed, or a list of parts")
    try:
        return joined(content, where)
    except ValueError as error:
        raise HTTPException(400, str(error)) from None


def add_api(app: FastAPI, service: Service) -> None:
    """The routes of responses, and of how many tokens one would read."""

    @app.post(PATH)
    async def respond(request: Request) -> Response:
        asked = await service.body(request, ResponseRequest)
        client = client_of(request)
        chat = await service.threads.run(client, asked.as_chat)
        with _own_words():
            job, _ = await service.start(chat, client)
        made = _Response(asked, chat, service, job)
        if asked.stream:
            headers = {"Cache-Control": "no-store"}
            return StreamingResponse(made.events(), media_type="text/event-stream", headers=headers)
        await service.whole(request, job)
        return await service.threads.run(client, made.answer)

    @app.post(COUNT_PATH)
    async def count(request: Request) -> dict[str, Any]:
        asked = await service.body(request, ResponseRequest)
        try:
            ids = await service.threads.run(client_of(request), lambda: service.conversation(asked.as_chat()))
        except UserError as error:
            raise HTTPException(400, _in_own_words(str(error))) from None
        return {"object": "response.input_tokens", "input_tokens": len(ids)}


def _call(call: ToolCall) -> dict[str, Any]:
    ids = {"id": f"fc_{secrets.token_hex(12)}", "call_id": call_id(call)}
    return {**ids, "type": "function_call", "name": call.name, "arguments": call.arguments, "status": "completed"}


class _Response:
    """One response, as it is made."""

    def __init__(self, asked: ResponseRequest, chat: ChatRequest, service: Service, job: Job):
        self._asked, self._chat, self._service, self._job = asked, chat, service, job
        self._speaker = service.speaker(asked.model)
        self._head = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": asked.model or service.name,
            **service.marks(),
        }
        self._message_id, self._count = f"msg_{secrets.token_hex(12)}", 0
        self._given = asked.model_dump(by_alias=True, exclude={"input"})

    def answer(self) -> Response:
        """The whole response as it is sent."""
        (line,) = self._job.lines
        assert line.text is not None
        said, calls = self._service.calls(self._chat, line.text.text)
        output = [self.message(said, line, self.logprobs_of_text(bool(calls)))] if said or not calls else []
        return JSONResponse(self.whole([*output, *map(_call, calls)], line))

    def whole(self, output: Sequence[dict[str, Any]], line: Line | None) -> dict[str, Any]:
        """The response with its output; one that is not done without a line."""
        usage = None
        is_cut = line is not None and line.finished == "length"
        if line is not None:
            counts = {"input_tokens": len(line.prompt), "output_tokens": len(line.ids)}
            usage = {
                **counts,
                "total_tokens": sum(counts.values()),
                "input_tokens_details": {"cached_tokens": line.num_known, "cache_write_tokens": line.num_kept},
                "output_tokens_details": {"reasoning_tokens": 0},
            }
        given = self._given
        return {
            **self._head,
            **{key: given[key] for key in _ECHOED},
            "status": "in_progress" if line is None else "incomplete" if is_cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": list(output),
            "parallel_tool_calls": self._asked.parallel_tool_calls is not False,
            "top_logprobs": given["top_logprobs"] or 0,
            "text": {"format": (given["text"] or {}).get("format") or {"type": "text"}},
            "tool_choice": given["tool_choice"] or "auto",
            "tools": given["tools"] or [],
            "truncation": given["truncation"] or "disabled",
            "store": False,
            "usage": usage,
        }

    def logprobs_of_text(self, has_calls: bool) -> list[dict[str, Any]]:
        """Log-probabilities of the whole answer's tokens, of those in front of its calls if it has any; none where the
        request does not include them."""
        (line,) = self._job.lines
        if not has_calls or not line.logprobs:
            return self._logprobs(line.logprobs)
        assert line.text is not None
        left, count = self._speaker.prompter.calls.free(line.text.text), 0
        text = TextStream(self._speaker.generator.tokenizer)
        while left > 0:
            left -= len(text.push(line.ids[count]))
            count += 1
        return self._logprobs(line.logprobs[:count])

    def _logprobs(self, kept: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return chat_logprobs(kept, self._speaker.generator.tokenizer)["content"]

    def message(self, text: str | None, line: Line | None, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """The turn of the assistant; one that has just begun without a text."""
        status = "in_progress" if line is None else "incomplete" if line.finished == "length" else "completed"
        content = [] if text is None else [_part(text, logprobs)]
        return {"id": self._message_id, "type": "message", "role": "assistant", "status": status, "content": content}

    async def events(self) -> AsyncIterator[str]:
        """The response as it comes, in server-sent events."""
        reader, begun, text = CallReader(self._service, self._chat, 1), time.monotonic(), ""
        metrics, output = self._service.metrics, list[dict[str, Any]]()
        (line,) = self._job.lines
        place = {"output_index": 0, "content_index": 0, "item_id": self._message_id}
        try:
            yield self._event("response.created", response=self.whole([], None))
            yield self._event("response.in_progress", response=self.whole([], None))
            is_open, calls, num_told = False, list[ToolCall](), 0
            async for piece in self._job.pieces():
                more, calls = reader.read(piece)
                if (more or (piece.ended and not calls)) and not is_open:
                    is_open = True
                    metrics.first_token.observe(time.monotonic() - begun)
                    yield self._event("response.output_item.added", output_index=0, item=self.message(None, None))
                    yield self._event("response.content_part.added", **place, part=_part("", ()))
                if more:
                    text += more
                    new = [] if calls else self._logprobs(line.logprobs[num_told : piece.num_logprobs])
                    num_told += len(new)
                    yield self._event("response.output_text.delta", **place, delta=more, logprobs=new)
            if is_open:
                told = self.logprobs_of_text(bool(calls))
                yield self._event("response.output_text.done", **place, text=text, logprobs=told)
                yield self._event("response.content_part.done", **place, part=_part(text, told))
                output.append(self.message(text, line, told))
                yield self._event("response.output_item.done", output_index=0, item=output[0])
            for call in map(_call, calls):
                at = {"output_index": len(output), "item_id": call["id"]}
                output.append(call)
                begun_call = {**call, "arguments": "", "status": "in_progress"}
                yield self._event("response.output_item.added", output_index=at["output_index"], item=begun_call)
                yield self._event("response.function_call_arguments.delta", **at, delta=call["arguments"])
                named = {"name": call["name"], "arguments": call["arguments"]}
                yield self._event("response.function_call_arguments.done", **at, **named)
                yield self._event("response.output_item.done", output_index=at["output_index"], item=call)
            whole = self.whole(output, line)
            metrics.duration.observe(time.monotonic() - begun)
            yield self._event(f"response.{whole['status']}", response=whole)
        except HTTPException as error:  # the status has been sent
            yield self._event("error", code="server_error", message=error.detail, param=None)

    def _event(self, kind: str, **more: Any) -> str:
        data = {"type": kind, "sequence_number": self._count, **more}
        self._count += 1
        return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"


def _part(text: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
