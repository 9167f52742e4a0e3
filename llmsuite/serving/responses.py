"""POST /v1/responses of OpenAI's API: requests become chats, and answers have the format of responses.

Responses are not stored: each request has the full conversation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from llmsuite.base.errors import UserError
from llmsuite.data.rows import REASONING, ROLES, ToolCall
from llmsuite.data.turns import DEVELOPER, join_text_parts, parse_tool_calls
from llmsuite.inference.batch import DecodingSequence, TokenLogprob
from llmsuite.inference.sampling import MAX_TEMPERATURE
from llmsuite.inference.text import TextStream
from llmsuite.inference.thoughts import AnswerReader
from llmsuite.serving.events import ToolCallReader
from llmsuite.serving.fair_queue import Client, client_of
from llmsuite.serving.faults import faults
from llmsuite.serving.jobs import Job, StreamedAnswer, TextDelta
from llmsuite.serving.logprobs import ChatLogprobs, chat_logprobs
from llmsuite.serving.protocol import FAIL_FAST, MAX_TOOLS, ChatRequest, TopLogprobs, call_id
from llmsuite.serving.service import Service

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
"""Values of `include` for built-in tools, which no answer calls here."""
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
"""Keys of a request that its response repeats."""
_RENAMED_KEYS = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("messages: ", "input: "),
)
"""Keys of a chat request, and those of a response request."""
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
    """Format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    answer_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def check(self) -> Format:
        """Check that name and schema are there exactly with type json_schema. Raises ValueError."""
        if (self.type == "json_schema") != (self.name is not None) or (self.name is None and self.answer_schema):
            raise ValueError("name and schema have to be given with type json_schema, and only then")
        return self


class Text(_Strict):
    """Options of the answer's text."""

    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class ResponseRequest(_Strict):
    """The body of a request."""

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], FAIL_FAST] = Field(
        description="a string, or a list of items, each an object"
    )
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool | None = None
    text: Text | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS), FAIL_FAST] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = Field(
        None, description='"none", "auto", "required" or {"type": "function", "name": NAME}'
    )
    parallel_tool_calls: bool | None = None
    include: Annotated[list[_Included], FAIL_FAST] | None = None
    top_logprobs: TopLogprobs | None = None
    """Number of the most likely tokens at each position, where log-probabilities are included."""
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
    """An input that does not fit the context is refused either way."""
    max_tool_calls: int | None = None
    """Most calls of built-in tools, which do not exist here."""
    background: Literal[False] | None = None
    # these would change it; null does not
    previous_response_id: None = None
    conversation: None = None
    reasoning: None = None
    prompt: None = None
    # not in OpenAI's API
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None

    def as_chat(self) -> ChatRequest:
        """The request as a chat request. Raises HTTPException naming an unsupported item of the input."""
        given = self.model_dump(exclude_none=True, by_alias=True)
        keys = ("model", "temperature", "top_p", "seed", "stream", "parallel_tool_calls")
        body: dict[str, Any] = {key: given[key] for key in keys if key in given}
        body["messages"] = self._messages()
        if self.max_output_tokens is not None:
            body["max_completion_tokens"] = self.max_output_tokens
        if "message.output_text.logprobs" in (self.include or ()):
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        tools = [{"type": "function", "function": _without_type(tool)} for tool in given.get("tools", ())]
        if tools:
            body["tools"] = tools
        choice = given.get("tool_choice")
        if isinstance(choice, dict):
            choice = {"type": "function", "function": {"name": choice["name"]}}
        if choice is not None:
            body["tool_choice"] = choice
        answer_format = given.get("text", {}).get("format")
        if answer_format is not None:
            body["response_format"] = {"type": answer_format["type"]}
            if schema := _without_type(answer_format):
                body["response_format"]["json_schema"] = schema
        try:
            return ChatRequest.model_validate(body)
        except ValidationError as error:
            raise HTTPException(400, _with_own_keys(faults(ChatRequest, error))) from None

    def _messages(self) -> list[dict[str, Any]]:
        system = []
        if self.instructions is not None:
            system = [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*system, {"role": "user", "content": self.input}]
        if not self.input:
            raise HTTPException(400, "input: has to be a text or a list of items, at least one")
        messages: list[dict[str, Any]] = [*system]
        thoughts = dict[str, Any]()  # of the turn that begins with the next item
        for number, item in enumerate(self.input):
            where = f"input[{number}]"
            kind = item.get("type", "message")
            if thoughts and not _is_answer(item):
                fault = f"{where}: an answer or a call of the assistant follows its reasoning"
                _add_thoughts(messages, thoughts, fault)
                thoughts = {}
            if kind == "message":
                if item.get("role") not in _ROLES:
                    raise HTTPException(400, f"{where}: needs role, one of {', '.join(_ROLES)}")
                content = _text(item.get("content"), f"{where}.content")
                messages.append({"role": item.get("role"), "content": content, **thoughts})
                thoughts = {}
            elif kind == "function_call":
                call = {key: item.get(key) for key in ("name", "arguments")}
                try:
                    parse_tool_calls([call], where)
                except ValueError as error:
                    raise HTTPException(400, str(error)) from None
                last = None
                if messages and messages[-1]["role"] == "assistant" and not thoughts:
                    last = messages[-1]
                if last is None:
                    last = {"role": "assistant", "content": None, **thoughts}
                    thoughts = {}
                    messages.append(last)
                entry = {"id": item.get("call_id"), "type": "function", "function": call}
                last.setdefault("tool_calls", []).append(entry)
            elif kind == "function_call_output":
                output = {"tool_call_id": item.get("call_id"), "content": _text(item.get("output"), f"{where}.output")}
                messages.append({"role": "tool", **output})
            elif kind == "reasoning":
                thoughts = {REASONING[0]: _reasoning_text(item.get("content"), f"{where}.content")}
            else:
                known = "message, function_call, function_call_output and reasoning"
                raise HTTPException(400, f"{where}: type {str(kind)[:100]!r} is not supported here; {known} are")
        if thoughts:
            fault = "input: ends with reasoning; an answer or a call of the assistant follows it"
            _add_thoughts(messages, thoughts, fault)
        return messages


def _add_thoughts(messages: Sequence[dict[str, Any]], thoughts: dict[str, Any], fault: str) -> None:
    """Add thoughts that follow an answer, as a stream of channels has them, to its turn. Raises HTTPException with
    `fault` if there is no answer before them."""
    if not messages or messages[-1]["role"] != "assistant":
        raise HTTPException(400, fault)
    key = REASONING[0]
    messages[-1][key] = "\n".join(filter(None, (messages[-1].get(key), thoughts[key])))


def _is_answer(item: dict[str, Any]) -> bool:
    """Return True for an item that the assistant has written after its thoughts."""
    kind = item.get("type", "message")
    return kind == "function_call" or (kind == "message" and item.get("role") == "assistant")


def _reasoning_text(content: Any, where: str) -> str:
    """The thoughts of an item. Raises HTTPException where there are none to read, such as encrypted ones."""
    texts = []
    if isinstance(content, list):
        for part in content:
            if isinstance(part, dict) and part.get("type") == "reasoning_text" and isinstance(part.get("text"), str):
                texts.append(part["text"])
    if not texts or len(texts) < len(content):
        raise HTTPException(400, f'{where}: a list of {{"type": "reasoning_text", "text": …}} is needed')
    return "".join(texts)


def _without_type(value: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key != "type"}


def _with_own_keys(message: str) -> str:
    """An error message of a chat request, with the keys of a response request."""
    for chat_key, own_key in _RENAMED_KEYS:
        message = message.replace(chat_key, own_key)
    return message


@contextlib.contextmanager
def _own_keys() -> Iterator[None]:
    """Turn errors of a chat request into those of a response request."""
    try:
        yield
    except HTTPException as error:
        raise HTTPException(error.status_code, _with_own_keys(error.detail)) from None


def _text(content: Any, where: str) -> str:
    """The text of a turn. Raises HTTPException for parts of any other kind."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise HTTPException(400, f"{where}: a text is needed, or a list of parts")
    try:
        return join_text_parts(content, where)
    except ValueError as error:
        raise HTTPException(400, str(error)) from None


def add_api(app: FastAPI, service: Service) -> None:
    """Add the routes of responses, and of the number of their input tokens."""

    @app.post(PATH)
    async def respond(request: Request) -> Response:
        body = await service.parse_body(request, ResponseRequest)
        client = client_of(request)
        chat = await service.threads.run(client, body.as_chat)
        with _own_keys():
            job, _ = await service.start(chat, client)
        response = _Response(body, chat, service, job)
        if body.stream:
            return StreamedAnswer(response.events(client), job)
        await service.wait_for_answers(request, job)
        return await service.threads.run(client, response.answer)

    @app.post(COUNT_PATH)
    async def count(request: Request) -> dict[str, Any]:
        body = await service.parse_body(request, ResponseRequest)
        try:
            ids = await service.threads.run(client_of(request), lambda: service.conversation(body.as_chat()))
        except UserError as error:
            raise HTTPException(400, _with_own_keys(str(error))) from None
        return {"object": "response.input_tokens", "input_tokens": len(ids)}


def _call(call: ToolCall) -> dict[str, Any]:
    ids = {"id": f"fc_{secrets.token_hex(12)}", "call_id": call_id(call)}
    return {**ids, "type": "function_call", "name": call.name, "arguments": call.arguments, "status": "completed"}


class _Response:
    """One response, while it is decoded and when it is complete."""

    def __init__(self, body: ResponseRequest, chat: ChatRequest, service: Service, job: Job):
        self._body = body
        self._chat = chat
        self._service = service
        self._job = job
        self._served_model = service.served_model(body.model)
        self._head = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": body.model or service.name,
            **service.version_info(),
        }
        self._message_id = f"msg_{secrets.token_hex(12)}"
        self._count = 0
        self._given = body.model_dump(by_alias=True, exclude={"input"})

    def answer(self) -> Response:
        """The HTTP response with the complete answer."""
        (sequence,) = self._job.sequences
        assert sequence.text is not None
        thoughts, content, calls = self._service.split_answer(self._chat, sequence)
        output = []
        if thoughts:
            output.append(self.reasoning(_thoughts_id(), thoughts, sequence))
        if content or not calls:
            output.append(self.message(content, sequence, self.logprobs_of_text(bool(calls), bool(thoughts))))
        return JSONResponse(self.body([*output, *map(_call, calls)], sequence, bool(thoughts)))

    def body(
        self, output: Sequence[dict[str, Any]], sequence: DecodingSequence | None, has_thoughts: bool = False
    ) -> dict[str, Any]:
        """The response as JSON, with its output; `sequence`: None while it is in progress."""
        usage = None
        is_cut = sequence is not None and sequence.finish_reason == "length"
        if sequence is not None:
            counts = {"input_tokens": len(sequence.prompt), "output_tokens": len(sequence.ids)}
            usage = {
                **counts,
                "total_tokens": sum(counts.values()),
                "input_tokens_details": {
                    "cached_tokens": sequence.num_cached_tokens,
                    "cache_write_tokens": sequence.num_stored_tokens,
                },
                "output_tokens_details": {
                    "reasoning_tokens": sum(self._thought_tokens(sequence)) if has_thoughts else 0
                },
            }
        given = self._given
        return {
            **self._head,
            **{key: given[key] for key in _ECHOED},
            "status": _status(sequence),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": list(output),
            "parallel_tool_calls": self._body.parallel_tool_calls is not False,
            "top_logprobs": given["top_logprobs"] or 0,
            "text": {"format": (given["text"] or {}).get("format") or {"type": "text"}},
            "tool_choice": given["tool_choice"] or "auto",
            "tools": given["tools"] or [],
            "truncation": given["truncation"] or "disabled",
            "store": False,
            "usage": usage,
        }

    def logprobs_of_text(self, has_calls: bool, has_thoughts: bool = False) -> list[dict[str, Any]]:
        """Log-probabilities of the answer's tokens, without its thoughts and its calls if it has any; empty where they
        are not requested."""
        (sequence,) = self._job.sequences
        if not (has_calls or has_thoughts) or not sequence.logprobs:
            return self._logprobs(sequence.logprobs)
        assert sequence.text is not None
        end = len(sequence.logprobs)
        if has_calls:
            left = self._served_model.prompter.tool_call_format.text_length(sequence.text.text)
            end = self._num_tokens(sequence, left)
        kept = sequence.logprobs[:end]
        if has_thoughts:
            kept = [each for each, is_thought in zip(kept, self._thought_tokens(sequence)) if not is_thought]
        return self._logprobs(kept)

    def _thought_tokens(self, sequence: DecodingSequence) -> list[bool]:
        """True for each token of the thoughts of an answer: those before its content, with their marks, and later ones
        that give thoughts alone."""
        reader = self._service.thought_reader(self._chat, sequence)
        assert reader is not None
        text = self._text_stream()
        flags = []
        has_content = False
        for token in sequence.ids:
            thoughts, content = reader.push(text.push(token), False)
            has_content |= bool(content)
            flags.append(not content and (bool(thoughts) or not has_content))
        return flags

    def _num_tokens(self, sequence: DecodingSequence, length: int) -> int:
        """Number of tokens of an answer whose text has `length` characters."""
        text = self._text_stream()
        count = 0
        while length > 0:
            length -= len(text.push(sequence.ids[count]))
            count += 1
        return count

    def _text_stream(self) -> TextStream:
        return TextStream(self._served_model.generator.tokenizer, shown=self._service.shown_tokens(self._chat))

    def reasoning(self, identifier: str, thoughts: str | None, sequence: DecodingSequence | None) -> dict[str, Any]:
        """An item with thoughts of the model; `thoughts` and `sequence`: None at its start."""
        content = []
        if thoughts is not None:
            content = [{"type": "reasoning_text", "text": thoughts}]
        status = _status(sequence)
        return {"id": identifier, "type": "reasoning", "summary": [], "content": content, "status": status}

    def _logprobs(self, kept: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return chat_logprobs(kept, self._served_model.generator.tokenizer)["content"]

    def message(
        self, text: str | None, sequence: DecodingSequence | None, logprobs: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        """The turn of the assistant; `text` and `sequence`: None at its start."""
        content = []
        if text is not None:
            content = [_part(text, logprobs)]
        status = _status(sequence)
        return {"id": self._message_id, "type": "message", "role": "assistant", "status": status, "content": content}

    async def events(self, client: Client) -> AsyncIterator[str]:
        """Yield the response as server-sent events for a client, while it is decoded."""
        threads = self._service.threads
        formatter = ChatLogprobs(self._served_model.generator.tokenizer)
        reader = ToolCallReader(self._service, self._chat, 1)
        started = time.monotonic()
        text = ""
        metrics = self._service.metrics
        output = list[dict[str, Any]]()
        (sequence,) = self._job.sequences
        thoughts = _StreamedThoughts(self, self._service.thought_reader(self._chat, sequence), output)
        indices: dict[str, Any] = {"output_index": 0, "content_index": 0, "item_id": self._message_id}
        try:
            yield self.event("response.created", response=self.body([], None))
            yield self.event("response.in_progress", response=self.body([], None))
            is_open = False
            calls = list[ToolCall]()
            num_sent = 0
            async for delta in self._job.deltas():
                delta, made = thoughts.read(delta, sequence)
                for event in made:
                    yield event
                more, calls = reader.read(delta)
                if (more or (delta.has_ended and not calls)) and not is_open:
                    is_open = True
                    metrics.first_token.observe(time.monotonic() - started)
                    indices["output_index"] = len(output)
                    item = self.message(None, None)
                    output.append(item)
                    yield self.event("response.output_item.added", output_index=len(output) - 1, item=item)
                    yield self.event("response.content_part.added", **indices, part=_part("", ()))
                if more:
                    text += more
                    num_sent = max(num_sent, thoughts.num_tokens)
                    new = [] if calls else formatter.add(sequence.logprobs[num_sent : delta.num_logprobs])["content"]
                    num_sent += len(new)
                    yield self.event("response.output_text.delta", **indices, delta=more, logprobs=new)
            if is_open:
                logprobs = await threads.run(client, self.logprobs_of_text, bool(calls), thoughts.has_any)
                yield self.event("response.output_text.done", **indices, text=text, logprobs=logprobs)
                yield self.event("response.content_part.done", **indices, part=_part(text, logprobs))
                item = self.message(text, sequence, logprobs)
                output[indices["output_index"]] = item
                yield self.event("response.output_item.done", output_index=indices["output_index"], item=item)
            for call in map(_call, calls):
                at = {"output_index": len(output), "item_id": call["id"]}
                output.append(call)
                started_call = {**call, "arguments": "", "status": "in_progress"}
                yield self.event("response.output_item.added", output_index=at["output_index"], item=started_call)
                yield self.event("response.function_call_arguments.delta", **at, delta=call["arguments"])
                named = {"name": call["name"], "arguments": call["arguments"]}
                yield self.event("response.function_call_arguments.done", **at, **named)
                yield self.event("response.output_item.done", output_index=at["output_index"], item=call)
            body = await threads.run(client, self.body, output, sequence, thoughts.has_any)
            metrics.duration.observe(time.monotonic() - started)
            yield self.event(f"response.{body['status']}", response=body)
        except HTTPException as error:  # the status has been sent
            yield self.event("error", code="server_error", message=error.detail, param=None)

    def event(self, kind: str, **more: Any) -> str:
        """A server-sent event."""
        data = {"type": kind, "sequence_number": self._count, **more}
        self._count += 1
        return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"


class _StreamedThoughts:
    """The thoughts of a response, while it is decoded. Thoughts that follow content are an item of their own."""

    def __init__(self, response: _Response, reader: AnswerReader | None, output: list[dict[str, Any]]):
        """
        Args:
            response: the response.
            reader: None for an answer without thoughts.
            output: the items of the response by now, to which the thoughts are added.
        """
        self._response = response
        self._reader = reader
        self._output = output
        self._at: dict[str, Any] = {}
        """Place and id of the open item; empty if none is open."""
        self._text = ""
        """Thoughts of the open item."""
        self.has_any = False
        self.num_tokens = 0
        """Tokens of the answer up to the end of the thoughts by now."""

    def read(self, delta: TextDelta, sequence: DecodingSequence) -> tuple[TextDelta, list[str]]:
        """Return the content of a delta, and the events of its thoughts."""
        if self._reader is None:
            return delta, []
        thoughts, content = self._reader.push(delta.text, delta.has_ended)
        events = []
        if self.has_any and not self._at:
            thoughts = thoughts.removeprefix("\n")  # the reader's separator of two thoughts
        if thoughts:
            if not self._at:
                events.append(self._open())
            self._text += thoughts
            self.num_tokens = delta.num_logprobs
            events.append(self._response.event("response.reasoning_text.delta", **self._at, delta=thoughts))
        if self._at and (content or delta.has_ended):
            events += self._close(sequence, bool(content))
        return dataclasses.replace(delta, text=content), events

    def _open(self) -> str:
        """Begin an item, and return its event."""
        self.has_any = True
        self._text = ""
        self._at = {"output_index": len(self._output), "content_index": 0, "item_id": _thoughts_id()}
        item = self._response.reasoning(self._at["item_id"], None, None)
        self._output.append(item)
        return self._response.event("response.output_item.added", output_index=self._at["output_index"], item=item)

    def _close(self, sequence: DecodingSequence, is_complete: bool) -> list[str]:
        """End the open item, and return its events."""
        at = self._at
        self._at = {}
        item = self._response.reasoning(at["item_id"], self._text, sequence)
        if is_complete:
            item["status"] = "completed"
        self._output[at["output_index"]] = item
        return [
            self._response.event("response.reasoning_text.done", **at, text=self._text),
            self._response.event("response.output_item.done", output_index=at["output_index"], item=item),
        ]


def _thoughts_id() -> str:
    return f"rs_{secrets.token_hex(12)}"


def _status(sequence: DecodingSequence | None) -> str:
    if sequence is None:
        return "in_progress"
    if sequence.finish_reason == "length":
        return "incomplete"
    return "completed"


def _part(text: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
