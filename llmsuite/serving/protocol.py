"""Requests and answers of OpenAI's API (platform.openai.com/docs/api-reference), as far as it is supported here.

Unknown keys and values of unsupported features are refused. Keys that do not change answers, such as those about the
user or about storage, are accepted, see `Request`.
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
from llmsuite.data.turns import parse_template_kwargs
from llmsuite.inference.batch import DecodingSequence
from llmsuite.inference.sampling import MAX_PENALTY, MAX_REPETITION, MAX_TEMPERATURE, MIN_REPETITION, Sampling

MAX_ANSWERS = 16
"""Most answers to one prompt."""
MAX_SEQUENCES = 128
"""Most answers to all prompts of a request."""
_ID_CHARACTERS = string.ascii_letters + string.digits
_MAX_STOPS = 16
MAX_TOOLS = 128
_MAX_STOP = 1000
FAIL_FAST = Field(fail_fast=True)
"""Annotation of a list whose validation stops at the first wrong entry: else a body with a million wrong entries would
have as many faults."""
_Stop = Annotated[str, Field(min_length=1, max_length=_MAX_STOP)]
_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], FAIL_FAST]
"""Token ids."""
_Bias = Annotated[float, Field(ge=-100, le=100)]
_MAX_BIASES = 1024
TopLogprobs = Annotated[int, Field(ge=0, le=20)]
"""Number of the most likely tokens at each position."""
_Short = Annotated[str, Field(max_length=1000)]


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    include_obfuscation: bool | None = None
    """Pad events, to hide their sizes in encrypted traffic; accepted, but no event is padded."""


class Request(BaseModel):
    """Keys that requests of chats and completions share."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=_MAX_STOPS), FAIL_FAST] | None = Field(
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
    # these do not change answers
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
        """The sampling parameters; `defaults` has those that the request does not set. Raises UserError for values that
        contradict each other."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
        }
        return dataclasses.replace(
            defaults,
            **{name: value for name, value in given.items() if value is not None},
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            seed=secrets.randbits(62)
            if self.seed is None
            else self.seed % 2**64,  # a negative seed differs from its absolute value
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
    """Each call has to fit the parameters; where `tool_choice` requires a call, it has to in any case."""


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
    """The tool that has to be called."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["function"]
    function: Named


class JsonSchema(BaseModel):
    """Format of an answer, as JSON Schema."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None
    """Accepted; answers always fit the schema."""


class ResponseFormat(BaseModel):
    """Format of the answer."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def check(self) -> ResponseFormat:
        """Check that there is a schema exactly with type json_schema. Raises ValueError."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema has to be given with type json_schema, and only then")
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The schema of an answer; None for any text."""
        if self.type == "text":
            return None
        found = None
        if self.json_schema is not None:
            found = self.json_schema.json_schema
        return {"type": "object"} if found is None else found


class ChatRequest(Request):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Any], FAIL_FAST]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS), FAIL_FAST] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description='"none", "auto", "required" or {"type": "function", "function": {"name": NAME}}'
    )
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Any], Field(max_length=0), FAIL_FAST] | None = None
    function_call: Literal["none", "auto"] | None = None
    # not in OpenAI's API
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template, such as {"enable_thinking": false}; those of the server apply to the others."""
    # these do not change answers
    store: bool | None = None
    modalities: Annotated[list[Literal["text"]], FAIL_FAST] | None = None
    prediction: dict[str, Any] | None = None
    prompt_cache_key: _Short | None = None
    prompt_cache_retention: _Short | None = None
    prompt_cache_options: dict[str, Any] | None = None
    # these would change answers; null does not
    audio: None = None
    reasoning_effort: None = None
    verbosity: Literal["medium"] | None = None
    web_search_options: None = None

    @property
    def tools_as_text(self) -> str:
        """The tools it may call in JSON, see `Conversation`; empty for none."""
        if not self.tools or self.tool_choice == "none":
            return ""
        return json.dumps([tool.model_dump(exclude_none=True) for tool in self.tools], ensure_ascii=False)

    @property
    def template_kwargs_as_text(self) -> str:
        """The variables of the chat template in JSON, see `Conversation`; empty for none. Raises ValueError for one
        that cannot be set."""
        return parse_template_kwargs({"chat_template_kwargs": self.chat_template_kwargs})

    @property
    def has_to_call(self) -> bool:
        """True where the answer has to be a tool call."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """The tools that may be called where the answer has to be a tool call."""
        named = None
        if isinstance(self.tool_choice, NamedTool):
            named = self.tool_choice.function.name
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        return [tool for tool in tools if named in (None, tool["function"]["name"])]

    @property
    def num_sampled(self) -> int:
        """Answers that are sampled for a prompt."""
        return self.n or 1


class CompletionRequest(Request):
    """POST /v1/completions."""

    prompt: str | Annotated[list[str], FAIL_FAST] | Ids | Annotated[list[Ids], FAIL_FAST] = Field(
        description="a string, a list of strings, a list of token ids, or a list of such lists"
    )
    max_tokens: _Count | None = None
    """0 is allowed with `echo`, for the prompt without an answer."""
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    suffix: Literal[""] | None = None

    @property
    def num_sampled(self) -> int:
        """Answers that are sampled for a prompt; the best `n` are returned."""
        return max(self.best_of or 1, self.n or 1)


def envelope(kind: str, model: str) -> dict[str, Any]:
    """The first keys of every answer."""
    prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": model}


def usage(sequences: Sequence[DecodingSequence], num_prompts: int) -> dict[str, Any]:
    """Token counts; a prompt with several answers counts once."""
    firsts = sequences[:: len(sequences) // num_prompts]
    prompt = sum(len(sequence.prompt) for sequence in firsts)
    answers = sum(len(sequence.ids) for sequence in sequences)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answers,
        "total_tokens": prompt + answers,
        "prompt_tokens_details": {"cached_tokens": sum(sequence.num_cached_tokens for sequence in firsts)},
    }


def tool_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Tool calls in a turn of the assistant."""
    return [
        {
            "id": call_id(call),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]


def call_id(call: ToolCall) -> str:
    """The id of a call: the model's own, or a new one of nine letters and digits, which Mistral's chat templates
    require."""
    return call.id or "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))


def error(message: str, kind: str = "invalid_request_error", code: str | None = None) -> dict[str, Any]:
    """The body of an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
