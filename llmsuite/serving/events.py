"""Answers as server-sent events, while they are decoded."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import HTTPException

from llmsuite.data.rows import ToolCall
from llmsuite.inference.thoughts import AnswerReader
from llmsuite.serving import protocol
from llmsuite.serving.fair_queue import Client
from llmsuite.serving.jobs import Job, TextDelta
from llmsuite.serving.logprobs import ChatLogprobs, CompletionLogprobs, LogprobFormatter
from llmsuite.serving.protocol import ChatRequest, CompletionRequest
from llmsuite.serving.service import Service


class EventStream:
    """The answers to one request as server-sent events."""

    def __init__(self, service: Service, body: ChatRequest | CompletionRequest, job: Job, num_prompts: int):
        self._service = service
        self._body = body
        self._job = job
        self._num_prompts = num_prompts
        self._is_chat = isinstance(body, ChatRequest)
        kind = "text_completion"
        if self._is_chat:
            kind = "chat.completion.chunk"
        self._head = {**protocol.envelope(kind, body.model or service.name), **service.version_info()}
        tokenizer = service.served_model(body.model).generator.tokenizer
        formatter: type[ChatLogprobs | CompletionLogprobs] = ChatLogprobs if self._is_chat else CompletionLogprobs
        self._formatters: list[LogprobFormatter] = [formatter(tokenizer) for _ in job.sequences]
        self._num_sent = [0] * len(job.sequences)
        """Tokens of each answer whose log-probabilities have been sent."""
        self._tool_calls = ToolCallReader(service, body, len(job.sequences))
        self._thoughts: list[AnswerReader | None] = [None] * len(job.sequences)
        if isinstance(body, ChatRequest):
            self._thoughts = [service.thought_reader(body, sequence) for sequence in job.sequences]

    async def events(self, client: Client) -> AsyncIterator[str]:
        """Yield the events for a client, in the order in which text becomes certain."""
        started = time.monotonic()
        metrics = self._service.metrics
        is_first = True
        try:
            if self._is_chat:
                for number in range(len(self._job.sequences)):
                    yield self._event([self._choice(number, "", None, role="assistant")])
            echoed = await self._service.threads.run(client, self._service.echoed_texts, self._body)
            for number, text in enumerate(echoed):
                yield self._event([self._choice(number, text, None)])
            async for delta in self._job.deltas():
                if delta.text and is_first:
                    metrics.first_token.observe(time.monotonic() - started)
                    is_first = False
                reader = self._thoughts[delta.number]
                if reader is not None:
                    thoughts, content = reader.push(delta.text, delta.has_ended)
                    delta = dataclasses.replace(delta, text=content)
                    if thoughts:
                        logprobs = self._logprobs(delta)
                        yield self._event([self._choice(delta.number, "", None, logprobs, reasoning_content=thoughts)])
                text, calls = self._tool_calls.read(delta)
                if text:
                    yield self._event([self._choice(delta.number, text, None, self._logprobs(delta))])
                if calls:
                    numbered = [{"index": i, **call} for i, call in enumerate(protocol.tool_calls(calls))]
                    yield self._event([self._choice(delta.number, "", None, tool_calls=numbered)])
                if delta.has_ended:  # tokens without a text of their own may be left
                    last = None
                    if self._num_sent[delta.number] < delta.num_logprobs:
                        last = self._logprobs(delta)
                    reason = "tool_calls" if calls else self._job.sequences[delta.number].finish_reason
                    yield self._event([self._choice(delta.number, "", reason, last)])
            if self._body.stream_options is not None and self._body.stream_options.include_usage:
                yield self._event([], usage=protocol.usage(self._job.sequences, self._num_prompts))
            metrics.duration.observe(time.monotonic() - started)
        except HTTPException as error:  # the status has been sent; the client's library knows this form
            yield f"data: {json.dumps(protocol.error(error.detail, 'server_error'))}\n\n"
            return
        yield "data: [DONE]\n\n"

    def _event(self, choices: list[Any], **more: Any) -> str:
        return f"data: {json.dumps({**self._head, 'choices': choices, **more}, ensure_ascii=False)}\n\n"

    def _choice(self, number: int, text: str, reason: str | None, logprobs: Any = None, **more: Any) -> dict[str, Any]:
        if not self._is_chat:
            return {"index": number, "text": text, "finish_reason": reason, "logprobs": logprobs}
        delta = dict(more)
        if text or "role" in more:
            delta["content"] = text
        return {"index": number, "delta": delta, "finish_reason": reason, "logprobs": logprobs}

    def _logprobs(self, delta: TextDelta) -> dict[str, Any] | None:
        """Log-probabilities of the tokens since the last event, where they are requested."""
        sequence = self._job.sequences[delta.number]
        begin = self._num_sent[delta.number]
        self._num_sent[delta.number] = delta.num_logprobs
        if self._body.logprobs in (None, False):
            return None
        return self._formatters[delta.number].add(sequence.logprobs[begin : delta.num_logprobs])


class ToolCallReader:
    """Separates text and tool calls while answers are decoded."""

    def __init__(self, service: Service, body: ChatRequest | CompletionRequest, count: int):
        """`count`: answers to the request."""
        self._service = service
        self._body = body
        self._held = [""] * count
        """Text of each answer that is held back, because it may become a tool call."""
        self._is_text = [False] * count
        """True for each answer that certainly has no calls."""
        self._may_call = isinstance(body, ChatRequest) and bool(body.tools_as_text)

    def read(self, delta: TextDelta) -> tuple[str, list[ToolCall]]:
        """The text that can be sent, and at the end of an answer its tool calls."""
        if not self._may_call or self._is_text[delta.number]:
            return delta.text, []
        assert isinstance(self._body, ChatRequest)
        call_format = self._service.served_model(self._body.model).prompter.tool_call_format
        held = self._held[delta.number] + delta.text
        if delta.has_ended:
            return self._service.parse_tool_calls(self._body, held)
        length = call_format.text_length(held)
        self._held[delta.number] = held[length:]
        self._is_text[delta.number] |= length > 0 and not call_format.start_marker
        return held[:length], []
