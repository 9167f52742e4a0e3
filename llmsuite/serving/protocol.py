"""Requests and answers of OpenAI's API (platform.openai.com/docs/api-reference), as far as it is served here.

Unknown keys are refused, and so are values that ask for something that is not supported. Keys that change no answer,
such as who asks or what is kept of it, are accepted: see `Request`.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import string
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from llmsuite.data.rows import ToolCall
from llmsuite.data.tokenizer import TextTokenizer
from llmsuite.inference.batch import Line, TokenLogprob
from llmsuite.inference.defaults import NAMES
from llmsuite.inference.sampling import MAX_PENALTY, MAX_REPETITION, MAX_TEMPERATURE, MIN_REPETITION, Sampling
from llmsuite.inference.text import TextStream

MAX_ANSWERS = 16
"""To one prompt."""
MAX_LINES = 128
"""Answers to all prompts of a request."""
_ID_CHARACTERS = string.ascii_letters + string.digits
_MAX_STOPS = 16
MAX_TOOLS = 128
_MAX_STOP = 1000
FIRST_FAULT = Field(fail_fast=True)
"""The mark of a list that is left at its first wrong entry: else a body of a million of them is as many faults."""
_Stop = Annotated[str, Field(min_length=1, max_length=_MAX_STOP)]
_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], FIRST_FAULT]
"""Token ids."""
_Bias = Annotated[float, Field(ge=-100, le=100)]
_MAX_BIASES = 1024
TopLogprobs = Annotated[int, Field(ge=0, le=20)]
"""How many of the most likely tokens are told at each place."""
_Short = Annotated[str, Field(max_length=1000)]


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    include_obfuscation: bool | None = None
    """Whether events are padded against those who see their sizes on the way; no event is."""


class Request(BaseModel):
    """Keys that both kinds of requests have."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=_MAX_STOPS), FIRST_FAULT] | None = Field(
        None, description=f"a string of 1 to {_MAX_STOP} characters, or a list of at most {_MAX_STOPS} of them"
    )
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: Annotated[
        dict[Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,8})$")], _Bias], Field(max_length=_MAX_BIASES)
    ] | (None) = Field(
        None,
        description=f"an object of at most {_MAX_BIASES:,} token ids, with a number between -100 and 100 for each",
    )
    # these change no answer
    user: str | None = None
    metadata: Annotated[dict[_Short, _Short], Field(max_length=64)] | None = None
    safety_identifier: _Short | None = None
    service_tier: _Short | None = None
    # not in OpenAI's API
    top_k: _Count | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION, le=MAX_REPETITION)] | None = None
    min_tokens: _Count = 0

    def sampling(self, max_new_tokens: int, num_logprobs: int | None, defaults: Sampling) -> Sampling:
        """The sampling parameters, with those of `defaults` that the request does not set. Raises UserError for values
        that contradict each other."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        given = {name: value for name in NAMES if (value := getattr(self, name)) is not None}
        return dataclasses.replace(
            defaults,
            **given,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            seed=secrets.randbits(62) if self.seed is None else self.seed % 2**64,  # those below 0 have their own
            max_new_tokens=max_new_tokens,
            min_new_tokens=self.min_tokens,
            stop=tuple(stop),
            num_logprobs=num_logprobs,
            logit_bias=tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items()),
        )


class Function(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Whether each call has to fit the parameters; it has to anyway where `tool_choice` asks for one."""


class Tool(BaseModel):
    """A tool that the model may call."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["function"]
    function: Function


class Named(BaseModel):
    """The name of a function."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str


class NamedTool(BaseModel):
    """The one tool that has to be called."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["function"]
    function: Named


class JsonSchema(BaseModel):
    """What an answer has to be, as JSON Schema."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None
    """Answers fit the schema either way."""


class ResponseFormat(BaseModel):
    """What kind of answer there has to be."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def check(self) -> ResponseFormat:
        """Raises ValueError unless the schema is where the type is."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema has to be given with type json_schema, and only then")
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The schema of an answer; None for any text."""
        if self.type == "text":
            return None
        found = self.json_schema.json_schema if self.json_schema is not None else None
        return {"type": "object"} if found is None else found


class ChatRequest(Request):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Any], FIRST_FAULT]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS), FIRST_FAULT] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description='"none", "auto", "required" or {"type": "function", "function": {"name": NAME}}'
    )
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Any], Field(max_length=0), FIRST_FAULT] | None = None
    function_call: Literal["none", "auto"] | None = None
    # these change no answer
    store: bool | None = None
    modalities: Annotated[list[Literal["text"]], FIRST_FAULT] | None = None
    prediction: dict[str, Any] | None = None
    prompt_cache_key: _Short | None = None
    prompt_cache_retention: _Short | None = None
    prompt_cache_options: dict[str, Any] | None = None
    # these would change it; null does not
    audio: None = None
    reasoning_effort: None = None
    verbosity: Literal["medium"] | None = None
    web_search_options: None = None

    @property
    def tools_as_text(self) -> str:
        """The tools it may call, as `Conversation` has them; empty for none."""
        if not self.tools or self.tool_choice == "none":
            return ""
        return json.dumps([tool.model_dump(exclude_none=True) for tool in self.tools], ensure_ascii=False)

    @property
    def has_to_call(self) -> bool:
        """Whether the answer has to be a call of a tool."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """The tools of which one has to be called."""
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        return [tool for tool in tools if named in (None, tool["function"]["name"])]

    @property
    def num_drawn(self) -> int:
        """Answers that are made to a prompt."""
        return self.n or 1


class CompletionRequest(Request):
    """POST /v1/completions."""

    prompt: str | Annotated[list[str], FIRST_FAULT] | Ids | Annotated[list[Ids], FIRST_FAULT] = Field(
        description="a string, a list of strings, a list of token ids, or a list of such lists"
    )
    max_tokens: _Count | None = None
    """0, with `echo`, for the prompt alone."""
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    suffix: Literal[""] | None = None

    @property
    def num_drawn(self) -> int:
        """Answers that are made to a prompt; the best `n` are given."""
        return max(self.best_of or 1, self.n or 1)


def envelope(kind: str, model: str) -> dict[str, Any]:
    """The keys that every answer begins with."""
    prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": model}


def usage(lines: Sequence[Line], num_prompts: int) -> dict[str, Any]:
    """Counts of tokens; a prompt with several answers counts once."""
    firsts = lines[:: len(lines) // num_prompts]
    prompt = sum(len(line.prompt) for line in firsts)
    answers = sum(len(line.ids) for line in lines)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answers,
        "total_tokens": prompt + answers,
        "prompt_tokens_details": {"cached_tokens": sum(line.num_known for line in firsts)},
    }


def tool_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Calls of tools in a turn of the assistant."""
    return [
        {
            "id": call_id(call),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]


def call_id(call: ToolCall) -> str:
    """The id of a call: the model's own, or a new one of nine letters and digits, the only ones that Mistral's chat
    templates take back."""
    return call.id or "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))


def chat_logprobs(kept: Sequence[TokenLogprob], tokenizer: TextTokenizer, begin: int = 0) -> dict[str, Any]:
    """Log-probabilities of a choice of a chat, from token `begin` on."""

    def entry(token: int, logprob: float, is_first: bool) -> dict[str, Any]:
        found = tokenizer.bytes_of(token, is_first)
        known = None if found is None else list(found)
        text = tokenizer.token_text(token, is_first)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": known}

    content = []
    first = tokenizer.begin([t.token for t in kept])
    for number, t in enumerate(kept[begin:], begin):
        top = [entry(other, value, number == first) for other, value in t.top]
        content.append({**entry(t.token, t.logprob, number == first), "top_logprobs": top})
    return {"content": content}


def completion_logprobs(kept: Sequence[TokenLogprob], tokenizer: TextTokenizer, begin: int = 0) -> dict[str, Any]:
    """Log-probabilities of a choice of a completion, from token `begin` on. Offsets are of the text: tokens that are
    parts of one character begin where it does."""
    stream, offsets = TextStream(tokenizer), list[int]()
    for t in kept:
        offsets.append(len(stream.text))
        stream.push(t.token)
    first = tokenizer.begin([t.token for t in kept])
    texts = [tokenizer.token_text(t.token, number == first) for number, t in enumerate(kept)]
    # tokens of one text, such as parts of characters, are one key, which has the likeliest
    top = [
        {tokenizer.token_text(other, number == first): value for other, value in reversed(t.top)}
        for number, t in enumerate(kept)
    ][begin:]
    logprobs = [t.logprob for t in kept[begin:]]
    return {"tokens": texts[begin:], "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets[begin:]}


def echoed_logprobs(first: int, kept: Sequence[TokenLogprob], tokenizer: TextTokenizer) -> dict[str, Any]:
    """Log-probabilities of a completion with its prompt, whose first token has none."""
    found = completion_logprobs([TokenLogprob(first, 0.0, ()), *kept], tokenizer)
    return {
        **found,
        "token_logprobs": [None, *found["token_logprobs"][1:]],
        "top_logprobs": [None, *found["top_logprobs"][1:]],
    }


def error(message: str, kind: str = "invalid_request_error", code: str | None = None) -> dict[str, Any]:
    """The body of an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
